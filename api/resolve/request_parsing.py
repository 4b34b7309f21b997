"""Parsing of the three request body shapes into one `ParsedRequest`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from dataclasses import field as dataclass_field
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from ...schemas.chat import ChatMessage, ImagePart, PlainMessage, TextPart
from ...schemas.errors import invalid
from ...schemas.extensions import ReaderSpec
from ...schemas.features import FeatureSpec
from ...schemas.handling import Handling, handling_of
from ...schemas.jobs import JobRequest, Sampling
from ...schemas.lens import LensSpec
from ...schemas.limits import MAX_PROMPTS, MAX_UNSERVED
from ...schemas.openai import ONLY, ChatRequest, CompletionRequest, OpenAIRequest
from ...schemas.probes import ProbeUse
from ...schemas.specs import CaptureSpec, PatchSpec, SteeringSpec
from .feature_wishes import FeatureWish
from .images import read_image


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt before tokenisation: text, token ids or a conversation; `field` is where the user wrote it."""

    field: str
    value: str | list[int] | list[PlainMessage]
    images: list[bytes] = dataclass_field(default_factory=list)  # of a conversation, in its order

    @property
    def is_conversation(self) -> bool:
        return not isinstance(self.value, str) and bool(self.value) and isinstance(self.value[0], dict)


@dataclass(frozen=True)
class ParsedRequest:
    """A body with defaults filled in, before anything is known of the model. `sampling_at` prefixes sampling's field names."""

    kind: Literal["generate", "completion", "chat"]
    model: str
    prompts: list[ParsedPrompt]
    sampling: Sampling
    sampling_at: str = ""
    max_tokens_at: str = "max_tokens"
    fill_max_tokens: bool = False  # generate as long as the model's length allows
    capture: CaptureSpec | None = None
    steering: list[SteeringSpec] = field(default_factory=list)
    patch: list[PatchSpec] = field(default_factory=list)
    lens: LensSpec | None = None
    readers: list[ReaderSpec] = field(default_factory=list)
    features: list[FeatureSpec] | list[FeatureWish] = field(default_factory=list)  # the latter once the autoencoders are known
    stream: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    handling: Handling = field(default_factory=Handling)
    lora: str | None = None
    probes: list[str | ProbeUse] = field(default_factory=list)


def parse_job(body: JobRequest) -> ParsedRequest:
    """The body of `POST /v1/jobs`. Raises a 400 naming `prompts` when there is nothing to run, or both kinds of prompts."""
    if (body.prompts is None) == (body.messages is None):
        what = "prompts and messages are both given" if body.prompts else "no prompt given"
        raise invalid("prompts", what, allowed="either prompts (texts or lists of token ids) or messages (lists of chat messages)")
    prompts = [ParsedPrompt(f"prompts[{index}]", prompt) for index, prompt in enumerate(body.prompts or [])]
    chats = [parse_conversation(f"messages[{index}]", messages) for index, messages in enumerate(body.messages or [])]
    return ParsedRequest(
        kind="generate",
        model=body.model,
        prompts=prompts or chats,
        sampling=body.sampling,
        sampling_at="sampling.",
        max_tokens_at="sampling.max_tokens",
        capture=body.capture,
        steering=body.steering,
        patch=body.patch,
        lens=body.lens,
        readers=body.readers,
        features=body.features,
        metadata=body.metadata,
        handling=handling_of(body),
        lora=body.lora,
        probes=body.probes,
    )


def parse_completion(body: CompletionRequest) -> ParsedRequest:
    """The body of `POST /v1/completions`. Raises a 400 naming the field that we do not serve."""
    _refuse_unserved(body)
    if body.stream and body.logprobs is not None:
        raise invalid("logprobs", "is not valid with stream: true", allowed="null, or stream: false")
    return ParsedRequest(
        kind="completion",
        model=body.model,
        prompts=_completion_prompts(body.prompt),
        sampling=_sampling(body, 16 if body.max_tokens is None else body.max_tokens, body.logprobs),
        capture=body.capture,
        steering=body.steering,
        patch=body.patch,
        lens=body.lens,
        readers=body.readers,
        features=body.features,
        stream=bool(body.stream),
        metadata=body.metadata or {},
        handling=handling_of(body),
        lora=body.lora,
        probes=body.probes,
    )


