"""The Lua scripts that change the ledger, and their arguments.

Every change of a job is one script in `lua/`, so that it is atomic. The tables of states and
problems that the scripts read are generated from `schemas`, the single source.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgspec
from zlib_ng import zlib_ng

from ....schemas.artifacts.conditions import StoredPolicy
from ....schemas.artifacts.hits import hit_of, text_of
from ....schemas.artifacts.loras import use_of
from ....schemas.artifacts.probes import ProbeScore
from ....schemas.artifacts.registered import Registered
from ....schemas.base.errors import STATUS_OF_KIND, MidstreamError, Translated
from ....schemas.base.limits import POLICY_DAYS
from ....schemas.base.records import from_msgpack, now, to_json, to_msgpack
from ....schemas.base.tensors import PackedBlobs, Tensor
from ....schemas.base.version import __version__
from ....schemas.jobs.job_requests import Idempotency
from ....schemas.jobs.jobs import TERMINAL, TRANSITIONS, Job, State
from ....schemas.jobs.kinds import KINDS
from ....schemas.jobs.models import SHOWN_IDENTITY
from ....schemas.jobs.queues import COMPARISONS
from ....schemas.jobs.receipts import (
    PLACED,
    STORE_UNAVAILABLE,
    CapturedFile,
    NumberedReceipt,
    Receipt,
)
from ....schemas.requests.source_runs import RunRecord
from ....schemas.settings.settings import Settings
from ...queue.celery_app import SEPARATOR, channels_of
from ...queue.messages import ORIGIN, TASK_CHANNELS, templates
from . import script_arguments
from .dispatch import STEPS, URGENCY
from .record import accepted
from .script_arguments import binary
from .tenants import limits_of

#: A job that has been queued this long without being claimed is searched for in the broker's lists.
QUEUED_LOOK_S = 10.0
#: A job that waits for the artifact store is sent again after this many seconds.
SHELVED_S = 10.0
#: Limit on a sweep's events that are not cells. Each attempt adds a few, so it is rarely reached.
SWEEP_EVENTS = 1000
#: Retention of the mark of a receipt stream; by then its worker is long gone. (A worker that
#: returns anyway reports its earlier receipts as lost, which no longer matters, and continues.)
MARK_TTL_S = 30 * 24 * 3600
#: Blobs are kept for this many result TTLs: a blob is stored before the jobs that name it, and must
#: outlive them. A repeated submit extends its TTL.
BLOB_TTL_FACTOR = 3

#: Folder of the scripts; file names are unique across its subfolders.
LUA = Path(__file__).parents[1] / "lua"
#: Included at the start of every script, in this order.
PARTS = (
    *("arguments", "job", "hits", "announce", "usage", "message", "dispatch", "transitions"),
    "pins",
)

#: The hash field for the time at which a state was entered.
STAMP: dict[State, str] = {
    State.QUEUED: "queued",
    State.RUNNING: "started",
    State.CANCELLING: "cancelling",
    **dict.fromkeys(TERMINAL, "finished"),
}

#: A job of more bytes than this, by estimate, is packed and compressed in parts of about this size.
PART = 1 << 16
#: Level of zlib, the fastest but one; and how what it returns begins, as no packed job does.
COMPRESSION = 2
_COMPRESSED = b"x"
#: What a prompt, and an entry of its steering or captures, take to pack: as long as so many bytes.
PROMPT = 1 << 8
ENTRY = 1 << 4
#: Fields of a job with an item for each prompt, in the order in which they are packed.
_BY_PROMPT = ("prompts", "steering", "captures")
#: A list of one empty list, which stands in for a field. No text can contain it after the field's
#: name: that is not UTF-8.
_STAND_IN = b"\x91\x90"


class ScriptClient(Protocol):
    """A redis-py client, synchronous or asynchronous."""

    def register_script(self, script: str) -> Any: ...


class Scripts:
    """The scripts of a folder bound to a client: `scripts.claim(args=…)`; awaitable when the client
    is.

    Reloaded after a Redis restart.
    """

    def __init__(
        self, client: ScriptClient, folder: Path = LUA, parts: tuple[str, ...] = PARTS
    ) -> None:
        self._bound = {
            name: client.register_script(text) for name, text in sources(folder, parts).items()
        }

    def __getattr__(self, name: str) -> Any:
        with Translated(KeyError, lambda error: AttributeError(name), hidden=True):
            return self._bound[name]


@cache
def sources(folder: Path = LUA, parts: tuple[str, ...] = PARTS) -> dict[str, str]:
    """Return name → complete text of the scripts of a folder, the ledger's or a package's:
    generated tables, shared functions, the script.

    `parts`: the ledger's functions that they use. Those of a package are in its folder `shared`.
    """
    shared = [LUA / "shared" / f"{part}.lua" for part in parts]
    if folder != LUA:
        shared += sorted(folder.glob("shared/*.lua"))
    before = "\n".join([_tables(), *(path.read_text() for path in shared)])
    return {
        path.stem: f"{before}\n{path.read_text()}"
        for path in sorted(folder.rglob("*.lua"))
        if path.parent.name != "shared"
    }


def _tables() -> str:
    allowed = {state: dict.fromkeys(following, True) for state, following in TRANSITIONS.items()}
    of_kind = {kind: MidstreamError(kind, "").problem() for kind in STATUS_OF_KIND}
    problems = {kind: [problem.title, problem.status] for kind, problem in of_kind.items()}
    constants = {
        "VERSION": __version__,
        "ALLOWED": allowed,
        "TERMINAL": dict.fromkeys(TERMINAL, True),
        "STAMP": STAMP,
        "STEPS": STEPS,
        "URGENCY": URGENCY,
        "SEPARATOR": SEPARATOR,
        "TASK_CHANNELS": TASK_CHANNELS,
        "ORIGIN": ORIGIN,
        "QUEUED_LOOK_S": QUEUED_LOOK_S,
        "SWEEP_EVENTS": SWEEP_EVENTS,
        "READS_RECEIPTS": {of: row.reads_receipts for of, row in KINDS.items()},
        "GRIDS": {of: row.grid for of, row in KINDS.items()},
        "MARK_TTL_S": MARK_TTL_S,
        "POLICY_DAYS": POLICY_DAYS,
        "SHELVED_S": SHELVED_S,
        "SHOWN_IDENTITY": SHOWN_IDENTITY,
        "COMPARISONS": COMPARISONS,
        "STORE_UNAVAILABLE": STORE_UNAVAILABLE,
    }
    return "\n".join(
        [
            *(f"local {name} = {_lua(value)}" for name, value in constants.items()),
            f"local function PROBLEMS() return {_lua(problems)} end",  # built only when a job fails
            *(
                f"local function {name}(of) return {expression} end"
                for name, expression in templates().items()
            ),
        ]
    )


def _lua(value: Any) -> str:
    """Return the Lua literal of a constant. Strings are not escaped: they are all identifiers."""
    if isinstance(value, Mapping):
        return (
            "{"
            + ",".join(f"[{_lua(key)}]={_lua(item)}" for key, item in sorted(value.items()))
            + "}"
        )
    if isinstance(value, list):
        return "{" + ",".join(map(_lua, value)) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}'" if isinstance(value, str) else repr(value)


def pack(settings: Settings, at: float | None = None, **own: Any) -> list[bytes]:
    """Return ARGV of a ledger script: the common arguments and its own; `at` is the time, in
    seconds since the epoch.
    """
    return script_arguments.pack(
        now() if at is None else at,
        result_ttl=settings.result_ttl_s,
        event_limit=settings.tuning.event_limit,
        max_attempts=settings.max_attempts,
        on_desync=settings.on_desync,
        window=settings.tuning.dispatch_window,
        store_wait=settings.artifact_wait_s,
        channels=channels_of(settings.redis_url),
        **own,
    )


def stored_tags(job: Job) -> list[str]:
    """Return the tags under which the job's captures become files; the user's tags first."""
    result = [*job.opened.facts.tags] + [
        capture.tag
        for captures in job.captures
        for capture in captures
        if "filesystem" in capture.consumers
    ]
    result += [spec.tag for spec in job.global_captures if "filesystem" in spec.consumers]
    return list(dict.fromkeys(result))


def _weight(job: Job) -> int:
    """Return about how many bytes the job takes when it is packed."""
    entries = sum(map(len, job.steering)) + sum(map(len, job.captures))
    texts = sum(PROMPT + len(each.token_ids) + len(each.text or "") for each in job.prompts)
    return texts + ENTRY * entries


def _record(job: Job) -> Iterator[bytes]:
    """Yield `to_msgpack(job)` in parts."""
    lists: dict[str, Any] = {name: getattr(job, name) for name in _BY_PROMPT if getattr(job, name)}
    rest = to_msgpack(msgspec.structs.replace(job, **{name: [[]] for name in lists}))
    for name, items in lists.items():
        before, _, rest = rest.partition(to_msgpack(name) + _STAND_IN)
        # the header of an array of as many items
        part = [before, to_msgpack(name), to_msgpack([None] * len(items))[: -len(items)]]
        weight = 0
        for item in items:
            part.append(to_msgpack(item))
            weight += PROMPT + len(part[-1])
            if weight >= PART:
                yield b"".join(part)
                part = []
                weight = 0
        yield b"".join(part)
    if rest:
        yield rest


async def record(job: Job) -> bytes:
    """Return the job as it is stored for workers, without its title; `recorded` inverts it.

    A large job is compressed part by part, and is never in memory as a whole: Redis takes, logs and
    keeps much less, on its one thread.
    """
    job = msgspec.structs.replace(job, title="")  # workers of older versions refuse the field
    parts: Iterable[bytes] = _record(job)
    if _weight(job) < PART:
        packed = to_msgpack(job)
        if len(packed) < PART:
            return packed
        parts = [packed]
    compressor = zlib_ng.compressobj(COMPRESSION)
    compressed = []
    for part in parts:
        compressed.append(compressor.compress(part))
        await asyncio.sleep(0)
    return b"".join([*compressed, compressor.flush()])


def recorded(raw: bytes) -> Job:
    """Return the job of a `record`. Raises msgspec.ValidationError."""
    packed = zlib_ng.decompress(raw) if raw.startswith(_COMPRESSED) else raw
    return from_msgpack(packed, Job)


def submit(
    settings: Settings,
    job: Job,
    spec: bytes,
    blobs: PackedBlobs,
    pinned: Iterable[str],
    idempotency: Idempotency | None,
    operator_tags: Collection[str] = (),
    request: bytes = b"",
    room: int = 0,
) -> list[bytes]:
    """Return ARGV of `submit` except its last two items: the memory that Redis uses, and its limit.

    `spec`: the job as `record` returns it. `pinned`: blobs copied from pinned tensors.
    `operator_tags`: tags of captures that the job's user did not request. `request`: its body as
    JSON; empty: it is not kept. `room`: the memory that is kept for the job until it has ended.
    """
    tags = stored_tags(job)
    captured = bool(set(tags) - set(operator_tags))
    key, body = idempotency or (None, None)
    run = (
        RunRecord(
            name=job.run,
            model=job.model,
            job=job.id,
            tag=tags[0],
            created=job.created,
            lora=use_of(job.lora),
            identity=job.identity,
        )
        if job.run
        else None
    )
    side = job.opened.facts.side
    return pack(
        settings,
        id=job.id,
        record={**accepted(job, request), "room": room},
        side=None if side is None else side._asdict(),
        idem=key,
        body=body,
        blob_ttl=BLOB_TTL_FACTOR * settings.result_ttl_s,
        tags=to_json(tags) if tags else None,
        packed_run=to_msgpack(run) if run else None,
        files=captured or job.opened.facts.writes_files,
        # files of the work itself are charged as they are kept
        charged=captured and not job.opened.facts.writes_files,
        limits=limits_of(settings),
        blobs=tensors({**dict.fromkeys(pinned, b""), **blobs}),
        spec=spec,
    )


def settle(settings: Settings, receipts: Iterable[NumberedReceipt]) -> list[bytes]:
    """Return ARGV of `settle`. `receipts`: ascending by sequence number."""
    rows = [
        (
            seq,
            report.job,
            report.request,
            report.rank,
            report.pp,
            report.attempt,
            report.verdict,
            binary(to_msgpack(report)),
            *_size_of(report.files),
            f"{report.checksum}:{report.actions}:{report.epoch}:{report.applied}",
            f"{report.worker}\0{report.boot}\0{report.kind}\0{report.message}",
            any(score.flagged for score in report.scores),
            [
                part
                for score in report.scores
                if score.policy is not None and score.policy.acts and score.triggered
                for part in (
                    score.policy.name,
                    score.triggers,
                    binary(_decision(report, score, score.policy)),
                )
            ],
            [
                part
                for score in report.scores
                if score.policy is not None
                for part in (
                    score.policy.name,
                    int(score.triggered),
                    int(score.triggered and score.policy.acts),
                    *_kept_hit(report.request, score, score.policy),
                )
            ],
        )
        for seq, report in receipts
    ]
    return pack(settings, receipts=rows, hits_kept=settings.hits_kept, hits_ttl=settings.hits_ttl_s)


def _kept_hit(
    request: int, score: ProbeScore, policy: StoredPolicy
) -> tuple[msgspec.Raw | bool, msgspec.Raw | bool]:
    """Return what is kept of a policy's first trigger on a prompt, and the tokens around it, both
    packed; False: nothing.
    """
    hit = hit_of(request, score, policy)
    text = text_of(score)
    return (
        hit is not None and binary(to_msgpack(hit)),
        text is not None and binary(to_msgpack(text)),
    )


def _decision(report: Receipt, score: ProbeScore, policy: StoredPolicy) -> bytes:
    """Return, as JSON, what webhooks say of a policy's decisions on a prompt: the number of
    triggers, and the first; null: a latch of the conversation was set before.
    """
    own = {name: getattr(policy, name) for name in ("version", "digest", "inherited")}
    first = next(iter(score.decisions), None)
    counted = {"request": report.request, "triggers": score.triggers, "first": first}
    return to_json({"policy": policy.name, **own, **counted})


def _size_of(files: Sequence[CapturedFile]) -> tuple[int, int]:
    """Return bytes and rows of captures; what a package's consumer writes is counted by the
    package.
    """
    captures = [file for file in files if file.layout != PLACED]
    return sum(file.bytes for file in captures), sum(file.rows for file in captures)


def size_of(record: Registered) -> int:
    """Return what an artifact counts towards its tenant's limit, in bytes: a module's vectors, and
    its record.
    """
    return getattr(record, "bytes", 0) + len(to_msgpack(record))


def packed_blobs(blobs: Mapping[str, bytes | Tensor]) -> dict[str, bytes]:
    return {
        name: to_msgpack(blob) if isinstance(blob, Tensor) else blob for name, blob in blobs.items()
    }


def tensors(blobs: PackedBlobs) -> list[tuple[str, msgspec.Raw | bool]]:
    """Return (name, bytes) of each blob; False instead of bytes if it is already pinned."""
    return [(name, binary(data) if data else False) for name, data in blobs.items()]


def text(reply: Sequence[Any]) -> list[str]:
    """Return a script's flat reply as strings."""
    return [part.decode() if isinstance(part, bytes) else str(part) for part in reply]
