"""Execution of a sweep: its unpatched prompts, then thousands of patched ones, a few in the engine
at a time.

A unit counts once every rank confirms it: its receipts are read from the ticket, and its record is
kept in the ledger, so that the attempt after a killed worker computes only the rest. A cell that
the ranks do not confirm gets no value but the reason; it never gets the value of an unpatched
prompt, and never ends the sweep.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from ....broker.ledger.jobs.ledger import Ledger
from ....broker.ledger.jobs.status import relay_alive_for
from ....broker.ledger.jobs.sweeps import Kept, Sweeps
from ....broker.ledger.results.attribution_cells import cells_to_compute, exact_units
from ....broker.ledger.results.sweep_metrics import in_nats, recovered, useless_baseline
from ....broker.ledger.results.sweep_result import sweep_cell, sweep_start, sweep_summary
from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.base.faults import crash_point
from ....schemas.base.tensors import Tensor, content_hash
from ....schemas.jobs.receipts import STORE_UNAVAILABLE, Receipt
from ....schemas.jobs.sweeps import (
    SHOWN_NEURONS,
    SweepCell,
    Unit,
    UnitRecord,
)
from ....schemas.requests.source_runs import RunFiles, parse_key
from ....storage.store import open_store
from ...engine.admission import CellSlots, CrowdedOut
from ...engine.protocol import Engine, EngineRequest, Fetch
from ...engine.ranks.collective import Quarantined
from ...engine.requests import tensors_of
from ..attempt import Attempt, StoreUnavailable
from ..redis_retry import end_tasks, patiently
from ..source_run_leases import SourceRunLeases
from .features import FeatureRows
from .neurons import order_by_difference
from .requests import SweepRequests
from .verdict import UnverifiedUnit, refusal, verdict, verified

logger = logging.getLogger(__name__)

#: How often receipts are polled while some are awaited. A step of the engine takes about as long.
POLL_S = 0.05
#: If reading receipts took longer than this, Redis was unreachable and the wait for receipts starts
#: again.
STALL_S = 2.0
#: Concurrent pairs: the prompts of the next pair run while the last cells of one are running.
PAIRS_AT_ONCE = 2
#: Units that have begun and whose receipts are not read: at most this many times the cells in
#: flight.
UNREAD = 4
#: Cells with two passes whose first passes are held on the ranks together.
FIRST_PASSES = 64
#: Receipts read per call.
POLL_UNITS = 256


class _Pending:
    """A unit whose requests were submitted to the engine."""

    def __init__(self, unit: Unit, asks: list[EngineRequest], first: bool = False) -> None:
        """`first`: this is the first of a cell's two passes, which gives no value."""
        self.unit, self.first = unit, first
        self.requests = [ask.request for ask in asks]
        self.running = len(asks)  # number of requests that the engine has not finished
        self.reason = ""  # why the engine refused
        self.finished = 0.0  # when the engine finished the last request (monotonic)
        self.receipts: list[list[Receipt]] = []  # of each request, once all have arrived
        self.kept: asyncio.Future[UnitRecord] = asyncio.get_running_loop().create_future()


class _Pair:
    """Inputs of the values of a pair's cells, and the noise units that are left."""

    def __init__(self, noise: int) -> None:
        self.base: float | None = None  # the metric in nats, of the base prompt without a patch
        self.source: float | None = None  # the same of the source prompt
        self.noise: list[float] = []  # the same of the base prompt with no-op patches
        self.noise_left = noise  # noise units without a record
        self.useless = ""  # why `recovered` cannot be computed


