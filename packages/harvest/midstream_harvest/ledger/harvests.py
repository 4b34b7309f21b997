"""The ledger of harvests: their records, the units that count, and the parts under way, whose jobs
were submitted and have not ended. See docs/decisions/0035-harvests.md.
"""

import hashlib
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec

from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.core.tenants import limits_of, refusal
from midstream.broker.ledger.jobs.ledger import ALPHABET, Ledger, new_job_id, of_each, reachable
from midstream.broker.ledger.jobs.units import LedgerUnits, UnitFate, UnitRow, kept_once
from midstream.broker.ledger.named.probes import all_fitting, watched_model, with_policies
from midstream.schemas.base.errors import MidstreamError, Problem
from midstream.schemas.base.limits import MAX_PAGE
from midstream.schemas.base.records import Record, from_json, from_msgpack, now, to_json, to_msgpack
from midstream.schemas.base.states import TERMINAL
from midstream.schemas.jobs.jobs import Job, Sampling, State
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.requests.policies import Policy
from midstream.schemas.requests.specs import probe_captures
from midstream.schemas.service.global_capture import captures_of

from ..names import OVER, PARTS_PER_WORKER, HarvestState
from ..records.harvests import (
    CheckedFile,
    HarvestFacts,
    HarvestPage,
    HarvestPlan,
    HarvestView,
    HarvestWork,
    Line,
    StoredHarvest,
    SurveyEntry,
    UnitEntry,
    side_of,
)
from ..records.work import HarvestPart
from .streams import HarvestStreams

log = logging.getLogger(__name__)

#: Jobs of one part that may fail before its harvest does.
TRIES = 3
#: Milliseconds after which the lock of a process that advances a harvest expires; its steps may be
#: repeated.
LOCK_MS = 10_000
#: Kinds of errors of a submission that pass with time.
WAITS = {"rate_limited", "too_many_jobs", "capture_limit", "overloaded", "unavailable"}
#: Why a harvest cannot be paused, resumed or cancelled.
REFUSED = {
    "over": "has ended",
    "cancelling": "is being cancelled",
    "sealing": "has all its rows, and its manifest is being written",
}
#: What a view has of the stored harvest.
_OF_HARVEST = (*HarvestFacts.__struct_fields__, "uri", "layers")
# Numbers of the parts that write the plan and the manifest, and of surveys.
PLANS = -1
SEALS = -2
SURVEYS = -3

WantedState = Literal["run", "pause", "cancel"]
Changed = Literal["changed", "unwanted", "sealing", "cancelling", "over", "gone"]
#: Replaces the request's lines in the stored specification. The lines have their own key until the
#: harvest ends, so that listings do not read them.
NO_LINES = [""]


class Out(Record, kw_only=True):
    """A part whose job was submitted. `failures`: its jobs that failed."""

    job: str
    part: HarvestPart
    failures: int = 0


class HarvestReport(NamedTuple):
    """What an attempt has done: records that are kept, each once, and further arguments of
    lua/jobs/keep.lua.
    """

    rows: Sequence[UnitRow] = ()
    facts: Mapping[str, Any] = {}


#: The manifest is about to be written: cancelling is no longer possible.
CLOSING = HarvestReport(facts={"set": {"closing": 1}})
#: The manifest is durable.
SEALED = HarvestReport(facts={"set": {"sealed": 1}})


def plan_kept(plan: HarvestPlan, file: CheckedFile) -> HarvestReport:
    """Report that the plan is durable in the harvest's store."""
    fields = {
        "units": len(plan.units),
        "parts": plan.parts,
        "weight": plan.weight,
        "plan": to_json(file).decode(),
        "planned": 1,
    }
    return HarvestReport(facts={"set": fields})


def part_kept(part: HarvestPart, file: CheckedFile) -> HarvestReport:
    """Report that the part's manifest is durable; its units are dropped."""
    kept = kept_once(part.part, to_json(file), {"parts_done": 1})
    return HarvestReport(
        [kept], {"place": f"ms:harvest-done:{part.harvest}", "done": units_key(part)}
    )


