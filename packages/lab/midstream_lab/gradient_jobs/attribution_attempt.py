"""Estimates of an attribution on a gradient worker: pair by pair, each kept once its receipt has
arrived; then the job is handed on to a vLLM worker, if cells are to be computed exactly.
"""

import time

from msgspec.structs import replace

from midstream.broker.ledger.jobs.units import UnitRow
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.jobs.jobs import Output
from midstream.schemas.settings.faults import crash_point
from midstream.workers.serving.attempt import Attempt, Bench, Run
from midstream.workers.serving.redis_retry import patiently
from midstream.workers.serving.units import UnitRecords

from ..gradients.protocol import EstimateRequest, GradientEngine
from ..records.sweep_units import SweepWork
from ..records.sweeps import UnitRecord
from ..results.attribution_result import estimated_pair
from ..results.ledger_sweeps import unit_row, units_key
from ..results.sweep_result import PairRecords, chosen_cells, sweep_start, sweep_summary
from ..run.verdict import unverified


class AttributionAttempt:
    """One attempt at the part of an attribution that needs gradients."""

    def __init__(self, bench: Bench[GradientEngine], attempt: Attempt) -> None:
        self._ledger = bench.ledger
        self._engine = bench.engine
        self._fetch = bench.fetch
        self._attempt = attempt
        self._job = attempt.job
        work = attempt.job.work_as(SweepWork)
        self._sweep = work.sweep
        self._units = work.units
        place = units_key(attempt.job.id)
        self._records = UnitRecords(bench, attempt, place, UnitRecord, self._shown)

    async def run(self) -> list[Output] | None:
        """Estimate all pairs. None: the job was handed on.

        Raises MidstreamError when no pair could be estimated, and CancelledError when the attempt
        is stopped.
        """
        self._attempt.check_unsteered()
        began = time.monotonic()
        await self._records.load()
        records = self._records.known
        if not records:
            await self._attempt.report(self._ledger, "start", sweep_start(self._sweep))
        mask = await self._fetch(self._sweep.mask) if self._sweep.mask else None
        estimates = []
        for pair in range(len(self._sweep.pairs)):
            number = self._units.estimate(pair).number
            if number not in records:
                await self._records.keep([await self._estimate(pair, number, mask)])
                crash_point("attribution.kept")
            estimates.append(records[number])
        if all(record.estimated is None for record in estimates):
            raise MidstreamError("intervention_failed", estimates[0].reason)
        attributed = self._sweep.attributed
        # policies of all traffic read both prompts of each pair, on a vLLM worker
        if attributed is not None and (attributed.verify is not None or self._job.probes):
            await self._hand_on(estimates)
            return None
        summary = sweep_summary(self._sweep, records, time.monotonic() - began)
        await self._attempt.report(self._ledger, "summary", summary)
        return []

    async def _estimate(self, pair: int, number: int, mask: Tensor | None) -> UnitRecord:
        """Return the record of a pair's estimates, or of the reason why there are none."""
        ask = EstimateRequest(
            job=self._job.id,
            request=number * self._units.width,
            attempt=self._attempt.number,
            sweep=self._sweep,
            pair=pair,
            mask=mask,
            trace=self._attempt.progress.span.traceparent,
        )
        record = UnitRecord(unit=number, attempt=self._attempt.number)
        self._attempt.progress.totals.prompt_tokens += len(self._sweep.pairs[pair].base)
        try:
            estimate = await self._engine.estimate(ask)
        except MidstreamError as error:
            if error.kind != "intervention_failed":
                raise
            return replace(record, reason=error.detail)
        finally:
            self._attempt.check()
        found = await self._attempt.receipts_of(
            [ask.request], self._ledger.settings.capture_timeout_s
        )
        receipts = found.get(ask.request, [])
        if why := unverified([receipts], self._engine.world):
            return replace(record, reason=why)
        # Stored with the estimates, so that a later attempt on either worker goes on with the same
        # cells.
        chosen = chosen_cells(PairRecords(self._sweep, pair, {}), estimate)
        return replace(record, estimate=replace(estimate, chosen=chosen), receipts=receipts)

    def _shown(self, record: UnitRecord) -> UnitRow:
        pair = record.unit - self._units.estimate(0).number
        shown = estimated_pair(self._sweep, pair, record)
        return unit_row(self._job, self._attempt.number, record, shown)

    # One job in two queues: a job for each phase would have two states, cancellations and results,
    # and a vLLM worker that called this one would hold the job while it waits.
    async def _hand_on(self, estimates: list[UnitRecord]) -> None:
        chosen = [record.estimated.chosen for record in estimates if record.estimated is not None]
        cells = len({number for of in chosen for numbers in of.values() for number in numbers})
        if self._sweep.adaptive:
            cells = self._sweep.num_exact
        crash_point("attribution.estimated")
        answer = await patiently(
            self._ledger.hand_on, self._job.id, self._attempt.number, "", cells
        )
        self._attempt.check_answer(answer, "handed_on")
        crash_point("attribution.handed")


def run(bench: Bench[GradientEngine]) -> Run:
    return Run(lambda attempt: AttributionAttempt(bench, attempt).run())
