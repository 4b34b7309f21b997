"""What may a user ask to be captured or steered? And in which compact form does a rank get it?"""

import hashlib
from typing import Annotated, Literal

import msgspec

from .base import Record
from .selectors import Hook, LayerSelector, PositionSelector
from .tensors import Tensor

#: A tag is a folder name: one path segment, so it cannot leave the capture root.
#: (`(?!\n)`: Python's `$` would let one line break follow.)
Tag = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}(?!\n)$")]


class CaptureSpec(Record):
    """Record rows of the residual stream. One row per (layer, position): `[hidden_size]` in the model's dtype.

    `all_generated` names the generated tokens that were fed back to the model: the last sampled token never is,
    so n generated tokens give n − 1 rows.
    """

    layers: LayerSelector = "all"
    hook: Hook = "post_block"
    positions: PositionSelector = "last_prompt"
    tag: Tag = "default"


class SteeringSpec(Record):
    """Add `scale · vector` to the residual stream at `hook` of each of `layers`, at `positions`.

    `vector`: `[hidden_size]`, finite. Activation addition: Turner et al. 2023, arXiv:2308.10248.
    """

    layers: LayerSelector
    vector: Tensor
    scale: float = 1.0
    hook: Hook = "post_block"
    positions: PositionSelector = "all"


class StoredSteering(Record):
    """A `SteeringSpec` after validation: layers are numbers, the vector is named by its content hash."""

    layers: list[int]
    vector: str
    scale: float
    hook: Hook
    positions: PositionSelector


class StoredCapture(Record):
    """A `CaptureSpec` after validation."""

    layers: list[int]
    hook: Hook
    positions: PositionSelector
    tag: str


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
    capture: StoredCapture | None = None
    digest: str = ""  # content of the interventions; empty when there is none
    first_affected: int = -1  # lowest absolute position an intervention touches; -1: none
    by_prompt: bool = False  # where the prompt ends decides what is touched: `all_prompt`, `last_prompt`, `all_generated`
    lowest_captured: int = -1  # lowest captured prompt position; -1: none
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
    """Group a request's steering by its positions, in the order first named."""
    groups: dict[str, list[StoredSteering]] = {}
    for entry in steering:
        groups.setdefault(str(entry.positions), []).append(entry)
    return [
        SteeringRow(key=_content_key([(e.hook, e.layers, e.vector, e.scale) for e in group]), positions=group[0].positions, entries=group)
        for group in groups.values()
    ]


def steering_digest(steering: list[StoredSteering]) -> str:
    """Names everything that the steering does to a request's KV cache; empty when there is none."""
    if not steering:
        return ""
    return _content_key([(e.hook, e.layers, e.vector, e.scale, e.positions) for e in steering])


def _content_key(content: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()
