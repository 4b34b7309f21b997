"""Requests and responses of the OpenAI-style endpoints, with `steering`, `patch`, `capture`,
`lens`, `features`, `readers` and `capture_wait` added.

Fields of OpenAI's that change nothing here (`user`, `store`, …) are accepted. Fields that we do not
serve are accepted only at the value that asks for nothing (`ONLY`), and refused by name otherwise;
any other field is unknown and refused as well.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..access.handling import Priority
from ..artifacts.probes import ProbeResult, TokenScores
from ..base.errors import Problem
from ..base.limits import (
    MAX_CHOICES,
    MAX_PROMPT_TOKENS,
    Count,
    Index,
    Label,
    Metadata,
    Share,
    Text,
)
from ..base.records import Record
from ..prompts.chat import Conversation, NamedTool, Role, ToolCall, ToolList
from ..readings.readings import ReadingResults
from .jobs import (
    AllowedTokens,
    BadWords,
    CaptureResults,
    Determinism,
    LogitBias,
    ModelRequest,
    Penalty,
    Prompt,
    RepetitionPenalty,
    Seed,
    StopText,
    StopTexts,
    StopTokens,
    StructuredRequest,
    Top,
    TopK,
    TopP,
)
from .models import GradientInfo, ModelFacts

#: Field → the values that ask for nothing. Anything else is refused with the field's name.
ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1, None),
    "suffix": (None, ""),
    "use_beam_search": (False, None),
    "truncate_prompt_tokens": (None,),
    "logprob_token_ids": (None, []),
    "kv_transfer_params": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "chat_template": (None,),
    "documents": (None, []),
    "add_special_tokens": (False, None),
    "include_reasoning": (True, None),
    "verbosity": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}


#: A field of `ONLY`: kept as it came, so that nothing large is built to be refused. Left out: it
#: asks for nothing.
Unserved = msgspec.Raw | UnsetType


class OpenAIError(Record):
    """The error in OpenAI's format: OpenAI's clients show `message`, and nothing of a problem
    document.
    """

    message: str
    type: str
    code: str
    param: str | None = None


class OpenAIProblem(Problem, kw_only=True, omit_defaults=True):
    """A problem document at OpenAI's paths."""

    error: OpenAIError


class TextFormat(Record, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Record, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Record):
    name: Label
    schema: msgspec.Raw
    description: Text | None = None
    strict: bool | None = None  # the schema is followed either way


class JsonSchemaFormat(Record, tag_field="type", tag="json_schema"):
    """JSON that a schema allows."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Record):
    include_usage: bool | None = False
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: bool = False  # nothing is padded either way


class OpenAIRequest(ModelRequest, kw_only=True):
    """Fields that both endpoints share.

    `temperature` is 1 by default, as in OpenAI's API; a job's is 0.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = 1.0
    top_p: TopP | None = 1.0
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None

    #: Hold the answer until every capture is durable and every rank has reported. A steered answer
    #: is always held for the ranks' reports, so that an intervention which was not applied is never
    #: answered as if it were.
    capture_wait: bool = False
    top_k: TopK = 0
    #: As a job's; vLLM's clients send 0, its `normal`.
    priority: Priority | Literal[0] = "normal"  # type: ignore[assignment]
    ignore_eos: bool = False
    stop_token_ids: StopTokens = []

    # As stock vLLM's server takes them
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = 1  # choices per prompt
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    repetition_penalty: RepetitionPenalty | None = 1.0
    min_p: Share | None = 0.0
    min_tokens: Index = 0
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords = []
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: Top | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredRequest | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # tokens of log-probabilities read `token_id:N`

    # Accepted, and without effect
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    service_tier: Label | None = None
    store: bool | None = None

    # Only at the value that asks for nothing: see `ONLY`
    use_beam_search: Unserved = UNSET
    truncate_prompt_tokens: Unserved = UNSET
    logprob_token_ids: Unserved = UNSET
    kv_transfer_params: Unserved = UNSET


class CompletionRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/completions`."""

    #: Text, several texts, token ids, or several lists of token ids.
    prompt: Text | Annotated[list[Prompt | Index], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
    max_tokens: Index | None = 16  # 0: only with `echo`
    logprobs: Top | None = None  # how many alternatives per token
    # the answer's text, tokens and log-probabilities begin with the prompt's
    echo: bool | None = False
    # whether texts get the special tokens that the tokenizer adds, such as BOS
    add_special_tokens: bool = True

    best_of: Unserved = UNSET
    suffix: Unserved = UNSET


class ChatRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Conversation
    max_tokens: Count | None = None  # default: what the model's length leaves
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Top | None = None
    tools: ToolList | None = None
    # default: `auto` with tools; without them, `auto` asks for nothing
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True  # false: at most one call
    add_generation_prompt: bool = True
    # the answer continues the last message; needs `add_generation_prompt: false`
    continue_final_message: bool = False
    # variables of the chat template, as vLLM sets them: this text, and whether it is not `none` as
    # `enable_thinking`
    reasoning_effort: Effort | None = None
    # further variables of the model's chat template
    chat_template_kwargs: msgspec.Raw | UnsetType = UNSET

    functions: Unserved = UNSET
    function_call: Unserved = UNSET
    chat_template: Unserved = UNSET
    documents: Unserved = UNSET
    add_special_tokens: Unserved = UNSET
    include_reasoning: Unserved = UNSET
    verbosity: Unserved = UNSET
    modalities: Unserved = UNSET
    audio: Unserved = UNSET
    prediction: Unserved = UNSET
    web_search_options: Unserved = UNSET


class CachedTokens(Record):
    cached_tokens: int


class TokenUsage(Record):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PolicyVerdict(Record):
    """What a policy decided on the choices of an answer, as far as its operator has it told."""

    policy: str
    triggered: list[int]  # indices of the choices at which it was on
    acted: list[int]  # of these, those at which it acted


# `omit_defaults`: an answer has no readings that were not asked for
class OpenAIAnswer(ReadingResults, omit_defaults=True):
    """Fields of every answer and chunk.

    `created` is in seconds since the epoch; `id` is the job's.
    """

    id: str
    object: str
    created: int
    model: str
    #: Present with capture, steering or global steering; in the last chunk of a stream.
    capture_results: CaptureResults | UnsetType = UNSET
    determinism: Determinism | UnsetType | None = UNSET
    #: Present with probes or policies; in the last chunk of a stream.
    probes: list[ProbeResult] | UnsetType = UNSET
    #: Of policies that are `told`; in the last chunk of a stream.
    verdicts: list[PolicyVerdict] | UnsetType = UNSET
    #: In chunks of a stream with probes: of tokens fed back to the model since the last chunk; the
    #: first are those of the prompt's last.
    scores: list[TokenScores] | UnsetType = UNSET


class CompletionLogprobs(Record):
    """Null: of a prompt's first token, which nothing precedes."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Record):
    """Log-probability of one token at one place of a prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


#: Of each token of a prompt: token id → its log-probability; null: the first token's.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(Record):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None  # the stop string or token that ended it
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`; likewise
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # with `prompt_logprobs`


class Completion(OpenAIAnswer, kw_only=True):
    """Answer of `POST /v1/completions`."""

    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(OpenAIAnswer, kw_only=True):
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class ChatLogprob(Record):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list["ChatLogprob"] | UnsetType = UNSET  # of a generated token


class ChatLogprobs(Record):
    content: list[ChatLogprob]
    refusal: None = None


class AnswerMessage(Record):
    role: Role
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Record):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None  # the stop string or token that ended it
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`


class ChatCompletion(OpenAIAnswer, kw_only=True):
    """Answer of `POST /v1/chat/completions`."""

    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # with `prompt_logprobs`


class CallPart(Record):
    """New part of a tool call in a chunk."""

    index: int
    function: dict[str, str]
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Record):
    role: Role | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallPart] | UnsetType = UNSET


class ChatChunkChoice(Record):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET  # with `finish_reason`
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`


class ChatChunk(OpenAIAnswer, kw_only=True):
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET  # of the first chunk, with `return_token_ids`
    usage: TokenUsage | UnsetType | None = UNSET


class ModelCard(ModelFacts, kw_only=True, forbid_unknown_fields=True):
    """One model as OpenAI lists it, with what a user needs to specify layers, vectors and
    positions. Only `GET /v1/models/{name}` has `certificate`, `attention` and `gradients`.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    workers: int  # live ones
    # of its gradient workers; null: there was none
    gradients: GradientInfo | None = None


class ModelList(Record):
    object: Literal["list"]
    data: list[ModelCard]
