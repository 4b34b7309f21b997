"""Reports of ended or failed requests: makes their receipts and hands over their captures."""

import dataclasses
import logging
import math
from typing import Any

from ....schemas.artifacts.hits import with_text
from ....schemas.artifacts.probes import ProbeScore
from ....schemas.base.version import full_version
from ....schemas.jobs.receipts import Receipt
from ..base.actions import ActionLedger, sealed
from ..base.config import PlaneConfig, RankPlace
from ..files.desk import EndedRequest
from ..files.finished_rows import Origin
from ..probes.gates import shown
from ..probes.watches import ProbeError, Watch
from ..rows.capture import Recording
from ..rows.delivery import RowDelivery
from ..rows.planner import Tracked

logger = logging.getLogger(__name__)


class Reports:
    """Reports of one rank; `Tracked.reported` ensures at most one receipt for each request."""

    def __init__(
        self,
        config: PlaneConfig,
        place: RankPlace,
        delivery: RowDelivery,
        actions: ActionLedger,
        *,
        num_layers: int,
    ) -> None:
        """`num_layers`: of the whole model."""
        self._config = config
        self._place = place
        self._delivery = delivery
        self._actions = actions
        self._version = full_version()
        self._origin = Origin(
            worker=config.worker,
            rank=place.rank,
            pp=place.pp,
            stages=place.stages,
            num_layers=num_layers,
            caveats=tuple(config.caveats),
            identity=config.identity,
        )
        self.describe()

    def describe(self, **changed: Any) -> None:
        """Change fields of `Origin` for every later manifest."""
        self._origin = dataclasses.replace(self._origin, **changed)
        self._delivery.set_origin(self._origin)

    def over(self, step: int, tracked: Tracked, token_ids: list[int], rows: int) -> None:
        """Report a request that has ended, once its captured rows are written.

        `token_ids`: all its tokens, including those of the prompt. `rows`: how many of them,
        from the first on, have rows.
        """
        if tracked.reported:
            return
        if self._place.grades and (why := lacking(tracked)):
            self.failed(step, tracked, why, "intervention_failed")
            return
        if tracked.watch is not None:
            try:
                _score(tracked, tracked.watch, rows)
            except ProbeError as error:
                self.failed(step, tracked, f"{error} (rank {self._place.rank})", "probe_failed")
                return
            prompt = tracked.spec.prompt_tokens
            tracked.scores = [with_text(score, token_ids, prompt) for score in tracked.scores]
        recordings = {
            number: recording
            for number, recording in tracked.recordings.items()
            if not recording.capture.scored
        }
        request = EndedRequest(
            receipt=self._receipt(step, tracked),
            spec=tracked.spec,
            captures=[
                recording.ended(number, _high(tracked, recording))
                for number, recording in recordings.items()
            ],
            token_ids=token_ids,
            rows=rows,
            unsound=tracked.unsound,
            sizes=[sizes.recorded for sizes in tracked.sizes.values()],
            shown=self._place.tp == 0,
            results=tracked.results,
            state=self._actions.state,
            nbytes=sum(recording.nbytes for recording in recordings.values()),
        )
        self._delivery.submit(request, recordings, list(tracked.sizes.values()))
        tracked.reported = True

    def failed(self, step: int, tracked: Tracked, message: str, kind: str) -> None:
        """Report a failure, without waiting for the request to end. `kind`: see `Receipt.kind`.

        The receipt has what policies have decided so far: no request hides it by failing.
        """
        if tracked.reported:
            return
        try:
            if tracked.watch is not None and (rows := tracked.watch.decide_all(tracked.counted)):
                _score(tracked, tracked.watch, rows)
        except Exception:
            logger.exception("a failed request is reported without the decisions of its policies")
        tracked.failure = message
        tracked.failure_kind = kind
        tracked.forget()
        request = EndedRequest(receipt=self._receipt(step, tracked), spec=tracked.spec)
        self._delivery.submit(request, {})
        tracked.reported = True

    def _receipt(self, step: int, tracked: Tracked) -> Receipt:
        spec = tracked.spec
        place = self._place
        return Receipt(
            version=self._version,
            worker=self._config.worker,
            boot=self._config.boot,
            job=spec.job,
            request=spec.request,
            attempt=spec.attempt,
            rank=place.rank,
            world=place.world,
            tp=place.tp,
            pp=place.pp,
            step=step,
            actions=self._actions.count,
            checksum=sealed(self._actions.state, tracked.results),
            status="error" if tracked.failure else "ok",
            message=tracked.failure,
            applied=tracked.applied,
            kind=tracked.failure_kind,
            global_version=spec.global_version,
            epoch=self._actions.epoch,
            graded=tracked.graded() if tracked.graded is not None and not tracked.failure else [],
            trace=spec.trace,
            scores=_reported_scores(tracked, place),
            identity=self._config.identity,
            depth=spec.depth,
        )


def _reported_scores(tracked: Tracked, place: RankPlace) -> list[ProbeScore]:
    """Return the scores that the receipt has. Of a failure they are those of policies, from every
    rank, because only the first such receipt counts.
    """
    if tracked.failure:
        return [score for score in tracked.scores if score.policy is not None]
    return tracked.scores if place.tp == 0 else []


def _score(tracked: Tracked, watch: Watch, rows: int) -> None:
    """Set the results of a request's probes, about its first `rows` tokens. Raises ProbeError."""
    tracked.scores, tracked.results = watch.results(rows, tracked.stopped_by)
    tracked.scores = [
        shown(watch, score, rows) if score.name in tracked.gates else score
        for score in tracked.scores
    ]


def _high(tracked: Tracked, recording: Recording) -> list[bool]:
    """Return for each token whether the probe that a capture's window names is high."""
    window = recording.capture.window
    if window is None or window.when is None:
        return []
    assert tracked.watch is not None, "the window's probe scores every token"
    return tracked.watch.high(window.when.probe, window.when.at_least)


def lacking(tracked: Tracked) -> str:
    """Return why an ended request has no grade of its next token; empty if it has a grade, or
    requested none.
    """
    if tracked.spec.grade is None:
        return ""
    if tracked.graded is None:
        return "the next token was not graded: no logits at the end of the prompt"
    values = tracked.graded()
    return (
        "" if all(map(math.isfinite, values)) else f"the next token's grade is not finite: {values}"
    )
