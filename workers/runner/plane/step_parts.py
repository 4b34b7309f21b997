"""Base class of the parts of a rank's step, with the phases of a step, and the batch that they
share: the tracked requests of a step, by what it has to do for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..base.engine_step import NewRequest, StepView
from ..base.row_index import Keeping
from ..edits.triggers import SharedSearches
from ..probes.gates import SharedGates
from ..probes.watches import Watch
from ..rows.capture import ScoredRows
from ..rows.planner import Tracked
from ..rows.slot_table import Slots, StepTokens


class StepBatch:
    """The requests of a step."""

    def __init__(
        self, view: StepView, tracked: Mapping[str, Tracked], of_requests: np.ndarray, slots: Slots
    ) -> None:
        """`of_requests`: the slot of each request; 0: the step does nothing for it."""
        self._tracked = tracked
        self.tokens = StepTokens(view, of_requests)
        #: Those about which the step decides something, see `Tracked.special`.
        self.special = self._members(slots.special[of_requests])
        self.gated = self._gated()
        triggered = [member for member in self.special if member[1].searches]
        conditions = [each for number, item in triggered for each in item.conditions_at(number)]
        rows = self.tokens.first_rows
        self.searches = SharedSearches(conditions, rows, view) if conditions else None
        #: The kinds of watches whose scores decide gates of the step.
        self.deciding = {gates.kind for gates in self.gated if gates.decides}
        #: Whether more may be decided in a step than gates.
        self.watched = any(
            item.spec.entry is not None
            or (item.spec.grade is not None and item.graded is None and not item.reported)
            for _, item in self.special
        )

    def _members(self, chosen: np.ndarray) -> list[tuple[int, Tracked]]:
        """Return the chosen requests, each with its number in the step. `chosen`: bool."""
        ids = self.tokens.ids
        return [(number, self._tracked[ids[number]]) for number in np.flatnonzero(chosen).tolist()]

    @cached_property
    def members(self) -> list[tuple[int, Tracked]]:
        """All tracked requests, each with its number in the step."""
        return self._members(self.tokens.of_requests > 0)

    # Whom an error concerns

    @property
    def steered(self) -> list[Tracked]:
        return [item for _, item in self.members if item.rows]

    @property
    def recording(self) -> list[Tracked]:
        return [item for _, item in self.members if item.recordings]

    @property
    def planned(self) -> list[Tracked]:
        return [item for _, item in self.members if item.rows or item.recordings]

    def _gated(self) -> list[SharedGates]:
        groups: dict[Any, list[tuple[int, Watch]]] = {}
        for number, item in self.special:
            if item.gates and (watch := item.watch) is not None:
                key = not item.reported, watch.kind, tuple(map(watch.number, item.gates))
                groups.setdefault(key, []).append((number, watch))
        columns = max((len(item.gates) + len(item.searches) for _, item in self.special), default=0)
        if columns:
            self.tokens.closed = np.zeros((len(self.tokens.slots), 1 + columns), dtype=bool)
        members = self.tokens.members
        return [
            SharedGates(each, probes, members, decides=decides)
            for (decides, _, probes), each in groups.items()
        ]


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

    # Apart from `admit`: a request is steered even if it cannot be captured, as its cached blocks
    # say.
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