def parse_chat(body: ChatRequest) -> ParsedRequest:
    """The body of `POST /v1/chat/completions`. Raises a 400 naming the field that we do not serve."""
    _refuse_unserved(body)
    if body.stream and body.logprobs:
        raise invalid("logprobs", "is not valid with stream: true", allowed="false, or stream: false")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    named = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, named)
    return ParsedRequest(
        kind="chat",
        model=body.model,
        prompts=[parse_conversation("messages", body.messages)],
        sampling=_sampling(body, max_tokens or 1, (body.top_logprobs or 0) if body.logprobs else None),
        max_tokens_at=named,
        fill_max_tokens=max_tokens is None,
        capture=body.capture,
        steering=body.steering,
        patch=body.patch,
        lens=body.lens,
        readers=body.readers,
        features=body.features,
        stream=bool(body.stream),
        metadata=body.metadata or {},
        handling=handling_of(body),
        lora=body.lora,
        probes=body.probes,
    )


def _refuse_unserved(body: OpenAIRequest) -> None:
    for name, harmless in ONLY.items():
        raw = getattr(body, name, UNSET)
        if raw is not UNSET and not _is_one_of(bytes(raw), harmless):
            shown = bytes(raw)[:80].decode(errors="replace")
            raise invalid(name, f"{shown} is not supported", allowed=f"omit it, or {msgspec.json.encode(harmless[0]).decode()}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream: true")


def _is_one_of(raw: bytes, values: Sequence[Any]) -> bool:
    """Whether the JSON is one of `values`. JSON longer than all of them is not decoded."""
    try:
        return len(raw) <= MAX_UNSERVED and msgspec.json.decode(raw) in values
    except (msgspec.DecodeError, UnicodeDecodeError):  # it was not checked before
        return False


def _sampling(body: OpenAIRequest, max_tokens: int, logprobs: int | None) -> Sampling:
    """The body's fields that are a job's by name; of the others `max_tokens` and `logprobs`. Null: the default."""
    given = {name: value for name in Sampling.__struct_fields__ if (value := getattr(body, name, None)) is not None}
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    return Sampling(**{"temperature": 1.0, **given, "max_tokens": max_tokens, "logprobs": logprobs})


def _completion_prompts(prompt: str | list[str | int | list[int]]) -> list[ParsedPrompt]:
    """One prompt (text or token ids), or a list of prompts; a mixture of token ids and prompts is neither."""
    if isinstance(prompt, str):
        return [ParsedPrompt("prompt", prompt)]
    if not prompt:
        raise invalid("prompt", "is empty: give text or token ids")
    if len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise invalid("prompt", f"has {len(prompt)} prompts", allowed=f"at most {MAX_PROMPTS}")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ParsedPrompt("prompt", ids)]
    if ids:
        raise invalid("prompt", "mixes token ids and texts", allowed="text, a list of texts, token ids, or lists of token ids")
    return [ParsedPrompt(f"prompt[{index}]", item) for index, item in enumerate(prompt) if not isinstance(item, int)]


def parse_conversation(at: str, messages: Sequence[ChatMessage]) -> ParsedPrompt:
    """One conversation, whose images are read. Raises a 400 naming the part below `at` that is not an image."""
    images = [
        read_image(part, f"{at}[{number}].content[{index}]")
        for number, message in enumerate(messages)
        if not isinstance(message.content, str)
        for index, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]
    return ParsedPrompt(at, plain_messages(messages), images)


def plain_messages(messages: Iterable[ChatMessage]) -> list[PlainMessage]:
    """A conversation as chat templates know it, with OpenAI's newer name for the system role under its old one."""
    return [_message(message) for message in messages]


def _message(message: ChatMessage) -> PlainMessage:
    plain = {"role": "system" if message.role == "developer" else message.role, "content": _content(message)}
    return plain if message.name is None else {**plain, "name": message.name}


def _content(message: ChatMessage) -> str | list[dict[str, str]]:
    """The text; parts where one of them is an image."""
    if isinstance(message.content, str):
        return message.content
    if any(isinstance(part, ImagePart) for part in message.content):
        return [{"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in message.content]
    return "\n".join(part.text for part in message.content if isinstance(part, TextPart))
