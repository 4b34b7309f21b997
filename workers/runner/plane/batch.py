"""The tracked requests of a step, by what it has to do for them. Successive steps share a batch
until a request comes, goes or changes.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..base.engine_step import StepView
from ..probes.gates import SharedGates
from ..probes.watches import Watch
from ..rows.planner import Tracked
from ..rows.slot_table import StepTokens


class StepBatch:
    """The requests of a step."""

    def __init__(
        self, view: StepView, tracked: Mapping[str, Tracked], without: Collection[str] = ()
    ) -> None:
        """`without`: requests for which the step does nothing."""
        self.members = [
            (number, item)
            for number, request in enumerate(view.ids)
            if (item := tracked.get(request)) is not None and request not in without
        ]
        slots = np.zeros(len(view.ids), dtype=np.int64)
        for number, item in self.members:
            slots[number] = item.slot
        self.tokens = StepTokens(view, slots)
        every = [item for _, item in self.members]
        self.steered = [item for item in every if item.rows]
        self.recording = [item for item in every if item.recordings]
        self.planned = [item for item in every if item.rows or item.recordings]
        self.gated = self._gated()
        #: The kinds of watches whose scores decide gates of the step.
        self.deciding = {gates.kind for gates in self.gated if gates.decides}
        #: Whether more may be decided in a step than gates.
        self.watched = any(
            item.spec.entry is not None
            or (item.spec.grade is not None and item.graded is None and not item.reported)
            for item in every
        )

    def _gated(self) -> list[SharedGates]:
        groups: dict[Any, list[tuple[int, Watch]]] = {}
        for number, item in self.members:
            if item.gates and (watch := item.watch) is not None:
                key = not item.reported, watch.kind, tuple(item.gates)
                groups.setdefault(key, []).append((number, watch))
        if groups:
            columns = 1 + max(len(probes) for _, _, probes in groups)
            self.tokens.closed = np.zeros((len(self.tokens.slots), columns), dtype=bool)
        members = self.tokens.members
        return [
            SharedGates(each, probes, members, decides=decides)
            for (decides, _, probes), each in groups.items()
        ]
