"""The job ledger in Redis: acceptance, claim, outputs, completion, and views for readers.

Everything here may be called from any process at any time; each change of a job is one Lua script
(`scripts.py`). Every report of a worker carries its `attempt`: a stale one changes nothing, and the
call returns None or False.
"""

import logging
import math
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import msgspec
import redis.asyncio

from ....schemas.base.errors import MidstreamError, Problem, Translated
from ....schemas.base.records import JsonObject, from_json, from_msgpack, now, to_json, to_msgpack
from ....schemas.base.tensors import Tensor
from ....schemas.base.version import __version__
from ....schemas.jobs.job_requests import Idempotency
from ....schemas.jobs.jobs import (
    Event,
    Job,
    JobPage,
    JobView,
    ListedJob,
    State,
    StoredOutcome as JobOutcome,
)
from ....schemas.jobs.kinds import KINDS
from ....schemas.jobs.queues import Queue
from ....schemas.jobs.results import JobResult
from ....schemas.requests.steering import GlobalSteering, SteeringTemplate
from ....schemas.settings.settings import Settings
from ..core import scripts
from ..core.aof_barrier import Barrier, persistence_in
from ..core.connection import of_each as of_each
from ..core.job_room import never_fits, room_of
from ..core.reachable import reachable as reachable
from ..core.record import FIELDS, LIST_FIELDS, JobRecord, decode
from ..core.tenants import MIB, refusal
from ..results import pages, views
from .fleet import Fleet

log = logging.getLogger(__name__)

#: A consistent snapshot of the parts of a result: fields of the record, outputs, receipts.
RESULT = (
    "return {redis.call('HMGET', KEYS[1], unpack(ARGV)), redis.call('GET', "
    "KEYS[2]), redis.call('HVALS', KEYS[3]), "
    "redis.call('INFO', 'persistence')}"
)
#: Where a client finds the ids of its jobs.
LISTED = "`client.jobs.list()`, `midstream list jobs` and GET /v1/jobs list jobs"
#: Crockford's base 32: no letter that reads like a digit.
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


class Claim(NamedTuple):
    job: Job
    attempt: int  # the fencing token, carried by every report of the worker about the job
    queued: float  # when the job began to wait, in seconds since the epoch


def _latched(job: Job, latches: Sequence[str]) -> Job:
    """Return the job with its policies turned on by the latches of its conversation: policy, and
    the job that set the latch, in turn.
    """
    holders = dict(zip(latches[::2], latches[1::2], strict=True))
    probes = [
        msgspec.structs.replace(
            probe,
            policy=msgspec.structs.replace(probe.policy, inherited=holders[probe.policy.name]),
        )
        if probe.policy is not None and probe.policy.name in holders
        else probe
        for probe in job.probes
    ]
    return msgspec.structs.replace(job, probes=probes) if holders else job


def _steered(job: Job, version: int, entries: bytes) -> Job:
    """Return the job under the global steering of its claim. Raises
    MidstreamError("version_mismatch").
    """
    with Translated(
        msgspec.DecodeError,
        lambda error: MidstreamError(
            "version_mismatch",
            f"another version of midstream stored global steering version {version}: {error}",
        ),
    ):
        known = from_msgpack(entries, list[SteeringTemplate]) if entries else []
    return msgspec.structs.replace(
        job, global_steering=GlobalSteering(version=version, entries=known)
    )


class JobSnapshot(NamedTuple):
    """A job as it was at one moment."""

    view: JobView
    result: JobResult | None = None  # None: not read, deleted, or a sweep's; see `Ledger.result`
    written: bool = False  # known to survive a kill of Redis


class EventsLost(MidstreamError):
    """Redis lost events of the attempt that it had confirmed: the job's stream would have a gap.

    Another attempt restarts the stream.
    """

    def __init__(self, job_id: str) -> None:
        super().__init__("internal", f"events of {job_id} were lost by Redis")


class ClaimRefused(MidstreamError):
    """The job exists, but the worker's ranks disagree: claim again once they are resynced."""

    def __init__(self, detail: str) -> None:
        super().__init__("conflict", detail)


class Renewal(NamedTuple):
    lost: set[str]  # no longer leased to this boot: stop them, drop their output
    cancelling: set[str]  # still held, but being cancelled


def new_job_id() -> str:
    """`job_`, 9 digits of time (so that ids sort by age) and 26 of secret randomness (130 bits)."""
    stamp = int(time.time() * 1000)
    prefix = ""
    for _ in range(9):
        stamp, digit = divmod(stamp, 32)
        prefix = ALPHABET[digit] + prefix
    return "job_" + prefix + "".join(ALPHABET[byte & 31] for byte in secrets.token_bytes(26))


