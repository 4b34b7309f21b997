"""Keyword arguments of the calls that take a request's fields, for editors and type checkers.

Each class has the names of a request's fields, with the Python values that `client.values` accepts
for them. None leaves a field out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import numpy as np

from ...schemas.access.handling import Priority
from ...schemas.artifacts.conditions import Aggregation
from ...schemas.artifacts.probes import HeldOut, ProbeUse
from ...schemas.base.states import CallbackEvent
from ...schemas.jobs.jobs import Sampling, StructuredRequest
from ...schemas.jobs.openai import ResponseFormat, StreamOptions
from ...schemas.prompts.chat import NamedTool, Tool
from ...schemas.prompts.selectors import HookName, Span
from ...schemas.prompts.sites import At
from ...schemas.readings.features import FeatureSpec
from ...schemas.readings.installed import ReaderSpec
from ...schemas.readings.lens import LensSpec
from ...schemas.requests.specs import CaptureSpec, PatchSpec, SteeringSpec

T = TypeVar("T")
#: One, or a list of them.
Some: TypeAlias = T | Sequence[T]
#: The fields of an object, as a dict.
Fields = Mapping[str, Any]
#: A vector or a matrix: numpy, torch, or lists of numbers.
Array = np.ndarray | Sequence[Any] | Any
#: A steering entry: a struct, or its fields with tensors as `Array`.
Steering = SteeringSpec | Fields
#: A patch: a struct, or its fields; `source` may be a run's name or an `Array`.
Patch = PatchSpec | Fields
Capture = CaptureSpec | Fields
#: Layers, heads or dimensions: "all", numbers, ranges such as "0-5,-1", or a list of them.
Numbers = str | int | Sequence[int] | range
#: Token positions: a name such as "all_prompt", numbers, or a part of the prompt's text.
Positions = str | int | Sequence[Any] | Span | Fields
HookInput = HookName | str
#: A text, or its token ids.
PromptInput = str | Sequence[int]
Chat = Sequence[Fields]
#: Name → probability bias or other number, by token id.
TokenBias = Mapping[int, float]


class ObservedFields(TypedDict, total=False):
    """Says what is done with the activations of prompts, and what is read from them."""

    capture: Capture | None
    steering: Some[Steering] | None
    patch: Some[Patch] | None
    probes: Some[str | ProbeUse | Fields] | None
    policies: Some[str] | None
    conversation: str | None
    lens: LensSpec | Fields | None
    features: Some[FeatureSpec | Fields] | None
    readers: Some[ReaderSpec | Fields] | None
    lora: str | None


class Sampled(TypedDict, total=False):
    """vLLM's sampling parameters."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: Some[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None
    prompt_logprobs: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: TokenBias | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    skip_special_tokens: bool | None
    spaces_between_special_tokens: bool | None
    include_stop_str_in_output: bool | None
    structured_outputs: StructuredRequest | Fields | None


class Handled(TypedDict, total=False):
    """Says how a job is handled."""

    priority: Priority | None
    expires_in: float | str | None
    metadata: Mapping[str, str] | None
    callback_url: str | None
    callback_events: Some[CallbackEvent] | None


class OfModel(TypedDict, total=False):
    """The model of a job; by default the only one."""

    model: str


class PromptFields(OfModel, total=False):
    """Prompts of a job: one, several, or conversations."""

    prompt: PromptInput
    prompts: Some[PromptInput]
    messages: Chat | Sequence[Chat]


class JobSampled(Sampled, total=False):
    """Sampling parameters of a job, at the top level or in `sampling`."""

    logprobs: int | None
    sampling: Sampling | Fields | None


class MapFields(OfModel, ObservedFields, JobSampled, Handled, total=False):
    """The fields of a job without its prompts."""

    add_special_tokens: bool


class JobFields(PromptFields, MapFields, total=False):
    """`POST /v1/jobs`."""


class RunFields(MapFields, total=False):
    """A job without its prompts, and how to wait for it."""

    timeout: float | None
    progress: bool


class ReadingFields(OfModel, ObservedFields, Handled, total=False):
    """The fields of a job without its prompts and sampling."""


class RowsFields(ReadingFields, total=False):
    """The job that captures rows, and how to wait for it."""

    add_special_tokens: bool
    timeout: float | None
    progress: bool


class FeatureFields(ReadingFields, total=False):
    """The job that reads features, and where."""

    positions: Positions
    at: At | None
    max_tokens: int
    timeout: float | None
    sampling: Fields | None


class OpenAIFields(ObservedFields, Sampled, Handled, total=False):
    """Has the fields of both OpenAI-style calls."""

    capture_wait: bool
    n: int | None
    stream: Literal[False] | None
    stream_options: StreamOptions | Fields | None
    response_format: ResponseFormat | Fields | None
    return_token_ids: bool | None
    return_tokens_as_token_ids: bool | None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    service_tier: str | None
    store: bool | None


class CompletionFields(OpenAIFields, total=False):
    """`POST /v1/completions`."""

    logprobs: int | None
    echo: bool | None
    add_special_tokens: bool


class ChatFields(OpenAIFields, total=False):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Tool | Fields] | None
    tool_choice: NamedTool | str | Fields | None
    parallel_tool_calls: bool | None
    add_generation_prompt: bool
    continue_final_message: bool
    reasoning_effort: str | None
    chat_template_kwargs: Fields | None


class ProbeFields(TypedDict, total=False):
    """`PUT /v1/artifacts/probes/{name}`."""

    weight: Array
    bias: Array | None
    layer: int
    hook: HookInput | None
    at: At | None
    labels: Sequence[str] | None
    thresholds: float | Sequence[float | None] | None
    aggregation: Aggregation | None
    decay: float | None
    held_out: Sequence[HeldOut]
    model: str | None
    description: str | None
