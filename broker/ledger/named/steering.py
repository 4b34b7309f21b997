"""Steering that is stored for a model (named modules, global steering, their tensors), and the
workers' reports.

The tensors of modules and of global steering are *pinned*: kept without expiry under their content
hash, while at least one owner (a module, the global steering of a model) names them. A job gets its
own copies: those of modules when it is accepted, those of global steering when it is claimed.
"""

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.base.records import from_msgpack, now, to_msgpack
from ....schemas.base.tensors import Tensor
from ....schemas.base.version import __version__
from ....schemas.jobs.models import WorkerInfo
from ....schemas.requests.steering import (
    GlobalSteering,
    SteeringTemplate,
    WorkerSteering,
)
from ..core import scripts
from ..jobs.ledger import LedgerPart, reachable, unreadable
from .registry import size_of

log = logging.getLogger(__name__)

#: Reports count only while their worker lives, so this only removes reports of workers that are
#: gone.
REPORT_TTL_S = 24 * 3600
#: Marks of workers whose ranks disagree: worker → reason.
DESYNC_KEY = "ms:desync"
#: Resolved disagreements: worker → "boot/epoch": receipts of its action ledgers up to this epoch no
#: longer mark it.
SETTLED_KEY = "ms:desync-settled"


class Look(NamedTuple):
    """Markers by which a worker notices what it should do. Empty: nothing of that kind."""

    version: int  # of global steering
    ask: str  # id of the last query
    desync: str  # why the worker's ranks need a resync
    checks: list[str]  # ids of the open checks of global steering


class Account(NamedTuple):
    """A live worker and its last report since its start; None: no report yet."""

    info: WorkerInfo
    report: WorkerSteering | None

    def answers(self, ask: str) -> bool:
        """Return whether the report was made after the query `ask`: queries are numbered."""
        return (
            self.report is not None and self.report.ask != "" and int(self.report.ask) >= int(ask)
        )


