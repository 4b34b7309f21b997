"""Desired steering state per model (named modules, global steering, their tensors), and the
workers' reports.

The tensors of modules and of global steering are *pinned*: kept without expiry under their content
hash, while at least one owner (a module, the global steering of a model, a proposal of it) names
them. A job gets its own copies when it is accepted.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ....schemas.access.keys import shown, unscoped
from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.base.records import from_msgpack, now, to_msgpack
from ....schemas.base.tensors import Tensor
from ....schemas.base.version import __version__
from ....schemas.jobs.models import WorkerInfo
from ....schemas.requests.steering import (
    Desired,
    GlobalSteering,
    Module,
    Proposal,
    SteeringTemplate,
    WorkerSteering,
)
from ..core import scripts
from ..core.tenants import MIB, refusal
from ..jobs.ledger import LedgerPart, reachable

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: Reports count only while their worker lives, so this only removes reports of workers that are
#: gone.
REPORT_TTL_S = 24 * 3600
#: Marks of workers whose ranks disagree: worker → reason.
DESYNC_KEY = "ms:desync"
#: Resolved disagreements: worker → "boot/epoch": receipts of its action ledgers up to this epoch no
#: longer mark it.
SETTLED_KEY = "ms:desync-settled"
#: Retries of a change that lost a race with another one.
RACES = 16
#: Assumed writer of items stored before versions were recorded.
UNKNOWN = "(unknown)"


class Kept(NamedTuple, Generic[T_co]):
    """A stored item of a model's steering: its kind, and the field with its writer's version."""

    kind: type[T_co]
    what: str
    written_by: str


CURRENT = Kept(GlobalSteering, "the global steering", "current_by")
PROPOSED = Kept(Proposal, "the proposed global steering", "proposal_by")


def a_module(name: str) -> Kept[Module]:
    return Kept(Module, f"the module {shown(name)!r}", f"module_by:{name}")


def unreadable(what: str, writer: str, error: msgspec.DecodeError) -> MidstreamError:
    return MidstreamError(
        "version_mismatch",
        (
            f"{what} was stored by midstream {writer}; midstream {__version__} cannot read "
            f"it: {error}; upgrade the older one, workers first"
        ),
    )


class Look(NamedTuple):
    """Markers by which a worker notices changes. Empty: none of that kind."""

    version: int  # of `Desired`
    proposal: str  # id of the proposal that should be prepared
    ask: str  # id of the last query
    desync: str  # why the worker's ranks need a resync
    # id of the committed proposal: versions may repeat if Redis lost its last second
    committed: str = ""


class Account(NamedTuple):
    """A live worker and its last report since its start; None: no report yet."""

    info: WorkerInfo
    report: WorkerSteering | None

    def answers(self, ask: str) -> bool:
        """Return whether the report was made after the query `ask`: queries are numbered."""
        return (
            self.report is not None and self.report.ask != "" and int(self.report.ask) >= int(ask)
        )


class Steering(LedgerPart):
    """The desired state in a ledger's Redis. Belongs to the ledger's event loop.

    All calls raise MidstreamError("unavailable") while Redis is unreachable.
    """

    # --- the worker's side

    @reachable
    async def desired(self, model: str) -> Desired:
        """Return a consistent snapshot of the state that a worker of `model` reconciles to, without
        expired proposals.

        Raises MidstreamError("version_mismatch"), as all reads of stored items do, for an item that
        another version of Midstream stored and this one cannot read; the error names both versions.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(_state(model), "version", "current", "proposal").hgetall(_modules(model))
            (version, current, packed), modules = await pipe.execute()
        proposal = None if packed is None else await self._read(model, PROPOSED, packed)
        return Desired(
            version=int(version or 0),
            current=GlobalSteering()
            if current is None
            else await self._read(model, CURRENT, current),
            proposal=proposal if proposal is not None and proposal.deadline > now() else None,
            modules={
                (text := name.decode()): await self._read(model, a_module(text), raw)
                for name, raw in sorted(modules.items())
            },
        )

    @reachable
    async def look(self, model: str, worker: str) -> Look:
        """Return the current markers; one round trip."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(_state(model), "version", "proposal_id", "ask", "committed_id").hget(
                DESYNC_KEY, worker
            )
            (version, proposal, ask, committed), desync = await pipe.execute()
        return Look(int(version or 0), _text(proposal), _text(ask), _text(desync), _text(committed))

    @reachable
    async def report(self, report: WorkerSteering) -> None:
        """Store a worker's report on itself; it replaces the previous one."""
        await self._redis.set(_report(report.worker), to_msgpack(report), ex=REPORT_TTL_S)

    @reachable
    async def clear_desync(self, worker: str, boot: str = "", epoch: int = 0) -> None:
        """Clear the worker's mark: its ranks agree again.

        Receipts of this `boot`'s action ledgers before `epoch` no longer mark it.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(DESYNC_KEY, worker)
            if boot:
                pipe.hset(SETTLED_KEY, worker, f"{boot}/{epoch - 1}")
            await pipe.execute()

    @reachable
    async def get_tensor(self, name: str) -> Tensor:
        """Return a tensor by content hash: a pinned one, or one of a job.

        Raises MidstreamError: `intervention_failed` if it is gone, `version_mismatch`.
        """
        pinned, blob = await self._redis.mget(f"ms:pinned:{name}", f"ms:blob:{name}")
        raw = blob if pinned is None else pinned
        if raw is None:
            raise MidstreamError("intervention_failed", f"the tensor {name} is no longer stored")
        with Translated(
            msgspec.DecodeError, lambda error: unreadable(f"the tensor {name}", UNKNOWN, error)
        ):
            return from_msgpack(raw, Tensor)

    # --- workers' reports

    @reachable
    async def ask(self, model: str) -> str:
        """Send a query to the workers of `model`; they answer with a new report (see
        `Account.answers`).
        """
        return str(await self._redis.hincrby(_state(model), "ask", 1))

    async def reports(self, model: str) -> list[WorkerSteering]:
        """Return the last report of each live worker of `model`, by worker; workers that have not
        reported since their start are left out.
        """
        return [
            account.report for account in await self.accounts(model) if account.report is not None
        ]

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
    async def propose(
        self, model: str, entries: Sequence[SteeringTemplate], blobs: Mapping[str, bytes | Tensor]
    ) -> Proposal:
        """Phase one: ask workers to prepare `entries` (none: clear) within `steering_wait_s`;
        nothing is applied yet.

        `blobs`: content hash → tensor, of those that may not be pinned yet. Raises
        MidstreamError("conflict") while another proposal is open, or if a tensor is neither
        supplied nor pinned; overloaded if Redis is too full for `entries`.
        """
        raw = _packed(blobs)
        if entries:  # clearing is allowed however full Redis is
            await self._ledger.check_room(_size(raw))
        for _ in range(RACES):
            # Numbers are never reused, even for uncommitted proposals: a rank never sees one number
            # with two contents.
            version = await self._redis.hincrby(_state(model), "global_numbers", 1)
            at = now()
            steering = GlobalSteering(version=version, entries=list(entries), changed=at)
            proposal = Proposal(
                id=secrets.token_hex(8),
                steering=steering,
                deadline=at + self._settings.steering_wait_s,
            )
            outcome, *detail = scripts.text(
                await self._scripts.propose(
                    args=scripts.propose(self._settings, model, proposal, to_msgpack(steering), raw)
                )
            )
            if outcome == "busy":
                raise MidstreamError(
                    "conflict",
                    f"another change to the global steering of {model!r} is in progress: try again",
                )
            _check_stored(outcome, detail)
            if outcome == "proposed":
                self._ledger.took_room(_size(raw))
                return proposal
        raise MidstreamError(
            "conflict",
            f"too many concurrent changes to the global steering of {model!r}: try again",
        )

    @reachable
    async def commit(self, model: str, proposal_id: str) -> GlobalSteering:
        """Phase two: make the proposal the desired state, under which all later jobs begin.

        Raises MidstreamError("conflict") if the proposal is no longer open: nothing has changed
        then.
        """
        outcome, *packed = await self._scripts.commit(
            args=scripts.pack(self._settings, model=model, id=proposal_id)
        )
        if outcome != b"committed":
            raise MidstreamError(
                "conflict",
                (
                    f"the change to the global steering of {model!r} was abandoned before it was "
                    "applied"
                ),
            )
        return await self._read(model, CURRENT, packed[0])

    @reachable
    async def abort(self, model: str, proposal_id: str) -> bool:
        """Abandon the proposal. False if it is no longer open."""
        outcome: bytes = await self._scripts.abort(
            args=scripts.pack(self._settings, model=model, id=proposal_id)
        )
        return outcome == b"aborted"

    # --- named modules

    @reachable
    async def put_module(
        self, module: Module, blobs: Mapping[str, bytes | Tensor]
    ) -> Module | None:
        """Point the name at this content; returns the module that it replaces, or None.

        The same content again changes at most the description: version and `created` stay. `blobs`
        as in `propose`. Raises MidstreamError("module_limit") if its tenant's limit is reached, and
        a 400 for a module larger than the limit.
        """
        raw = _packed(blobs)
        for _ in range(RACES):
            packed = await self._redis.hget(_modules(module.model), module.name)
            former = (
                None
                if packed is None
                else await self._read(module.model, a_module(module.name), packed)
            )
            same = former is not None and former.digest == module.digest
            stored = (
                msgspec.structs.replace(module, created=former.created)
                if former is not None and same
                else module
            )
            if stored == former:
                return former
            await self._ledger.check_room(_size(raw))
            outcome, *detail = scripts.text(
                await self._scripts.put_module(
                    args=scripts.put_module(self._settings, stored, packed, not same, raw)
                )
            )
            _check_stored(outcome, detail)
            if outcome == "refused":
                limit, used, allowed, _ = detail
                raise refusal(
                    unscoped(stored.name)[0],
                    limit,
                    int(used),
                    int(allowed),
                    -(-scripts.size_of(stored) // MIB),
                    None,
                )
            if outcome == "stored":
                self._ledger.took_room(_size(raw))
                return former
        raise MidstreamError(
            "conflict", f"too many concurrent changes to module {module.name!r}: try again"
        )

    @reachable
    async def delete_module(self, model: str, name: str) -> Module | None:
        """Delete the module and return it; None if there is no such module.

        Accepted jobs keep its content.
        """
        # raises for an unreadable module, which stays: the version that wrote it may need it
        await self.module(model, name)
        arguments = scripts.pack(self._settings, model=model, name=name, tenant=unscoped(name)[0])
        packed = await self._scripts.delete_module(args=arguments)
        return await self._read(model, a_module(name), packed) if packed else None

    @reachable
    async def standing(
        self, model: str, names: Sequence[str]
    ) -> tuple[dict[str, Module], GlobalSteering]:
        """Return a consistent snapshot of the modules with these names that exist, and of global
        steering.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(_state(model), "current")
            if names:
                pipe.hmget(_modules(model), list(names))
            current, *result = await pipe.execute()
        pairs = zip(names, result[0] if result else [], strict=True)
        modules = {
            name: await self._read(model, a_module(name), packed)
            for name, packed in pairs
            if packed is not None
        }
        return modules, GlobalSteering() if current is None else await self._read(
            model, CURRENT, current
        )

    async def _read(self, model: str, kept: Kept[T], packed: bytes) -> T:
        """Decode a stored item. Raises MidstreamError("version_mismatch")."""
        try:
            return from_msgpack(packed, kept.kind)
        except msgspec.DecodeError as error:
            writer = await self._redis.hget(_state(model), kept.written_by)
            raise unreadable(
                f"{kept.what} of {model!r}", _text(writer) or UNKNOWN, error
            ) from error

    async def module(self, model: str, name: str) -> Module | None:
        """Return the module of this name; None if there is none."""
        return (await self.standing(model, [name]))[0].get(name)

    @reachable
    async def modules(self, model: str) -> list[Module]:
        """Return every module of `model`, by name."""
        raw = await self._redis.hgetall(_modules(model))
        return [await self._read(model, a_module(name.decode()), raw[name]) for name in sorted(raw)]

    @reachable
    async def module_names(self, model: str) -> list[str]:
        return sorted(name.decode() for name in await self._redis.hkeys(_modules(model)))


def _decoded(packed: bytes | None) -> WorkerSteering | None:
    try:
        return None if packed is None else from_msgpack(packed, WorkerSteering)
    except msgspec.ValidationError as error:  # from another version: treated as no report
        log.warning("cannot read a worker's report: %s", error)
        return None


def _check_stored(outcome: str, detail: Sequence[str]) -> None:
    if outcome == "missing":
        raise MidstreamError("conflict", f"the tensor {detail[0]} is not stored: send it again")


def _packed(blobs: Mapping[str, bytes | Tensor]) -> dict[str, bytes]:
    return {
        name: to_msgpack(blob) if isinstance(blob, Tensor) else blob for name, blob in blobs.items()
    }


def _size(raw: Mapping[str, bytes]) -> int:
    return sum(map(len, raw.values()))


def _state(model: str) -> str:
    return f"ms:steering:{model}"


def _modules(model: str) -> str:
    return f"ms:modules:{model}"


def _report(worker: str) -> str:
    return f"ms:steering-report:{worker}"


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode()
