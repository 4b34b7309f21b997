"""What may a user ask to be captured or steered? And in which compact form does a rank get it?"""

import hashlib
import math
from typing import Annotated, Literal, NamedTuple

import msgspec

from .base import Record
from .selectors import Hook, HookName, LayerSelector, PositionSelector, PositionWish, Window, select
from .tensors import ITEM_BYTES, Tensor

#: A tag is a folder name: one path segment, so it cannot leave the capture root.
#: (`(?!\n)`: Python's `$` would let one line break follow.)
Tag = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}(?!\n)$")]


#: Before or after the interventions of the same site.
At = Literal["before", "after"]
#: What captured rows are stored as; `model`: as the model computes them.
RowDType = Literal["model", "float32", "bfloat16", "float16"]
#: How captured rows become files, see `docs/capture.md`; `auto`: `segment` for small captures, `packed` for others.
Layout = Literal["auto", "packed", "per_file", "segment"]
#: Who gets the rows, by name: `filesystem`, `memory`, `logging`, and what is installed besides.
Consumers = Annotated[list[str], msgspec.Meta(min_length=1, max_length=8)]
DEFAULT_CONSUMERS = ("filesystem",)
LAYERS_AND_HOOKS = "name layers per hook in `hooks`, or `hook` with `layers`, not both"


class CaptureSpec(Record):
    """Record rows of the residual stream or its branches. One row per (hook, layer, position): `[hidden_size]`.

    `hooks` gives each hook point its own layers (`{"post_block": "all", "pre_attn": "0-17"}`) and stands instead of `hook`
    and `layers`. `all_generated` names the generated tokens that were fed back to the model: the last sampled token
    never is, so n generated tokens give n − 1 rows; with `every_n` only every n-th generated token, from the first.
    """

    layers: LayerSelector | None = None  # null: all
    hook: HookName | None = None  # null: post_block
    hooks: dict[HookName, LayerSelector] | None = None
    positions: PositionWish = "last_prompt"
    every_n: Annotated[int, msgspec.Meta(ge=1)] = 1
    at: At = "before"
    dtype: RowDType = "model"
    tag: Tag = "default"
    layout: Layout = "auto"
    consumers: Consumers = msgspec.field(default_factory=lambda: list(DEFAULT_CONSUMERS))

    def __post_init__(self) -> None:
        if self.hooks is not None and (self.hook is not None or self.layers is not None):
            raise ValueError(LAYERS_AND_HOOKS)
        if self.hooks is not None and not self.hooks:
            raise ValueError("hooks is empty: name at least one")

    @property
    def wanted(self) -> dict[HookName, LayerSelector]:
        """Hook as the user named it → layers, whichever way it was written."""
        return self.hooks if self.hooks is not None else {self.hook or "post_block": "all" if self.layers is None else self.layers}


#: What a steering entry does to a row s at its hook; formulas, sources and order: `docs/steering.md`.
#: `replace`: (1 − alpha) · s + alpha · scale · v, with alpha 1 bit for bit scale · v (activation patching: Vig et al. 2020,
#: arXiv:2004.12265; Meng et al. 2022, arXiv:2202.05262).
#: `lowrank`: s + strength · Rᵀ(W s + b − R s) (LoReFT: Wu et al. 2024, arXiv:2404.03592).
#: `add`: s + scale · v (activation addition: Turner et al. 2023, arXiv:2308.10248); with `norm_match` s + scale · ‖s‖ · v̂.
#: `ablate`: s − strength · (s·v̂) v̂ (directional ablation: Arditi et al. 2024, arXiv:2406.11717).
#: `clamp`: s + strength · (min(max(s·v̂, low), high) − s·v̂) v̂ (as feature clamping: Templeton et al. 2024, Scaling
#: Monosemanticity).
#: v̂ = v/‖v‖. In this order where several touch a row, and of one kind in the order written.
SteeringOp = Literal["replace", "lowrank", "add", "ablate", "clamp"]


class OpFields(NamedTuple):
    """What an op takes besides where it acts; other fields must be left out."""

    tensors: tuple[str, ...]  # all of them, in the order of `StoredSteering.tensors`
    options: tuple[str, ...]


STEERING_FIELDS: dict[SteeringOp, OpFields] = {
    "replace": OpFields(("vector",), ("scale", "alpha")),
    "lowrank": OpFields(("rotation", "weight", "bias"), ("strength",)),
    "add": OpFields(("vector",), ("scale", "norm_match")),
    "ablate": OpFields(("vector",), ("strength",)),
    "clamp": OpFields(("vector",), ("strength", "low", "high")),
}
#: The largest rank of one `lowrank`, as the kernels have it.
MAX_RANK = 64


