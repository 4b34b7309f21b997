"""Probes in a rank's step: attaches them to recordings, and scores the recorded rows."""

import sys
from collections.abc import Mapping

from ..base.engine_step import NewRequest
from ..probes.gates import gates_of
from ..rows.planner import Tracked
from .probe_scores import Scorer
from .requests import Requests
from .step_parts import RanStep, StepPart


class Probes(StepPart):
    """Step part for probes."""

    def __init__(self, requests: Requests, scorer: Scorer) -> None:
        self._requests, self._scorer = requests, scorer

    def begin(self, ended: Mapping[str, int]) -> None:
        """Score the rows that ended requests and gates need."""
        tracked, watched = self._requests.tracked, self._requests.kinds.watched
        if not watched and self._scorer.settled:
            return
        with self._requests.guard(watched, "probe_failed"):
            needed = {
                item.watch: ended.get(request, sys.maxsize)
                for request, item in (tracked.items() if watched else ())
                if item.watch is not None and (request in ended or item.gates is not None)
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

    def drain(self, step: RanStep) -> None:
        """Score the step's rows that probes read, and stored rows served for cached tokens."""
        if step.recorded is None:
            return
        if watched := self._requests.kinds.watched:
            with self._requests.guard(watched, "probe_failed"):
                self._scorer.take(
                    step.recorded,
                    [recording for tracked in watched for recording in tracked.recordings.values()],
                )

    def forget(self) -> None:
        self._scorer.clear()
