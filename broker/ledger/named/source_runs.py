"""Source runs in the ledger: names, state and locations of their rows.

The ledger's side of `schemas.requests.source_runs`.

A name points at the captures of a job and is written in the commit that accepts the job
(`submit.lua`). The captures never change; a reused name points at another job. The rows are capture
files, deleted like others, but not on expiry while a job holds a lease on them.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ....schemas.access.keys import DEFAULT_TENANT, Caller, own, scoped, shown, unscoped
from ....schemas.base.errors import MidstreamError, Problem, Translated, unknown
from ....schemas.base.records import by_key, from_json, from_msgpack, now, to_json
from ....schemas.jobs.jobs import TERMINAL, State
from ....schemas.jobs.receipts import Receipt, receipt_decoder
from ....schemas.requests.source_runs import (
    RunFiles,
    RunPage,
    RunPrompt,
    RunRecord,
    RunState,
    RunView,
    parse_key,
)
from ....storage.store import open_store
from ...artifacts import source_run_files
from ...artifacts.headers import UNREADABLE, must_be_there
from ...artifacts.source_run_files import RunBlob, unusable
from ..jobs.captures import LedgerCaptures
from ..jobs.ledger import Ledger, LedgerPart, of_each, reachable, unreadable
from ..results import pages

#: Job ids name the captures of their jobs; names of runs must not begin like this.
JOB_PREFIX = "job_"

RunRecords = list[RunRecord]
Views = list[RunView]
Blobs = list[RunBlob]
Receipts = list[Receipt]

#: Seconds between two searches for names of runs that the ledger no longer knows.
PRUNE_S = 3600.0


class RunReadiness(NamedTuple):
    """The ledger's knowledge of a run's captures."""

    state: RunState
    detail: str = ""  # why it is not ready
    bytes: int = 0  # of its files


class RunContent(NamedTuple):
    """A run's state, and what it holds."""

    readiness: RunReadiness
    prompts: list[RunPrompt] | None = None  # None: it is not ready


Standings = list[RunReadiness | None]
#: The record outlives the captures, so a named run without a record was deleted long ago.
DELETED = RunReadiness("deleted", "its captures were deleted")


