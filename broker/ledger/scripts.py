"""Which Lua scripts change the ledger, and in which order do they take their arguments?

Every change of a job is one script in `lua/`, so that it is atomic. The tables of states and problems that the scripts read
are generated from `schemas`, so that there is one truth. The packers below are the scripts' typed signatures.
"""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...schemas.base import now, to_json, to_msgpack
from ...schemas.errors import STATUS_OF_KIND, MidstreamError
from ...schemas.jobs import TERMINAL, TRANSITIONS, Job, State
from ...schemas.keys import unscoped
from ...schemas.receipts import LostRange, Receipt
from ...schemas.settings import Settings
from ...schemas.source_runs import Run
from ...schemas.steering import Module, Proposal
from ...schemas.sweep_units import Units
from ...schemas.version import __version__
from ..queue.celery_app import SEPARATOR, channels_of
from ..queue.messages import SENT_CHANNEL, templates
from .dispatch import STEPS, URGENCY, cost_of
from .tenants import limits_of

#: A job that has been queued this long without being claimed is looked for in the broker's lists.
QUEUED_LOOK_S = 10.0
#: Events of a sweep besides its cells, at most: every attempt has a few.
SWEEP_EVENTS = 1000
#: How long it is remembered up to where a stream of receipts was committed; then its worker is long gone. (One that comes back
#: all the same says that what it had before is lost, which concerns nobody any more, and goes on.)
MARK_TTL_S = 30 * 24 * 3600
#: Blobs outlive the jobs that name them: they were stored before, and a repeated submit refreshes them.
BLOB_TTL_FACTOR = 3

NAMES = (
    "submit", "claim", "store", "fail", "cancel", "cancelled", "release", "release_boots", "renew", "emit",
    "settle", "lost", "sweep", "look_again", "forget_captures", "removed_captures", "desync",
    "propose", "commit", "abort", "put_module", "delete_module", "delete_run", "keep_units", "top_up", "recount", "recounted",
    "list_modules", "forget_workers",
)  # fmt: skip

#: Place among the arguments of `submit`: the first behind the context.
FILL = 7
#: What every script begins with, in this order.
PARTS = ("record", "announce", "message", "dispatch", "prelude")

#: The hash field that gets the time at which a state was entered.
STAMP: dict[State, str] = {
    State.QUEUED: "queued",
    State.RUNNING: "started",
    State.CANCELLING: "cancelling",
    **dict.fromkeys(TERMINAL, "finished"),
}

Argument = bytes | str | int | float
#: Number of the unit, its packed record, and its event as JSON; no event: it is no cell.
KeptUnit = tuple[int, bytes, bytes]


class Registry(Protocol):
    """A redis-py client, synchronous or asynchronous."""

    def register_script(self, script: str) -> Any: ...


class Scripts:
    """The scripts bound to a client: `scripts.claim(args=…)`; awaitable when the client is. Reloaded after a Redis restart."""

    def __init__(self, client: Registry) -> None:
        self._bound = {name: client.register_script(source(name)) for name in NAMES}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._bound[name]
        except KeyError:
            raise AttributeError(name) from None


@cache
def source(name: str) -> str:
    """The whole text of a script: generated tables, prelude, body."""
    folder = Path(__file__).parent / "lua"
    return "\n".join([_tables(), *[(folder / f"{part}.lua").read_text() for part in (*PARTS, name)]])


def _tables() -> str:
    allowed = {state: dict.fromkeys(following, True) for state, following in TRANSITIONS.items()}
    problems = {kind: [(problem := MidstreamError(kind, "").problem()).title, problem.status] for kind in STATUS_OF_KIND}
    return "\n".join(
        [
            f"local VERSION = {_lua(__version__)}",
            f"local ALLOWED = {_lua(allowed)}",
            f"local TERMINAL = {_lua(dict.fromkeys(TERMINAL, True))}",
            f"local STAMP = {_lua(STAMP)}",
            f"local function PROBLEMS() return {_lua(problems)} end",  # built only where a job fails
            f"local STEPS = {_lua(STEPS)}",
            f"local URGENCY = {_lua(URGENCY)}",
            *[f"local function {name}(of) return {expression} end" for name, expression in templates().items()],
            f"local SEPARATOR = {_lua(SEPARATOR)}",
            f"local SENT_CHANNEL = {_lua(SENT_CHANNEL)}",
            f"local QUEUED_LOOK_S = {QUEUED_LOOK_S}",
            f"local SWEEP_EVENTS = {SWEEP_EVENTS}",
            f"local MARK_TTL_S = {MARK_TTL_S}",
        ]
    )


