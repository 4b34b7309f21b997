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

    def begin(self, ended: Mapping[str, int]) -> None:
        """Score the rows that ended requests need."""
        tracked = self._requests.tracked
        with self._requests.guard(self._requests.kinds.watched, "probe_failed"):
            needed = {
                watch: rows
                for request, rows in ended.items()
                if (watch := tracked[request].watch) is not None
            }
            self._scorer.settle(needed)

    def admit(self, tracked: Tracked, request: NewRequest) -> None:
        if tracked.reported:
            return
        with self._requests.guard([tracked], "probe_failed"):
            tracked.watch = self._scorer.watch(
                request.id, tracked.spec, tracked.recordings.values()
            )
            tracked.gates = gates_of(tracked.spec, tracked.watch)

    def prepare(self, keeping: Keeping | None) -> None:
        self._serves = self._serves or (keeping is not None and bool(keeping.serve))

    def drain(self, step: RanStep) -> None:
        """Score the step's rows that probes read, and stored rows served for cached tokens."""
        recorded = step.recorded
        watched = self._requests.kinds.watched
        if recorded is None or not (watched or self._scorer.pending):
            return
        try:
            if self._serves:
                self._serves = False
                for recording in (each for item in watched for each in item.recordings.values()):
                    recorded += reused_rows(recording) if recording.watch is not None else ()
            self._scorer.take(recorded)
        except Exception as error:
            self._requests.blame(error, watched, "probe_failed")

    def forget(self) -> None:
        self._scorer.clear()
