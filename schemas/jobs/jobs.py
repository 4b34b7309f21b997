"""Jobs: request, states and transitions, result."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ..access.handling import Callback, Priority
from ..access.keys import DEFAULT_TENANT
from ..artifacts.loras import LoraUse, StoredLora
from ..artifacts.probes import ProbeList, ProbeResult, StoredProbe
from ..base.errors import Problem
from ..base.limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_FORMAT_CHOICES,
    MAX_INT64,
    MAX_LOGIT_BIAS,
    MAX_PROMPTS,
    MAX_REGEX,
    MAX_SCHEMA,
    MAX_STOP_TEXT,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    Index,
    Metadata,
    Name,
    PathName,
    Share,
    Text,
    TokenIds,
)
from ..base.records import JsonObject, Record
from ..base.states import TERMINAL as TERMINAL, TRANSITIONS as TRANSITIONS, State as State
from ..prompts.chat import Conversation, ToolCall, ToolUse
from ..prompts.images import ImageRef
from ..prompts.selectors import Hook, HookName
from ..prompts.sight import TurnMap
from ..readings.readings import ReadingRequest
from ..requests.policies import PolicyList
from ..requests.specs import (
    CaptureSpec,
    CaptureStatus,
    PatchList,
    SteeringList,
    StoredCapture,
    StoredSteering,
)
from ..requests.steering import GlobalSteering
from .captures import CaptureBlob, CaptureState
from .queues import Queue
from .works import NOTHING_MORE, Work, opened

W = TypeVar("W", bound=Work)
#: A prompt is text or token ids.
Prompt = Text | TokenIds
Seed = Annotated[int, msgspec.Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)]  # torch takes 64 bits
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_TEXT)]
StopTexts = Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)]
RegexText = Annotated[str, msgspec.Meta(max_length=MAX_REGEX)]
SchemaText = Annotated[str, msgspec.Meta(max_length=MAX_SCHEMA)]
#: How many alternatives come with the log-probability of a token.
Top = Annotated[int, msgspec.Meta(ge=0, le=20)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=100)]
#: How many tokens may be sampled; 0 and vLLM's -1: all.
TopK = Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)]
StopTokens = Annotated[list[Index], msgspec.Meta(max_length=MAX_STOP_TOKENS)]
LogitBias = Annotated[
    dict[Index, Annotated[float, msgspec.Meta(ge=-100, le=100)]],
    msgspec.Meta(max_length=MAX_LOGIT_BIAS),
]
AllowedTokens = Annotated[list[Index], msgspec.Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)]
BadWords = Annotated[list[StopText], msgspec.Meta(max_length=MAX_BAD_WORDS)]


class StructuredRequest(Record, omit_defaults=True):
    """vLLM's `structured_outputs`: exactly one constraint, and how JSON is written."""

    json: SchemaText | JsonObject | None = None  # a JSON schema, as text or as an object
    json_object: Literal[True] | None = None
    regex: RegexText | None = None
    choice: (
        Annotated[
            list[RegexText],
            msgspec.Meta(min_length=1, max_length=MAX_FORMAT_CHOICES),
        ]
        | None
    ) = None
    grammar: SchemaText | None = None
    structural_tag: SchemaText | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: RegexText | None = None


class Sampling(Record, omit_defaults=True):  # older workers can read it if new fields are unset
    """vLLM's sampling parameters that a job may set; defaults are greedy."""

    # 0: no token is computed, see `RankSpec.depth`
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    top_p: TopP = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0: all
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: Top | None = None  # of the generated tokens
    prompt_logprobs: Top | None = None  # of the prompt's
    min_tokens: int = 0  # before any stop
    # share of the most likely token's probability
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: dict[int, float] | None = None  # token id → added to its logit, -100 to 100
    allowed_token_ids: list[int] | None = None  # no others are sampled
    bad_words: list[str] = []  # are not generated
    skip_special_tokens: bool = True  # in the text
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredRequest | None = None  # in a job, `json` is text

    @property
    def reads_logits(self) -> bool:
        """Whether the whole model is computed: for tokens, or for probabilities of the prompt's."""
        return self.max_tokens > 0 or self.prompt_logprobs is not None