class SweepAttempt:
    """One attempt at one sweep.

    All sweeps of the worker share `cells_in_flight`, first come, first served.
    """

    def __init__(
        self,
        ledger: Ledger,
        engine: Engine,
        sources: SourceRunLeases,
        attempt: Attempt,
        cells_in_flight: CellSlots,
        fetch: Fetch,
        refused: Callable[[Kept], None],
    ) -> None:
        """`refused` stops the attempt when the ledger rejects what it wants to keep."""
        assert attempt.job.sweep is not None
        settings = ledger.settings
        self._ledger, self._sweeps, self._engine, self._sources, self._attempt = (
            ledger,
            Sweeps(ledger),
            engine,
            sources,
            attempt,
        )
        self._sweep, self._fetch, self._refused = attempt.job.sweep, fetch, refused
        self._everyone = attempt.lease.steering
        # Global steering may apply below the layer at which a forward pass would begin.
        enters = settings.sweep_entry and engine.enters and not self._everyone.entries
        self._requests = SweepRequests(
            attempt.job, attempt.number, engine.info, enters, settings.sweep_entry
        )
        self._units = self._requests.units
        attributed = self._sweep.attributed
        self._adaptive = attributed is not None and attributed.method == "adaptive"
        self._features = (
            FeatureRows(settings, self._sweep)
            if attributed is not None and attributed.sae is not None
            else None
        )
        # request → first pass of a cell, until its second pass has ended
        self._firsts: dict[int, tuple[Unit, list[Receipt]]] = {}
        self._slots = cells_in_flight
        self._unread = asyncio.Semaphore(UNREAD * settings.sweep_cells_in_flight)
        self._patience_s = settings.capture_timeout_s
        self._records: dict[int, UnitRecord] = {}
        self._pairs = [_Pair(0) for _ in self._sweep.pairs]
        self._waiting: list[_Pending] = []  # finished in the engine, oldest first
        self._decided: list[tuple[UnitRecord, Unit]] = []  # without a value, not kept yet
        self._work = asyncio.Event()
        self._unkept = 0  # number of decided units that are not kept yet
        self._all_kept = asyncio.Event()
        self._ended = False  # nothing is kept from here on

    async def run(self) -> None:
        """Run the sweep to its last cell.

        Raises MidstreamError ("useless_baseline" when all pairs are useless), and CancelledError
        when the attempt is stopped.
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
        self._records = await patiently(lambda: self._sweeps.records(job.id), f"units of {job.id}")
        if not self._records:
            await self._attempt.report(self._ledger, "start", sweep_start(self._sweep))
        names = sorted(
            {*tensors_of(job, self._everyone), *([self._sweep.mask] if self._sweep.mask else [])}
        )
        await self._engine.hold_vectors(names, self._fetch)
        try:
            self._attempt.check()
            await self._compute_units()
            await self._restore()
        finally:
            if self._features is not None:
                await asyncio.to_thread(self._features.close)
            await self._engine.release_vectors(names)
        if all(pair.useless for pair in self._pairs):
            raise MidstreamError("useless_baseline", self._pairs[0].useless, field="metric")
        summary = sweep_summary(self._sweep, self._records, time.monotonic() - began)
        await self._attempt.report(self._ledger, "summary", summary)

    async def _compute_units(self) -> None:
        # Tasks that talk to Redis are ended, not cancelled once: see `redis_retry`.
        tasks = [asyncio.ensure_future(self._collect()), asyncio.ensure_future(self._all_pairs())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ended = True
            await end_tasks(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        self._attempt.check()

    async def _restore(self) -> None:
        """Store lost records again: if Redis's machine dies, Redis loses its last second."""
        job = self._attempt.job.id
        present = await patiently(lambda: self._sweeps.records(job), f"units of {job}")
        lost = [record for number, record in self._records.items() if number not in present]
        if lost:
            logger.warning(
                "storing again the units that the ledger had lost (count: %d, job: %s)",
                len(lost),
                job,
            )
            exact = {
                unit.number: unit
                for pair in range(len(self._sweep.pairs))
                for unit in exact_units(self._sweep, pair, self._records)
            }
            await self._keep(
                (record, exact.get(record.unit, Unit(record.unit, "base", 0))) for record in lost
            )

    # Submitting

    async def _all_pairs(self) -> None:
        for pair in range(len(self._sweep.pairs)):
            for unit in self._units.cells(pair) if self._sweep.attributed is None else ():
                column = self._sweep.pairs[pair].columns[unit.column]
                if not column.places and unit.number not in self._records:
                    self._decide(unit, column.reason or "the column is skipped")
        begun = asyncio.Semaphore(PAIRS_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for pair in range(len(self._sweep.pairs)):
                await begun.acquire()
                group.create_task(self._pair(pair)).add_done_callback(lambda _: begun.release())
        while self._unkept:
            self._all_kept.clear()
            await self._all_kept.wait()

    async def _pair(self, pair: int) -> None:
        """Compute all units of a pair that have no record."""
        state, missing = self._pairs[pair], self._missing(pair)
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
                    kept = [
                        (await self._begin(group, unit)).kept
                        for unit in missing
                        if not self._given_up(unit)
                    ]
                    await asyncio.gather(*kept)
                    # further rounds of the method `adaptive`; one that was given up is over
                    missing = self._missing(pair) if self._adaptive and kept else []
        except MidstreamError as error:  # from loading the runs; requests raise a group
            reason = _reason_or_raise(error)
            for unit in missing:
                if unit.kind == "cell" and unit.number not in self._records:
                    self._decide(unit, reason)

    async def _of_features(self, features: FeatureRows, pair: int, missing: Sequence[Unit]) -> None:
        """Compute a pair's features: their rows are computed from its runs, and sent in batches."""
        locate, runs = self._locate(pair), self._requests.control_runs(pair)
        of_base = await locate(runs[0])
        of_source = await locate(runs[1]) if self._sweep.ablation is None else None
        async with self._holding(pair, self._requests.runs(pair)):
            controls = [unit for unit in missing if unit.kind != "cell"]
            for batch in features.batches([unit for unit in missing if unit.kind == "cell"]):
                computing = asyncio.to_thread(features.rows, of_base, of_source, batch)
                try:
                    rows = await self._sources.reading(computing)
                except (OSError, ValueError) as error:
                    why = f"the rows of features cannot be computed: {error}"
                    raise MidstreamError("intervention_failed", why) from error
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

        await self._engine.hold_vectors([*tensors], fetch)
        try:
            async with asyncio.TaskGroup() as group:
                kept = [
                    (await self._begin(group, unit)).kept
                    for unit in units
                    if not self._given_up(unit)
                ]
                await asyncio.gather(*kept)
        finally:
            await self._engine.release_vectors([*tensors])

    def _holding(self, pair: int, runs: Sequence[str]) -> AbstractAsyncContextManager[None]:
        return self._sources.holding(self._attempt.job.id, runs, {}, self._locate(pair))

    async def _send(self, sender: Unit, runs: Sequence[str]) -> str:
        """Compute the first pass of a path whose sender is the same for all cells of the pair.

        Returns why it failed; empty when it has succeeded, perhaps in an earlier attempt.
        """
        if sender.number not in self._records:
            async with self._holding(sender.pair, runs), asyncio.TaskGroup() as group:
                await (await self._begin(group, sender, [self._requests.first(sender)])).kept
        return self._records[sender.number].reason

    async def _in_two_passes(self, pair: int, missing: Sequence[Unit]) -> None:
        """Compute cells of a path with a sender of their own each, in two passes.

        No runs are held while waiting for others: see `RankCache`.
        """
        runs = self._requests.runs(pair)
        controls = [unit for unit in missing if unit.kind != "cell"]
        cells = [unit for unit in missing if unit.kind == "cell"]
        for start in range(0, max(len(cells), 1), FIRST_PASSES):
            batch, firsts = cells[start : start + FIRST_PASSES], []
            async with self._holding(pair, runs), asyncio.TaskGroup() as group:
                noise = [await self._begin(group, unit) for unit in controls if not start]
                for unit in batch:
                    if not self._given_up(unit):
                        firsts.append(
                            await self._begin(group, unit, [self._requests.first(unit)], first=True)
                        )
                await asyncio.gather(*(pending.kept for pending in (*noise, *firsts)))
            succeeded = []
            for pending in firsts:
                if reason := (await pending.kept).reason:
                    self._decide(pending.unit, f"the first pass failed: {reason}")
                else:
                    self._firsts[pending.requests[0]] = pending.unit, pending.receipts[0]
                    succeeded.append(pending)
            held = [*runs, *(self._requests.first_key(pending.unit) for pending in succeeded)]
            async with self._holding(pair, held), asyncio.TaskGroup() as group:
                kept = [
                    (await self._begin(group, pending.unit)).kept
                    for pending in succeeded
                    if not self._given_up(pending.unit)
                ]
                await asyncio.gather(*kept)
            for pending in succeeded:
                del self._firsts[pending.requests[0]]

    async def _rank(self, pair: int) -> None:
        """Compute the dimensions that the pair's cells name by rank.

        Raises MidstreamError for rows that cannot be read.
        """
        columns = self._sweep.pairs[pair].columns
        most = max(column.ranks[1] if column.ranks else 0 for column in columns)
        if not most or not columns[0].places:
            return
        locate, runs = self._locate(pair), self._requests.control_runs(pair)
        base, source = [await locate(key) for key in runs]
        sites = {
            (number, place): (hook, layer)
            for number, hook in enumerate(self._sweep.hooks)
            for place, layer in enumerate(self._sweep.layers)
        }
        store = open_store(self._ledger.settings.artifacts)
        with Translated(
            (OSError, ValueError),
            lambda error: MidstreamError(
                "intervention_failed",
                f"the rows that neurons are chosen from cannot be read: {error}",
            ),
        ):
            ordering = asyncio.to_thread(
                order_by_difference,
                store,
                base,
                source,
                list(sites.values()),
                columns[0].places,
                most,
            )
            order = await self._sources.reading(ordering)
        self._requests.rank(pair, {numbers: order[site] for numbers, site in sites.items()})

    def _missing(self, pair: int) -> list[Unit]:
        """Return the patched units without a record, in the order in which they are submitted: by
        layer, so that forward passes that begin at the same layer share a step.

        For `recovered` the noise units come first: the difference of the two prompts, which it is a
        share of, must be larger than the noise.
        """
        noise = [unit for unit in self._units.noise(pair) if unit.number not in self._records]
        columns = self._sweep.pairs[pair].columns
        wanted = cells_to_compute(self._sweep, pair, self._records)
        cells = [
            unit
            for unit in exact_units(self._sweep, pair, self._records)
            if columns[unit.column].places
            and unit.number not in self._records
            and (wanted is None or unit.number in wanted)
        ]
        self._pairs[pair].noise_left = len(noise)
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
        controls = []
        async with asyncio.TaskGroup() as group:
            for unit in units:
                known = unit.number in self._records
                if known and self._records[unit.number].value is None:
                    continue  # its recorded failure stands
                if known and unit.kind == "base":
                    self._requests.take_over(pair, self._records[unit.number].receipts)
                # the ranks keep the reference's distribution for one attempt only
                recomputed = needed and self._sweep.metric == "kl" and unit == reference
                if not known or recomputed:
                    pending = await self._begin(
                        group, unit, self._requests.control(unit, captures=not known)
                    )
                    controls.append(pending)
                    if self._sweep.metric == "kl":
                        await asyncio.shield(pending.kept)
            records = {
                pending.unit.number: await asyncio.shield(pending.kept) for pending in controls
            }
        for unit in units:
            record = records.get(unit.number) or self._records[unit.number]
            if record.value is None:
                return (
                    f"the {'source' if unit.kind == 'source' else 'patched'} prompt failed: "
                    f"{record.reason}"
                )
        return self._take_in(pair, units, needed)

    def _take_in(self, pair: int, units: Sequence[Unit], needed: bool) -> str:
        """Set the pair's baseline from its records. Returns why the pair gets no values, or ""."""
        state = self._pairs[pair]
        known = [self._records[unit.number] for unit in units]
        for unit, record in zip(units, known, strict=True):
            if unit.kind == "base":
                state.base = record.value
            else:
                state.source = record.value
        if self._sweep.metric == "recovered":
            if state.base is None or state.source is None:
                return "there is no second prompt to compare with"
            for unit in self._units.noise(pair):
                if (
                    earlier := self._records.get(unit.number)
                ) is not None and earlier.value is not None:
                    state.noise.append(state.base + earlier.value * (state.source - state.base))
            self._judge(state)
        versions = {receipt.global_version for record in known for receipt in record.receipts} - {
            self._everyone.version
        }
        if needed and versions:
            return (
                f"the sweep began under global steering version {min(versions)} and was "
                "interrupted; the version is now "
                f"{self._everyone.version}, so its remaining cells are not comparable with "
                "those done"
            )
        return ""

    def _judge(self, state: _Pair) -> None:
        assert state.base is not None
        assert state.source is not None
        state.useless = useless_baseline(state.base, state.source, state.noise)

    def _given_up(self, unit: Unit) -> bool:
        """Return whether the pair has become useless; if so, decide a cell with that reason."""
        state = self._pairs[unit.pair]
        if state.useless and unit.kind == "cell":
            self._decide(unit, state.useless)
        return bool(state.useless)

    async def _begin(
        self,
        group: asyncio.TaskGroup,
        unit: Unit,
        asks: list[EngineRequest] | None = None,
        *,
        first: bool = False,
    ) -> _Pending:
        """Submit the unit's requests to the engine, once there are free slots."""
        if self._ended:
            # a group cancels its tasks once, and this task's cancellation was swallowed (see
            # `redis_retry`)
            raise asyncio.CancelledError
        asks = self._requests.patched(unit) if asks is None else asks
        await self._unread.acquire()
        pending = _Pending(unit, asks, first)
        for ask in asks:
            await self._slots.acquire()
            # A callback releases the slot even if the task never runs.
            group.create_task(self._request(pending, ask)).add_done_callback(
                lambda _: self._slots.release()
            )
        return pending

    async def _request(self, pending: _Pending, ask: EngineRequest) -> None:
        try:
            finished, totals = False, self._attempt.progress.totals
            totals.prompt_tokens += len(ask.token_ids)
            async with aclosing(self._attempt.submit(self._engine, ask)) as stream:
                async for progress in stream:
                    finished = progress.finished is not None
                    pending.reason = pending.reason or (
                        f"the probe {progress.stopped_by!r} ended it" if progress.stopped_by else ""
                    )
                    totals.generated_tokens += len(progress.token_ids)
            self._attempt.check()
            if not finished:
                raise MidstreamError(
                    "engine_failed", f"the engine ended request {ask.request} without an output"
                )
        except MidstreamError as error:
            pending.reason = pending.reason or _reason_or_raise(error)
        pending.running -= 1
        if not pending.running:
            pending.finished = time.monotonic()
            self._waiting.append(pending)
            self._work.set()

    def _locate(self, pair: int) -> "Callable[[str], Coroutine[Any, Any, RunFiles]]":
        async def locate(key: str) -> RunFiles:
            request, sender = parse_key(key)[1], self._units.sender(pair)
            receipts = [
                receipt
                for unit in (
                    self._units.base(pair),
                    self._units.source(pair),
                    *([sender] if sender else []),
                )
                if (record := self._records.get(unit.number)) is not None
                for receipt in record.receipts
            ]
            with Translated(
                ValueError, lambda error: MidstreamError("intervention_failed", str(error))
            ):
                if request in self._firsts:
                    return self._requests.first_files(*self._firsts[request])
                if sender is not None and key == self._requests.first_key(sender):
                    return self._requests.first_files(sender, receipts)
                return self._requests.files(pair, key, receipts)

        return locate

    # Keeping

    def _decide(self, unit: Unit, reason: str) -> None:
        """Record the unit without a value, for `reason`; the engine need not compute it."""
        self._unkept += 1
        self._decided.append(
            (UnitRecord(unit=unit.number, reason=reason, attempt=self._attempt.number), unit)
        )
        self._work.set()

    async def _collect(self) -> None:
        """Keep decided units, and units that all ranks have reported on, until cancelled."""
        while True:
            await self._work.wait()
            self._attempt.check()
            decided, self._decided = self._decided, []
            await self._keep(decided)
            self._unkept -= len(decided)
            if not self._unkept:
                self._all_kept.set()
            settled = await self._settled()
            await self._keep(
                [(record, pending.unit) for pending, record in settled if not pending.first]
            )
            done = {id(pending) for pending, _ in settled}
            self._waiting = [pending for pending in self._waiting if id(pending) not in done]
            for pending, record in settled:
                self._unread.release()
                if not pending.kept.done():
                    pending.kept.set_result(record)
            if not self._decided and not self._waiting:
                self._work.clear()
            else:
                await asyncio.sleep(POLL_S)

    async def _keep(self, decided: Iterable[tuple[UnitRecord, Unit]]) -> None:
        batch: list[tuple[UnitRecord, SweepCell | None]] = [
            (record, sweep_cell(self._sweep, unit, record) if unit.kind == "cell" else None)
            for record, unit in decided
        ]
        if not batch:
            return
        job, number, engine = self._attempt.job, self._attempt.number, self._engine
        kept = await patiently(
            lambda: self._sweeps.keep(job, number, batch, engine.world, engine.info.pp),
            f"cells of {job.id}",
        )
        crash_point("sweep.kept")
        if kept != "kept":
            self._refused(kept)
            self._attempt.check()
        self._attempt.progress.totals.cells += sum(cell is not None for _, cell in batch)
        for record, _ in batch:
            self._records.setdefault(record.unit, record)

    async def _settled(self) -> list[tuple[_Pending, UnitRecord]]:
        """Read receipts; return the waiting units that have a record, with their records."""
        began = time.monotonic()
        unread = [
            pending for pending in self._waiting if not pending.receipts and not pending.reason
        ][:POLL_UNITS]
        requests = [request for pending in unread for request in pending.requests]
        job, world = self._attempt.job.id, self._engine.world
        report = await patiently(
            lambda: self._sweeps.receipts(job, requests, world), f"receipts of {job}"
        )
        now = time.monotonic()
        if now - began > STALL_S:
            for pending in self._waiting:
                pending.finished = now
        late = []
        for pending in unread:
            if all(request in report for request in pending.requests):
                pending.receipts = [report[request] for request in pending.requests]
                _check_stored(pending.receipts)
            elif now - pending.finished > self._patience_s:
                late.append(pending)
        if late and not await patiently(
            lambda: relay_alive_for(self._ledger, self._patience_s), f"receipts of {job}"
        ):
            late = []
        for pending in late:
            arrived = await patiently(
                lambda of=pending.requests: self._sweeps.reported(  # type: ignore[misc]
                    job, of, world
                ),
                f"receipts of {job}",
            )
            pending.reason = refusal(arrived) or (
                f"{len(arrived)} of {world * len(pending.requests)} receipts arrived within "
                f"{self._patience_s:g} s of the engine's output"
            )
        settled = []
        # cells last, because they depend on noise units
        for pending in sorted(self._waiting, key=lambda pending: pending.unit.kind == "cell"):
            outcome = pending.receipts or pending.reason
            if outcome and (record := self._record(pending)) is not None:
                settled.append((pending, record))
        return settled

    def _record(self, pending: _Pending) -> UnitRecord | None:
        """Return a unit's record; None while it depends on a unit without a record."""
        unit, state = pending.unit, self._pairs[pending.unit.pair]
        if pending.first or unit.kind == "sender":
            receipts = (
                []
                if pending.first
                else [receipt for receipts in pending.receipts for receipt in receipts]
            )
            reason = pending.reason or self._unverified(pending)
            return UnitRecord(
                unit=unit.number, reason=reason, attempt=self._attempt.number, receipts=receipts
            )
        if (
            unit.kind == "cell"
            and self._sweep.metric == "recovered"
            and state.noise_left
            and not state.useless
        ):
            return None
        record = UnitRecord(unit=unit.number, reason=pending.reason, attempt=self._attempt.number)
        if not pending.reason:
            record = self._value(pending)
        if unit.kind == "noise":
            state.noise_left -= 1
            if not state.noise_left and self._sweep.metric == "recovered":
                self._judge(state)
        return record

    def _unverified(self, pending: _Pending) -> str:
        """Return why a rank does not confirm the unit; empty when all do."""
        try:
            verified(pending.receipts, self._engine.world)
        except UnverifiedUnit as error:
            return str(error)
        return ""

    def _value(self, pending: _Pending) -> UnitRecord:
        unit, state, attempt = pending.unit, self._pairs[pending.unit.pair], self._attempt.number
        stored, nodes = self._sweep.pairs[unit.pair], self._units.nodes[unit.pair]
        try:
            grades = verdict(
                stored, nodes, pending.receipts, self._engine.world, self._requests.compares(unit)
            )
            reference = self._sweep.metric == "kl" and unit == self._requests.reference(unit.pair)
            value = 0.0 if reference else in_nats(self._sweep.metric, grades)
        except (UnverifiedUnit, ValueError) as error:
            return UnitRecord(unit=unit.number, reason=str(error), attempt=attempt)
        if unit.kind == "noise":
            state.noise.append(value)
        if unit.kind in ("cell", "noise") and self._sweep.metric == "recovered":
            assert state.base is not None
            assert state.source is not None
            if state.useless:
                return UnitRecord(unit=unit.number, reason=state.useless, attempt=attempt)
            value = recovered(value, state.base, state.source)
        return UnitRecord(
            unit=unit.number,
            value=value,
            logprob=grades.logprob,
            foil_logprob=grades.foil_logprob,
            attempt=attempt,
            neurons=self._requests.neurons(unit)[:SHOWN_NEURONS] if unit.kind == "cell" else [],
            receipts=[receipt for receipts in pending.receipts for receipt in receipts]
            if unit.kind in ("base", "source", "sender")
            else [],
        )


def _reason_or_raise(error: MidstreamError) -> str:
    """Return the text of an error that concerns one request; raise any other error."""
    ends_attempt = Quarantined | CrowdedOut | StoreUnavailable
    if error.kind == "engine_failed" or isinstance(error, ends_attempt):
        raise error
    return error.detail


def _check_stored(report: Sequence[Sequence[Receipt]]) -> None:
    """Raises StoreUnavailable if a rank could not keep the rows because the artifact store is
    unavailable.
    """
    for receipt in (receipt for receipts in report for receipt in receipts):
        if receipt.status == "error" and receipt.kind == STORE_UNAVAILABLE:
            raise StoreUnavailable(
                f"request {receipt.request}, rank {receipt.rank} (stage {receipt.pp}): "
                f"{receipt.message}"
            )
