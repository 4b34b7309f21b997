"""Path patching: measures the effect of one site of a model on another, with the branches between
them frozen at their unpatched values.

Wang et al. 2022 (arXiv:2211.00593). A cell takes two passes. In the first, the sender has the rows
of the other prompt, the frozen branches above it have the rows of the patched prompt itself, and
the receivers' rows are kept; in the second, the receivers are patched with these rows. A path to
the logits needs only the first pass.
"""

from typing import Annotated, Literal

import msgspec

from midstream.schemas.base.limits import MAX_RECEIVERS
from midstream.schemas.base.records import Record
from midstream.schemas.prompts.selectors import FORWARD, Hook, HookName, LayerNumber

#: A hook, and a layer of the model.
SiteKey = tuple[Hook, int]
#: A branch of every layer, and the hook at which its output is frozen.
Branch = Literal["attn", "mlp"]
BRANCH_HOOK: dict[Branch, Hook] = {"attn": "attn_out", "mlp": "mlp_out"}
#: Branch → the first hook of a layer whose changes do not reach this layer's branch.
_PAST: dict[Branch, Hook] = {"attn": "attn_out", "mlp": "mlp_in"}


class PathEnd(Record):
    """An end of a path: a hook of a layer, with the whole row or the part of one head."""

    layer: LayerNumber
    hook: HookName
    head: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] | None = None


class SweepPath(Record):
    """A path with one fixed end: exactly one of `sender` and `receivers`. The sweep's cells are the
    other end.

    `sender`: gets the other prompt's rows at all positions with a counterpart. `receivers`: all
    together; `logits`: the end of the model. `frozen`: the branches that are frozen in all layers
    between the two ends, except receivers.
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
    dims: str = ""  # dimensions of the row; empty: all
    head: int = -1

    @property
    def site(self) -> SiteKey:
        return self.hook, self.layer


class StoredPath(Record):
    """A `SweepPath` after validation. Without sender and receivers, the path goes from the cells to
    the logits.
    """

    frozen: list[Branch]
    sender: StoredEnd | None = None
    receivers: list[StoredEnd] = []

    @property
    def passes(self) -> int:
        """The number of passes of a cell."""
        return 2 if self.receivers else 1

    def senders(self, cells: list[SiteKey]) -> list[SiteKey]:
        """Return the sites that send: the sender's, or else those of the `cells`."""
        return cells if self.sender is None else [self.sender.site]

    def frozen_sites(self, sender: SiteKey, top: int) -> dict[Hook, list[int]]:
        """Return the sites to freeze, up to layer `top`: the frozen branches that a change at the
        site `sender` reaches.
        """
        hook, layer = sender
        sites = {}
        for branch in self.frozen:
            past = place_of(hook) >= place_of(_PAST[branch])
            inside = branch == "attn" and hook != "pre_attn"
            first = layer + 1 if past or inside else layer
            if first <= top:
                sites[BRANCH_HOOK[branch]] = list(range(first, top + 1))
        return sites

    def shown(self) -> SweepPath:
        """Return the path as it is reported in results."""
        if self.sender is not None:
            return SweepPath(sender=_end(self.sender), frozen=self.frozen)
        return SweepPath(
            receivers=[_end(receiver) for receiver in self.receivers] or "logits",
            frozen=self.frozen,
        )


def place_of(hook: Hook) -> int:
    """Return the hook's index in the order of a layer's forward pass."""
    return FORWARD.index(hook)


def reaches(sender: SiteKey, receiver: SiteKey) -> bool:
    """Return whether one site comes before another in the forward pass."""
    return (sender[1], place_of(sender[0])) < (receiver[1], place_of(receiver[0]))


def _end(stored: StoredEnd) -> PathEnd:
    return PathEnd(
        layer=stored.layer, hook=stored.hook, head=None if stored.head < 0 else stored.head
    )