class SteeringSpec(Record):
    """Edit the rows at `hook` of each of `layers`, at `positions`, as `op` says. Null: what the comment says, or not of this op.

    Or apply a named `module`, with `scale` (of all that it does, see `at_scale`) and `positions` (instead of the module's own).

    `vector` v: `[hidden_size]`, finite; its length does not matter for `ablate`, `clamp` and with `norm_match`.
    `rotation` R and `weight` W: `[rank, hidden_size]`, `bias` b: `[rank]`.
    """

    layers: LayerSelector | None = None  # required without `module`
    vector: Tensor | None = None
    hook: HookName | None = None  # post_block
    positions: PositionWish | None = None  # all; of a module: its own
    op: SteeringOp | None = None  # add
    module: str | None = None
    scale: float | None = None  # 1
    norm_match: bool | None = None  # false
    alpha: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None  # 1: all of it
    strength: float | None = None  # 1: all of it
    low: float | None = None  # of the component along v, in units of the stream; no lower limit
    high: float | None = None  # no upper limit
    rotation: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        # JSON writes these as null, and null has a meaning.
        for name in ("scale", "alpha", "strength", "low", "high"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} is {value}: leave it out, or give a finite number")


#: What the ops are to the ranks, in the order in which they are applied: `kernels.families`. `add_matched` is `add` with
#: `norm_match`.
Family = Literal["replace", "lowrank", "add", "add_matched", "ablate", "clamp"]


class StoredSteering(Record):
    """A `SteeringSpec` after validation, for one prompt: layers are numbers, tensors are named by their content hashes."""

    layers: list[int]
    hook: Hook
    positions: PositionSelector
    family: Family
    tensors: list[str]  # the vector; of `lowrank` R, W and b
    scale: float = 1.0  # of the vector, for `replace` and `add`
    numbers: list[float] = []  # the family's first scalars: alpha, or strength, …
    rank: int = 0  # of `lowrank`

    @property
    def num_vectors(self) -> int:
        """Entries of the ranks' pool for each site."""
        return 2 * self.rank or 1

    def shapes(self, hidden_size: int) -> list[list[int]]:
        """What its tensors must be."""
        return shapes_of(self.family, self.rank, hidden_size)


def shapes_of(family: Family, rank: int, hidden_size: int) -> list[list[int]]:
    """The shapes of a family's tensors, in the order of `StoredSteering.tensors`."""
    if family == "lowrank":
        return [[rank, hidden_size], [rank, hidden_size], [rank]]
    return [[hidden_size]]


#: What a factor on the whole of a family scales: the vector, or the first of its numbers (its strength, or norm_match's scale).
SCALED_VECTOR: frozenset[Family] = frozenset({"replace", "add"})


def at_scale(entry: StoredSteering, factor: float) -> StoredSteering:
    """The entry with `factor` times its effect: scale · factor where the vector is scaled, strength · factor otherwise."""
    if factor == 1.0:
        return entry
    if entry.family in SCALED_VECTOR:
        return msgspec.structs.replace(entry, scale=entry.scale * factor)
    return msgspec.structs.replace(entry, numbers=[entry.numbers[0] * factor, *entry.numbers[1:]])