class LedgerSteering(LedgerPart):
    """Steering in a ledger's Redis. Belongs to the ledger's event loop.

    All calls raise MidstreamError("unavailable") while Redis is unreachable.
    """

    @property
    def _check_ttl(self) -> int:
        """Seconds after which a check whose process died is dropped."""
        return math.ceil(2 * self._settings.steering_wait_s)

    # --- the worker's side

    @reachable
    async def look(self, model: str, worker: str) -> Look:
        """Return the current markers; one round trip."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(_state(model), "global_version", "ask").hget(DESYNC_KEY, worker)
            pipe.zrangebyscore(_checks(model), now(), "inf")
            (version, ask), desync, checks = await pipe.execute()
        return Look(int(version or 0), _text(ask), _text(desync), scripts.text(checks))

    @reachable
    async def checked_entries(self, check: str) -> list[SteeringTemplate]:
        """Return the entries of a check; none if it is over.

        Raises MidstreamError("version_mismatch"), as all reads of stored items do, for an item that
        another version of Midstream stored and this one cannot read; the error names both versions.
        """
        packed, writer = await self._redis.hmget(_check(check), "entries", "by")
        if packed is None:
            return []
        with Translated(
            msgspec.DecodeError,
            lambda error: unreadable("the checked global steering was stored", error, writer),
        ):
            return from_msgpack(packed, list[SteeringTemplate])

    @reachable
    async def answer(self, check: str, boot: str, refusal: str) -> None:
        """Store a worker's answer to a check: which of its ranks cannot apply the entries, and why;
        empty if all can.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(_check(check), _answer_of(boot), refusal)
            pipe.expire(_check(check), self._check_ttl)  # it may be over
            await pipe.execute()

    @reachable
    async def report(self, report: WorkerSteering) -> None:
        """Store a worker's report on itself; it replaces the previous one."""
        await self._redis.set(_report(report.worker), to_msgpack(report), ex=REPORT_TTL_S)

    @reachable
    async def clear_desync(self, worker: str, boot: str, epoch: int = 0) -> None:
        """Clear the worker's mark: its ranks agree again.

        Receipts of this `boot`'s action ledgers before `epoch` no longer mark it.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(DESYNC_KEY, worker)
            pipe.hset(SETTLED_KEY, worker, f"{boot}/{epoch - 1}")
            await pipe.execute()

    @reachable
    async def get_tensor(self, name: str, check: str = "") -> Tensor:
        """Return a tensor by content hash: a pinned one, or one of a job or of the check.

        Raises MidstreamError: `intervention_failed` if it is gone, `version_mismatch`.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.mget(f"ms:pinned:{name}", f"ms:blob:{name}").hget(_check(check), name)
            (pinned, blob), checked = await pipe.execute()
        raw = next((raw for raw in (pinned, blob, checked) if raw is not None), None)
        if raw is None:
            raise MidstreamError("intervention_failed", f"the tensor {name} is no longer stored")
        with Translated(
            msgspec.DecodeError, lambda error: unreadable(f"the tensor {name} was stored", error)
        ):
            return from_msgpack(raw, Tensor)

    # --- workers' reports

    @reachable
    async def ask(self, model: str) -> str:
        """Send a query to the workers of `model`; they answer with a new report (see
        `Account.answers`).
        """
        return str(await self._redis.hincrby(_state(model), "ask", 1))

    @reachable
    async def accounts(self, model: str | None = None) -> list[Account]:
        """Return the live workers (of `model`, or all) and their last reports, by worker."""
        live = [
            info for info in await self._ledger.workers() if model is None or info.model == model
        ]
        raw = await self._redis.mget([_report(info.worker) for info in live]) if live else []
        reports = [_decoded(packed) for packed in raw]
        return [
            Account(info, report if report is not None and report.boot == info.boot else None)
            for info, report in zip(live, reports, strict=True)
        ]

    # --- global steering

    @reachable
    async def open_check(
        self, model: str, entries: Sequence[SteeringTemplate], blobs: Mapping[str, bytes | Tensor]
    ) -> str:
        """Ask the workers of `model` whether their ranks could apply `entries`; return the id of
        the question, which is open for `steering_wait_s`. Nothing is applied yet.

        `blobs`: content hash → tensor, of those that may not be pinned yet. Raises
        MidstreamError("overloaded") if Redis is too full for them.
        """
        raw = scripts.packed_blobs(blobs)
        if entries:  # clearing is allowed however full Redis is
            await self._ledger.check_room(size_of(raw))
        check = secrets.token_hex(8)
        at = now()
        async with self._redis.pipeline(transaction=True) as pipe:
            fields = {"entries": to_msgpack(list(entries)), "by": __version__}
            pipe.hset(_check(check), mapping=raw | fields)
            pipe.expire(_check(check), self._check_ttl)
            pipe.zremrangebyscore(_checks(model), "-inf", at)
            pipe.zadd(_checks(model), {check: at + self._settings.steering_wait_s})
            pipe.expire(_checks(model), self._check_ttl)
            await pipe.execute()
        self._ledger.took_room(size_of(raw))
        return check

    @reachable
    async def answers(self, model: str, check: str) -> dict[str, str | None]:
        """Return the answer of each live worker, see `answer`; None: it has not answered since its
        start.
        """
        live = [info for info in await self._ledger.workers() if info.model == model]
        fields = [_answer_of(info.boot) for info in live]
        raw = await self._redis.hmget(_check(check), fields) if live else []
        return {
            info.worker: None if refusal is None else _text(refusal)
            for info, refusal in zip(live, raw, strict=True)
        }

    @reachable
    async def close_check(self, model: str, check: str) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem(_checks(model), check).delete(_check(check))
            await pipe.execute()

    @reachable
    async def set_global(
        self, model: str, check: str, entries: Sequence[SteeringTemplate]
    ) -> GlobalSteering:
        """Make the entries of a check, which the ranks have passed, the global steering under which
        later claims begin.

        Raises MidstreamError("conflict") if the check has expired, or a tensor was neither supplied
        with it nor is pinned: nothing has changed then.
        """
        steering = GlobalSteering(entries=list(entries))
        reply = await self._run(
            "set_global",
            model=model,
            check=check,
            tensors=steering.tensors,
            steers=bool(entries),
        )
        outcome, *detail = scripts.text(reply)
        if outcome == "missing":
            raise MidstreamError("conflict", f"the tensor {detail[0]} is not stored: send it again")
        if outcome == "gone":
            raise MidstreamError(
                "conflict",
                f"the change to the global steering of {model!r} took too long, and was not made",
            )
        version, changed = detail
        return msgspec.structs.replace(steering, version=int(version), changed=float(changed))

    @reachable
    async def current(self, model: str) -> GlobalSteering:
        fields = ("global_version", "entries", "changed")
        version, entries, changed = await self._redis.hmget(_state(model), fields)
        return GlobalSteering(
            version=int(version or 0),
            entries=[] if entries is None else await self._entries(model, entries),
            changed=float(changed or 0),
        )

    async def _entries(self, model: str, packed: bytes) -> list[SteeringTemplate]:
        try:
            return from_msgpack(packed, list[SteeringTemplate])
        except msgspec.DecodeError as error:
            writer = await self._redis.hget(_state(model), "current_by")
            what = f"the global steering of {model!r} was stored"
            raise unreadable(what, error, writer) from error


def _decoded(packed: bytes | None) -> WorkerSteering | None:
    try:
        return None if packed is None else from_msgpack(packed, WorkerSteering)
    except msgspec.ValidationError as error:  # from another version: treated as no report
        log.warning("cannot read a worker's report: %s", error)
        return None


def _state(model: str) -> str:
    return f"ms:steering:{model}"


def _checks(model: str) -> str:
    return f"ms:steering-checks:{model}"


def _check(check: str) -> str:
    return f"ms:steering-check:{check}"


def _answer_of(boot: str) -> str:
    return f"answer:{boot}"


def _report(worker: str) -> str:
    return f"ms:steering-report:{worker}"


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode()