class LedgerRuns(LedgerPart):
    """Source runs of a ledger, in the capture root of its settings.

    Belongs to the ledger's event loop.

    `caller`: names are those of its tenant, and jobs that it may not see do not exist. None: names
    are as stored. All calls raise MidstreamError("unavailable") while Redis is unreachable.
    """

    def __init__(self, ledger: Ledger, caller: Caller | None = None) -> None:
        super().__init__(ledger)
        self._caller = caller
        self._store = open_store(ledger.settings.artifacts)
        self._pruned = 0.0  # time of the last search through the names
        # the last job and tag read from disk, and their blobs
        self._scanned: tuple[str, str, dict[int, Blobs]] = ("", "", {})

    # --- resolving names

    @reachable
    async def lookup(self, model: str, name_or_job: str) -> RunRecord | None:
        """Return the run with this name, or the captures of the job with this id under its first
        tag (the user's); None if there is no such run.

        Also finds runs that are pending, failed or deleted: see `standing`.
        """
        if not name_or_job.startswith(JOB_PREFIX):
            name = name_or_job if self._caller is None else scoped(self._caller.tenant, name_or_job)
            packed = await self._redis.hget(_names(model), name)
            return None if packed is None else _decoded(packed)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(
                f"ms:capture:{name_or_job}", "tags", "created", "model", "tenant", "identity"
            )
            pipe.hget(f"ms:job:{name_or_job}", "model")
            (tags, created, of_capture, tenant, identity), of_job = await pipe.execute()
        of_model = of_job if of_capture is None else of_capture
        if tags is None or of_model is None or of_model.decode() != model:
            return None
        if self._caller is not None and not self._caller.sees(
            DEFAULT_TENANT if tenant is None else tenant.decode()
        ):
            return None
        return RunRecord(
            name=name_or_job,
            model=model,
            job=name_or_job,
            tag=from_json(tags, list[str])[0],
            created=float(created),
            identity=(identity or b"").decode(),
        )

    @reachable
    async def names(self, model: str) -> list[str]:
        """Return all names, sorted, regardless of the state of the run."""
        names = [name.decode() for name in await self._redis.hkeys(_names(model))]
        return sorted(names if self._caller is None else own(self._caller.tenant, names))

    @reachable
    async def standing(self, run: RunRecord) -> RunReadiness:
        """Return the state of a run, and the reason if it is not ready."""
        (standing,) = await self._known([run.job])
        return standing or DELETED

    async def read(self, run: RunRecord, only: Collection[int] | None = None) -> RunContent:
        """Return the state of a run and, if it is ready, its captured prompts, ascending; `only`:
        just these, if they were captured. A run is not ready if its rows are missing or damaged.
        """
        standing = await self.standing(run)
        if standing.state != "ready":
            return RunContent(standing)
        try:
            found = await self._blobs(run.job, run.tag, only)
        except MidstreamError as error:
            if error.kind not in UNREADABLE:
                raise
            state: RunState = "deleted" if error.kind == "gone" else "failed"
            return RunContent(RunReadiness(state, error.detail))
        for request, blobs in found.items():
            if why := source_run_files.shortfall(blobs):
                why = f"source run {shown(run.name)}, prompt {request}: {why}"
                return RunContent(RunReadiness("failed", why))
        return RunContent(
            standing, [source_run_files.run_prompt(blobs) for blobs in found.values()]
        )

    async def files(self, key: str) -> RunFiles:
        """Return the files that ranks load for a `run_key`.

        If the ledger does not know its job, the disk is authoritative.

        Raises MidstreamError("intervention_failed") with the reason if the captures are incomplete,
        failed, deleted or gone.
        """
        job, request, tag = parse_key(key)
        (standing,) = await self._known([job])
        if standing is not None and standing.state != "ready":
            raise unusable(key, standing.detail)
        try:
            blobs = (await self._blobs(job, tag, [request])).get(request, [])
        except MidstreamError as error:
            if error.kind not in UNREADABLE:
                raise
            raise unusable(key, error.detail) from error
        if why := source_run_files.shortfall(blobs):
            raise unusable(key, why)
        return source_run_files.run_files(key, blobs)

    # --- for users

    async def view(self, model: str, name: str) -> RunView:
        """Return the run with its prompts. Raises MidstreamError("not_found")."""
        run = await self._existing(model, name)
        (view,) = await self._views([run], model)
        readiness, prompts = await self.read(run)
        return msgspec.structs.replace(
            view, state=readiness.state, detail=readiness.detail, prompts=prompts
        )

    async def list(self, model: str, limit: int = 50, cursor: str | None = None) -> RunPage:
        """Return the runs that have a name, newest first.

        Raises MidstreamError("invalid_request") for an invalid cursor.
        """
        before = pages.parse_cursor(cursor)
        ordered = sorted(await self._named(model), key=_place, reverse=True)
        older = [run for run in ordered if cursor is None or _place(run) < before]
        shown = older[:limit]
        more = len(older) > limit
        return RunPage(
            runs=await self._views(shown, model),
            next=pages.format_cursor(*_place(shown[-1])) if more else None,
        )

    async def delete(self, model: str, name: str) -> None:
        """Delete the captures, as `LedgerCaptures.delete` does, and then the name; jobs that hold
        the run keep its rows until they end.

        May be repeated. Raises MidstreamError: `not_found`, `conflict` while its job runs,
        `internal` when the disk refuses.
        """
        run = await self._existing(model, name)
        try:
            await LedgerCaptures(self._ledger).delete(run.job)
        except MidstreamError as error:
            if error.kind not in ("gone", "not_found"):  # deleted before, perhaps long ago
                raise
        await self._forget(run)

    @reachable
    async def _forget(self, run: RunRecord) -> None:
        await self._run("delete_run", model=run.model, name=run.name, job=run.job)

    async def prune(self, at: float) -> int:
        """Remove the names of runs deleted long ago; searches once an hour.

        Returns the number removed.
        """
        if at < self._pruned + PRUNE_S:
            return 0
        self._pruned = at
        removed: RunRecords = []
        for model in await self._ledger.models():
            runs = await self._named(model.name)
            known = await self._known([run.job for run in runs]) if runs else []
            removed += [run for run, standing in zip(runs, known, strict=True) if standing is None]
        for run in removed:
            await self._forget(run)
        return len(removed)

    # --- leases

    @reachable
    async def lease(self, held: Mapping[str, Iterable[str]], seconds: float) -> None:
        """Protect captures from expiry for `seconds`; `held`: job → keys of the runs that the job
        holds.
        """
        if not held:
            return
        at = now()
        holders: dict[str, dict[str, float]] = {}
        for holder, keys in held.items():
            for lease in _leases(keys):
                holders.setdefault(lease, {})[holder] = at + seconds
        await of_each(
            self._redis,
            holders,
            lambda pipe, lease: (
                pipe.zremrangebyscore(lease, "-inf", at)
                .zadd(lease, holders[lease])
                .expire(lease, int(seconds) + 1)
            ),
        )

    @reachable
    async def unlease(self, keys: Iterable[str], holder: str) -> None:
        """Release the lease of the job `holder` on these runs."""
        await of_each(self._redis, _leases(keys), lambda pipe, lease: pipe.zrem(lease, holder))

    @reachable
    async def record_held(self, worker: str, keys: Iterable[str], seconds: float) -> None:
        """Record for `seconds` that `worker` has these runs in memory."""
        held = sorted({_captures_of(key) for key in keys})
        await self._redis.set(_cache(worker), to_json(held), px=int(seconds * 1000))

    # --- internals

    async def _existing(self, model: str, name: str) -> RunRecord:
        if (run := await self.lookup(model, name)) is None:
            raise unknown("source run", name, model, await self.names(model))
        return run

    @reachable
    async def _named(self, model: str) -> RunRecords:
        runs = [_decoded(packed) for packed in await self._redis.hvals(_names(model))]
        return (
            runs
            if self._caller is None
            else [run for run in runs if unscoped(run.name)[0] == self._caller.tenant]
        )

    @reachable
    async def _known(self, jobs: Sequence[str]) -> Standings:
        """Return the readiness of each job's captures; None for unknown jobs."""
        answers = await of_each(
            self._redis,
            jobs,
            lambda pipe, job: pipe.hmget(f"ms:capture:{job}", "deleted", "status", "bytes").hmget(
                f"ms:job:{job}", "state", "error"
            ),
            transaction=True,
        )
        return [_readiness(*answers[at], *answers[at + 1]) for at in range(0, len(answers), 2)]

    @reachable
    async def _views(self, runs: RunRecords, model: str) -> Views:
        if not runs:
            return []
        known = await self._known([run.job for run in runs])
        workers = [info.worker for info in await self._ledger.workers() if info.model == model]
        async with self._redis.pipeline(transaction=False) as pipe:
            for run in runs:
                pipe.zcount(_lease(run.job), now(), "+inf")
            for worker in workers:
                pipe.get(_cache(worker))
            answers = await pipe.execute()
        caches = [set(from_json(raw, list[str])) if raw else set() for raw in answers[len(runs) :]]
        return [
            RunView(
                **(msgspec.structs.asdict(run) | {"name": shown(run.name)}),
                **(standing or DELETED)._asdict(),
                in_use=int(count),
                held_by=[
                    worker
                    for worker, held in zip(workers, caches, strict=True)
                    if f"{run.job}.{run.tag}" in held
                ],
            )
            for run, standing, count in zip(runs, known, answers[: len(runs)], strict=True)
        ]

    async def _blobs(self, job: str, tag: str, only: Collection[int] | None) -> dict[int, Blobs]:
        """Return prompt → its blobs, ascending; found by the receipts while they exist, later on
        disk.
        """
        receipts = await self._receipts(job, only)
        files = [
            (receipt.request, file)
            for receipt in receipts
            for file in receipt.files
            if file.tag == tag
        ]
        if not files:
            disk = await self._on_disk(job, tag)
            return {
                request: blobs for request, blobs in disk.items() if only is None or request in only
            }
        blobs = await asyncio.to_thread(source_run_files.reported, self._store, job, files)
        requests = (request for request, _ in files)
        return dict(sorted(by_key(zip(requests, blobs, strict=True)).items()))

    async def _on_disk(self, job: str, tag: str) -> dict[int, Blobs]:
        """Return the blobs found on disk; cached for the job's next key, since a search reads many
        manifests and complete runs do not change.
        """
        of_job, of_tag, disk = self._scanned
        if (of_job, of_tag) == (job, tag):
            await asyncio.to_thread(must_be_there, self._store, job)
            return disk
        # Receipts expire, or go with Redis, but captures stay until they are deleted; the mark of a
        # deletion is in the store, too.
        disk = await asyncio.to_thread(source_run_files.on_disk, self._store, job, tag)
        if disk and not any(map(source_run_files.shortfall, disk.values())):
            self._scanned = job, tag, disk
        return disk

    @reachable
    async def _receipts(self, job: str, only: Collection[int] | None) -> Receipts:
        """Return the receipts of these prompts, or of all; none if any has expired."""
        ticket = f"ms:ticket:{job}"
        if only is None:
            return [receipt_decoder.decode(raw) for raw in await self._redis.hvals(ticket)]
        packed = await self._redis.hmget(ticket, [f"{request}/0" for request in only])
        if None in packed:
            return []
        receipts = [receipt_decoder.decode(raw) for raw in packed]
        rest = [f"{each.request}/{rank}" for each in receipts for rank in range(1, each.world)]
        packed = await self._redis.hmget(ticket, rest) if rest else []
        return [] if None in packed else receipts + [receipt_decoder.decode(raw) for raw in packed]


