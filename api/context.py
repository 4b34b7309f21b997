"""Application context of the routes: one `AppContext` per process with ledger, watcher, Celery and
tokenizers. Holds no job state.
"""

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
from litestar import Request

from ..broker.artifacts.retention import Usage
from ..broker.ledger.core.scripts import stored_tags
from ..broker.ledger.jobs.ledger import Ledger, Outcome, new_job_id, reachable
from ..broker.ledger.jobs.watch import SharedReads, Watcher
from ..broker.ledger.named.probes import of_all_traffic, with_policies
from ..broker.ledger.named.registry import Registry
from ..broker.ledger.named.source_runs import SourceRuns
from ..broker.ledger.named.steering import Steering
from ..broker.ledger.people.keys import Keys
from ..broker.ledger.people.sessions import Sessions
from ..broker.ledger.recovery.harvests import Harvests
from ..broker.ops import global_capture, logs
from ..broker.ops.hosts import Hosts
from ..broker.queue.celery_app import make_app as make_celery
from ..schemas.access.keys import Caller, own, scoped, shown
from ..schemas.artifacts.probes import PROBES
from ..schemas.base.errors import MidstreamError, invalid
from ..schemas.base.faults import crash_point
from ..schemas.base.records import from_msgpack
from ..schemas.base.settings import Settings, asks_for_keys
from ..schemas.jobs.harvests import HarvestView
from ..schemas.jobs.jobs import Job, JobView, State
from ..schemas.jobs.models import ModelInfo, TokenizerBundle
from ..schemas.requests.policies import POLICIES
from ..schemas.requests.specs import PatchSpec, SteeringSpec
from ..schemas.service.compatibility import misfit_of
from ..storage.store import open_store
from .operations.disks import Disks
from .operations.job_feed import JobFeed
from .operations.service_figures import ServiceFigures
from .resolve.admission import admission
from .resolve.edits import patches
from .resolve.edits.directions import DirectionFiles, check_directed
from .resolve.edits.features import NONE, FeatureFiles, Named, Rows, check_range, check_specs
from .resolve.edits.loras import named_lora
from .resolve.edits.model_state import NOTHING, ModelState, find_runs
from .resolve.prompts.callback_url import check_callback
from .resolve.prompts.request_parsing import ParsedRequest
from .resolve.prompts.tokenizer import Codec
from .resolve.prompts.tokenizer_pool import BundleHelpers, Helpers
from .resolve.prompts.vllm_lens_fields import check_answer
from .resolve.readings.lens import named_jacobian, single_tokens
from .resolve.readings.probes import policies_of, probes_of
from .resolve.readings.readings import with_artifacts
from .resolve.readings.saes import named_sae
from .web import request_context
from .web.auth import Gate, caller_of
from .web.key_revocation import ALWAYS, HeldKey, KeyWatch
from .web.open_calls import OpenCalls
from .web.problems import ClientGone
from .web.request_context import traceparent
from .web.shares import Shares

log = logging.getLogger("midstream.api")

T = TypeVar("T")

#: A held response outlives a Redis that restarts within this many seconds.
OUTAGE_S = 20.0
OUTAGE_PAUSE_S = 0.25
#: Seconds after which a cancelled wait that has not ended is cancelled again: its cancellation may
#: have been lost.
CANCEL_AGAIN_S = 0.2
#: Time limit for broadcasting a cancellation to workers; otherwise they notice it when they next
#: renew the lease.
BROADCAST_S = 5.0
#: Seconds between two reads of a harvest by its event streams, which share the reads.
HARVEST_LOOK_S = 0.5
#: Captures whose rows are read for their norms at the same time; others wait.
MEASURED_AT_ONCE = 2
#: How many of the captures that are read or wait may belong to one tenant, which bounds the wait of
#: other tenants.
MEASURED_OF_TENANT = 8


