"""Parts of a rank's step: what each may do in it, and when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..base.engine_step import NewRequest, RequestRows, StepView
from ..base.row_index import Keeping
from ..rows.capture import Extent, Recording
from ..rows.planner import Tracked


@dataclass(slots=True)
class RanStep:
    """A step whose forward pass ran."""

    view: StepView | None  # None: it was not planned
    hidden: torch.Tensor | None  # `[tokens, hidden_size]`, what left the last layer, if it is here
    # the rows that it recorded; None: no site had anything to do
    recorded: list[tuple[Recording, Extent]] | None = None


class StepPart:
    """One concern of a rank; a part overrides the phases that concern it.

    The phases in the order in which the data plane calls them, each for all parts before the next.
    What a part raises ends the engine: it guards what only some requests need, see
    `Requests.guard`.
    """

    def begin(self, ended: Mapping[str, int]) -> None:
        """A step begins. `ended`: requests that end before it → their tokens."""

    def release(self, tracked: Tracked) -> None:
        """An ended request gives back what `acquire` gave it."""

    def admit(self, tracked: Tracked, request: NewRequest) -> None:
        """Set up what a new request reads."""

    def acquire(self, tracked: Tracked) -> None:
        """Give a new request what it shares with others; also if it cannot be read."""

    def prepare(self, keeping: Keeping | None) -> None:
        """All requests of the step are here. `keeping`: orders about stored rows."""

    def plan(self, tracked_rows: Sequence[tuple[Tracked, RequestRows]], view: StepView) -> None:
        """Set up the forward that follows. `own`: the requests of `view` that are tracked."""

    def drain(self, step: RanStep) -> None:
        """Take what the forward left."""

    def settle(self, step: RanStep) -> None:
        """Judge the step, and hand on what is not needed any more."""

    def forget(self) -> None:
        """Drop what requests and calls of the worker left here; every request has failed."""

    def close(self) -> None:
        """Finish what is pending, and stop."""