def _lua(value: Any) -> str:
    """A Lua literal of a constant; strings here are our own identifiers."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"[{_lua(key)}]={_lua(item)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "{" + ",".join(map(_lua, value)) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{value}'"
    return repr(value)


def context(settings: Settings, at: float | None = None) -> list[Argument]:
    """The seven arguments that every script begins with; `at` is the time, in seconds since the epoch."""
    return [
        repr(now() if at is None else at), settings.result_ttl_s, settings.event_limit, settings.max_attempts, settings.on_desync,
        settings.dispatch_window, channels_of(settings.redis_url),
    ]  # fmt: skip


def asked_requests(job: Job) -> int:
    """How many of the job's prompts have an intervention or a capture, and so get a receipt from every rank. (None of a sweep's, which
    reads its receipts itself.)"""
    return sum(1 for captures, steering in zip_longest(job.captures, job.steering) if captures or steering)


def _callback(job: Job) -> bytes | str:
    """With the key whose secret signs what is told."""
    return to_json(msgspec.structs.replace(job.callback, key=job.key)) if job.callback else ""


def stored_tags(job: Job) -> list[str]:
    """The tags under which the job's captures become files; the user's own first."""
    if job.sweep is not None:
        return ["base"] if job.sweep.ablation else ["base", "source"]
    found = [capture.tag for captures in job.captures for capture in captures if "filesystem" in capture.consumers]
    return list(dict.fromkeys(found))


def submit(
    settings: Settings,
    job: Job,
    blobs: Mapping[str, bytes],
    pinned: Iterable[str],
    idempotency: tuple[str, str] | None,
    written_by: str,
    operators: Collection[str] = (),
) -> list[Argument]:
    """A blob without bytes is one that is copied from what is pinned. `operators`: tags that its user did not ask for. At
    `FILL` it is to be said how full Redis is, in percent."""
    key, body = idempotency or ("", "")
    blobs = {**dict.fromkeys(pinned, b""), **blobs}
    flat = [part for pair in blobs.items() for part in pair]
    tags = stored_tags(job)
    requests = len(job.prompts) if job.sweep is None else Units(job.sweep).requests
    return [
        *context(settings), 0.0,
        job.id, to_msgpack(job), repr(job.created), job.kind, job.model, requests, asked_requests(job),
        int(any(job.captures) or job.sweep is not None), int(any(job.steering)), to_json(job.metadata), written_by, key, body,
        BLOB_TTL_FACTOR * settings.result_ttl_s, to_json(tags) if tags else "", to_json(job.modules),
        job.sweep.num_cells if job.sweep is not None else 0, to_json(job.runs), job.run,
        to_msgpack(Run(name=job.run, model=job.model, job=job.id, tag=tags[0], created=job.created)) if job.run else "",
        job.tenant, job.priority, "" if job.expires is None else repr(job.expires), _callback(job),
        cost_of(job), int(bool(set(tags) - set(operators))), to_json(limits_of(settings)), *flat,
    ]  # fmt: skip


def claim(settings: Settings, job_id: str, worker: str, boot: str, ranks: int, global_version: int, everyone: bool) -> list[Argument]:
    """With a name of its own, by which the same call is known when redis-py repeats it."""
    return [*context(settings), job_id, worker, boot, ranks, settings.lease_s, global_version, int(everyone), secrets.token_hex(8)]


def of_attempt(settings: Settings, job_id: str, attempt: int, *rest: Argument) -> list[Argument]:
    """What every script of a worker's attempt begins with."""
    return [*context(settings), job_id, attempt, *rest]


def renew(settings: Settings, worker: str, boot: str, held: Mapping[str, int]) -> list[Argument]:
    return [*context(settings), worker, boot, settings.lease_s, *[part for pair in held.items() for part in pair]]


def settle(settings: Settings, receipts: Iterable[tuple[int, Receipt]]) -> list[Argument]:
    """`receipts` ascending by sequence number."""
    arguments = context(settings)
    for seq, told in receipts:
        arguments += (
            seq, told.job, told.request, told.rank, told.pp, told.attempt, told.verdict,
            to_msgpack(told), sum(file.bytes for file in told.files), sum(file.rows for file in told.files),
            f"{told.checksum}:{told.actions}:{told.epoch}:{told.applied}", f"{told.worker}\0{told.boot}\0{told.kind}\0{told.message}",
        )  # fmt: skip
    return arguments


def keep_units(
    settings: Settings, job_id: str, attempt: int, width: int, ranks: int, stages: int, units: Iterable[KeptUnit]
) -> list[Argument]:
    return of_attempt(settings, job_id, attempt, width, ranks, stages, *[part for unit in units for part in unit])


def lost(settings: Settings, worker: str, rank: int, lost_range: LostRange) -> list[Argument]:
    return [*context(settings), lost_range.first, lost_range.last, worker, rank, lost_range.message, *lost_range.jobs]


def propose(settings: Settings, model: str, proposal: Proposal, steering: bytes, blobs: Mapping[str, bytes]) -> list[Argument]:
    """`steering`: the proposal's, packed by itself."""
    return [
        *context(settings), model, proposal.id, proposal.steering.version, repr(proposal.deadline), to_msgpack(proposal), steering,
        *_tensors(proposal.steering.tensors, blobs),
    ]  # fmt: skip


def put_module(settings: Settings, module: Module, former: bytes, other: bool, blobs: Mapping[str, bytes]) -> list[Argument]:
    """`former`: as it is stored, empty for none; `other`: its content is not the module's."""
    return [
        *context(settings), module.model, module.name, to_msgpack(module), former, int(other), unscoped(module.name)[0],
        size_of(module), to_json(limits_of(settings)), *_tensors(module.tensors, blobs),
    ]  # fmt: skip


def size_of(module: Module) -> int:
    """Bytes that a module counts with: its vectors, and the record that names them."""
    return module.bytes + len(to_msgpack(module))


def _tensors(names: Sequence[str], blobs: Mapping[str, bytes]) -> list[Argument]:
    """How many, and (name, bytes) of each; no bytes: it is pinned already."""
    return [len(names), *[part for name in names for part in (name, blobs.get(name, b""))]]


def text(reply: Sequence[Any]) -> list[str]:
    """A script's flat reply as strings."""
    return [part.decode() if isinstance(part, bytes) else str(part) for part in reply]