class AppContext:
    """Everything a handler needs. Build with `open_context`."""

    def __init__(self, settings: Settings, ledger: Ledger, watcher: Watcher, celery: Any):
        self.settings = settings
        self.ledger = ledger
        self.keys = Keys(ledger)
        self.sessions = Sessions(ledger)
        self.gate = Gate(settings, self.keys, self.sessions)
        self.hosts = Hosts(settings, settings.api_host, asks_for_keys(settings))
        self.key_watch = KeyWatch(self.keys, self.sessions, self.gate.always)
        self.steering = Steering(ledger)
        self.probes, self.policies = Registry(ledger, PROBES), Registry(ledger, POLICIES)
        self.harvests = Harvests(ledger)
        self._features = FeatureFiles(settings.sae_root)
        self._directions = DirectionFiles(settings.lens_root)
        self._reading_features = anyio.CapacityLimiter(1)
        self.measuring = anyio.CapacityLimiter(MEASURED_AT_ONCE)
        self.measured = Shares(MEASURED_OF_TENANT, "looks at captured rows")
        self.watcher = watcher
        self.celery = celery
        self.store = open_store(settings.artifacts)
        self.disks = Disks(settings, self.store)
        self._usage = Usage(self.store, settings.capture_quota_mib << 20)
        # shares reads of the service's state, which many pages, scrapers and probes request
        self.looks: SharedReads[Any] = SharedReads()
        self.harvest_looks: SharedReads[tuple[HarvestView, bytes]] = SharedReads(HARVEST_LOOK_S / 2)
        self.open_calls = OpenCalls(settings)
        self.feed = JobFeed(ledger, watcher)
        self.figures = ServiceFigures(settings, ledger, self.steering, self.disks, self._usage)
        self.helpers = Helpers(settings)
        self._codecs: dict[tuple[str, int], Codec] = {}
        self._reading = asyncio.Lock()
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Answer held responses with what is known so far: the server is stopping.

        The jobs continue.
        """
        self.key_watch.close()
        self.feed.close()
        if not self._closing.done():
            self._closing.set_result(None)

    @property
    def closing(self) -> bool:
        return self._closing.done()

    def job_url(self, job_id: str) -> str:
        return f"{self.settings.public_url.rstrip('/')}/v1/jobs/{job_id}"

    # --- Submission

    async def model(self, name: str) -> ModelInfo:
        """Return the model of this name. Raises `not_found`, which lists the served models."""
        return await self._usable(name, await self.ledger.model(name))

    async def _usable(self, name: str, info: ModelInfo | None) -> ModelInfo:
        if info is None:
            raise admission.unknown_model(
                name, [model.name for model in await self.ledger.models()]
            )
        if (trouble := misfit_of(info)) is not None:
            raise trouble
        return info

    async def the_model(self, name: str | None) -> ModelInfo:
        """Return the named model, or without a name the only served one.

        Raises `not_found`, and a 400 if no name is given and several models are served.
        """
        if name is not None:
            return await self.model(name)
        models = await self.ledger.models()
        if len(models) > 1:
            live = {worker.model for worker in await self.ledger.workers()}
            models = [model for model in models if model.name in live] if len(live) == 1 else models
        if len(models) > 1:
            raise invalid(
                "model",
                "is required: several models are served",
                allowed=", ".join(model.name for model in models),
            )
        if not models:
            raise admission.unknown_model("", [])
        return models[0]

    async def codec(self, info: ModelInfo) -> Codec:
        """Return the model's tokenizer, which a process reads once per content hash and model
        length.
        """

        async def fetch() -> bytes:
            raw = await self.ledger.get_blob(info.tokenizer)
            if raw is None:
                raise MidstreamError(
                    "unavailable",
                    f"the tokenizer of {info.name!r} has not been published yet",
                    field="model",
                )
            return raw

        key = (info.tokenizer, info.max_model_len)
        async with self._reading:
            # concurrent first requests share one read
            known = self._codecs.get(key)
            if known is None:
                raw = await fetch()
                helpers = BundleHelpers(self.helpers, info.tokenizer, fetch)
                known = await anyio.to_thread.run_sync(
                    lambda: Codec(from_msgpack(raw, TokenizerBundle), info.max_model_len, helpers)
                )
                self._codecs[key] = known
        return known

    async def submit(
        self,
        parsed: ParsedRequest,
        idempotency: tuple[str, str] | None,
        caller: Caller,
        change: Callable[[Job, ModelInfo], Job] = lambda job, _: job,
    ) -> str:
        """Validate a request, commit it to the ledger and hand it to Celery; return the job's id.

        `change`: returns the job to commit in place of the request's.

        Once this returns, the job is durable.

        Raises MidstreamError: 4xx for an invalid request, `idempotency_mismatch`, `quota_exceeded`
        when captures would have no room, `unavailable` when nothing was accepted.
        """
        info, watching = await self.ledger.watched_model(parsed.model)
        info = await self._usable(parsed.model, info)
        named = admission.modules_of(parsed)
        artifacts = parsed.readings or any(spec.sae or spec.jacobian for spec in parsed.steering)
        scored = parsed.probes or parsed.policies
        names = named or parsed.lora or scored or artifacts or patches.runs_of(parsed.patch)
        if names and idempotency and (known := await self.ledger.repeated(idempotency)):
            # the first job, even if the modules, probes, … that it names have been removed since
            return known
        lora = await named_lora(parsed.lora, info, self.ledger)
        parsed = await with_artifacts(parsed, info, self.ledger)
        probes = await probes_of(parsed.probes, info, self.probes)
        job_id = new_job_id()
        policies = await policies_of(parsed, info, self.policies, watching, job_id)
        model_state = (
            await self.model_state(info.name, named, caller, parsed.patch)
            if named or parsed.steering or parsed.patch or policies.gated
            else NOTHING
        )
        model_state = replace(
            model_state,
            modules={**model_state.modules, **policies.modules},
            features=await self.features(info, parsed.steering),
        )
        codec = await self.codec(info)
        admitted = await admission.admit(
            parsed, info, codec, job_id, model_state, caller, lora, probes, policies
        )
        check_answer(parsed, admitted.job, info, self.settings.vllm_lens_mib)
        call = request_context.CURRENT.get()
        body = call.body if call is not None else b""
        job = change(admitted.job, info)
        return await self.accept(job, info, admitted.blobs, idempotency, admitted.pinned, body)

    async def accept(
        self,
        job: Job,
        info: ModelInfo,
        blobs: Mapping[str, bytes],
        idempotency: tuple[str, str] | None,
        pinned: Iterable[str] = (),
        request: bytes = b"",
    ) -> str:
        """Commit a valid job to the ledger, which sends its Celery message; see `submit`.

        `blobs`, `pinned`, `request`: see `Ledger.submit`.
        """
        check_callback(job.callback, self.settings)
        if any(job.steering) or job.sweep is not None:
            tenant = await reachable(self.ledger.tenants.get)(job.tenant)
            job = admission.under_limit(job, tenant.limits.edit_limit)
        await self.disks.check(job)
        if self.settings.capture_quota_mib and not (
            idempotency and await self.ledger.knows_key(idempotency[0])
        ):
            job = await self._within_quota(job, info)
        if parent := traceparent():
            job = msgspec.structs.replace(job, trace=parent)
        operator_tags = {spec.tag for spec in info.global_captures}
        request_context.accepting(job.id, self.job_url(job.id))
        job_id, _ = await self.ledger.submit(
            job, blobs, idempotency, pinned, operator_tags, request
        )
        crash_point("api.committed")
        request_context.accepted(job_id, self.job_url(job_id))
        logs.bind(job=job_id)
        return job_id

    async def model_state(
        self, model: str, names: list[str], caller: Caller, patch: Sequence[PatchSpec] = ()
    ) -> ModelState:
        """Return a consistent snapshot of the caller's modules with these names and of global
        steering, and the source runs that patches name.
        """
        kept, current = await self.steering.standing(
            model, [scoped(caller.tenant, name) for name in names]
        )
        modules = {
            shown(name): msgspec.structs.replace(module, name=shown(name))
            for name, module in kept.items()
        }
        known = (
            own(caller.tenant, await self.steering.module_names(model))
            if len(modules) < len(names)
            else []
        )
        runs = await find_runs(self.ledger, model, patch, caller)
        needed = patches.runs_of(patch)
        named = (
            await SourceRuns(self.ledger, caller).names(model) if len(runs) < len(needed) else []
        )
        _, watching = await self.ledger.watched_model(model)
        guards = [
            policy
            for policy in await self.policies.named(model, watching)
            if policy.current.content.mode != "shadow" and policy.current.content.edits == "refuse"
        ]
        return ModelState(modules, current, known, runs, named, guards=guards)

    async def watched(self, job: Job, info: ModelInfo) -> Job:
        """Return a sweep with the scores that policies of all traffic of the model need, and their
        webhooks.
        """
        _, names = await self.ledger.watched_model(info.name)
        return with_policies(job, await of_all_traffic(self.policies, info, names), job.id)

    async def features(self, info: ModelInfo, specs: Sequence[SteeringSpec]) -> Named:
        """Return the features and directions that steering names. Raises a 400 naming the field."""
        saes, lenses = {}, {}
        for index, spec in enumerate(specs):
            if spec.jacobian is not None and spec.jacobian not in lenses:
                lenses[spec.jacobian] = await named_jacobian(
                    spec.jacobian, f"steering[{index}].jacobian", info, self.ledger
                )
            if spec.sae is not None and spec.sae not in saes:
                saes[spec.sae] = await named_sae(
                    spec.sae, f"steering[{index}].sae", info, self.ledger
                )
        rows: dict[tuple[str, int], Rows] = {}
        for name, features in check_specs(specs, saes).items():
            result = await anyio.to_thread.run_sync(
                self._features.read, saes[name], features, limiter=self._reading_features
            )
            check_range(saes[name], info, result)
            rows |= {(name, feature): value for feature, value in result.items()}
        plain = {}
        for directed in check_directed(specs, lenses, info):
            ids = await single_tokens(directed.tokens, await self.codec(info))
            tokens, limiter = list(ids.values()), self._reading_features
            plain[directed.at] = await anyio.to_thread.run_sync(
                self._directions.plain_specs, directed, tokens, limiter=limiter
            )
        return Named(saes, rows, lenses, plain) if saes or lenses else NONE

    async def _within_quota(self, job: Job, info: ModelInfo) -> Job:
        """Return the job, without global capture if the quota has no room for it.

        Raises `quota_exceeded` if there is no room for the captures that its user requested.
        """
        tags, operator_tags = set(stored_tags(job)), {spec.tag for spec in info.global_captures}
        if tags - operator_tags:
            await anyio.to_thread.run_sync(self._usage.take, [1])
        if tags & operator_tags:
            try:
                await anyio.to_thread.run_sync(
                    self._usage.take,
                    [1],
                    (self.settings.capture_quota_mib << 20) // global_capture.QUOTA_SPARE,
                )
            except MidstreamError as error:
                return global_capture.without(job, info, "quota", error.detail)
        return job

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

    # --- Waiting

    async def outcome(
        self,
        job_id: str,
        until: Callable[[JobView], bool],
        seconds: float,
        *,
        quiet: Collection[str] = (),
        known: int = 0,
    ) -> Outcome:
        """Return the job with its result as soon as `until` holds, or as it is after `seconds` (or
        when the server stops).

        Keeps waiting while Redis restarts. `quiet`, `known`: see `_look`.
        """
        return await self._look(
            job_id, self.ledger.outcome, until, seconds, patient=True, quiet=quiet, known=known
        )

    async def wait(
        self,
        job_id: str,
        until: Callable[[JobView], bool],
        seconds: float,
        *,
        patient: bool = False,
        held_key: HeldKey = ALWAYS,
    ) -> JobView:
        """Wait like `outcome`, and return the job without its result.

        Raises `unauthorized` when the key of `held_key` is revoked or expires.
        """

        async def view(job_id: str) -> Outcome:
            return Outcome(await self.ledger.view(job_id))

        return (
            await self._look(job_id, view, until, seconds, patient=patient, held_key=held_key)
        ).view

    async def _look(
        self,
        job_id: str,
        read: Callable[[str], Awaitable[Outcome]],
        until: Callable[[JobView], bool],
        seconds: float,
        *,
        patient: bool,
        quiet: Collection[str] = (),
        known: int = 0,
        held_key: HeldKey = ALWAYS,
    ) -> Outcome:
        """Return the result of `read` once `until` holds, or after `seconds`.

        `known`: a version up to which `until` cannot hold; nothing is read until there is a later
        one. `quiet`: states that cannot make `until` hold, see `Watcher.changed`. Raises
        `not_found`; `unavailable` when Redis is unreachable for longer than a restart takes, or
        (unless `patient`) at the first read.
        """
        deadline = time.monotonic() + min(seconds, self.settings.max_wait_s)
        if known and seconds > 0 and not self.closing:
            await self.or_closing(
                self.watcher.changed(job_id, known, deadline - time.monotonic(), quiet), held_key
            )
        while True:
            held_key.check()
            outcome = await (self.patiently(lambda: read(job_id)) if patient else read(job_id))
            patient = True
            remaining = deadline - time.monotonic()
            if until(outcome.view) or remaining <= 0 or self.closing:
                return outcome
            await self.or_closing(
                self.watcher.changed(job_id, outcome.view.version, remaining, quiet), held_key
            )

    async def patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        """Call `read`; repeat the call while Redis restarts."""
        until: float | None = None
        while True:
            try:
                return await read()
            except MidstreamError as error:
                until = until or time.monotonic() + OUTAGE_S
                if error.kind != "unavailable" or self.closing or time.monotonic() > until:
                    raise
            await self.or_closing(asyncio.sleep(OUTAGE_PAUSE_S))

    async def or_closing(self, wait: Any, held_key: HeldKey = ALWAYS) -> None:
        """Await `wait`; return early when the server stops or `held_key` ends."""
        task = asyncio.ensure_future(wait)
        try:
            await asyncio.wait(
                {task, self._closing, *held_key.ends}, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done() and (error := task.exception()) is not None:
                if not (isinstance(error, MidstreamError) and error.kind == "unavailable"):
                    raise error
                # the caller's next read raises it again if it persists
                await asyncio.sleep(OUTAGE_PAUSE_S)
        finally:
            await _cancel(task)


@asynccontextmanager
async def open_context(settings: Settings) -> AsyncIterator[AppContext]:
    celery = make_celery(settings)
    ledger = Ledger.connect(settings)
    try:
        async with Watcher(ledger) as watcher:
            context = AppContext(settings, ledger, watcher, celery)
            try:
                yield context
            finally:
                context.close()
                await context.helpers.close()
    finally:
        await ledger.close()


def context_of(request: Request[Any, Any, Any]) -> AppContext:
    context: AppContext = request.app.state.context
    return context


async def unless_client_leaves(request: Request[Any, Any, Any], work: Awaitable[T]) -> T:
    """Await `work`; raises ClientGone if the connection closes, `unauthorized` if the caller's key
    is revoked or expires.

    (Litestar would leave the handler waiting.) `work` is cancelled then, so it must only wait: make
    changes before.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        with context_of(request).key_watch.of(caller_of(request)) as held_key:
            ends: set[asyncio.Future[Any]] = {task, disconnected, *held_key.ends}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            held_key.check()
            raise ClientGone
    finally:
        await _cancel(task, disconnected)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks, repeatedly, until all have ended.

    Before Python 3.12 a cancellation is lost if it reaches an `asyncio.wait_for` whose work has
    just finished, and redis-py sends its commands through one: the wait would continue after its
    client has left. A caller that is cancelled meanwhile still waits for the tasks, so that none
    outlives it.
    """
    interrupted: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while remaining := [task for task in tasks if not task.done()]:
            for task in remaining:
                task.cancel()
            try:
                await asyncio.wait(remaining, timeout=CANCEL_AGAIN_S)
            except asyncio.CancelledError as again:
                interrupted = again
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("an abandoned wait failed: %r", error)
    if interrupted is not None:
        raise interrupted


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