def survey_kept(job_id: str, part: HarvestPart, entry: SurveyEntry) -> HarvestReport:
    """Report a survey whose file is durable; its harvest has succeeded."""
    kept = kept_once(job_id, to_json(entry), {"bytes": entry.bytes})
    side = side_of(part.harvest)
    return HarvestReport([kept], {"place": side.kept, "open": side.open})


def store_awaited(reason: str) -> HarvestReport:
    """Report why a worker waits, which is shown until a unit is kept. The harvest can be cancelled
    meanwhile.
    """
    return HarvestReport(facts={"set": {"trouble": reason}, "clear": ["closing"]})


async def advance_all(ledger: Ledger) -> None:
    """Advance all harvests in a ledger: what its reaper does for them."""
    await LedgerHarvests(ledger).advance_all()


def new_harvest_id() -> str:
    return "hrv_" + new_job_id().removeprefix("job_")


def job_id_of(harvest: str, part: int, tries: int) -> str:
    """Return the id of a part's job, equal for every process that submits it."""
    digest = hashlib.sha256(f"{harvest}/{part}/{tries}".encode()).digest()
    return (
        "job_"
        + harvest.removeprefix("hrv_")[:9]
        + "".join(ALPHABET[byte & 31] for byte in digest[:26])
    )


def not_found(harvest_id: str) -> MidstreamError:
    return MidstreamError("not_found", f"unknown harvest {harvest_id}")


