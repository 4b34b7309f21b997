"""Steps that repeat the plan of the one before, as those of decoding do until a request comes or
goes: they are planned without a look at each request.
"""

from collections.abc import Sequence

import numpy as np

from ..base.engine_step import RequestRows, StepView
from ..rows.banks import Banks
from ..rows.plan_ends import end_of_plan
from ..rows.planner import Tracked


class RepeatedSteps:
    """Steps of the same requests, from one that was planned in full on."""

    def __init__(
        self,
        view: StepView,
        members: Sequence[tuple[Tracked, RequestRows]],
        banks: Banks,
        *,
        family: int,
    ) -> None:
        """`view`: of the step that was planned in full; `members`: its tracked requests. `family`:
        see `DataPlane.choose`.
        """
        self._view, self._members, self._banks, self._family = view, members, banks, family
        numbers = {request: number for number, request in enumerate(view.ids)}
        self._places = np.array([numbers[rows.id] for _, rows in members], dtype=np.int64)
        self._counts = view.counts[self._places]
        self._ends: np.ndarray | None = None  # positions below which the plan is right
        # of each request: the first position that was never computed, and token rows since then
        self._reached = np.array([tracked.reached for tracked, _ in members], dtype=np.int64)
        self._new = np.zeros_like(self._reached)
        #: Of the requests: the position of each one's first row in this step.
        self.positions = self._first = view.positions[self._places]
        self.recording = [tracked for tracked, _ in members if tracked.recordings]
        self.planned = [tracked for tracked, _ in members if tracked.rows or tracked.recordings]
        self._gates = [
            (number, tracked, tracked.gates.decided(rows.first_position))
            for number, (tracked, rows) in enumerate(members)
            if tracked.gates is not None
        ]

    @property
    def possible(self) -> bool:
        """Return whether there may be others: nothing but gates of single tokens is decided about a
        request in each step.
        """
        return all(
            (tracked.gates is None or rows.num_rows == 1)
            and tracked.spec.entry is None
            and (tracked.spec.grade is None or tracked.graded is not None or tracked.reported)
            for tracked, rows in self._members
        )

    def take(self, view: StepView, *, family: int) -> bool:
        """Add a step; return False if it has another plan, or earlier positions."""
        if family != self._family or not view.is_like(self._view):
            return False
        positions = view.positions[self._places]
        stops = positions + self._counts
        if self._ends is None:  # only now, since many steps are not repeated
            self._ends = self._find_ends()
        if bool((positions < self._first).any() or (stops > self._ends).any()):
            return False
        for number, tracked, before in self._gates:
            position = int(positions[number])
            assert tracked.gates is not None
            if tracked.decide(position + 1) or tracked.gates.decided(position) != before:
                return False
        self._new += np.maximum(stops - np.maximum(positions, self._reached), 0)
        self._reached = np.maximum(self._reached, stops)
        self.positions = positions
        return True

    def _find_ends(self) -> np.ndarray:
        ends = [
            min(end_of_plan(bank, tracked, rows) for bank in self._banks.names)
            for tracked, rows in self._members
        ]
        return np.array(ends, dtype=np.int64)

    def count(self) -> None:
        """Count the edits of these steps, which are not counted yet."""
        for (tracked, _), reached in zip(self._members, self._reached.tolist(), strict=True):
            if tracked.rows:
                tracked.reached = reached
        for member, edits in self._banks.steered:
            self._members[member][0].applied += edits * int(self._new[member])
        self._new[:] = 0