class SamplingRequest(Sampling):
    """Sampling parameters as a request gives them.

    Jobs that were accepted under wider limits are read as `Sampling`.
    """

    max_tokens: Index = 16
    top_k: TopK = 0
    seed: Seed | None = None
    stop: StopTexts = []
    stop_token_ids: StopTokens = []
    min_tokens: Index = 0
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords = []

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "top_k", max(self.top_k, 0))


class ModelRequest(ReadingRequest, kw_only=True):
    """Has the fields that every form of request to a model has."""

    model: Name
    capture: CaptureSpec | None = None
    steering: SteeringList = []
    patch: PatchList = []
    probes: ProbeList = []
    policies: PolicyList = []
    #: Name of the conversation that the request continues, for policies that latch it; the tenant's
    #: own.
    conversation: PathName | None = None


class JobRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/jobs`: `prompts`, or conversations in `messages`."""

    prompts: Annotated[list[Prompt], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)] | None = (
        None
    )
    #: Conversations; each becomes a prompt through the model's chat template, opened for the
    #: assistant's turn.
    messages: (
        Annotated[list[Conversation], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)] | None
    ) = None
    #: Whether texts in `prompts` get the special tokens that the tokenizer adds, such as BOS.
    add_special_tokens: bool = True
    sampling: SamplingRequest = SamplingRequest()
    metadata: Metadata = {}


class StoredPrompt(Record, omit_defaults=True):
    """A prompt after tokenisation; the token ids are the truth from here on."""

    # the API keeps them as an `array`, which takes half the memory of a list
    token_ids: Sequence[int]
    text: str | None = None
    # with images, `token_ids` has one placeholder for each image: see `schemas.prompts.images`
    images: list[ImageRef] = []
    # of a conversation that a policy reads by its turns; null: unknown, and so read as a whole
    turns: TurnMap | None = None


class Accepted(Record, omit_defaults=True, kw_only=True):
    """Has what stays as it was when a job was accepted."""

    id: str
    model: str
    created: float
    metadata: dict[str, str] = {}
    # named modules that it uses → the digest that the name pointed at
    modules: dict[str, str] = {}
    # source runs that it is patched with → the job that the name pointed at
    runs: dict[str, str] = {}
    run: str = ""  # its captures are kept as the source run of this name
    # owner of the job, its captures and its source run; invisible to other tenants
    tenant: str = DEFAULT_TENANT
    priority: Priority = "normal"
    # seconds since the epoch: aborted if no worker has begun it by then
    expires: float | None = None
    conversation: str = ""  # that it continues; of its tenant
    # of the model that it was accepted for, and no other runs it; empty: accepted by a version
    # without identities, so no worker runs it
    identity: str = ""
    # what it names or the operator adds: `sae/NAME`, `tuned/NAME`, `policy/NAME`, … → digest
    contents: dict[str, str] = {}
    # hook point → the name that its request gave it, if that is TransformerLens'
    hook_names: dict[Hook, HookName] = {}
    # how many layers, counted from the first, its prompts compute at most; null: the whole model,
    # as the cells of a sweep, which are graded by logits, or it computes no prompt
    layers: int | None = None
    # the queue that it enters first; in `JobView`, the one that it is in: that of vLLM's workers,
    # or `gradients`
    queue: Queue = ""


class Inputs(Record):
    """The object of the artifact store that has a job's tensors and images."""

    bytes: int
    digest: str  # SHA-256


class Job(Accepted, dict=True, kw_only=True):
    # `dict`: for the cached property; `omit_defaults`: as for `Sampling`
    """A validated job as the ledger keeps it and the worker reads it.

    Never changes after acceptance; a claim adds what holds at that moment.
    """

    kind: str  # of a row in `kinds`, or of a package that is not installed here
    title: str = ""  # the text by which people recognise it; empty: its work's, or its first prompt
    prompts: list[StoredPrompt]  # empty if its work has its own
    sampling: Sampling
    #: One list per prompt: positions are resolved against that prompt. Empty if nothing is
    #: requested. Patches come before steering.
    steering: list[list[StoredSteering]] = []
    captures: list[list[StoredCapture]] = []
    stream: bool = False  # publish token events while generating
    # the record of its work, as its kind has it: see `works`. It stays packed until it is asked for
    work: msgspec.Raw = NOTHING_MORE
    key: str = ""  # id of the API key that it was submitted with; empty: authentication is off
    callback: Callback | None = None
    trace: str = ""  # W3C traceparent of its submission; empty: not traced
    lora: StoredLora | None = None  # adapter that all its requests are computed with
    n: int = 1  # outputs per prompt; `prompts` repeats each prompt `n` times in a row
    tools: ToolUse | None = None  # of a chat: its outputs are parsed for calls
    echo: bool = False  # outputs come with their prompts
    # for prompts with images: generate up to the model's length limit, since the API does not know
    # the prompts' lengths; `sampling.max_tokens` is too large
    fills: bool = False
    probes: list[StoredProbe] = []  # that score all its prompts; also for its policies
    hooks: dict[str, Callback] = {}  # policy that acts on it → the webhook of its decisions
    inputs: Inputs | None = None  # null: its tensors and images are in the ledger
    # if its prompts are not in `prompts`: the global captures
    global_captures: list[CaptureSpec] = []
    # that the attempt runs under, from its claim to its end; the stored job has none
    global_steering: GlobalSteering = GlobalSteering()
    weight: int = 1  # of its tenant when it was claimed; the stored job has none

    @cached_property
    def opened(self) -> Work:
        """Its work. Raises MidstreamError as `works.opened` does."""
        return opened(self.kind, self.work)

    def work_as(self, kind: type[W]) -> W:
        """Return its work. Raises TypeError if that is of another kind, and as `opened` does."""
        if not isinstance(self.opened, kind):
            raise TypeError(f"job {self.id} is of kind {self.kind}")
        return self.opened

    @property
    def wants_receipts(self) -> bool:
        own = self.opened.facts.wants_receipts or self.lora is not None
        steered = any(self.steering) or bool(self.global_steering.entries)
        return own or any(self.captures) or steered or bool(self.probes)

    @property
    def cost(self) -> int:
        """Its cost in tokens, charged to its tenant's share: the prompts and the most that it may
        generate, and what its work costs.
        """
        prompts = sum(len(prompt.token_ids) for prompt in self.prompts)
        return prompts + self.sampling.max_tokens * len(self.prompts) + self.opened.facts.tokens

    @cached_property
    def captured(self) -> dict[str, int]:
        """Tag → how many prompts have a capture under it.

        Not every prompt: a global capture may select no position of a short one.
        """
        captured = (
            {capture.tag: None for capture in captures if capture.reading is None}
            for captures in self.captures
        )
        return dict(Counter(tag for tags in captured for tag in tags))


class TokenLogprob(Record):
    token_id: int
    token: str
    logprob: float
    top: list["TokenLogprob"] = []
    rank: int | UnsetType = UNSET  # of a prompt's token: 1 for the most likely one


class Message(Record, omit_defaults=True):
    """Output of a chat with tools, as vLLM's parser reads it."""

    content: str | None = None
    tool_calls: list[ToolCall] = []


class CallDelta(Record, omit_defaults=True):
    """New part of a call in a streamed message. A call's first one has `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class MessageDelta(Record, omit_defaults=True):
    """New part of a message, as vLLM's parser reads the text while it is generated."""

    content: str = ""
    calls: list[CallDelta] = []


