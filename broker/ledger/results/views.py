"""Views of a job's record: state, result, ticket, determinism."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np

from ....schemas.access.handling import Callback, Priority
from ....schemas.access.keys import DEFAULT_TENANT, shown
from ....schemas.artifacts.loras import LoraUse
from ....schemas.artifacts.probes import ProbeResult, ProbeScore
from ....schemas.base.errors import Problem, invalid
from ....schemas.base.records import from_json, from_msgpack, now
from ....schemas.base.settings import Settings
from ....schemas.jobs.jobs import (
    TERMINAL,
    CaptureResults,
    ConsumerReport,
    Determinism,
    FileEntry,
    JobResult,
    JobView,
    Output,
    RankReport,
    StageReport,
    State,
)
from ....schemas.jobs.receipts import CapturedFile, Receipt, receipt_decoder
from ....schemas.jobs.sweeps import StoredSweep
from ....schemas.prompts.selectors import as_ranges
from ....schemas.requests.harvest_work import HARVEST
from ....schemas.requests.readings import READER
from ....schemas.requests.specs import CaptureStatus
from .readings import readings
from .sweep_result import Records, sweep_result

#: The fields of `ms:job:{id}` that a view needs; not `spec`, which may be large.
FIELDS = [
    "state",
    "kind",
    "model",
    "attempt",
    "version",
    "created",
    "queued",
    "started",
    "generated",
    "cancelling",
    "finished",
    "worker",
    "capture_status",
    "receipts",
    "expected",
    "prompts",
    "error",
    "metadata",
    "captures",
    "steers",
    "everyone",
    "global_version",
    "retried",
    "modules",
    "runs",
    "run",
    "cells",
    "cells_expected",
    "tenant",
    "priority",
    "expires",
    "callback",
    "lora",
    "probed",
    "identity",
    "contents",
]

#: Ranges of positions that a detail lists; the rest are only counted.
SHOWN_RANGES = 8

_STREAM_ID = re.compile(r"^\d{1,20}(-\d{1,20})?$")
_CURSOR = re.compile(r"^(\d+(?:\.\d+)?):([A-Za-z0-9_]+)$")


class Facts(NamedTuple):
    """Fields of the record that a result needs in addition to the view."""

    captures: bool
    global_version: int
    retried: list[str]


def facts(values: Sequence[bytes | None]) -> Facts:
    record = dict(zip(FIELDS, values, strict=True))
    retried = record["retried"]
    return Facts(
        captures=record["captures"] == b"1",
        global_version=int(record["global_version"] or 0),
        retried=[] if retried is None else [retried.decode()],
    )


def view(job_id: str, values: Sequence[bytes | None], settings: Settings) -> JobView | None:
    """`values` as HMGET returns them for `FIELDS`; None if there is no such job.

    A result past its retention reads `expired`.
    """
    record = {name: value for name, value in zip(FIELDS, values, strict=True) if value is not None}
    if "state" not in record:
        return None

    def moment(name: str) -> float | None:
        return float(record[name]) if name in record else None

    state, finished = State(record["state"].decode()), moment("finished")
    if state in TERMINAL and finished is not None and now() > finished + settings.result_ttl_s:
        state = State.EXPIRED
    return JobView(
        id=job_id,
        kind=record["kind"].decode(),
        model=record["model"].decode(),
        state=state,
        attempt=int(record["attempt"]),
        version=int(record["version"]),
        created=float(record["created"]),
        queued=moment("queued"),
        started=moment("started"),
        generated=moment("generated"),
        cancelling=moment("cancelling"),
        finished=finished,
        worker=record["worker"].decode() if "worker" in record else None,
        capture_status=cast(CaptureStatus, record["capture_status"].decode()),
        receipts=int(record["receipts"]),
        receipts_expected=int(record["expected"]),
        prompts=0 if record["kind"] in (b"sweep", b"harvest") else int(record["prompts"]),
        error=from_json(record["error"], Problem) if "error" in record else None,
        metadata=from_json(record["metadata"], dict[str, str]),
        steered=b"1" in (record.get("steers"), record.get("everyone")),
        modules=from_json(record["modules"], dict[str, str]) if "modules" in record else {},
        runs=from_json(record["runs"], dict[str, str]) if "runs" in record else {},
        run=shown(record["run"].decode()) if "run" in record else "",
        cells=int(record.get("cells", 0)),
        cells_expected=int(record.get("cells_expected", 0)),
        tenant=record["tenant"].decode() if "tenant" in record else DEFAULT_TENANT,
        priority=cast(Priority, record["priority"].decode()) if "priority" in record else "normal",
        expires=moment("expires"),
        callback_url=from_json(record["callback"], Callback).url if "callback" in record else None,
        lora=from_json(record["lora"], LoraUse) if "lora" in record else None,
        probed="probed" in record,
        identity=record["identity"].decode() if "identity" in record else "",
        contents=from_json(record["contents"], dict[str, str]) if "contents" in record else {},
        global_version=int(record["global_version"]) if "global_version" in record else None,
    )


def result(
    view: JobView,
    values: Sequence[bytes | None],
    outputs: bytes | None,
    receipts: Iterable[bytes],
    settings: Settings,
    swept: tuple[StoredSweep, Records] | None = None,
) -> JobResult:
    """`values` as for `view`; `outputs` and `receipts` as stored; receipts of one attempt, in any
    order. `swept`: the result of a sweep.
    """
    known = facts(values)
    report = [receipt_decoder.decode(raw) for raw in receipts]
    sweep = None
    if swept is not None:
        report += [receipt for record in swept[1].values() for receipt in record.receipts]
        seconds = (
            view.generated - view.started
            if view.generated is not None and view.started is not None
            else None
        )
        sweep = sweep_result(*swept, seconds)
    ticket = sorted(report, key=lambda report: (report.request, report.pp, report.rank))
    return JobResult(
        id=view.id,
        model=view.model,
        state=view.state,
        outputs=from_msgpack(outputs, list[Output]) if outputs else [],
        capture_results=capture_results(view, known, ticket, settings),
        determinism=determinism(view, known, ticket)
        if known.captures or view.steered or any(item.scores for item in ticket)
        else None,
        attempt=view.attempt,
        sweep=sweep,
        lora=view.lora,
        **readings(ticket),
        probes=[
            probe_result(item.request, score)
            for item in ticket
            for score in item.scores
            if not score.watching
        ],
        identity=view.identity,
    )


def probe_result(request: int, score: ProbeScore) -> ProbeResult:
    crossed = {
        label: position
        for label, position in zip(score.labels, score.crossed, strict=True)
        if position is not None
    }
    tokens = (
        np.frombuffer(score.tokens, dtype="<f4").reshape(-1, len(score.labels)).tolist()
        if score.tokens
        else None
    )
    return ProbeResult(
        request=request,
        probe=score.name,
        digest=score.digest,
        scores=dict(zip(score.labels, score.score, strict=True)),
        positions=score.positions,
        crossed=crossed,
        action=score.action,
        flagged=score.flagged,
        stopped=score.stopped,
        tokens=tokens,
        gate=score.gate,
        gated=score.gated,
    )


def capture_results(
    view: JobView, known: Facts, ticket: Sequence[Receipt], settings: Settings
) -> CaptureResults:
    """The files of the receipts that arrived, under the status that the ledger settled on."""
    if not known.captures:
        return CaptureResults(status="not_requested", job=view.id)
    files = [
        FileEntry(
            path=file.path,
            request=report.request,
            rank=report.rank,
            pp=report.pp,
            bytes=file.bytes,
            crc32=file.crc32,
            rows=file.rows,
            sites=_sites(file),
            positions=file.positions,
            offset=file.offset,
            layout=file.layout,
            tag=file.tag,
            reused=file.reused,
            dropped=file.dropped,
            non_finite=file.non_finite,
        )
        for report in ticket
        for file in report.files
        if file.tag != HARVEST
    ]
    consumers = [
        ConsumerReport(
            name=made.name,
            request=report.request,
            pp=report.pp,
            ok=made.ok,
            message=made.message,
            rows=made.rows,
        )
        for report in ticket
        for made in report.consumed
        if made.name != READER
    ]
    return CaptureResults(
        status=view.capture_status,
        job=view.id,
        url=f"{settings.public_url.rstrip('/')}/v1/captures/{view.id}",
        root=settings.artifacts,
        files=files,
        consumers=consumers,
        bytes=sum(file.bytes for file in files),
        rows=sum(file.rows for file in files),
        detail=_capture_detail(view, ticket),
    )


def _sites(file: CapturedFile) -> dict[str, list[int]]:
    return {"post_block": file.layers} if file.layers and not file.sites else file.sites


def _capture_detail(view: JobView, ticket: Sequence[Receipt]) -> str:
    """The reason for a status other than `ok`; and what a prefix cache hit has saved."""
    if view.error is not None:
        return view.error.detail
    if view.capture_status == "pending":
        if view.kind == "sweep" and view.state is not State.QUEUED:
            return f"cells done: {view.cells} of {view.cells_expected}"
        if view.receipts_expected == 0:
            return "no worker has started the job yet"
        return f"receipts received: {view.receipts} of {view.receipts_expected}"
    if view.capture_status == "error":
        return f"the job was {view.state}"
    return "; ".join(
        [reason for report in ticket for reason in _shortcomings(report)] + _reuse(ticket)
    )


def _shortcomings(receipt: Receipt) -> Iterator[str]:
    """Yield what a rank could not do for a request: its own message, or derived from its
    receipt.
    """
    if receipt.verdict == "ok":
        return
    where = f"request {receipt.request}, rank {receipt.rank}"
    if receipt.message:
        yield f"{where}: {receipt.message}"
        return
    for file in receipt.files:
        if file.dropped:
            yield (
                f"{where}: positions dropped under overload: "
                f"{as_ranges(file.dropped, SHOWN_RANGES)} ({len(file.dropped)} in total)"
            )
    for made in receipt.consumed:
        if not made.ok:
            yield f"{where}: consumer {made.name} failed: {made.message or 'no reason given'}"


def _reuse(ticket: Sequence[Receipt]) -> list[str]:
    files = [file for report in ticket for file in report.files]
    reused = sum(file.reused for file in files)
    return (
        [(f"rows computed by an earlier request: {reused} of {sum(file.rows for file in files)}")]
        if reused
        else []
    )


def determinism(view: JobView, known: Facts, ticket: Sequence[Receipt]) -> Determinism:
    """Return whether, for every request, the ranks of each pipeline stage report the same checksum,
    actions and edited rows, in one epoch.

    Covers the receipts that have arrived; a rank that has not reported counts neither as agreeing
    nor as disagreeing.
    """
    stages = []
    for pp in sorted({account.pp for account in ticket}):
        of_stage = [account for account in ticket if account.pp == pp]
        accounts: dict[int, set[tuple[str, int, int, int]]] = {}
        for account in of_stage:
            accounts.setdefault(account.request, set()).add(
                (account.checksum, account.actions, account.epoch, account.applied)
            )
        ranks = [
            RankReport(
                rank=account.rank,
                tp=account.tp,
                request=account.request,
                step=account.step,
                checksum=account.checksum,
                actions=account.actions,
                applied=account.applied,
                status=account.verdict,
                message=account.message,
            )
            for account in of_stage
        ]
        stages.append(
            StageReport(
                pp=pp,
                consistent=all(len(account) == 1 for account in accounts.values()),
                ranks=ranks,
            )
        )
    return Determinism(
        consistent=all(stage.consistent for stage in stages),
        stages=stages,
        worker=view.worker or "",
        global_version=known.global_version,
        retried=known.retried,
    )


def after_id(last: str) -> str:
    """XRANGE's lower bound for the entries after `last`.

    Raises MidstreamError("invalid_request") for an invalid stream id.
    """
    if last in ("", "0"):
        return "-"
    if not _STREAM_ID.match(last):
        raise invalid(
            "Last-Event-ID",
            f"{last!r} is not an event id",
            "an id from this stream, such as 1700000000000-0",
        )
    return f"({last}"


def jobs_in(state: State | None, tenant: str | None) -> str:
    """The zset that lists the jobs of a state.

    It also has those that now read `expired`, and for `expired` there is none.
    """
    return listing("jobs" if state in (None, State.EXPIRED) else f"jobs-in:{state}", tenant)


def listing(kind: str, tenant: str | None) -> str:
    """The zset that lists jobs or captures by the time of creation: a tenant's own, or all."""
    return f"ms:{kind}" if tenant is None else f"ms:{kind}:{tenant}"


def format_cursor(score: float, last: str) -> str:
    return f"{score!r}:{last}"


def parse_cursor(cursor: str | None) -> tuple[float, str]:
    """(creation time, job id) to continue after.

    Raises MidstreamError("invalid_request") for an invalid cursor.
    """
    if not cursor:
        return float("inf"), ""
    match = _CURSOR.match(cursor)
    if match is None:
        raise invalid("cursor", f"{cursor!r} is not a cursor", "the `next` of a previous page")
    return float(match[1]), match[2]
