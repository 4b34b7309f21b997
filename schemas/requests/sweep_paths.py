"""Path patching: what one place of a model passes to another, with the branches between them held
as they are without a patch.

Wang et al. 2022 (arXiv:2211.00593). Two passes: in the first, the sender has the rows of the other
prompt, the frozen branches above it those of the patched prompt itself, and what the receivers
compute is kept; in the second, the receivers have that. The values of a path to the logits are the
first pass' own.
"""

from typing import Annotated, Literal

import msgspec

from ..base.limits import MAX_RECEIVERS
from ..base.records import Record
from ..prompts.selectors import FORWARD, Hook, HookName, LayerNumber

#: A branch of every layer, and the hook at which its output is held.
Branch = Literal["attn", "mlp"]
BRANCH_HOOK: dict[Branch, Hook] = {"attn": "attn_out", "mlp": "mlp_out"}
#: The hook from which on a layer's branch does not read what a hook changes.
_PAST: dict[Branch, Hook] = {"attn": "attn_out", "mlp": "mlp_in"}


class PathEnd(Record):
    """End of a path: a hook of a layer, all of its row or one head's part."""

    layer: LayerNumber
    hook: HookName
    head: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] | None = None


class SweepPath(Record):
    """Path of a sweep whose cells are one of its ends.

    Exactly one of `sender` and `receivers`; the cells are the other end.

    `sender`: has the other prompt's rows at all positions that have a counterpart. `receivers`: all
    immediately; `logits`: the end of the model. `frozen`: the branches that are held in all layers
    between the two, receivers excepted.
    """

    sender: PathEnd | None = None
    receivers: (
        Literal["logits"]
        | Annotated[list[PathEnd], msgspec.Meta(min_length=1, max_length=MAX_RECEIVERS)]
        | None
    ) = None
    frozen: Annotated[list[Branch], msgspec.Meta(min_length=1, max_length=2)] = msgspec.field(
        default_factory=lambda: ["attn", "mlp"]
    )

    def __post_init__(self) -> None:
        if (self.sender is None) == (self.receivers is None):
            raise ValueError(
                "a path has either a `sender` or `receivers`: the sweep's cells are the other end"
            )


class StoredEnd(Record):
    """A `PathEnd` after validation."""

    layer: int
    hook: Hook
    dims: str = ""  # of the row; empty: all
    head: int = -1


class StoredPath(Record):
    """A `SweepPath` after validation.

    Without sender and receivers: from the cells to the logits.
    """

    frozen: list[Branch]
    sender: StoredEnd | None = None
    receivers: list[StoredEnd] = []

    @property
    def passes(self) -> int:
        """Requests of a cell."""
        return 2 if self.receivers else 1

    def frozen_sites(self, layer: int, hook: Hook, top: int) -> dict[Hook, list[int]]:
        """Return what is held when the sender is at `hook` of `layer`, up to layer `top`: branches
        that read what it changes.
        """
        sites = {}
        for branch in self.frozen:
            first = layer + (
                place_of(hook) >= place_of(_PAST[branch])
                or (branch == "attn" and hook != "pre_attn")
            )
            if first <= top:
                sites[BRANCH_HOOK[branch]] = list(range(first, top + 1))
        return sites

    def shown(self) -> SweepPath:
        """Return the path as results name it."""
        if self.sender is not None:
            return SweepPath(sender=_end(self.sender), frozen=self.frozen)
        return SweepPath(
            receivers=[_end(receiver) for receiver in self.receivers] or "logits",
            frozen=self.frozen,
        )


def place_of(hook: Hook) -> int:
    """When a layer's forward meets the hook."""
    return FORWARD.index(hook)


def reaches(sender: tuple[int, Hook], receiver: tuple[int, Hook]) -> bool:
    """Return whether what is at one (layer, hook) is computed before the other."""
    return (sender[0], place_of(sender[1])) < (receiver[0], place_of(receiver[1]))


def _end(stored: StoredEnd) -> PathEnd:
    return PathEnd(
        layer=stored.layer, hook=stored.hook, head=None if stored.head < 0 else stored.head
    )