class StoredCapture(Record):
    """A `CaptureSpec` after validation, for one prompt."""

    sites: dict[Hook, list[int]]  # hook → ascending layers, at least one
    positions: PositionSelector
    tag: str
    every_n: int = 1
    at: At = "before"
    dtype: RowDType = "model"
    layout: Layout = "auto"
    consumers: list[str] = msgspec.field(default_factory=lambda: list(DEFAULT_CONSUMERS))

    @property
    def num_sites(self) -> int:
        """Rows per captured position."""
        return sum(len(layers) for layers in self.sites.values())

    def select(self, start: int, stop: int, prompt_tokens: int) -> "list[int] | range":
        """The absolute positions in the window `[start, stop)` that are captured, ascending."""
        chosen = select(self.positions, start, stop, prompt_tokens)
        if self.every_n == 1:
            return chosen
        return [position for position in chosen if position < prompt_tokens or (position - prompt_tokens) % self.every_n == 0]

    def count_positions(self, prompt_tokens: int, max_tokens: int) -> int:
        """How many rows per site it may give, when up to `max_tokens` are generated. Takes no time, however many they are."""
        chosen = select(self.positions, 0, prompt_tokens + max_tokens - 1, prompt_tokens)
        if self.every_n == 1 or not isinstance(chosen, range):
            return len(chosen)  # a list names prompt positions, and those are all taken
        of_prompt = range(chosen.start, min(chosen.stop, prompt_tokens))
        passed = max(chosen.start - prompt_tokens, 0)  # generated tokens before the first that is named
        first = prompt_tokens + -(-passed // self.every_n) * self.every_n
        return len(of_prompt) + len(range(first, chosen.stop, self.every_n))


#: Bytes of a captured position besides its rows: its number and its token id, int64 each.
POSITION_BYTES = 16


def memory_bytes(positions: int, sites: int, hidden_size: int, dtype: str, stages: int = 1) -> int:
    """What one prompt's rows count against `memory_limit_kib`: rows, numbers and token ids, but not the blob's header.

    `positions` `[hidden_size]` rows of `dtype` at each of `sites`; each of `stages` tells the positions anew.
    """
    return positions * (sites * hidden_size * ITEM_BYTES[dtype] + stages * POSITION_BYTES)


class RankSpec(Record):
    """What a rank is told about one request, in `SamplingParams.extra_args["midstream"]` (as plain containers).

    Positions are resolved against this request's prompt.
    """

    version: str  # Midstream's version; a rank of another version refuses
    job: str
    request: int  # index of the prompt in its job
    attempt: int  # fencing token
    prompt_tokens: int
    steering: list[StoredSteering] = []
    captures: list[StoredCapture] = []  # what the user asked for, and what the operator captures of everyone
    digest: str = ""  # content of the interventions; empty when there is none
    first_affected: int = -1  # lowest absolute position an intervention touches; -1: none
    by_prompt: bool = False  # where the prompt ends decides what is touched: `all_prompt`, `last_prompt`, `all_generated`
    lowest_captured: int = -1  # lowest captured prompt position; -1: none
    requests: dict[str, int] = {}  # tag → how many of the job's prompts have a capture under it
    told_when_over: bool = False  # the worker says where the output ends (stop strings are found there, after the fact)
    global_steering: list[StoredSteering] = []  # the operator's, applied before `steering`; part of `digest` and what follows from it
    global_version: int = 0  # of the global steering that the request began under

    @property
    def key(self) -> str:
        """Names this request in calls to the ranks."""
        return f"{self.job}.{self.request}.{self.attempt}"


CaptureStatus = Literal["not_requested", "pending", "ok", "partial", "error", "timed_out"]


#: So many rows of the ranks' steering table may edit one token for its request, and as many more for everyone's sake.
MAX_STEERING_ROWS = 4


class SteeringRow(Record):
    """Entries of one request that share their positions: one row of the rank's steering table.

    `key` names the row's content (layers, tensors, numbers), not where it is applied, so that equal configurations
    share a row.
    """

    key: str
    positions: PositionSelector
    entries: list[StoredSteering]

    @property
    def num_vectors(self) -> int:
        """Entries of the ranks' pool, at most: sites where the same entries meet share them."""
        meet: dict[tuple[Hook, int, Family], tuple[int, ...]] = {}  # site and family → which entries
        for number, entry in enumerate(self.entries):
            for layer in entry.layers:
                site = entry.hook, layer, entry.family
                meet[site] = (*meet.get(site, ()), number)
        return sum(self.entries[numbers[-1]].num_vectors for numbers in set(meet.values()))


#: Families of which a row may have several at one site: they are joined to one.
JOINED: frozenset[Family] = frozenset({"add", "replace"})


def steering_rows(steering: list[StoredSteering]) -> list[SteeringRow]:
    """Group a request's steering by its positions, in the order first named.

    A family's entries at one site are applied in the order of the rows, and those of `JOINED` in one row in the order
    written. So an entry whose family is at one of its sites already joins no earlier row than that one, or, where it cannot
    be joined, a later one or a new one. The order of additions does not matter.
    """
    groups: list[list[StoredSteering]] = []
    named: dict[object, int] = {}  # positions → the last group that has them
    met: dict[tuple[Hook, int, Family], int] = {}  # (hook, layer, family) → the last group that has it
    for entry in steering:
        positions = hashable(entry.positions)
        sites = [(entry.hook, layer, entry.family) for layer in entry.layers]
        before = -1 if entry.family == "add" else max((met.get(site, -1) for site in sites), default=-1)
        number = named.get(positions, -1)
        if number < max(0, before if entry.family in JOINED else before + 1):
            number = len(groups)
            groups.append([])
        groups[number].append(entry)
        named[positions] = number
        met.update((site, max(number, met.get(site, -1))) for site in sites)
    rows = []
    for group in groups:
        content = [(e.hook, e.layers, e.family, e.tensors, e.scale, e.numbers) for e in group]
        rows.append(SteeringRow(key=content_key(content), positions=group[0].positions, entries=group))
    return rows


def hashable(positions: PositionSelector) -> str | tuple[int, ...] | Window:
    return tuple(positions) if isinstance(positions, list) else positions


def steering_digest(steering: list[StoredSteering]) -> str:
    """Names everything that the steering does to a request's KV cache; empty when there is none."""
    if not steering:
        return ""
    return content_key([(e.hook, e.layers, e.family, e.tensors, e.scale, e.numbers, e.positions) for e in steering])


def content_key(content: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()
