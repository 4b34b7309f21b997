"""Execution of a sweep: its unpatched prompts, then thousands of patched ones, a few in the engine
at a time.

A unit counts once every rank confirms it: its receipts are read from the ticket, and its record is
kept in the ledger, so that the attempt after a killed worker computes only the rest. A cell that
the ranks do not confirm gets no value but the reason; it never gets the value of an unpatched
prompt, and never ends the sweep.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from itertools import chain

from midstream.schemas.base.errors import MidstreamError, Translated
from midstream.schemas.base.tensors import Tensor, content_hash
from midstream.schemas.jobs.receipts import STORE_UNAVAILABLE, Receipt
from midstream.schemas.requests.source_runs import RunFiles, parse_key
from midstream.storage.store import open_store
from midstream.workers.engine.admission import CellSlots
from midstream.workers.engine.protocol import EngineRequest, GeneratingEngine, Locate
from midstream.workers.engine.requests import tensors_of
from midstream.workers.serving.attempt import Attempt, Bench, ending_for_retry
from midstream.workers.serving.redis_retry import end_tasks
from midstream.workers.serving.source_run_leases import StoreUnavailable

from ..records.sweep_units import SweepWork
from ..records.sweeps import Unit, UnitRecord
from ..results.sweep_result import PairRecords, cells_to_compute, sweep_start, sweep_summary
from .features import FeatureRows
from .neurons import order_by_difference
from .records import SweepRecords
from .requests import SweepRequests
from .values import PairValues
from .verdict import refusal

#: Concurrent pairs: the prompts of the next pair run while the last cells of one are running.
PAIRS_AT_ONCE = 2
#: Units that have begun and whose receipts are not read: at most this many times the cells in
#: flight.
UNREAD = 4
#: Cells with two passes whose first passes are held on the ranks together.
FIRST_PASSES = 64


class SweepAttempt:
    """One attempt at one sweep.

    All sweeps of the worker share `cells_in_flight`, first come, first served.
    """

    def __init__(
        self,
        bench: Bench[GeneratingEngine],
        attempt: Attempt,
        cells_in_flight: CellSlots,
    ) -> None:
        settings = bench.ledger.settings
        engine = bench.engine
        self._ledger = bench.ledger
        self._engine = engine
        self._sources = bench.sources
        self._attempt = attempt
        self._fetch = bench.fetch
        self._sweep = attempt.job.work_as(SweepWork).sweep
        self._records = SweepRecords(bench, attempt)
        self._known = self._records.known
        self._everyone = attempt.job.global_steering
        # Global steering may apply below the layer at which a forward pass would begin.
        enters = settings.tuning.sweep_entry and engine.enters and not self._everyone.entries
        self._requests = SweepRequests(
            attempt.job, attempt.number, engine.info, enters, settings.tuning.sweep_entry
        )
        self._units = self._requests.units
        attributed = self._sweep.attributed
        self._features = (
            FeatureRows(settings, self._sweep)
            if attributed is not None and attributed.sae is not None
            else None
        )
        # request → first pass of a cell, until its second pass has ended
        self._firsts: dict[int, tuple[Unit, Sequence[Receipt]]] = {}
        self._slots = cells_in_flight
        self._unread = asyncio.Semaphore(UNREAD * settings.tuning.sweep_cells_in_flight)
        self._patience_s = settings.capture_timeout_s
        self._pairs = [
            PairValues(self._sweep, self._requests, self._records, engine.world)
            for _ in self._sweep.pairs
        ]
        self._decisions: list[asyncio.Future[None]] = []  # about units that were not computed
        self._failed = ""  # kind of the first error of a request
        self._ended = False  # nothing is submitted from here on

    async def run(self) -> None:
        """Run the sweep to its last cell.

        Raises MidstreamError ("useless_baseline" when all pairs are useless, and what failed when
        no cell has a value), and CancelledError when the attempt is stopped.
        """
        began = time.monotonic()
        if not self._engine.info.grades:
            raise MidstreamError(
                "intervention_failed",
                "the worker's engine cannot return log-probabilities of given tokens",
            )
        job = self._attempt.job
        if self._sweep.attributed is not None:
            self._attempt.check_unsteered()
        await self._records.load()
        if not self._known:
            await self._attempt.report(self._ledger, "start", sweep_start(self._sweep))
        names = sorted({*tensors_of(job), *([self._sweep.mask] if self._sweep.mask else [])})
        async with self._engine.holding_vectors(names, self._fetch):
            try:
                self._attempt.check()
                await self._compute_units()
                await self._records.restore()
            finally:
                if self._features is not None:
                    await asyncio.to_thread(self._features.close)
        if all(pair.useless for pair in self._pairs):
            raise MidstreamError("useless_baseline", self._pairs[0].useless, field="metric")
        self._require_values()
        summary = sweep_summary(self._sweep, self._known, time.monotonic() - began)
        await self._attempt.report(self._ledger, "summary", summary)

    def _require_values(self) -> None:
        """Raise what failed if no cell has a value and nothing was estimated."""
        records = self._known.values()
        first = self._units.first_cell
        cells = [record for record in records if record.unit >= first]
        if self._failed and all(cell.value is None and cell.estimated is None for cell in cells):
            reason = next(record.reason for record in records if record.reason)
            raise MidstreamError(self._failed, f"no cell has a value: {reason}")

    async def _compute_units(self) -> None:
        # Tasks that talk to Redis are ended, not cancelled once: see `redis_retry`.
        tasks = [
            asyncio.ensure_future(self._records.keep_added()),
            asyncio.ensure_future(self._all_pairs()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ended = True
            await end_tasks(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        self._attempt.check()

    # Submitting

    def _decide_skipped(self) -> None:
        """Decide the cells of columns that are not computed."""
        for number, pair in enumerate(self._sweep.pairs):
            for unit in self._units.cells(number):
                column = pair.columns[unit.column]
                if not column.places and unit.number not in self._known:
                    self._decide(unit, column.reason or "the column is skipped")

    async def _all_pairs(self) -> None:
        if self._sweep.attributed is None:
            self._decide_skipped()
        begun = asyncio.Semaphore(PAIRS_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for pair in range(len(self._sweep.pairs)):
                await begun.acquire()
                group.create_task(self._pair(pair)).add_done_callback(lambda _: begun.release())
        await asyncio.gather(*self._decisions)

    async def _pair(self, pair: int) -> None:
        """Compute all units of a pair that have no record."""
        state = self._pairs[pair]
        missing = self._missing(pair)
        if self._sweep.attributed is not None and not any(u.kind == "cell" for u in missing):
            if not self._attempt.job.probes:
                return
            missing = []  # policies of all traffic read the prompts
        reason = await self._controls(pair, bool(missing))
        if reason or (state.useless and len(self._pairs) > 1):
            for unit in missing:
                if unit.kind == "cell":
                    self._decide(unit, reason or state.useless)
            return
        if not missing or state.useless:
            return
        try:
            await self._rank(pair)
            if self._units.passes > 1:
                await self._in_two_passes(pair, missing)
                return
            if self._features is not None:
                await self._of_features(self._features, pair, missing)
                return
            runs = self._requests.runs(pair)
            if (sender := self._units.sender(pair)) is not None:
                if reason := await self._send(sender, runs):
                    raise MidstreamError("intervention_failed", f"the first pass failed: {reason}")
                runs = [*runs, self._requests.first_key(sender)]
            # A pair takes all its runs together and then waits for no others, so two pairs never
            # wait for each other's space.
            async with self._holding(pair, runs), asyncio.TaskGroup() as group:
                while missing:
                    kept = await self._begin_all(group, missing)
                    # further rounds of the method `adaptive`; one that was given up is over
                    missing = self._missing(pair) if self._sweep.adaptive and kept else []
        except MidstreamError as error:  # from loading the runs; requests raise a group
            reason = self._reason_or_raise(error)
            for unit in missing:
                if unit.kind == "cell" and unit.number not in self._known:
                    self._decide(unit, reason)

    async def _of_features(self, features: FeatureRows, pair: int, missing: Sequence[Unit]) -> None:
        """Compute a pair's features: their rows are computed from its runs, and sent in batches."""
        locate = self._locate(pair)
        runs = self._requests.control_runs(pair)
        of_base = await locate(runs[0])
        of_source = await locate(runs[1]) if self._sweep.ablation is None else None
        async with self._holding(pair, self._requests.runs(pair)):
            controls = [unit for unit in missing if unit.kind != "cell"]
            for batch in features.batches([unit for unit in missing if unit.kind == "cell"]):
                computing = asyncio.to_thread(features.rows, of_base, of_source, batch)
                rows = await self._sources.reading(computing)
                tensors: dict[str, Tensor] = {}
                for number, written in rows.items():
                    self._requests.rows[number] = [content_hash(row) for row in written]
                    tensors.update(zip(self._requests.rows[number], written, strict=True))
                await self._compute_held([*controls, *batch], tensors)
                controls = []

    async def _compute_held(self, units: Sequence[Unit], tensors: dict[str, Tensor]) -> None:
        """Compute units whose patches need `tensors` (name → tensor) on the ranks."""

        async def fetch(name: str) -> Tensor:
            return tensors[name]

        async with (
            self._engine.holding_vectors([*tensors], fetch),
            asyncio.TaskGroup() as group,
        ):
            await self._begin_all(group, units)

    def _holding(self, pair: int, runs: Sequence[str]) -> AbstractAsyncContextManager[None]:
        return self._sources.holding(self._attempt.job.id, runs, {}, self._locate(pair))

    async def _send(self, sender: Unit, runs: Sequence[str]) -> str:
        """Compute the first pass of a path whose sender is the same for all cells of the pair.

        Returns why it failed; empty when it has succeeded, perhaps in an earlier attempt.
        """
        if sender.number not in self._known:
            async with self._holding(sender.pair, runs), asyncio.TaskGroup() as group:
                await self._begin(group, sender)
        return self._known[sender.number].reason

    async def _in_two_passes(self, pair: int, missing: Sequence[Unit]) -> None:
        """Compute cells of a path with a sender of their own each, in two passes.

        No runs are held while waiting for others: see `RankCache`.
        """
        runs = self._requests.runs(pair)
        controls = [unit for unit in missing if unit.kind != "cell"]
        cells = [unit for unit in missing if unit.kind == "cell"]
        for start in range(0, max(len(cells), 1), FIRST_PASSES):
            async with self._holding(pair, runs), asyncio.TaskGroup() as group:
                if start == 0:
                    for unit in controls:
                        await self._begin(group, unit)
                firsts = {
                    unit: await self._begin(group, unit._replace(kind="sender"), kept=False)
                    for unit in cells[start : start + FIRST_PASSES]
                    if not self._given_up(unit)
                }
            sent: dict[int, Unit] = {}
            for unit, first in firsts.items():
                record = first.result()
                if record.reason:
                    self._decide(unit, f"the first pass failed: {record.reason}")
                else:
                    request = self._units.first_request(unit)
                    self._firsts[request] = unit, record.receipts
                    sent[request] = unit
            held = [*runs, *map(self._requests.first_key, sent.values())]
            async with self._holding(pair, held), asyncio.TaskGroup() as group:
                await self._begin_all(group, sent.values())
            for request in sent:
                del self._firsts[request]

    async def _rank(self, pair: int) -> None:
        """Compute the dimensions that the pair's cells name by rank.

        Raises MidstreamError for rows that cannot be read.
        """
        columns = self._sweep.pairs[pair].columns
        most = max(column.ranks[1] if column.ranks else 0 for column in columns)
        if not most:
            return
        locate = self._locate(pair)
        runs = self._requests.control_runs(pair)
        base, source = [await locate(key) for key in runs]
        store = open_store(self._ledger.settings.artifacts)
        ordering = asyncio.to_thread(
            order_by_difference,
            store=store,
            base=base,
            source=source,
            sites=self._sweep.sites,
            places=columns[0].places,
            most=most,
        )
        self._requests.ranked[pair] = await self._sources.reading(ordering)

    def _missing(self, pair: int) -> list[Unit]:
        """Return the patched units without a record, in the order in which they are submitted: by
        layer, so that forward passes that begin at the same layer share a step.

        For `recovered` the noise units come first: the difference of the two prompts, which it is a
        share of, must be larger than the noise.
        """
        noise = [unit for unit in self._units.noise(pair) if unit.number not in self._known]
        known = PairRecords(self._sweep, pair, self._known)
        columns = known.stored.columns
        wanted = cells_to_compute(known)
        cells = [
            unit
            for unit in known.exact_units()
            if columns[unit.column].places
            and unit.number not in self._known
            and (wanted is None or unit.number in wanted)
        ]
        self._pairs[pair].await_noise(len(noise))
        early = self._sweep.metric == "recovered"
        return sorted(
            [*noise, *cells],
            key=lambda unit: (early and unit.kind == "cell", unit.layer, unit.column, unit.hook),
        )

    async def _controls(self, pair: int, needed: bool) -> str:
        """Compute the pair's two unpatched prompts unless they have records, and use the records.

        `needed`: cells will be compared with them. Returns why the pair gets no values, or "".
        """
        units = [self._units.base(pair)]
        if self._sweep.ablation is None:
            units.append(self._units.source(pair))
        reference = self._requests.reference(pair)
        if self._sweep.metric == "kl":
            units.sort(key=lambda unit: unit != reference)  # the other unit is compared with it
        computed: dict[int, asyncio.Task[UnitRecord]] = {}
        async with asyncio.TaskGroup() as group:
            for unit in units:
                known = unit.number in self._known
                if known and self._known[unit.number].value is None:
                    self._failed = self._failed or "intervention_failed"
                    continue  # its recorded failure stands
                if known and unit.kind == "base":
                    self._requests.take_over(pair, self._known[unit.number].receipts)
                # the ranks keep the reference's distribution for one attempt only
                recomputed = needed and self._sweep.metric == "kl" and unit == reference
                if not known or recomputed:
                    computed[unit.number] = await self._begin(group, unit, captures=not known)
                    if self._sweep.metric == "kl":
                        await computed[unit.number]
        for unit in units:
            record = (
                computed[unit.number].result()
                if unit.number in computed
                else self._known[unit.number]
            )
            if record.value is None:
                return (
                    f"the {'source' if unit.kind == 'source' else 'patched'} prompt failed: "
                    f"{record.reason}"
                )
        receipts = [receipt for unit in units for receipt in self._known[unit.number].receipts]
        versions = {receipt.global_version for receipt in receipts} - {self._everyone.version}
        if why := self._pairs[pair].take_in(units, self._units.noise(pair)):
            return why
        # Cells under different global steering could not be compared with one baseline.
        if needed and versions:
            return (
                f"the sweep began under global steering version {min(versions)} and was "
                "interrupted; the version is now "
                f"{self._everyone.version}, so its remaining cells are not comparable with "
                "those done"
            )
        return ""

    def _given_up(self, unit: Unit) -> bool:
        """Return whether the pair has become useless; if so, decide a cell with that reason."""
        state = self._pairs[unit.pair]
        if state.useless and unit.kind == "cell":
            self._decide(unit, state.useless)
        return bool(state.useless)

    async def _begin_all(
        self, group: asyncio.TaskGroup, units: Iterable[Unit]
    ) -> "list[asyncio.Task[UnitRecord]]":
        """Submit the units that their pair has not given up, and wait until each is settled."""
        begun = [await self._begin(group, unit) for unit in units if not self._given_up(unit)]
        await asyncio.gather(*begun)
        return begun

    async def _begin(
        self,
        group: asyncio.TaskGroup,
        unit: Unit,
        *,
        captures: bool = True,
        kept: bool = True,
    ) -> "asyncio.Task[UnitRecord]":
        """Submit the unit's requests to the engine, once there are free slots. `captures`: those of
        an unpatched prompt capture its rows. `kept`: the unit's record is kept.
        """
        if self._ended:
            # a group cancels its tasks once, and this task's cancellation was swallowed (see
            # `redis_retry`)
            raise asyncio.CancelledError
        asks = self._requests.asks(unit, captures)
        await self._unread.acquire()
        running = []
        for ask in asks:
            await self._slots.acquire(self._attempt.job.tenant)
            running.append(group.create_task(self._request(ask)))
            # a callback releases the slot even if the task never runs
            running[-1].add_done_callback(lambda _: self._slots.release())
        settled = group.create_task(
            self._settle(unit, [ask.request for ask in asks], running, kept)
        )
        settled.add_done_callback(lambda _: self._unread.release())
        return settled

    async def _request(self, ask: EngineRequest) -> str:
        """Run a request in the engine; return why the engine did not do it, or ""."""
        finished = False
        reason = ""
        totals = self._attempt.progress.totals
        totals.prompt_tokens += len(ask.token_ids)
        try:
            async with aclosing(self._engine.generate(ask)) as stream:
                async for progress in stream:
                    finished = progress.finished is not None
                    if progress.stopped_by:
                        reason = f"the probe {progress.stopped_by!r} ended it"
                    totals.generated_tokens += len(progress.token_ids)
            self._attempt.check()
            if not finished:
                raise MidstreamError(
                    "engine_failed", f"the engine ended request {ask.request} without an output"
                )
        except MidstreamError as error:
            return reason or self._reason_or_raise(error)
        return reason

    async def _settle(
        self, unit: Unit, requests: list[int], running: "list[asyncio.Task[str]]", kept: bool
    ) -> UnitRecord:
        """Wait until the engine and every rank are done with a unit, and return its record."""
        reason = next(filter(None, await asyncio.gather(*running)), "")
        report: list[list[Receipt]] = []
        if not reason:
            arrived = await self._attempt.receipts_of(requests, self._patience_s)
            if arrived.keys() == set(requests):
                report = [arrived[request] for request in requests]
                self._note(chain.from_iterable(report))
            else:
                partly = await self._attempt.receipts.partly(requests)
                self._note(partly)
                self._failed = self._failed or "receipts_timed_out"
                reason = refusal(partly) or (
                    f"{len(partly)} of {self._engine.world * len(requests)} receipts arrived "
                    f"within {self._patience_s:g} s of the engine's output"
                )
        record = await self._pairs[unit.pair].record(unit, report, reason)
        if kept:
            await self._records.add(record)
        return record

    def _locate(self, pair: int) -> Locate:
        return _locator(self._requests, self._known, self._firsts, pair)

    def _reason_or_raise(self, error: MidstreamError) -> str:
        """Return the text of an error that concerns one request, and note it; raise any other."""
        if error.kind == "engine_failed" or ending_for_retry(error) is not None:
            raise error
        self._failed = self._failed or error.kind
        return error.detail

    def _note(self, receipts: Iterable[Receipt]) -> None:
        """Note the first error in receipts. Raises StoreUnavailable if a rank could not keep the
        rows because the artifact store is unavailable.
        """
        for receipt in receipts:
            if receipt.status == "error" and receipt.kind == STORE_UNAVAILABLE:
                raise StoreUnavailable(
                    f"request {receipt.request}, rank {receipt.rank} (stage {receipt.pp}): "
                    f"{receipt.message}"
                )
            self._failed = self._failed or receipt.kind

    def _decide(self, unit: Unit, reason: str) -> None:
        """Record the unit without a value, for `reason`; the engine need not compute it."""
        self._decisions.append(self._records.add(self._records.new(unit, reason)))


def _locator(
    requests: SweepRequests,
    known: Mapping[int, UnitRecord],
    firsts: Mapping[int, tuple[Unit, Sequence[Receipt]]],
    pair: int,
) -> Locate:
    """Return what finds the files of a pair's runs by their key. `firsts`: by request."""
    units = requests.units

    async def locate(key: str) -> RunFiles:
        request = parse_key(key)[1]
        sender = units.sender(pair)
        receipts = [
            receipt
            for unit in (units.base(pair), units.source(pair), *([sender] if sender else []))
            if (record := known.get(unit.number)) is not None
            for receipt in record.receipts
        ]
        with Translated(
            ValueError, lambda error: MidstreamError("intervention_failed", str(error))
        ):
            if request in firsts:
                return requests.first_files(*firsts[request])
            if sender is not None and key == requests.first_key(sender):
                return requests.first_files(sender, receipts)
            return requests.files(pair, key, receipts)

    return locate
