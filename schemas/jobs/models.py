"""A worker's published facts about its model, for validation in the API without an engine."""

import hashlib

from ..artifacts.loras import LoraSupport
from ..base.records import Published, Record, to_msgpack
from ..extensions import Extension
from ..model.attention import AttentionKind
from ..model.banks import RowShape
from ..requests.specs import CaptureSpec
from ..requests.steering import RankLoad
from .certificates import Certificate, Started

#: The digits of an identity shown in errors, in tables and on the page.
SHOWN_IDENTITY = 12
#: Advice for a request with tools to a worker without `tool_parser`.
NO_TOOL_PARSER = (
    "start the worker with the setting tool_parser, such as `--set tool_parser=hermes`, or send no "
    "tools"
)


class ModelFacts(Started, kw_only=True):
    """Describes a served model to users and jobs."""

    num_layers: int
    # a request that needs no token computes only the layers that its rows need; not in a compiled
    # engine, which computes every prompt in whole
    exits: bool = False
    hidden_size: int
    vocab_size: int
    max_model_len: int  # tokens, prompt and generated together
    dtype_reason: str = ""  # why it computes in `dtype`
    hooks: list[str]  # served hook points
    # hook point whose rows do not have the hidden size → their shape
    inside: dict[str, RowShape] = {}
    # hook points whose rows some layer multiplies before it adds them to the residual stream
    multiplied: list[str] = []
    consumers: list[str] = []  # of captured rows, loaded on every rank
    memory_limit_kib: int = 0  # the largest capture that a response returns
    global_captures: list[CaptureSpec] = []  # captures of every request
    # SHA-256 of everything that determines the model's results, see docs/reliability.md
    identity: str = ""
    # vLLM's method, and how weights and activations are rounded; empty: not quantised
    quantization: str = ""
    lora: LoraSupport | None = None  # null: no adapters are served
    certificate: Certificate | None = None  # of the engine's start; null: it was not certified
    # of each layer that attends: how it turns queries and keys into patterns; empty: not reported
    attention: list[AttentionKind] = []


class ModelInfo(ModelFacts, kw_only=True):
    """Facts about a served model. A worker publishes them in Redis when its engine is up; they stay
    when the worker stops, so that jobs are still accepted.
    """

    name: str
    version: str  # Midstream's version on the worker
    tokenizer: str  # SHA-256 of the tokenizer bundle's bytes, the key of its blob
    tp: int = 1
    pp: int = 1
    runner: str = "v1"
    step_tokens: int = 0  # the most token rows in one engine step
    speculative_tokens: int = 0  # the most drafts of a request in one engine step
    # rows that one engine step may capture: those of one token and its drafts must fit; 0: no limit
    capture_row_limit: int = 0
    steering_rows: int = 0  # distinct steering rows that the engine can hold; 0: not reported
    steering_entries: int = 0  # vectors of those rows, over all sites; 0: not reported
    grades: bool = False  # ranks support `RankSpec.grade`, so sweeps can run
    multimodal: bool = False  # the model accepts images, even if this worker does not
    images: int = 0  # the most images of a prompt; 0: this worker accepts none
    images_refused: str = ""  # why this worker accepts none
    # token ids of an image in a prompt as its chat template writes it
    image_placeholder: list[int] = []
    tool_parser: str = ""  # vLLM's parser of tool calls; empty: chats take no tools
    # without a parser: those that may fit the chat template, for the setting `tool_parser`
    tool_parsers: list[str] = []
    wire: int = 0  # of the worker, see `schemas.service.compatibility`
    oldest_wire: int = 0

    def row_size(self, hook: str) -> int:
        """Return the number of elements of a row at `hook`."""
        return self.inside[hook].size if hook in self.inside else self.hidden_size

    def installed(self, kind: str, name: str | None) -> Extension:
        """Return the extension of a kind and a name. Raises ValueError with the valid names."""
        present = {each.name: each for each in self.extensions if each.kind == kind}
        if name is None or name not in present:
            valid = (
                f"valid: {', '.join(sorted(present))}"
                if present
                else f"no {kind}s are installed for {self.name} (setting extensions)"
            )
            raise ValueError(f"unknown {kind} {name!r}; {valid}")
        return present[name]

    def step_holds(self, rows: int) -> bool:
        """Return whether one engine step may capture that many rows, assuming that the pipeline
        stages share them evenly. Only the worker knows the actual shares.
        """
        return not self.capture_row_limit or -(-rows // self.pp) <= self.capture_row_limit


class GradientInfo(Published):
    """Facts about a model on its gradient workers. A worker publishes them when it can take jobs,
    and again when it has compared its rows; they stay when the worker stops.
    """

    model: str
    identity: str  # of the model, as in `ModelInfo`
    dtype: str
    device: str
    # why no gradient job of the model can run, with figures: its rows differ from the vLLM
    # worker's, or it cannot be loaded; empty: jobs are accepted
    refused: str = ""
    absent: dict[str, str] = {}  # hook point without gradients → the reason

    def fits(self, model: ModelInfo) -> bool:
        """Return whether the worker computes with this very model, not another of its name."""
        return self.identity == model.identity


class TokenizerBundle(Record):
    """The tokenizer exactly as the worker's engine uses it; `tokenizers` loads it without torch."""

    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, … for the chat template
    eos_token_ids: list[int]
    # the chat template reads a message's content as a list of parts, such as text
    parts: bool = False


def encode_bundle(bundle: TokenizerBundle) -> tuple[str, bytes]:
    """Return the key of the bundle's blob (its SHA-256, as in `ModelInfo.tokenizer`), and the blob
    (MessagePack).
    """
    raw = to_msgpack(bundle)
    return hashlib.sha256(raw).hexdigest(), raw


class WorkerStats(RankLoad, kw_only=True):
    """A worker's current activity. Figures of its ranks are a few seconds old: those of `RankLoad`
    are of all ranks, or of the rank with the most rows.
    """

    at: float  # seconds since the epoch
    jobs: int  # jobs that it holds
    waiting: int  # requests that wait for the engine, or for rows of the steering table
    prompt_tokens_s: float  # tokens per second since the last heartbeat
    generated_tokens_s: float
    prompt_tokens: int  # since the worker started
    generated_tokens: int
    cells: int  # of sweeps
    # tenant → tokens of its prompts and of what they generated, since the worker started
    tenant_tokens: dict[str, int] = {}
    # those of tenants with some since the last heartbeat, per second
    tenant_tokens_s: dict[str, float] = {}
    desyncs: int
    resyncs: int
    last_desync: str = ""  # what the ranks disagreed on
    last_desync_at: float | None = None


class WorkerInfo(Published):
    """A live worker's record, renewed with its heartbeat."""

    worker: str
    boot: str
    model: str
    version: str
    host: str
    pid: int
    started: float
    tp: int
    pp: int
    healthy: bool = True
    detail: str = ""
    stats: WorkerStats | None = None
    wire: int = 0  # see `schemas.service.compatibility`
    oldest_wire: int = 0
    identity: str = ""  # of the model that it serves
    queue: str = ""  # that it serves, see `schemas.requests.attributions.Queue`
