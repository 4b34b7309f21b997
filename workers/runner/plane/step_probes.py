"""Probes in a rank's step: attaches them to recordings, and scores the recorded rows."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..base.engine_step import NewRequest
from ..base.row_index import Keeping
from ..probes.gates import gates_of
from ..rows.capture import reused_rows
from ..rows.planner import Tracked
from .probe_scores import Scorer
from .requests import Requests
from .step_parts import RanStep, StepPart


@dataclass(eq=False)
class ProbesPart(StepPart):
    """Step part for probes."""

    _requests: Requests
    _scorer: Scorer
    _serves: bool = False  # stored rows were served since the last scores
    _watching: int = 0  # tracked requests with probes

    def begin(self, ended: Mapping[str, int]) -> None:
        """Score the rows that ended requests need."""
        tracked = self._requests.tracked
        needed = {
            watch: rows
            for request, rows in ended.items()
            if (watch := tracked[request].watch) is not None
        }
        try:
            self._scorer.settle(needed)
        except Exception as error:
            self._requests.blame(error, self._requests.watched(), "probe_failed")

    def admit(self, tracked: Tracked, request: NewRequest) -> None:
        if tracked.reported:
            return
        with self._requests.guard([tracked], "probe_failed"):
            tracked.watch = self._scorer.watch(
                request.id, tracked.spec, tracked.recordings.values()
            )
            if tracked.watch is not None:
                self._watching += 1
            tracked.gates = gates_of(tracked.spec, tracked.watch)

    def release(self, tracked: Tracked) -> None:
        if tracked.watch is not None:
            self._watching -= 1

    def prepare(self, keeping: Keeping | None) -> None:
        self._serves = self._serves or (keeping is not None and bool(keeping.serve))

    def drain(self, step: RanStep) -> None:
        """Score the step's rows that probes read, and stored rows served for cached tokens."""
        recorded = step.recorded
        if recorded is None or not (self._watching or self._scorer.pending):
            return
        requests = self._requests
        try:
            if self._serves:
                self._serves = False
                served = [each for item in requests.watched() for each in item.recordings.values()]
                for recording in served:
                    recorded += reused_rows(recording) if recording.watch is not None else ()
            self._scorer.take(recorded)
        except Exception as error:
            requests.blame(error, requests.watched(), "probe_failed")

    def forget(self) -> None:
        self._scorer.clear()