def accepted_at(job_id: str) -> float:
    """Return when `new_job_id` made the id, in seconds since the epoch; 0 for any other name."""
    stamp = 0
    for letter in job_id.removeprefix("job_")[:9]:
        stamp = 32 * stamp + max(ALPHABET.find(letter), 0)
    return stamp / 1000 if job_id.startswith("job_") else 0.0


def not_found(job_id: str) -> MidstreamError:
    return MidstreamError("not_found", f"unknown job {job_id}", hint=LISTED)


def unreadable(
    what: str, error: msgspec.DecodeError, writer: bytes | None = None
) -> MidstreamError:
    """Return the error for what another version has written. `writer`: that version, if known."""
    by = "(unknown)" if writer is None else writer.decode()
    return MidstreamError(
        "version_mismatch",
        f"{what} by midstream {by}; midstream {__version__} cannot read it: {error}; "
        "upgrade the older one, workers first",
    )


def _record(job_id: str, values: Sequence[bytes | None]) -> JobRecord:
    """Decode `values` as HMGET returns them for `FIELDS`. Raises not_found."""
    if (record := decode(job_id, values)) is None:
        raise not_found(job_id)
    return record


class Ledger(Fleet):
    """The job ledger over one asyncio Redis client.

    Belongs to the event loop on which it is first used.
    """

    def __init__(self, client: redis.asyncio.Redis, settings: Settings) -> None:
        super().__init__(client, settings)
        self._result: Any = client.register_script(RESULT)

    # --- accepting

    @reachable
    async def submit(
        self,
        job: Job,
        blobs: Mapping[str, bytes | Tensor],
        idempotency: Idempotency | None = None,
        pinned: Iterable[str] = (),
        operator_tags: Collection[str] = (),
        request: bytes = b"",
    ) -> tuple[str, bool]:
        """Accept `job` and its vectors (content hash -> tensor) in one commit; returns its id and
        whether it is new.

        `pinned`: content hashes of tensors of named modules, which are copied for the job.
        `operator_tags`: tags of captures that the job's user did not request. `request`: its body
        as JSON, kept for readers. The same `idempotency` again returns the first job's id and
        False. The job's message is sent when its turn comes, usually immediately. The returned
        result survives a kill of Redis (`written`).

        Raises MidstreamError: `idempotency_mismatch` for the same key with another body; `conflict`
        if a pinned tensor is gone; rate_limited, too_many_jobs, too_many_cells, capture_limit if
        the tenant has reached a limit; overloaded if too many jobs wait or Redis is too full;
        invalid_request, with the field, if the job never fits. Nothing is accepted then.
        """
        room = room_of(job, self.settings)
        [packed] = scripts.submit(
            settings=self.settings,
            job=job,
            spec=await scripts.record(job),
            blobs=scripts.packed_blobs(blobs),
            pinned=pinned,
            idempotency=idempotency,
            operator_tags=operator_tags,
            request=request,
            room=room,
        )
        size = len(packed) + room
        reply = await self.scripts.submit(args=[packed, *await self._pressure.usage(size)])
        outcome, job_id = scripts.text(reply[:2])
        if outcome == "refused":
            limit = job_id
            used, allowed, seconds = scripts.text(reply[2:])
            if limit == "job_room":
                raise never_fits(job, self.settings, int(allowed))
            in_memory = limit == "tenant_room"
            raise refusal(
                job.tenant,
                limit,
                int(used),
                int(allowed),
                math.ceil(room / MIB) if in_memory else job.opened.facts.cells,
                float(seconds) if seconds else None,
            )
        if outcome == "missing":
            named = ", ".join(sorted(job.modules)) or "its source"
            raise MidstreamError(
                "conflict",
                (
                    f"{named} was changed or unregistered while the request was being accepted: "
                    "repeat the request"
                ),
            )
        if outcome == "mismatch":
            raise MidstreamError(
                "idempotency_mismatch",
                f"this Idempotency-Key was used for job {job_id} with a different body",
                field="Idempotency-Key",
            )
        if outcome == "exists":
            raise MidstreamError("conflict", f"job {job_id} already exists")
        self._pressure.accepted(size)
        await self._written()
        return job_id, outcome == "created"

    @reachable
    async def knows_key(self, key: str) -> bool:
        """Return whether a job was accepted under this Idempotency-Key, so that another submission
        with the key creates none.
        """
        return bool(await self.redis.exists(f"ms:idem:{key}"))

    @reachable
    async def repeated(self, idempotency: Idempotency) -> str | None:
        """Return the id of the job accepted under this key for this body, or None; a
        different body is left for `submit` to report.
        """
        first: bytes | None = await self.redis.get(f"ms:idem:{idempotency[0]}")
        job_id, _, body = (first or b"").decode().partition(":")
        return (
            job_id
            if body == idempotency[1] and await self.redis.exists(f"ms:job:{job_id}")
            else None
        )

    @reachable
    async def request_cancel(self, job_id: str) -> JobView:
        """Abort a queued job immediately; set a running one `cancelling` until its worker reports
        that it has stopped.

        Raises not_found, and conflict if the job is over. A repeated request is harmless.
        """
        outcome, *state = scripts.text(await self.run("cancel", id=job_id))
        if outcome == "unknown":
            raise not_found(job_id)
        if outcome == "refused":
            raise MidstreamError("conflict", f"job {job_id} has ended: its state is {state[0]}")
        return await self.view(job_id)

    # --- the worker's side

    @reachable
    async def claim(
        self,
        job_id: str,
        worker: str,
        boot: str,
        ranks: int,
        identity: str,
        unreachable: str = "",
        crowded: bool = False,
    ) -> Claim | None:
        """Take a queued job: running, attempt + 1, leased for `lease_s`.

        Returns None if another worker has it, or it has ended. With `redis_replicas`, the replicas
        have the claim before this returns.

        `identity`: of the worker's model. A job that was accepted for another model fails
        `model_changed`, or with the setting `on_model_change` = "wait" stays queued until a worker
        serves its model.
        `ranks`: number of receipts that each request with an intervention or a capture will get.
        `unreachable`: why the worker's artifact store is unavailable, or empty: a job whose
        captures go there waits for it, for at most `artifact_wait_s`. `crowded`: the worker holds
        as many side jobs as it may, and takes no other.

        The job comes with the global steering of this moment (if that has entries, every request
        gets receipts), and with latches. Raises not_found; ClaimRefused while the worker's ranks
        disagree.
        """
        outcome, *rest = await self.run(
            "claim",
            id=job_id,
            worker=worker,
            boot=boot,
            ranks=ranks,
            lease_s=self.settings.lease_s,
            blob_ttl=scripts.BLOB_TTL_FACTOR * self.settings.result_ttl_s,
            # identifies the call if redis-py repeats it
            call=secrets.token_hex(8),
            unreachable=unreachable,
            queue=self.settings.queue,
            crowded=crowded,
            identity=identity,
            on_model_change=self.settings.on_model_change,
        )
        if outcome == b"unknown":
            raise not_found(job_id)
        if outcome == b"refused":
            return None
        if outcome == b"desynced":
            raise ClaimRefused(rest[0].decode())
        attempt = int(rest[0])
        if self.settings.redis_replicas:
            # else another worker could hold the same attempt after a failover
            await self._written()
        try:
            job = _steered(await self._decode_job(job_id, rest[1]), int(rest[4]), rest[5])
            job = msgspec.structs.replace(job, weight=int(rest[6]))
            _ = job.opened  # not later: the worker could not say why it cannot run it
        except MidstreamError as error:
            log.error("%s", error.detail)
            await self.fail(job_id, attempt, error.problem())
            return None
        return Claim(_latched(job, scripts.text(rest[3])), attempt, float(rest[2]))

    async def store_outputs(
        self,
        job_id: str,
        attempt: int,
        outputs: JobOutcome,
        last: Event | None = None,
        text: int = 0,
    ) -> State | None:
        """Store all outputs of the attempt together, or its outcome, and the `last` event
        of its stream.

        `text`: number of events before `last`.

        Returns the state: succeeded, or running while receipts are awaited; None if the attempt is
        stale or was cancelled: nothing is stored then. Raises EventsLost.
        """
        outcome = await self._report(
            "store",
            job_id,
            attempt,
            capture_timeout=self.settings.capture_timeout_s,
            outputs=to_msgpack(outputs),
            said=text,
            last=to_json(last) if last else None,
        )
        if outcome == "behind":
            raise EventsLost(job_id)
        return State(outcome) if outcome in (State.RUNNING, State.SUCCEEDED) else None

    async def fail(self, job_id: str, attempt: int, problem: Problem) -> bool:
        """End the job `failed` with `problem`. False: the attempt is stale."""
        return await self._report("fail", job_id, attempt, problem=to_json(problem)) == "failed"

    async def finish_cancel(self, job_id: str, attempt: int) -> bool:
        """Record that the cancelled job has left the engine.

        False: the attempt is stale, or no cancel was requested.
        """
        return await self._report("cancelled", job_id, attempt) == "cancelled"

    async def hand_on(
        self, job_id: str, attempt: int, queue: Queue, cells: int
    ) -> Literal["handed_on", "cancelling", "stale"]:
        """Give the job to the workers of another queue; the attempt does not count.

        `cells`: how many cells of it will be computed exactly. `cancelling`: cancellation was
        requested; `stale`: the attempt is no longer current. It is not handed on then.
        """
        return cast(
            Literal["handed_on", "cancelling", "stale"],
            await self._report("hand_on", job_id, attempt, queue=queue, cells=cells),
        )

    async def release(
        self,
        job_id: str,
        attempt: int,
        unreachable: str = "",
        later: bool = False,
        stopped: bool = False,
    ) -> State | None:
        """Give the job back: queued, failed `worker_lost` after the last attempt, or cancelled.

        `later`: the attempt was not begun: it does not count, and the job is sent again after
        `SHELVED_S`. `unreachable`: why the artifact store is unavailable: the job waits for it, for
        at most `artifact_wait_s` without progress, and the attempt does not count. `stopped`: the
        worker was told to stop, and the attempt does not count. Returns the new state; None if the
        attempt is stale.
        """
        outcome = await self._report(
            "release", job_id, attempt, unreachable=unreachable, later=later, stopped=stopped
        )
        return None if outcome == "stale" else State(outcome)

    async def desync_release(self, job_id: str, attempt: int, detail: str) -> State | None:
        """Give the job back because this worker's ranks disagree (`detail`): queued once, if
        `on_desync` says so, else failed.

        Returns the new state; None if the attempt is stale.
        """
        outcome = await self._report("desync", job_id, attempt, detail=detail)
        return None if outcome == "stale" else State(outcome)

    async def emit(self, job_id: str, attempt: int, number: int, event: Event) -> bool:
        """Append event `number` of the attempt to the job's event stream.

        False: the attempt is stale.

        Numbers not above the last are duplicates: a call may be repeated, but calls must stay in
        order. Raises EventsLost.
        """
        outcome = await self._report("emit", job_id, attempt, number=number, event=to_json(event))
        if outcome == "behind":
            raise EventsLost(job_id)
        return outcome == "emitted"

    @reachable
    async def _report(self, script: str, job_id: str, attempt: int, **own: Any) -> str:
        reply = await self.run(script, id=job_id, attempt=attempt, **own)
        if (outcome := str(reply.decode())) == "unknown":
            raise not_found(job_id)
        return outcome

    @reachable
    async def renew(self, worker: str, boot: str, held: Mapping[str, int]) -> Renewal:
        """Renew the leases of `held` (job id -> attempt) by `lease_s`."""
        lost, cancelling = await self.run(
            "renew",
            worker=worker,
            boot=boot,
            lease_s=self.settings.lease_s,
            held=[*held.items()],
        )
        return Renewal(set(scripts.text(lost)), set(scripts.text(cancelling)))

    # --- reading

    @reachable
    async def job(self, job_id: str) -> Job:
        """Return the job as accepted. Raises not_found."""
        if (raw := await self.redis.hget(f"ms:job:{job_id}", "spec")) is None:
            raise not_found(job_id)
        return await self._decode_job(job_id, raw)

    @reachable
    async def request(self, job_id: str) -> tuple[Job, JsonObject | None]:
        """Return the job as accepted, and the body of its request, if that is kept.

        Raises not_found.
        """
        raw, body = await self.redis.hmget(f"ms:job:{job_id}", "spec", "request")
        if raw is None:
            raise not_found(job_id)
        return await self._decode_job(job_id, raw), None if body is None else from_json(
            body, dict[str, Any]
        )

    @reachable
    async def view(self, job_id: str) -> JobView:
        """Return the view of the job. Raises not_found."""
        record = _record(job_id, await self.redis.hmget(f"ms:job:{job_id}", FIELDS))
        return views.view(record, self.settings)

    @reachable
    async def outcome(self, job_id: str) -> JobSnapshot:
        """Return the job with its result, and whether Redis has logged both, in one round trip.

        Raises not_found.
        """
        names = [f"ms:{kind}:{job_id}" for kind in ("job", "out", "ticket")]
        values, outputs, receipts, persistence = await self._result(keys=names, args=FIELDS)
        record = _record(job_id, values)
        view = views.view(record, self.settings)
        # A script cannot wait for replicas. `lossy`: reading needs no log, only confirming does.
        written = not self.settings.redis_replicas and Barrier(lossy=True).passed(
            persistence_in(persistence)
        )
        unread = view.kind not in KINDS or KINDS[view.kind].grid  # `result` says or reads more
        if view.state is State.EXPIRED or unread:
            return JobSnapshot(view, written=written)
        return JobSnapshot(
            view, views.result(view, record, outputs, receipts, self.settings), written
        )

    @reachable
    async def result(self, job_id: str) -> JobResult:
        """Return outputs, captures and determinism as far as they are known; `state` shows whether
        the job is over.

        Raises not_found, and gone after the retention time.
        """
        view, result, _ = await self.outcome(job_id)
        if view.state is State.EXPIRED:
            raise MidstreamError(
                "gone",
                f"the result of job {job_id} was deleted after {self.settings.result_ttl_s} s",
            )
        if result is not None:
            return result
        async with self.redis.pipeline(transaction=True) as pipe:
            job = f"ms:job:{job_id}"
            pipe.hmget(job, FIELDS).hget(job, "spec").hvals(f"ms:units:{job_id}").hvals(
                f"ms:ticket:{job_id}"
            )
            values, spec, units, receipts = await pipe.execute()
        record = _record(job_id, values)
        if spec is None:
            raise not_found(job_id)
        work = (await self._decode_job(job_id, spec)).opened
        view = views.view(record, self.settings)
        return views.result(view, record, None, receipts, self.settings, (work, units))

    @reachable
    async def list(
        self,
        state: State | None = None,
        model: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        tenant: str | None = None,
        policy: str | None = None,
        flagged: bool | None = None,
    ) -> JobPage:
        """Return jobs (of `tenant`; that triggered `policy`; that are `flagged` or not), newest
        first.

        `cursor` is a previous page's `next`. A rare filter may give a short page with a `next`.

        Raises MidstreamError("invalid_request") for an invalid cursor.
        """
        score, last = pages.parse_cursor(cursor)
        listed = views.jobs_in(state, tenant)
        if state is State.EXPIRED:  # no younger job is expired
            score = min(score, now() - self.settings.result_ttl_s)

        async def read(chunk: pages.Chunk) -> Iterable[ListedJob | None]:
            names = [name for name, _ in chunk]
            found = await of_each(
                self.redis, names, lambda pipe, name: pipe.hmget(f"ms:job:{name}", LIST_FIELDS)
            )
            return [
                views.listed(name, values, self.settings)
                for name, values in zip(names, found, strict=True)
            ]

        def wanted(view: JobView) -> bool:
            return (
                state in (None, view.state)
                and model in (None, view.model)
                and policy in (None, *view.triggered)
                and flagged in (None, view.flagged)
            )

        found, following = await pages.page(
            (score, last), limit, partial(pages.older, self.redis, listed), read, wanted
        )
        return JobPage(jobs=found, next=following)

    @reachable
    async def events(self, job_id: str, after: str = "0-0", count: int = 1000) -> Sequence[Event]:
        """Return up to `count` events after the event id `after`, by default from the first kept.

        Raises not_found for an unknown or expired job.
        """
        entries = await self.redis.xrange(f"ms:events:{job_id}", min=f"({after}", count=count)
        if not entries and not await self.redis.exists(f"ms:job:{job_id}"):
            raise not_found(job_id)
        return [
            msgspec.structs.replace(from_json(fields[b"e"], Event), id=name.decode())
            for name, fields in entries
        ]

    @reachable
    async def version(self, job_id: str) -> int | None:
        """Return the job's version; None if there is no such job."""
        raw = await self.redis.hget(f"ms:job:{job_id}", "version")
        return None if raw is None else int(raw)

    async def _decode_job(self, job_id: str, raw: bytes) -> Job:
        """Decode a stored job. Raises MidstreamError("version_mismatch")."""
        try:
            return scripts.recorded(raw)
        except msgspec.ValidationError as error:
            writer = await self.redis.hget(f"ms:job:{job_id}", "written_by")
            raise unreadable(f"job {job_id} was accepted", error, writer) from error


class LedgerPart:
    """Reads and writes one kind of a ledger's records. Belongs to the ledger's event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._redis: Any = ledger.redis
        self._settings = ledger.settings
        self._run = ledger.run
