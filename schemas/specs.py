"""What may a user ask to be captured or steered? And in which compact form does a rank get it?"""

import hashlib
from typing import Annotated, Literal

import msgspec

from .base import Record
from .selectors import Hook, HookName, LayerSelector, PositionSelector, PositionWish, select
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


#: What a steering entry does to a row s with its vector v: `add`: s + scale · v; `replace`: (1 − alpha) · s + alpha · scale · v,
#: with alpha 1 bit for bit scale · v.
SteeringOp = Literal["add", "replace"]


class SteeringSpec(Record):
    """Edit the rows at `hook` of each of `layers`, at `positions`.

    `vector`: `[hidden_size]`, finite. Activation addition: Turner et al. 2023, arXiv:2308.10248. Where one request names a row
    several times, replacements come first, then additions, each in the order written.
    """

    layers: LayerSelector
    vector: Tensor
    scale: float = 1.0
    hook: HookName = "post_block"
    positions: PositionWish = "all"
    op: SteeringOp = "add"
    alpha: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # of `replace`


class StoredSteering(Record):
    """A `SteeringSpec` after validation: layers are numbers, the vector is named by its content hash."""

    layers: list[int]
    vector: str
    scale: float
    hook: Hook
    positions: PositionSelector
    op: SteeringOp = "add"
    alpha: float = 1.0


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
        return len(of_prompt) + len(range(max(chosen.start, prompt_tokens), chosen.stop, self.every_n))


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

    @property
    def key(self) -> str:
        """Names this request in calls to the ranks."""
        return f"{self.job}.{self.request}.{self.attempt}"


CaptureStatus = Literal["not_requested", "pending", "ok", "partial", "error", "timed_out"]


#: A request's steering may name this many different position selectors: so many rows may edit one token.
MAX_STEERING_SELECTORS = 4


class SteeringRow(Record):
    """Entries of one request that share their positions: one row of the rank's steering table.

    `key` names the row's content (layers, vectors, scales), not where it is applied, so that equal configurations
    share a row.
    """

    key: str
    positions: PositionSelector
    entries: list[StoredSteering]


def steering_rows(steering: list[StoredSteering]) -> list[SteeringRow]:
    """Group a request's steering by its positions, in the order first named.

    An entry that replaces joins its group only where no later group replaces at one of its sites: replacements of a row
    happen in the order written.
    """
    groups: list[list[StoredSteering]] = []
    for entry in steering:
        same = [number for number, group in enumerate(groups) if group[0].positions == entry.positions]
        if same and not (entry.op == "replace" and any(_replaces(group, entry) for group in groups[same[-1] + 1 :])):
            groups[same[-1]].append(entry)
        else:
            groups.append([entry])
    rows = []
    for group in groups:
        content = [(e.hook, e.layers, e.vector, e.scale, e.op, e.alpha) for e in group]
        rows.append(SteeringRow(key=_content_key(content), positions=group[0].positions, entries=group))
    return rows


def _replaces(group: list[StoredSteering], entry: StoredSteering) -> bool:
    """Does one of the group replace at a site of `entry`?"""
    return any(e.op == "replace" and e.hook == entry.hook and not set(e.layers).isdisjoint(entry.layers) for e in group)


def steering_digest(steering: list[StoredSteering]) -> str:
    """Names everything that the steering does to a request's KV cache; empty when there is none."""
    if not steering:
        return ""
    return _content_key([(e.hook, e.layers, e.vector, e.scale, e.op, e.alpha, e.positions) for e in steering])


def _content_key(content: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()
