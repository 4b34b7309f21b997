"""Base class of the parts of a rank's step, with the phases of a step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..base.engine_step import NewRequest, StepView
from ..base.row_index import Keeping
from ..rows.planner import Tracked
from ..rows.scored_rows import ScoredRows
from .batch import StepBatch


@dataclass(slots=True)
class RanStep:
    """A step whose forward pass ran."""

    view: StepView | None  # None: it was not planned
    # output of the last layer, `[tokens, hidden_size]`; None on other stages
    hidden: torch.Tensor | None
    # the recorded rows that probes read; None: no site had anything to do
    recorded: list[ScoredRows] | None = None


class StepPart:
    """One concern of a rank; a part overrides the phases that concern it.

    The data plane calls the phases in the order of the methods below, each for all parts before the
    next. An error that a part raises ends the engine; therefore a part guards work that only some
    requests need, see `Requests.guard`.
    """

    def begin(self, ended: Mapping[str, int]) -> None:
        """Begin a step before which requests ended. `ended`: request → its `Finish.rows`."""

    def release(self, tracked: Tracked) -> None:
        """Take back from an ended request what `acquire` gave it."""

    def admit(self, tracked: Tracked, request: NewRequest) -> None:
        """Set up a new request's captures and probes."""

    def acquire(self, tracked: Tracked) -> None:
        """Give a new request its share of common resources, even if `admit` failed it."""

    def prepare(self, keeping: Keeping | None) -> None:
        """Prepare the step, whose requests are admitted. `keeping`: commands about stored rows.
        Not called if there are none, and nothing waits for the writers.
        """

    def plan(self, batch: StepBatch, view: StepView) -> None:
        """Set up the next forward. `batch`: the tracked requests of `view`."""

    def drain(self, step: RanStep) -> None:
        """Take the results of the forward."""

    def settle(self, step: RanStep) -> None:
        """Check the step, and pass on rows that are no longer needed."""

    def forget(self) -> None:
        """Drop the state of requests, which have all failed, and what the worker's calls set."""

    def close(self) -> None:
        """Finish pending work, and stop."""