def _readiness(
    deleted: bytes | None,
    status: bytes | None,
    size: bytes | None,
    state: bytes | None,
    error: bytes | None,
) -> RunReadiness | None:
    """Return the readiness by fields of the capture's record and the job's; either may be gone."""
    if deleted is not None:
        return DELETED
    if status is None:
        return None if state is None else RunReadiness("failed", "its job has no captures in files")
    if state is not None and (job_state := State(state.decode())) not in TERMINAL:
        return RunReadiness("pending", f"its job is {job_state}", int(size or 0))
    if status != b"ok":
        why = (
            from_json(error, Problem).detail
            if error is not None
            else f"the status of its captures is {status.decode()}"
        )
        return RunReadiness("failed", why, int(size or 0))
    return RunReadiness("ready", bytes=int(size or 0))


def _decoded(packed: bytes) -> RunRecord:
    with Translated(
        msgspec.ValidationError, lambda error: unreadable("a run's name was stored", error)
    ):
        return from_msgpack(packed, RunRecord)


def _place(run: RunRecord) -> tuple[float, str]:
    """Return the position of a run in the listing."""
    return run.created, run.job


def _names(model: str) -> str:
    return f"ms:runs:{model}"


def _lease(job: str) -> str:
    return f"ms:run-lease:{job}"


def _leases(keys: Iterable[str]) -> list[str]:
    """Return the lease keys of the runs: one per job, since captures are deleted by job."""
    return sorted({_lease(parse_key(key)[0]) for key in keys})


def _cache(worker: str) -> str:
    return f"ms:run-cache:{worker}"


def _captures_of(key: str) -> str:
    job, _, tag = parse_key(key)
    return f"{job}.{tag}"
