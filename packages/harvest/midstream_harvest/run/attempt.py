"""Execution of a part of a harvest: units are read, cut, computed and kept, a few shards at a time.

A unit counts once its shards are durable and one commit in the ledger has recorded it. The next
attempt computes the units that do not count yet.
"""

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec

from midstream.broker.artifacts.global_capture import QUOTA_SPARE, count_skipped
from midstream.broker.ledger.jobs.units import UnitFate, UnitRow
from midstream.broker.telemetry import metrics
from midstream.schemas.base.dtypes import RowDType
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_msgpack, now, to_json, to_msgpack
from midstream.schemas.base.version import __version__
from midstream.schemas.jobs.jobs import Job, Sampling
from midstream.schemas.jobs.receipts import STORE_UNAVAILABLE, Receipt
from midstream.schemas.prompts.selectors import PositionSelector, PositionWindow
from midstream.schemas.prompts.sites import hook_layers
from midstream.schemas.requests.specs import StoredCapture
from midstream.schemas.settings.faults import crash_point
from midstream.storage.capture_usage import CaptureUsage
from midstream.storage.store import ArtifactStore, open_store
from midstream.workers.engine.admission import CellSlots
from midstream.workers.engine.protocol import EngineRequest, GeneratingEngine
from midstream.workers.engine.requests import format_request, sequence_request, tensors_of
from midstream.workers.serving.attempt import Attempt, Bench
from midstream.workers.serving.redis_retry import patiently
from midstream.workers.serving.units import UnitRecords

from ..files.shards import checked, checksum, put, units_of
from ..ledger.harvests import (
    CLOSING,
    SEALED,
    HarvestReport,
    LedgerHarvests,
    part_kept,
    plan_kept,
    record_key,
    store_awaited,
    survey_kept,
    unit_row,
    units_key,
)
from ..names import HARVEST
from ..records.harvests import (
    FORMAT,
    MANIFEST,
    CheckedFile,
    HarvestManifest,
    HarvestPlan,
    HarvestWork,
    PartManifest,
    ShardEntry,
    ShardFile,
    StoredHarvest,
    SurveyTask,
    UnitEntry,
)
from ..records.work import HarvestPlace, Survey
from .cut import CutSequence, cut, shards_of
from .process import SURVEY_MIB, SourceProcess, SourceReader

logger = logging.getLogger(__name__)

#: Seconds before a write to an unavailable store is retried; the pause doubles with each try.
PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
#: A shard may take this many times `capture_timeout_s` after its last token, because it is written
#: as a whole.
WRITE_PATIENCE = 10
#: Reads the sources of all harvests of this worker.
SOURCES = SourceProcess()
#: Computes surveys, one at a time, so that neither this process nor the model's waits for them.
SURVEYS = SourceProcess(SURVEY_MIB)
SHARDS = "shards"
PARTS = "parts"
PLANS = "plans"


class ShardNotStored(Exception):
    """The store was unavailable when a rank wrote a shard."""


