"""Application context of the routes: one `AppContext` per process with ledger, watcher, Celery and
tokenizers. Holds no job state.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio.to_thread
import msgspec

from ..broker.ledger.jobs.inputs import LedgerInputs
from ..broker.ledger.jobs.ledger import Ledger, new_job_id
from ..broker.ledger.jobs.watch import JobWatcher, SharedReads
from ..broker.ledger.named.steering import LedgerSteering
from ..broker.ledger.people.keys import LedgerKeys
from ..broker.ledger.people.sessions import Sessions
from ..broker.processes.hosts import Hosts
from ..broker.queue.celery_app import make_app as make_celery
from ..broker.telemetry import logs
from ..schemas.access.keys import Caller
from ..schemas.base.tensors import PackedBlobs
from ..schemas.jobs.job_requests import Idempotency
from ..schemas.jobs.jobs import Job, JobPlan, JobView, State
from ..schemas.jobs.kinds import KINDS
from ..schemas.jobs.models import ModelInfo
from ..schemas.settings.faults import crash_point
from ..schemas.settings.settings import Settings, asks_for_keys
from ..storage.store import open_store
from .operations.disks import CaptureQuota, Disks
from .operations.twin import Twin
from .operations.waiting import Waiting, ended, left
from .resolve.admission import admission
from .resolve.admission.names import Names, names_something
from .resolve.admission.served import Served
from .resolve.prompts.callback_url import check_callback
from .resolve.prompts.request_parsing import ParsedRequest
from .web.aside import aside, call_aside
from .web.auth import Gate, caller_of
from .web.key_watch import KeyWatch
from .web.open_calls import OpenCalls
from .web.problems import ClientGone
from .web.request_context import AnyRequest, current

log = logging.getLogger("midstream.api")

T = TypeVar("T")

#: Time limit for broadcasting a cancellation to workers; otherwise they notice it when they next
#: renew the lease.
BROADCAST_S = 5.0
#: Entries of a job's modules that are resolved in the event loop that answers calls.
INLINE_ENTRIES = 16


class AppContext:
    """Everything a handler needs. Build with `open_context`."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        watcher: JobWatcher,
        celery: Any,
        twin: Twin | None = None,
    ):
        self.twin = twin
        self.settings = settings
        self.ledger = ledger
        self.keys = LedgerKeys(ledger)
        self.inputs = LedgerInputs(ledger)
        self.sessions = Sessions(ledger)
        self.gate = Gate(settings, self.keys, self.sessions)
        self.hosts = Hosts(settings, settings.api_host, asks_for_keys(settings))
        self.key_watch = KeyWatch(self.keys, self.sessions, self.gate.always)
        self.steering = LedgerSteering(ledger)
        self.watcher = watcher
        self.celery = celery
        self.store = open_store(settings.artifacts)
        self.disks = Disks(settings, self.store)
        self.quota = CaptureQuota(self.store, settings.capture_quota_mib << 20)
        # shares reads of the service's state, which many pages, scrapers and probes request
        self.looks: SharedReads[Any] = SharedReads()
        self.open_calls = OpenCalls(settings)
        self.served = Served(settings, ledger)
        self.names = Names(settings, ledger, self.served)
        self.waiting = Waiting(ledger, watcher, settings.max_wait_s)
        # what packages have to do when the server stops
        self.at_close: list[Callable[[], None]] = []

    def close(self) -> None:
        """Answer held responses with what is known so far: the server is stopping.

        The jobs continue.
        """
        if self.twin is not None:
            self.twin.stop()
        self.key_watch.close()
        self.waiting.close()
        for close in self.at_close:
            close()

    def url(self, path: str) -> str:
        """Return the public address of a path below `/v1/`, such as `jobs/job_x`."""
        return f"{self.settings.public_url.rstrip('/')}/v1/{path}"

    def job_url(self, job_id: str) -> str:
        return self.url(f"jobs/{job_id}")

    # --- Submission

    async def submit(
        self,
        parsed: ParsedRequest,
        idempotency: Idempotency | None,
        caller: Caller,
        change: Callable[[Job], Job] | None = None,
    ) -> str:
        """Validate a request, commit it to the ledger and hand it to Celery; return the job's id.

        `change`: returns the job to commit in place of the request's, beside the event loop.

        Once this returns, the job is durable.

        Raises MidstreamError: 4xx for an invalid request, `idempotency_mismatch`, `quota_exceeded`
        when captures would have no room, `unavailable` when nothing was accepted.
        """
        info, watching = await self._watched(parsed)
        # the first job, even if the modules, probes, … that it names have been removed since
        if names_something(parsed) and (known := await self.repeated(idempotency)) is not None:
            return known
        admitted = await self._admitted(parsed, info, watching, caller)
        job = admitted.job
        if change is not None:
            job = await call_aside(change, job)
        return await self.accept(
            job, info, admitted.blobs, idempotency, admitted.pinned, current().body
        )

    async def plan(self, parsed: ParsedRequest, caller: Caller) -> JobPlan:
        """Return what a request would compute.

        Raises MidstreamError for an invalid one, as `submit`.
        """
        info, watching = await self._watched(parsed)
        job = (await self._admitted(parsed, info, watching, caller)).job
        return JobPlan(
            model=info.name,
            tokens=[len(prompt.token_ids) for prompt in job.prompts],
            layers=job.layers,
            num_layers=info.num_layers,
        )

    async def _watched(self, parsed: ParsedRequest) -> tuple[ModelInfo, list[str]]:
        """Return the request's model, and the policies that apply to all its traffic."""
        info, watching = await self.ledger.watched_model(parsed.model)
        return await self.served.usable(parsed.model, info), watching

    async def _admitted(
        self, parsed: ParsedRequest, info: ModelInfo, watching: list[str], caller: Caller
    ) -> admission.Admitted:
        """Resolve a request against its model."""
        named = await self.names.resolve(parsed, info, watching, caller)
        codec = await self.served.codec(info)
        admitting = admission.admit(parsed, info, codec, new_job_id(), named, caller)
        entries = sum(len(module.entries) for module in named.state.modules.values())
        large = entries > INLINE_ENTRIES or current().large
        return await (aside(admitting) if large else admitting)

    async def repeated(self, idempotency: Idempotency | None) -> str | None:
        """Return the id of the job that was accepted with the same key and body, if any: then the
        call needs its body no more, however long its response is held.
        """
        known = await self.ledger.repeated(idempotency) if idempotency else None
        if known is not None:
            current().keep()
        return known

    async def accept(
        self,
        job: Job,
        info: ModelInfo,
        blobs: PackedBlobs,
        idempotency: Idempotency | None,
        pinned: Iterable[str] = (),
        request: bytes = b"",
    ) -> str:
        """Commit a valid job to the ledger, which sends its Celery message; see `submit`.

        `blobs`, `pinned`, `request`: see `Ledger.submit`.
        """
        check_callback(job.callback, self.settings)
        call = current()
        call.keep()
        if any(job.steering) or KINDS[job.kind].grid:
            tenant = await self.ledger.tenants.get(job.tenant)
            job = admission.under_limit(job, tenant.limits.edit_limit)
        await self.disks.check(job)
        if self.settings.capture_quota_mib and not (
            idempotency and await self.ledger.knows_key(idempotency[0])
        ):
            job = await self.quota.within(job, info)
        if parent := call.span.traceparent:
            job = msgspec.structs.replace(job, trace=parent)
        operator_tags = {spec.tag for spec in info.global_captures}
        async with self.inputs.kept(job, blobs) as (job, blobs):
            call.submits(job.id, self.job_url(job.id))
            job_id, _ = await self.ledger.submit(
                job, blobs, idempotency, pinned, operator_tags, request
            )
        crash_point("api.committed")
        if job.inputs is not None and job_id != job.id:  # a repeat of the first
            await self.inputs.discard(job.id)
        call.submits(job_id, self.job_url(job_id), accepted=True)
        logs.bind(job=job_id)
        return job_id

    async def cancel(self, job_id: str) -> JobView:
        """Cancel a job. Raises `conflict` for a job that is over.

        The broadcast is a hint: a worker also sees the state when it renews its lease.
        """
        view = await self.ledger.request_cancel(job_id)
        await self.notify_worker(view)
        return view

    async def notify_worker(self, view: JobView) -> None:
        """Ask the worker of a job that is being cancelled to read its state immediately."""
        job_id = view.id
        if view.state is State.CANCELLING:
            try:
                with anyio.fail_after(BROADCAST_S):
                    await anyio.to_thread.run_sync(
                        lambda: self.celery.control.broadcast(
                            "midstream_cancel",
                            arguments={"job_id": job_id},
                            pattern=f"{view.worker}@*",
                            matcher="glob",
                        ),
                        abandon_on_cancel=True,
                    )
            except Exception as error:  # kombu raises what its transport raises
                log.warning(
                    (
                        "cannot broadcast the cancellation of job %s (%r): it takes effect at the "
                        "worker's next lease renewal"
                    ),
                    job_id,
                    error,
                )


@asynccontextmanager
async def open_context(settings: Settings, twin: Twin | None = None) -> AsyncIterator[AppContext]:
    celery = make_celery(settings)
    ledger = Ledger.connect(settings)
    try:
        async with JobWatcher(ledger) as watcher:
            context = AppContext(settings, ledger, watcher, celery, twin)
            try:
                yield context
            finally:
                context.close()
                await context.served.close()
                if twin is not None:
                    await twin.close()
    finally:
        await ledger.close()


def context_of(request: AnyRequest) -> AppContext:
    context: AppContext = request.app.state.context
    return context


async def unless_client_leaves(request: AnyRequest, work: Awaitable[T]) -> T:
    """Await `work`; raises ClientGone if the connection closes, `unauthorized` if the caller's key
    is revoked or expires.

    (Litestar would leave the handler waiting.) `work` is cancelled then, so it must only wait: make
    changes before.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(left(request.receive))
    try:
        with context_of(request).key_watch.of(caller_of(request)) as held_key:
            ends: set[asyncio.Future[Any]] = {task, disconnected, *held_key.ends}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            held_key.check()
            raise ClientGone
    finally:
        await ended(task, disconnected)