class Prompted(Record):
    """The prompt of an output."""

    text: str
    token_ids: list[int]
    first: str = ""  # text of its first token
    # of its tokens, if `prompt_logprobs` was requested; the first has none
    logprobs: list[TokenLogprob | None] | None = None


class Output(Record):
    """Generated output of one prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | tool_calls | probe:NAME | policy:NAME
    prompt_tokens: int
    cached_tokens: int = 0  # prompt tokens served by the prefix cache
    logprobs: list[TokenLogprob] | None = None
    # the stop string or token that ended it, other than the end-of-sequence token
    stop_reason: int | str | UnsetType = UNSET
    message: Message | UnsetType = UNSET  # with tools
    prompt: Prompted | UnsetType = UNSET  # if it was requested


#: What a worker stores for a job: its outputs, or the outcome of its kind.
StoredOutcome = list[Output] | Record


class FileEntry(CaptureBlob, kw_only=True):
    """A durable capture blob as the user sees it."""

    positions: int
    tag: str = ""


class ConsumerReport(Record):
    """A consumer's result for one prompt's rows on one stage."""

    name: str
    request: int
    pp: int
    ok: bool
    message: str = ""
    rows: bytes = b""  # `memory`: a safetensors blob, base64 in JSON


class CaptureResults(CaptureState, kw_only=True):
    """`ok` only if every file is durable and every rank has reported."""

    url: str | None = None  # where the manifest and the tensors are
    files: list[FileEntry] = []
    consumers: list[ConsumerReport] = []


class RankReport(Record):
    rank: int
    tp: int
    request: int
    step: int
    checksum: str  # 16 hex digits
    actions: int
    applied: int
    status: str
    message: str = ""
    # layers, counted from the first, that the request needed; 0: the whole model
    depth: int = 0


class StageReport(Record):
    """The ranks of one pipeline stage; they must agree for every request."""

    pp: int
    consistent: bool
    ranks: list[RankReport]


class Determinism(Record):
    """Agreement of the ranks of each pipeline stage on the actions of every request.

    `consistent` covers the attempt that produced the result; a disagreement that ended an earlier
    attempt is in `retried`.
    """

    consistent: bool
    stages: list[StageReport]
    worker: str = ""
    global_version: int = 0  # of the global steering that the job ran under; 0: none was ever set
    retried: list[str] = []  # what ranks of an earlier attempt disagreed on


class JobView(Accepted, kw_only=True):
    """Answer of `GET /v1/jobs/{id}`."""

    kind: str
    state: State
    attempt: int  # how many times a worker has started it
    version: int  # grows with every change; the ETag
    queued: float | None = None
    started: float | None = None
    generated: float | None = None  # all outputs stored; captures may still be landing
    cancelling: float | None = None
    finished: float | None = None
    worker: str | None = None
    capture_status: CaptureStatus = "not_requested"
    receipts: int = 0  # arrived
    receipts_expected: int = 0
    prompts: int = 0
    error: Problem | None = None
    cells: int = 0  # of a sweep: those that are known, skipped ones included
    cells_expected: int = 0
    callback_url: str | None = None
    probed: bool = False  # probes score it: its own, or those of policies
    triggered: dict[str, bool] = {}  # policy that was on at a token of it → whether it acted there
    flagged: bool = False  # a probe or a policy with the action `flag` was on at a token of it
    # something edits it: its own steering, its adapter, or the global steering that it was started
    # under
    steered: bool = False
    lora: LoraUse | None = None
    # version of the global steering that its attempt began under; null: it has not begun
    global_version: int | None = None
    retry_reason: str = ""  # why its previous attempt ended; empty: there was none


class JobPlan(Record):
    """Answer of `POST /v1/jobs` with `dry_run`: what the job would compute."""

    model: str
    tokens: list[int]  # of each prompt
    layers: int | None  # as in `JobView`
    num_layers: int  # of the model


class JobProblem(Problem):
    """Answer of `GET /v1/jobs/{id}/result` for a job that failed."""

    probes: list[ProbeResult] = []  # of its policies, with what they decided before it failed


class ListedJob(JobView, kw_only=True):
    """A job in a list."""

    # the beginning of its first prompt (of a chat: the last message; of a sweep: both prompts)
    prompt: str = ""


class JobPage(Record):
    jobs: list[ListedJob]
    next: str | None = None  # pass as `?cursor=`


#: Not an event of a job: the last event of a stream, with the problem that ended it.
PROBLEM_EVENT = "error"
EventKind = Literal[
    "state", "token", "score", "output", "receipt", "start", "estimate", "fit", "cell", "summary",
    "done",
]  # fmt: skip


class Event(Record):
    """One entry of a job's event stream; its id is the SSE id.

    state: {state, attempt} · token: {index, text, token_ids, finish_reason}, with tools also
    `delta`, and `logprobs` and `prompt` as in `Output` where they were requested · score: {index,
    position, scores: {probe: {label: score}}, aggregates: likewise} · output: {index, first_token:
    its time on the worker; null: none} · receipt:
    {request, rank, status: ok | partial | error | disagrees (with another rank of its stage)} ·
    done: {state} · a sweep has no `output` events, and `receipt` events only where ranks disagree;
    instead, it has start: SweepStart · cell: SweepCell · summary: SweepSummary; an attribution has
    also estimate: EstimatedPair; a fit has fit: FitPoint or LensProgress
    """

    event: EventKind
    data: JsonObject  # JSON
    attempt: int = 0
    id: str = ""