class HarvestAttempt:
    """One attempt at one part. `slots` and `shards` are shared by all harvests of the worker."""

    def __init__(
        self,
        bench: Bench[GeneratingEngine],
        attempt: Attempt,
        slots: CellSlots,
        shards: asyncio.Semaphore,
    ) -> None:
        settings = bench.ledger.settings
        self._bench = bench
        self._ledger = bench.ledger
        self._engine = bench.engine
        self._attempt = attempt
        self._part = attempt.job.work_as(HarvestWork).part
        self._harvests = LedgerHarvests(bench.ledger)
        self._slots = slots
        self._shards = shards
        self._usage = CaptureUsage(open_store(settings.artifacts), settings.capture_quota_mib << 20)
        self._numbers = itertools.count()  # of requests
        self._requests = defaultdict[int, list[int]](list)  # number of a unit → its requests

    async def run(self) -> None:
        """Run the part to its end. Raises MidstreamError, and CancelledError when stopped."""
        harvest = await patiently(self._harvests.stored, self._part.harvest)
        store = open_store(harvest.uri)
        roots = self._ledger.settings.harvest_sources
        info = self._engine.info
        process = SOURCES if self._part.survey is None else SURVEYS
        source = SourceReader(process, harvest, self._engine.tokenizer, roots, info.vocab_size)
        if self._part.survey is not None:
            await self._survey(harvest, store, source, self._part.survey)
        elif self._part.role == "plan":
            await self._plan(harvest, store, source)
        elif self._part.role == "seal":
            await self._seal(harvest, store)
        else:
            await self._compute(harvest, store, source)

    async def _report(self, report: HarvestReport) -> UnitFate:
        """Return the ledger's answer to a report of this attempt."""
        attempt = self._attempt
        return await patiently(self._harvests.report, attempt.job, attempt.number, report)

    async def _survey(
        self, harvest: StoredHarvest, store: ArtifactStore, source: SourceReader, survey: Survey
    ) -> None:
        """Run a survey of the finished harvest, and record it."""
        settings = self._ledger.settings
        task = SurveyTask(
            job=self._attempt.job.id,
            survey=survey,
            sae_root=settings.artifacts_of("saes"),
            sae_bytes=settings.tuning.sae_cache_mib << 20,
            data_dir=settings.data_dir,
        )
        entry = await source.survey(task)
        crash_point("harvest.surveyed")
        answer = await self._report(survey_kept(task.job, self._part, entry))
        if answer in ("cancelling", "unknown"):  # no other attempt follows
            await asyncio.to_thread(store.delete, entry.key)
        self._attempt.check_answer(answer)

    # Planning and sealing

    async def _plan(
        self, harvest: StoredHarvest, store: ArtifactStore, source: SourceReader
    ) -> None:
        plan = await source.plan()
        key = f"{PLANS}/{self._attempt.job.id}.a{self._attempt.number}.msgpack"
        # The input is cut into units before anything is computed: a unit then means the same
        # documents to every attempt and worker.
        file = await self._put(harvest, store, key, to_msgpack(plan))
        crash_point("harvest.planned")
        answer = await self._report(plan_kept(plan, file))
        if answer != "kept" and await self._planned(harvest) != key:
            # the file may be younger than the seal, which removes what nothing names
            await asyncio.to_thread(store.delete, key)
        self._attempt.check_answer(answer)

    async def _planned(self, harvest: StoredHarvest) -> str:
        """Return the key of the plan that counts; empty before there is one."""
        try:
            file = await patiently(self._harvests.plan, harvest.id)
        except MidstreamError as error:
            if error.kind != "not_found":
                raise
            return ""
        return file.key

    async def _seal(self, harvest: StoredHarvest, store: ArtifactStore) -> None:
        done = await patiently(self._harvests.done, harvest.id)
        file, plan = await self._read_plan(harvest, store)
        if len(done) != plan.parts:
            raise MidstreamError(
                "internal", f"{len(done)} of {plan.parts} parts are recorded: no files were removed"
            )
        manifest = await asyncio.to_thread(
            self._manifest, harvest, store, [done[part] for part in sorted(done)], plan, file
        )
        crash_point("harvest.sealing")

        async def close() -> None:
            self._attempt.check_answer(await self._report(CLOSING))

        # The last object: without it a harvest is not done, and with it everything that it names is
        # durable.
        await self._put(harvest, store, MANIFEST, to_json(manifest), close)
        self._attempt.check_answer(await self._report(SEALED))

    async def _read_plan(
        self, harvest: StoredHarvest, store: ArtifactStore
    ) -> tuple[CheckedFile, HarvestPlan]:
        file = await patiently(self._harvests.plan, harvest.id)

        data = await asyncio.to_thread(checked, store, file)
        return file, await asyncio.to_thread(from_msgpack, data, HarvestPlan)

    def _manifest(
        self,
        harvest: StoredHarvest,
        store: ArtifactStore,
        parts: Sequence[CheckedFile],
        plan: HarvestPlan,
        file: CheckedFile,
    ) -> HarvestManifest:
        """Return the manifest of all parts; removes objects that no part names."""
        named = {part.key for part in parts} | {file.key}
        units = units_of(store, parts)
        _check_documents(units, plan)
        named |= {file.key for unit in units for shard in unit.shards for file in shard.files}
        folders = store.children(f"{SHARDS}/")
        for key in itertools.chain(*map(store.children, (f"{PARTS}/", f"{PLANS}/", *folders))):
            if key not in named:
                logger.info("removing %s: left by a superseded attempt", key)
                store.delete(key)
        for folder in folders:
            if not store.children(folder):
                store.delete(folder)
        return HarvestManifest(
            format=FORMAT,
            version=__version__,
            id=harvest.id,
            model=harvest.model,
            created=harvest.created,
            finished=now(),
            sites={str(hook): layers for hook, layers in harvest.sites.items()},
            widths={str(hook): self._engine.info.row_size(hook) for hook in harvest.sites},
            at=harvest.at,
            dtype=self._engine.info.dtype if harvest.dtype == "model" else harvest.dtype,
            max_length=harvest.max_length,
            fit=harvest.cut.fit,
            positions=harvest.positions,
            shuffle=harvest.shards.shuffle,
            source=harvest.source.path or "lines",
            documents=sum(unit.documents for unit in units),
            tokens=sum(unit.tokens for unit in units),
            generated=sum(unit.generated for unit in units),
            rows=sum(unit.rows for unit in units),
            bytes=sum(unit.bytes for unit in units),
            shards=sum(len(unit.shards) for unit in units),
            parts=list(parts),
            metadata=harvest.metadata,
            identity=harvest.identity,
            checkpoint=self._engine.checkpoint,
            dropped=harvest.stream is not None and not harvest.stream.keep,
        )

    async def _put(
        self,
        harvest: StoredHarvest,
        store: ArtifactStore,
        key: str,
        data: bytes,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> CheckedFile:
        """Store `data` under `key`, retrying until the store takes it; return a reference to it.

        `before` is awaited before each try.
        """

        def write() -> CheckedFile:
            put(store, key, [data])
            with store.open(key) as handle:
                return CheckedFile(key=key, crc32=checksum(handle))

        pause = PAUSE_S
        while True:
            if before is not None:
                await before()
            try:
                return await asyncio.to_thread(write)
            except OSError as error:
                pause = await self._wait_for_store(harvest, str(error), pause)

    async def _wait_for_store(self, harvest: StoredHarvest, reason: str, pause: float) -> float:
        """Publish the reason and wait `pause` seconds; returns the next pause."""
        logger.warning("harvest %s waits for its store: %s", harvest.id, reason)
        metrics.HARVEST_WAITS.labels(harvest.model).inc()
        self._attempt.check_answer(await self._report(store_awaited(reason)))
        await asyncio.sleep(pause)
        self._attempt.check()
        return min(LONGEST_PAUSE_S, 2 * pause)

    # Computing

    async def _compute(
        self, harvest: StoredHarvest, store: ArtifactStore, source: SourceReader
    ) -> None:
        if harvest.steering != self._attempt.job.global_steering.digest:
            detail = (
                "the global steering has changed since the harvest was accepted: its rows would "
                "come from two different models"
            )
            raise MidstreamError("conflict", detail)
        if self._part.part in await patiently(self._harvests.done, harvest.id):
            return
        _, plan = await self._read_plan(harvest, store)

        def row(entry: UnitEntry) -> UnitRow:
            weight = plan.units[entry.unit].weight
            return unit_row(entry, weight, self._requests[entry.unit])

        units = UnitRecords(
            bench=self._bench,
            attempt=self._attempt,
            place=units_key(self._part),
            kind=UnitEntry,
            row=row,
            whole=record_key(harvest.id),
        )
        await units.load()
        if harvest.generate is not None:
            await self._engine.check(format_request(self._attempt.job, harvest.generate))
        bos, eos = await source.special()
        names = sorted(tensors_of(self._attempt.job) | harvest.tensors)
        async with (
            self._engine.holding_vectors(names, self._bench.fetch, users=[harvest.edits]),
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._part.first, self._part.first + self._part.count):
                if number in units.known:
                    continue
                if number >= await patiently(self._harvests.window_end, harvest):
                    # A full window holds no worker, at the price of a job for every unit of a
                    # harvest that waits.
                    break  # the rest of the part is submitted again when consumers are there
                documents = await source.read(plan, plan.units[number])
                shards = shards_of(
                    harvest, await asyncio.to_thread(cut, harvest, documents, bos, eos)
                )
                begun = asyncio.Event()
                group.create_task(
                    self._unit(
                        harvest=harvest,
                        number=number,
                        first=plan.units[number].document,
                        documents=len(documents),
                        shards=shards,
                        begun=begun,
                        units=units,
                    )
                )
                # read the next unit while the last shards of this one are computed
                await begun.wait()
        if len(units.known) < self._part.count:
            return
        await units.restore()
        manifest = PartManifest(
            part=self._part.part, units=[units.known[number] for number in sorted(units.known)]
        )
        key = f"{PARTS}/{self._part.part:04d}.json"
        file = await self._put(harvest, store, key, to_json(manifest))
        crash_point("harvest.part")
        self._attempt.check_answer(await self._report(part_kept(self._part, file)))

    async def _unit(
        self,
        harvest: StoredHarvest,
        number: int,
        first: int,
        documents: int,
        shards: Sequence[Sequence[CutSequence]],
        begun: asyncio.Event,
        units: UnitRecords[UnitEntry],
    ) -> None:
        """Compute a unit and keep it. `first`: its first document. `begun` is set when its last
        shard has started.
        """
        if not shards:
            begun.set()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._shard(
                        harvest,
                        number,
                        place,
                        sequences,
                        begun if place + 1 == len(shards) else asyncio.Event(),
                    )
                )
                for place, sequences in enumerate(shards)
            ]
        results = [task.result() for task in tasks]
        entry = UnitEntry(
            unit=number,
            first=first,
            documents=documents,
            tokens=sum(len(sequence.token_ids) for sequences in shards for sequence in sequences),
            generated=sum(generated for _, generated in results),
            rows=sum(shard.rows for shard, _ in results),
            bytes=sum(file.bytes for shard, _ in results for file in shard.files),
            shards=[shard for shard, _ in results],
            skipped=documents
            - len(
                {
                    span[0]
                    for sequences in shards
                    for sequence in sequences
                    for span in sequence.spans
                }
            ),
        )
        crash_point("harvest.written")
        await units.keep([entry])
        crash_point("harvest.kept")
        for counter, more in (
            (metrics.HARVESTED_TOKENS, entry.tokens + entry.generated),
            (metrics.HARVESTED_ROWS, entry.rows),
            (metrics.HARVESTED_BYTES, entry.bytes),
        ):
            counter.labels(harvest.model).inc(more)

    async def _shard(
        self,
        harvest: StoredHarvest,
        unit: int,
        place: int,
        sequences: Sequence[CutSequence],
        begun: asyncio.Event,
    ) -> tuple[ShardEntry, int]:
        """Compute a shard, again if the store did not take it; returns its entry once it is
        durable, and the number of generated tokens.
        """
        pause = PAUSE_S
        async with self._shards:
            begun.set()
            while True:
                try:
                    return await self._try_shard(harvest, unit, place, sequences)
                except ShardNotStored as error:
                    pause = await self._wait_for_store(harvest, str(error), pause)
                    while trouble := await asyncio.to_thread(open_store(harvest.uri).trouble):
                        pause = await self._wait_for_store(harvest, trouble, pause)

    async def _try_shard(
        self,
        harvest: StoredHarvest,
        unit: int,
        place: int,
        sequences: Sequence[CutSequence],
    ) -> tuple[ShardEntry, int]:
        key = f"{SHARDS}/{self._attempt.job.id}/u{unit:07d}.s{place:03d}.a{self._attempt.number}"
        job = await self._within_quota(len(sequences))
        asks = [
            self._ask(job, harvest, key, index, sequence, len(sequences))
            for index, sequence in enumerate(sequences)
        ]
        requests = [ask.request for ask in asks]
        self._requests[unit] += requests
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._sequence(ask)) for ask in asks]
        # The receipt of the sequence that completes a shard names its file. A receipt for each
        # shard would be a second protocol between ranks and worker.
        receipts = await self._settled(requests)
        generated = 0 if harvest.generate is None else sum(task.result() for task in tasks)
        files = {
            file.path: (file, receipt.pp)
            for receipt in receipts
            for file in receipt.files
            if file.tag == HARVEST
        }
        entry = ShardEntry(
            rows=next((file.positions for file, _ in files.values()), 0),
            files=[
                ShardFile(
                    key=path,
                    bytes=file.bytes,
                    crc32=file.crc32,
                    sites=file.sites,
                    pp=pp,
                    non_finite=file.non_finite,
                )
                for path, (file, pp) in sorted(files.items())
            ],
            flagged=len({each.request for each in receipts for by in each.scores if by.flagged}),
        )
        complete = {*entry.hook_layers} == {*hook_layers(harvest.sites)}
        if not complete or any(file.positions != entry.rows for file, _ in files.values()):
            raise MidstreamError(
                "capture_failed",
                (
                    f"the ranks reported {len(files)} files of shard {key}, which lack some of its "
                    "rows"
                ),
            )
        return entry, generated

    async def _within_quota(self, sequences: int) -> Job:
        """Returns the part's job; without its global capture if that would exceed the capture
        quota, since no user requested it.
        """
        job = self._attempt.job
        quota = self._ledger.settings.capture_quota_mib << 20
        if not quota or not job.global_captures:
            return job
        try:
            await asyncio.to_thread(self._usage.take, [1], quota // QUOTA_SPARE)
        except MidstreamError as error:
            count_skipped("quota", sequences, error.detail)
            return msgspec.structs.replace(job, global_captures=[])
        return job

    def _ask(
        self,
        job: Job,
        harvest: StoredHarvest,
        key: str,
        index: int,
        sequence: CutSequence,
        sequences: int,
    ) -> EngineRequest:
        chosen = sequence.chosen.tolist()
        # a window counts no position that gives no row
        generating = PositionWindow(start=chosen[0] if chosen else len(sequence.token_ids))
        dtype: RowDType = (
            "model"
            if harvest.dtype == "int8" or harvest.dtype == "float8_e4m3fn"
            else harvest.dtype
        )
        place = HarvestPlace(
            uri=harvest.uri,
            key=key,
            index=index,
            sequences=sequences,
            spans=sequence.spans,
            dtype=harvest.dtype,
            shuffle=harvest.shards.shuffle,
            every=harvest.positions.every,
            prompt=chosen if harvest.generate is not None else None,
            metadata={"id": harvest.id, "model": harvest.model, "format": FORMAT},
        )
        positions: PositionSelector = generating
        if harvest.generate is None:
            positions = "all" if sequence.whole else chosen
        capture = StoredCapture(
            sites=harvest.sites,
            positions=positions,
            tag=HARVEST,
            at=harvest.at,
            dtype=dtype,
            consumers=[HARVEST],
            place=to_msgpack(place),
            window=harvest.positions.window,
        )
        return sequence_request(
            job,
            self._engine.info,
            capture,
            request=next(self._numbers),
            attempt=self._attempt.number,
            token_ids=sequence.token_ids.tolist(),
            sampling=harvest.generate or Sampling(max_tokens=0),
            steering=harvest.edits,
            captured={HARVEST: sequences},
            trace=self._attempt.progress.span.traceparent,
        )

    async def _sequence(self, ask: EngineRequest) -> int:
        """Run a sequence in the engine; returns how many tokens were generated."""
        generated = 0
        async with self._slots.admitted(1, ask.tenant):
            with self._attempt.progress.prompt(ask.request, len(ask.token_ids)) as report:
                async with aclosing(self._engine.generate(ask)) as stream:
                    async for progress in stream:
                        self._attempt.check()
                        report.add_generated(len(progress.token_ids))
                        generated += len(progress.token_ids)
        return generated

    async def _settled(self, requests: Sequence[int]) -> list[Receipt]:
        """Wait for and return the receipts of all `requests`.

        Raises ShardNotStored, and MidstreamError for what a rank could not do.
        """
        patience = WRITE_PATIENCE * self._ledger.settings.capture_timeout_s
        report = await self._attempt.receipts_of(requests, patience)
        if missing := len(set(requests) - report.keys()):
            raise MidstreamError(
                "receipts_timed_out", f"the receipts of {missing} sequences did not arrive in time"
            )
        receipts = [receipt for request in requests for receipt in report[request]]
        failed = [receipt for receipt in receipts if receipt.verdict != "ok"]
        for receipt in failed:
            if receipt.kind != STORE_UNAVAILABLE:
                raise MidstreamError(
                    receipt.kind or "capture_failed",
                    f"rank {receipt.rank}: {receipt.message or receipt.verdict}",
                )
        if failed:
            raise ShardNotStored(failed[0].message)
        return receipts


def _check_documents(units: Sequence[UnitEntry], plan: HarvestPlan) -> None:
    """Raises MidstreamError unless each unit has the documents that it was planned with; a unit
    with a limit of tokens may have fewer.
    """
    if len(units) != len(plan.units):
        raise MidstreamError(
            "internal",
            f"{len(units)} of {len(plan.units)} units are recorded: no files were removed",
        )
    for number, (unit, planned) in enumerate(zip(units, plan.units, strict=True)):
        complete = (
            unit.documents <= planned.documents
            if planned.tokens >= 0
            else unit.documents == planned.documents
        )
        if not complete or (unit.unit, unit.first) != (number, planned.document):
            raise MidstreamError(
                "internal",
                f"unit {number} has {unit.documents} documents from {unit.first} on, and was "
                f"planned with {planned.documents} "
                f"from {planned.document} on: no files were removed",
            )
