"""Reports of ended or failed requests: makes their receipts and passes captures to the writer."""

import logging
from functools import partial
from typing import Any

import msgspec
import torch

from ....schemas.base.version import __version__
from ....schemas.jobs.receipts import Receipt
from ..base.config import Place, PlaneConfig
from ..edits.actions import ActionLedger, sealed
from ..files.finished_rows import FinishedCapture
from ..files.writer import InterventionError, WriteJob, Writer
from ..probes.watches import ProbeError, Watch
from ..rows.capture import Recording
from ..rows.edit_sizes import RequestSizes
from ..rows.finite_check import precedes_edits
from ..rows.planner import Tracked
from .grading import lacking

logger = logging.getLogger(__name__)


class Reports:
    """Reports of one rank; `Tracked.reported` ensures at most one receipt for each request."""

    def __init__(
        self,
        config: PlaneConfig,
        place: Place,
        writer: Writer,
        actions: ActionLedger,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        num_layers: int,
    ) -> None:
        """`hidden_size` and `dtype`: of captured rows. `num_layers`: of the whole model."""
        self._config, self._place, self._writer, self._actions = config, place, writer, actions
        self._hidden_size, self._dtype = hidden_size, dtype
        self.origin: dict[str, Any] = {
            "worker": config.worker,
            "rank": place.rank,
            "pp": place.pp,
            "stages": place.stages,
            "num_layers": num_layers,
            "caveats": tuple(config.caveats),
            "identity": config.identity,
        }

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
        tracked.reported = True
        recordings = [
            recording for recording in tracked.recordings.values() if not recording.capture.scored
        ]
        builds = [
            partial(self._build, tracked, recording, token_ids, rows) for recording in recordings
        ]
        size = sum(recording.nbytes for recording in recordings)
        complete = None
        if tracked.sizes:
            complete = partial(
                _with_sizes,
                sizes=list(tracked.sizes.values()),
                results=tracked.results,
                state=self._actions.state,
                shown=self._place.tp == 0,
            )
        receipt, spec = self._receipt(step, tracked), tracked.spec
        self._writer.submit(WriteJob(receipt, builds, size, complete, spec.work, spec.tenant))

    def failed(self, step: int, tracked: Tracked, message: str, kind: str) -> None:
        """Report a failure, without waiting for the request to end. `kind`: see `Receipt.kind`.

        The receipt has what policies have decided so far: no request hides it by failing.
        """
        if tracked.reported:
            return
        try:
            if tracked.watch is not None and (rows := tracked.watch.decided(tracked.counted)):
                _score(tracked, tracked.watch, rows)
        except Exception:
            logger.exception("a failed request is reported without the decisions of its policies")
        tracked.failure, tracked.failure_kind, tracked.reported = message, kind, True
        for recording in tracked.recordings.values():
            recording.forget()
        tracked.forget_sizes()
        self._writer.submit(WriteJob(self._receipt(step, tracked), [], 0))

    def _build(
        self, tracked: Tracked, recording: Recording, token_ids: list[int], rows: int
    ) -> FinishedCapture:
        """Build a finished capture, in a writer thread.

        Raises InterventionError for a row that is not finite, unless the unedited model made it so.
        """
        place = self._place
        capture = recording.finish(
            tracked.spec,
            token_ids,
            rows=rows,
            watch=tracked.watch,
            hidden_size=self._hidden_size,
            dtype=self._dtype,
            **self.origin,
        )
        if capture.unsound is not None and not tracked.unsound:
            hook, layer, position = capture.unsound
            if not precedes_edits(
                tracked.spec, position, (hook, layer), after=recording.capture.at == "after"
            ):
                where = f"{hook} of layer {layer}, position {position}"
                raise InterventionError(
                    f"the captured row at {where} is not finite, after edits of this request (rank "
                    f"{place.rank})"
                )
        return capture

    def _receipt(self, step: int, tracked: Tracked) -> Receipt:
        spec, place = tracked.spec, self._place
        return Receipt(
            version=__version__,
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
            checksum=self._actions.seal(tracked.results),
            status="error" if tracked.failure else "ok",
            message=tracked.failure,
            applied=tracked.applied,
            kind=tracked.failure_kind,
            global_version=spec.global_version,
            epoch=self._actions.epoch,
            graded=tracked.graded() if tracked.graded is not None and not tracked.failure else [],
            trace=spec.trace,
            # of a failure those of policies, from every rank: only the first such receipt counts
            scores=[score for score in tracked.scores if score.policy is not None]
            if tracked.failure
            else tracked.scores
            if place.tp == 0
            else [],
            identity=self._config.identity,
        )


def _score(tracked: Tracked, watch: Watch, rows: int) -> None:
    """Set the results of a request's probes, about its first `rows` tokens. Raises ProbeError."""
    tracked.scores, tracked.results = watch.results(rows, tracked.stopped_by)
    if tracked.gates is not None:
        tracked.results = tracked.gates.checksum(rows, tracked.results)
        tracked.scores = [tracked.gates.shown(score, rows) for score in tracked.scores]


def _with_sizes(
    receipt: Receipt, *, sizes: list[RequestSizes], results: int, state: int, shown: bool
) -> Receipt:
    """Add the sizes of the request's edits to its receipt and to the checksum of `results`, in a
    writer thread: thousands of bins are no work for the model's.
    """
    for each in sizes:
        results = each.checksum(results)
    return msgspec.structs.replace(
        receipt,
        checksum=sealed(state, results),
        sizes=[size for each in sizes for size in each.report(receipt.request)] if shown else [],
    )