# The work is done by ordinary jobs, so claims, fencing, fair shares and the reaper need no code
# here. One job would bind a harvest to one worker and its deaths; a leader that waits in a slot
# could deadlock.
class LedgerHarvests(HarvestStreams, LedgerUnits):
    """Harvests in a ledger. Belongs to the ledger's event loop."""

    # --- accepting and reading

    @reachable
    async def submit(
        self, harvest: StoredHarvest, idempotency: tuple[str, str] | None = None
    ) -> str:
        """Accept the harvest; returns its id once it is durable, or the id of the first harvest
        with the same Idempotency-Key and body.

        Raises MidstreamError("idempotency_mismatch") for another body; too_many_harvests,
        capture_limit if the tenant has reached a limit, and overloaded if Redis is nearly full:
        nothing is accepted then.
        """
        key, body = idempotency or (None, None)
        lines = harvest.source.lines
        settings = self._ledger.settings
        packed = None if lines is None else to_msgpack(lines)
        spec = to_msgpack(harvest if lines is None else _with_lines(harvest, NO_LINES))
        size = len(spec) + len(packed or b"")
        await self._ledger.check_room(size)
        arguments = scripts.pack(
            settings,
            id=harvest.id,
            spec=spec,
            lines=packed,
            streams=harvest.stream is not None or None,
            created=repr(harvest.created),
            tenant=harvest.tenant,
            idem=key,
            body=body,
            limits=limits_of(settings),
            tensors=[(name, False) for name in harvest.tensors],
        )
        outcome, harvest_id, *rest = scripts.text(await self._own.accept_harvest(args=arguments))
        if outcome == "refused":
            raise refusal(harvest.tenant, harvest_id, int(rest[0]), int(rest[1]), 1, None)
        if outcome == "missing":
            raise MidstreamError(
                "conflict", "a module was changed while the harvest was being accepted: repeat it"
            )
        if outcome == "mismatch":
            detail = f"this Idempotency-Key was used for {harvest_id} with a different body"
            raise MidstreamError("idempotency_mismatch", detail, field="Idempotency-Key")
        self._ledger.took_room(size)
        # also for a repeat: the first submission may not have got as far as this
        await self._ledger.written()
        return harvest_id

    @reachable
    async def stored(self, harvest_id: str) -> StoredHarvest:
        """Return the harvest as accepted, with its request's lines until it ends.

        Raises not_found.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            raw, lines = (
                await pipe.hget(f"ms:harvest:{harvest_id}", "spec")
                .get(f"ms:harvest-lines:{harvest_id}")
                .execute()
            )
        if raw is None:
            raise not_found(harvest_id)
        harvest = from_msgpack(raw, StoredHarvest)
        return (
            harvest
            if lines is None
            else _with_lines(harvest, from_msgpack(lines, list[str | list[int]]))
        )

    @reachable
    async def view(self, harvest_id: str) -> HarvestView:
        """Return the view of the harvest. Raises not_found."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(f"ms:harvest:{harvest_id}").hvals(f"ms:harvest-out:{harvest_id}")
            pipe.hvals(f"ms:harvest-surveys:{harvest_id}")
            record, out, surveys = await pipe.execute()
        if not record:
            raise not_found(harvest_id)
        view = _view(_texts(record), [from_json(item, Out).job for item in out])
        return msgspec.structs.replace(view, surveys=_surveys(surveys))

    @reachable
    async def list(
        self, tenant: str | None, limit: int, surveyed: str | None = None
    ) -> HarvestPage:
        """Return the newest harvests, of one tenant or of all. With `surveyed`: those of the newest
        `MAX_PAGE` that have finished surveys of that autoencoder's features, and these surveys.
        """
        names = await self._redis.zrevrange(
            "ms:harvests" if tenant is None else f"ms:harvests:{tenant}",
            0,
            (MAX_PAGE if surveyed else limit) - 1,
        )
        records = await of_each(
            self._redis, names, lambda pipe, name: pipe.hgetall(f"ms:harvest:{name.decode()}")
        )
        views = [_view(_texts(record), []) for record in records if record]
        if surveyed:
            entries = await of_each(
                self._redis, views, lambda pipe, view: pipe.hvals(f"ms:harvest-surveys:{view.id}")
            )
            views = [
                msgspec.structs.replace(view, surveys=kept)
                for view, packed in zip(views, entries, strict=True)
                if (kept := _surveys(packed, surveyed))
            ]
        return HarvestPage(harvests=views[:limit])

    @reachable
    async def live(self) -> Sequence[str]:
        """Return the ids of the harvests that have not ended."""
        return [name.decode() for name in await self._redis.smembers("ms:harvests-live")]

    # --- the user's side

    @reachable
    async def ask(self, harvest_id: str, action: WantedState) -> HarvestView:
        """Pause, resume or cancel the harvest.

        Raises not_found, and conflict if it has ended, is complete or is being cancelled.
        """
        if (answer := await self._change(harvest_id, ask=action)) == "gone":
            raise not_found(harvest_id)
        if answer != "changed":
            raise MidstreamError(
                "conflict",
                (
                    f"harvest {harvest_id} {REFUSED[answer]}: its state is "
                    f"{(await self.view(harvest_id)).state}"
                ),
            )
        await self._ledger.written()
        await self.advance(harvest_id)
        return await self.view(harvest_id)

    async def _change(self, harvest_id: str, **change: Any) -> Changed:
        """Run lua/change_harvest.lua, which documents its arguments and outcomes."""
        arguments = scripts.pack(
            self._ledger.settings, id=harvest_id, **{"set": {}, "once": {}, **change}
        )
        return cast(Changed, (await self._own.change_harvest(args=arguments)).decode())

    @reachable
    async def forget(self, harvest_id: str) -> None:
        """Remove the record of a harvest that has ended and whose files are deleted: its tenant is
        no longer charged for them.
        """
        await self._own.forget_harvest(args=scripts.pack(self._ledger.settings, id=harvest_id))

    # --- the worker's side

    @reachable
    async def surveys(self, job_id: str) -> bool:
        """Return whether the job is a survey, which reads a finished harvest."""
        return bool(await self._redis.hexists(f"ms:job:{job_id}", "side"))

    async def report(self, job: Job, attempt: int, report: HarvestReport) -> UnitFate:
        """Record what an attempt at a part reports."""
        whole = record_key(job.work_as(HarvestWork).part.harvest)
        return await self.keep(job.id, attempt, report.rows, whole=whole, **report.facts)

    @reachable
    async def plan(self, harvest_id: str) -> CheckedFile:
        """Return the file of the plan that counts.

        Raises not_found before there is one.
        """
        if (file := await self._redis.hget(f"ms:harvest:{harvest_id}", "plan")) is None:
            raise not_found(harvest_id)
        return from_json(file, CheckedFile)

    @reachable
    async def done(self, harvest_id: str) -> dict[int, CheckedFile]:
        """Return number → file of the parts that are done."""
        raw = await self._redis.hgetall(f"ms:harvest-done:{harvest_id}")
        return {int(number): from_json(record, CheckedFile) for number, record in raw.items()}

    # --- advancing

    async def advance_all(self) -> None:
        """Advance every harvest that has not ended; an error of one is logged, and the others
        advance.
        """
        for harvest_id in await self.live():
            try:
                await self.advance(harvest_id)
            except MidstreamError as error:
                if error.kind == "unavailable":
                    raise
                log.error("harvest %s cannot continue: %s", harvest_id, error)

    # The API, workers and the reaper call it, and every step may be repeated or raced, so no
    # process owns a harvest and none has to be waited for when it dies.
    @reachable
    async def advance(self, harvest_id: str) -> None:
        """Check the parts under way, and submit, stop or end as they require.

        Any process may call this at any time.
        """
        lock = f"ms:harvest-lock:{harvest_id}"
        token = secrets.token_hex(8)
        if not await self._redis.set(lock, token, nx=True, px=LOCK_MS):
            return
        try:
            await self._advance(harvest_id)
        finally:
            if await self._redis.get(lock) == token.encode():
                await self._redis.delete(lock)

    async def _advance(self, harvest_id: str) -> None:
        record = _texts(await self._redis.hgetall(f"ms:harvest:{harvest_id}"))
        if not record or record["state"] in OVER:
            await self._redis.srem("ms:harvests-live", harvest_id)
            return
        harvest = from_msgpack(cast(bytes, record["spec"]), StoredHarvest)
        if record.get("sealed"):
            await self._end(harvest_id, "succeeded", None)
            return
        out, again, problem = await self._look(harvest_id)
        action = record["wanted"]
        if action != "run" or problem is not None:
            running = [item for item in out if await self._stop(item)]
            if problem is not None or action == "cancel":
                if not running:
                    await self._end(
                        harvest_id, "failed" if problem is not None else "cancelled", problem
                    )
            else:
                await self._show(
                    harvest_id, record, "paused", "paused by the user" if not running else "pausing"
                )
            return
        parts = int(record.get("parts", 0))
        done = int(record.get("parts_done", 0))
        state: HarvestState = "planning"
        if record.get("planned"):
            state = "running" if done < parts else "sealing"
        reason = await self._submit(harvest, record, state, out, again)
        await self._show(harvest_id, record, state, reason)

    async def _look(self, harvest_id: str) -> tuple[Sequence[Out], dict[int, Out], Problem | None]:
        """Return (parts whose jobs have not ended, number → part that needs another job, why the
        harvest fails or None).
        """
        raw = await self._redis.hgetall(f"ms:harvest-out:{harvest_id}")
        done = {int(part) for part in await self._redis.hkeys(f"ms:harvest-done:{harvest_id}")}
        out = []
        again = {}
        problem = None
        for item in (from_json(value, Out) for value in raw.values()):
            try:
                view = await self._ledger.view(item.job)
            except MidstreamError as error:
                if error.kind != "not_found":
                    raise
                view = None
            if view is not None and view.state not in TERMINAL and view.state is not State.EXPIRED:
                out.append(item)
            elif item.part.part in done or (
                item.part.part < 0 and view is not None and view.state is State.SUCCEEDED
            ):
                await self._redis.hdel(f"ms:harvest-out:{harvest_id}", item.part.part)
            elif view is not None and view.state is State.FAILED:
                failures = item.failures + 1
                permanent = view.error is not None and view.error.status < 500
                if failures >= TRIES or permanent:
                    problem = (
                        view.error
                        or MidstreamError("internal", f"part {item.part.part} failed").problem()
                    )
                again[item.part.part] = msgspec.structs.replace(item, failures=failures)
            else:
                again[item.part.part] = item
        return out, again, problem

    async def _submit(
        self,
        harvest: StoredHarvest,
        record: Mapping[str, Any],
        state: HarvestState,
        out: Sequence[Out],
        again: dict[int, Out],
    ) -> str:
        """Submit the parts for which there is room; return why a part has to wait, or ""."""
        try:
            model, policies = await watched_model(self._ledger, harvest.model)
            if model is None:
                return f"the model {harvest.model!r} is not served"
            fitting = all_fitting(policies, model)
        except MidstreamError as error:
            return error.detail  # a probe that watches all traffic does not fit
        room = await self._room(harvest.model) - len(out)
        taken = {item.part.part for item in out} | again.keys()
        begun = int(await self._redis.scard(f"ms:harvest-begun:{harvest.id}"))
        for part in self._next(harvest, record, state, room, taken, begun):
            again[part.part] = Out(job="", part=part)
        end = await self.window_end(harvest)
        ready = [item for item in again.values() if await self.has_work(item.part, end)]
        if again and not ready and not out:
            return "its window is full: it waits until its consumers acknowledge units"
        for previous in ready:
            part = (
                msgspec.structs.replace(previous.part, tries=previous.part.tries + 1)
                if previous.job
                else previous.part
            )
            item = Out(
                job=job_id_of(harvest.id, part.part, part.tries),
                part=part,
                failures=previous.failures,
            )
            try:
                job = _job(harvest, item, model, fitting)
                pinned = {name for probe in job.probes for name in probe.content.tensors}
                pinned |= harvest.tensors
                await self._ledger.submit(
                    job, {}, None, pinned, {spec.tag for spec in job.global_captures}
                )
            except MidstreamError as error:
                if error.kind in WAITS:
                    return error.detail
                if error.kind != "conflict":  # else another process has submitted the same job
                    raise
            once = {"started": repr(now())} if part.part >= 0 else {}
            if (
                await self._change(
                    harvest.id, wanted="run", once=once, part=part.part, out=to_json(item)
                )
                != "changed"
            ):
                await self._stop(item)  # it was paused or cancelled meanwhile
                return ""
        return ""

    def _next(
        self,
        harvest: StoredHarvest,
        record: Mapping[str, Any],
        state: HarvestState,
        room: int,
        present: "set[int]",
        begun: int,
    ) -> Iterable[HarvestPart]:
        if state == "planning" and PLANS not in present:
            yield HarvestPart(harvest=harvest.id, part=PLANS, role="plan")
        elif state == "sealing" and SEALS not in present:
            yield HarvestPart(harvest=harvest.id, part=SEALS, role="seal")
        elif state == "running":
            units = int(record["units"])
            parts = int(record["parts"])
            size = -(-units // parts)
            for part in range(begun, min(parts, begun + max(0, room))):
                count = min(size, units - part * size)
                yield HarvestPart(
                    harvest=harvest.id,
                    part=part,
                    first=part * size,
                    count=count,
                    tokens=harvest.shard_rows * count,
                )

    async def _room(self, model: str) -> int:
        workers = sum(worker.model == model for worker in await self._ledger.workers())
        # No worker is idle between two parts, and none takes all parts.
        return PARTS_PER_WORKER * max(1, workers)

    async def _stop(self, out: Out) -> bool:
        """Request the cancellation of a part's job; return whether the job has not ended yet."""
        try:
            view = await self._ledger.request_cancel(out.job)
        except MidstreamError as error:
            if error.kind not in ("conflict", "not_found"):
                raise
            return False
        return view.state not in TERMINAL

    async def _show(
        self, harvest_id: str, record: Mapping[str, Any], state: HarvestState, reason: str
    ) -> None:
        if (record["state"], record.get("reason", "")) == (state, reason):
            return
        at = now()
        fields: dict[str, Any] = {"state": state, "reason": reason}
        if state == "paused" and record["state"] != "paused":
            fields["paused_at"] = repr(at)
        elif state != "paused" and record["state"] == "paused":
            fields["paused_s"] = repr(
                float(record.get("paused_s", 0)) + at - float(record.get("paused_at", at))
            )
        await self._change(harvest_id, wanted=record["wanted"], set=fields)

    async def _end(self, harvest_id: str, state: HarvestState, problem: Problem | None) -> None:
        """End the harvest. Its record stays until its files are deleted, but for its lines."""
        await self._change(
            harvest_id, finish=state, error=None if problem is None else to_json(problem)
        )


def record_key(harvest: str) -> str:
    return f"ms:harvest:{harvest}"


def units_key(part: HarvestPart) -> str:
    return f"ms:harvest-units:{part.harvest}:{part.part}"


def unit_row(entry: UnitEntry, weight: int, requests: Iterable[int]) -> UnitRow:
    """Return the record of a unit whose shards are durable."""
    counts = {
        "units_done": 1,
        "weight_done": weight,
        "documents": entry.documents,
        "tokens": entry.tokens + entry.generated,
        "rows": entry.rows,
        "bytes": entry.bytes,
        "shards": len(entry.shards),
        "flagged": sum(shard.flagged for shard in entry.shards),
    }
    return kept_once(entry.unit, to_msgpack(entry), counts, requests=requests)


def _job(harvest: StoredHarvest, out: Out, model: ModelInfo, policies: Sequence[Policy]) -> Job:
    """Return the job of a part; a part that runs units also gets the policies and captures that
    apply to all traffic now.
    """
    runs = out.part.role == "run"
    job = Job(
        id=out.job,
        kind="harvest",
        model=harvest.model,
        prompts=[],
        sampling=Sampling(max_tokens=1),
        created=now(),
        work=HarvestWork(part=out.part).packed,
        tenant=harvest.tenant,
        key=harvest.key,
        priority=harvest.priority,
        metadata={"harvest": harvest.id},
        lora=harvest.lora if runs else None,
        global_captures=model.global_captures if runs else [],
        identity=harvest.identity,
    )
    if not runs:
        return job
    job = with_policies(job, policies)
    everyones = [captures_of(spec, model, [harvest.max_length])[0] for spec in job.global_captures]
    beside = [*probe_captures(job.probes), *(capture for capture in everyones if capture)]
    return msgspec.structs.replace(job, layers=harvest.depth(beside, exits=model.exits))


def _with_lines(harvest: StoredHarvest, lines: Sequence[Line]) -> StoredHarvest:
    return msgspec.structs.replace(
        harvest, source=msgspec.structs.replace(harvest.source, lines=list(lines))
    )


def _texts(record: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Decode the record's fields as text, except those that are packed."""
    return {
        name.decode(): value if name in (b"spec", b"error") else value.decode()
        for name, value in record.items()
    }


def _surveys(packed: Iterable[bytes], sae: str | None = None) -> list[SurveyEntry]:
    """Return a harvest's surveys, oldest first; with `sae`, only those of its features."""
    return [
        entry
        for entry in sorted((from_json(raw, SurveyEntry) for raw in packed), key=lambda e: e.job)
        if sae is None or (entry.survey.sae is not None and entry.survey.sae.name == sae)
    ]


def _view(record: Mapping[str, Any], jobs: list[str]) -> HarvestView:
    harvest = from_msgpack(record["spec"], StoredHarvest)
    fields = {name: record[name] for name in HarvestView.__struct_fields__ if name in record}
    fields |= {name: getattr(harvest, name) for name in _OF_HARVEST}
    if "error" in record:
        fields["error"] = from_json(record["error"], Problem)
    view = msgspec.convert(fields, HarvestView, strict=False)  # numbers are texts in Redis
    state = view.state
    reason = view.reason
    if state == "running" and record.get("trouble"):
        state = "paused"
        reason = record["trouble"]
    if record["wanted"] == "cancel" and state not in OVER:
        reason = "being cancelled"
    paused_at = float(record.get("paused_at", 0)) if view.state == "paused" else 0.0
    end = view.finished or paused_at or now()
    active = 0.0
    if view.started is not None:
        active = max(1e-9, end - view.started - float(record.get("paused_s", 0)))
    weight = int(record.get("weight", 0))
    share = int(record.get("weight_done", 0)) / weight if weight else 0.0
    if state == "succeeded":
        share = 1.0
    consumers = harvest.stream.consumers if harvest.stream else []
    return msgspec.structs.replace(
        view,
        state=state,
        reason=reason,
        share=share,
        tokens_s=view.tokens / active if active else 0.0,
        left_s=active * (1 - share) / share if share and state not in OVER else None,
        jobs=sorted(jobs),
        acknowledged={consumer: int(record.get(f"ack:{consumer}", 0)) for consumer in consumers},
    )
