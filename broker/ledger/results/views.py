"""Views of a job's record: state, result, ticket, determinism."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from ....schemas.access.keys import shown
from ....schemas.artifacts.probes import ProbeResult, ProbeScore
from ....schemas.base.records import by_key, fields_of, now
from ....schemas.jobs.jobs import (
    TERMINAL,
    CaptureResults,
    ConsumerReport,
    Determinism,
    FileEntry,
    JobView,
    ListedJob,
    RankReport,
    StageReport,
    State,
)
from ....schemas.jobs.kinds import kind_of
from ....schemas.jobs.receipts import PLACED, CapturedFile, Receipt, receipt_decoder
from ....schemas.jobs.results import JobResult
from ....schemas.jobs.works import Work
from ....schemas.prompts.selectors import as_ranges
from ....schemas.readings.stored import READER
from ....schemas.settings.settings import Settings
from ..core.record import JobRecord, decode
from .outcomes import grid, outcome
from .readings import readings

#: Ranges of positions that a detail lists; the rest are only counted.
SHOWN_RANGES = 8


def view(record: JobRecord, settings: Settings) -> JobView:
    """Return the record as users see it; a job whose results were removed reads `expired`."""
    past = record.finished is not None and now() > record.finished + settings.result_ttl_s
    fields = fields_of(record, JobView) | {
        "state": State.EXPIRED if record.state in TERMINAL and past else record.state,
        "receipts_expected": record.expected,
        "prompts": 0 if kind_of(record.kind).reads_receipts else record.prompts,
        "run": shown(record.run) if record.run else "",
        "callback_url": record.callback.url if record.callback is not None else None,
        "steered": record.steers or record.everyone,
    }
    return JobView(**fields)


def listed(job_id: str, values: Sequence[bytes | None], settings: Settings) -> ListedJob | None:
    """Return a job as a list shows it, of `values` as HMGET returns them for `LIST_FIELDS`; None if
    there is no such job.
    """
    prompt, *others = values
    record = decode(job_id, others)
    if record is None:
        return None
    fields = msgspec.structs.asdict(view(record, settings))
    return ListedJob(**fields, prompt=(prompt or b"").decode())


def result(
    view: JobView,
    record: JobRecord,
    outputs: bytes | None,
    receipts: Iterable[bytes],
    settings: Settings,
    swept: tuple[Work, Sequence[bytes]] | None = None,
) -> JobResult:
    """Return the result of a job. `view` is of `record`; `outputs` and `receipts` as stored;
    receipts of one attempt, in any order. `swept`: the work of a job with a grid, and the records
    of its units.
    """
    decoded = [receipt_decoder.decode(raw) for raw in receipts]
    cells: dict[str, Any] = {}
    if swept is not None:
        seconds = (
            view.generated - view.started
            if view.generated is not None and view.started is not None
            else None
        )
        cells, of_units = grid(view.kind, *swept, seconds)
        decoded += of_units
    ticket = sorted(decoded, key=lambda receipt: (receipt.request, receipt.pp, receipt.rank))
    fields = {**outcome(view.kind, outputs, ticket), **readings(ticket), **cells}
    scores = [probe_result(request, score) for (request, _), score in first_scores(ticket).items()]
    reported = record.captures or view.steered or swept is not None or bool(scores)
    return JobResult(
        id=view.id,
        model=view.model,
        state=view.state,
        **fields,
        capture_results=capture_results(view, record, ticket, settings),
        determinism=determinism(view, record, ticket) if reported else None,
        attempt=view.attempt,
        layers=view.layers,
        lora=view.lora,
        probes=scores,
        edits=[size for item in ticket for size in item.sizes],
        identity=view.identity,
    )


def first_scores(ticket: Iterable[Receipt]) -> dict[tuple[int, str], ProbeScore]:
    """Return request and probe → the first report; every rank reports on a request that fails."""
    found: dict[tuple[int, str], ProbeScore] = {}
    for receipt in ticket:
        for score in receipt.scores:
            found.setdefault((receipt.request, score.name), score)
    return found


def probe_result(request: int, score: ProbeScore) -> ProbeResult:
    """Return the scores of a probe; those that a policy read, with its decisions."""
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
    # policies list their actions, of which `action` is the one that decides how requests continue
    shown = ("steer", "stop", "flag") if score.policy is None else ("steer", "stop")
    fields = fields_of(score, ProbeResult) | {
        "request": request,
        "probe": score.name,
        "scores": dict(zip(score.labels, score.score, strict=True)),
        "crossed": crossed,
        "action": next((action for action in shown if action in score.actions), "none"),
        "tokens": tokens,
    }
    return ProbeResult(**fields)


def capture_results(
    view: JobView, record: JobRecord, ticket: Sequence[Receipt], settings: Settings
) -> CaptureResults:
    """Return the files of the receipts that have arrived, with the capture status in the ledger."""
    if not record.captures:
        return CaptureResults(
            status="not_requested", job=view.id, hook_names=view.hook_names or UNSET
        )
    files = [
        _file_entry(receipt, file)
        for receipt in ticket
        for file in receipt.files
        if file.layout != PLACED
    ]
    consumers = [
        ConsumerReport(
            request=receipt.request, pp=receipt.pp, **fields_of(consumed, ConsumerReport)
        )
        for receipt in ticket
        for consumed in receipt.consumed
        if consumed.name != READER
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
        hook_names=view.hook_names or UNSET,
    )


def _file_entry(receipt: Receipt, file: CapturedFile) -> FileEntry:
    fields = fields_of(receipt, FileEntry) | fields_of(file, FileEntry)
    if file.layers and not file.sites:
        fields["sites"] = {"post_block": file.layers}
    return FileEntry(**fields)


def _capture_detail(view: JobView, ticket: Sequence[Receipt]) -> str:
    """Return the reason for a status other than `ok`, and how many rows the prefix cache saved."""
    if view.error is not None:
        return view.error.detail
    if view.capture_status == "pending":
        if kind_of(view.kind).grid and view.state is not State.QUEUED:
            return f"cells done: {view.cells} of {view.cells_expected}"
        if view.receipts_expected == 0:
            return "no worker has started the job yet"
        return f"receipts received: {view.receipts} of {view.receipts_expected}"
    if view.capture_status == "error":
        return f"the job was {view.state}"
    return "; ".join(
        [reason for receipt in ticket for reason in _shortcomings(receipt)] + _reuse(ticket)
    )


def _shortcomings(receipt: Receipt) -> Iterator[str]:
    """Yield what a rank could not do for a request: the receipt's message, or else what the receipt
    shows.
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
    for consumed in receipt.consumed:
        if not consumed.ok:
            reason = consumed.message or "no reason given"
            yield f"{where}: consumer {consumed.name} failed: {reason}"


def _reuse(ticket: Sequence[Receipt]) -> list[str]:
    files = [file for receipt in ticket for file in receipt.files]
    reused = sum(file.reused for file in files)
    return (
        [(f"rows computed by an earlier request: {reused} of {sum(file.rows for file in files)}")]
        if reused
        else []
    )


def determinism(view: JobView, record: JobRecord, ticket: Sequence[Receipt]) -> Determinism:
    """Return whether, for every request, the ranks of each pipeline stage report the same checksum,
    actions and edited rows, in one epoch.

    Covers the receipts that have arrived; a rank that has not reported counts neither as agreeing
    nor as disagreeing.
    """
    stages = []
    for pp in sorted({receipt.pp for receipt in ticket}):
        of_stage = [receipt for receipt in ticket if receipt.pp == pp]
        accounts = by_key((receipt.request, receipt.account) for receipt in of_stage)
        ranks = [
            RankReport(**(fields_of(receipt, RankReport) | {"status": receipt.verdict}))
            for receipt in of_stage
        ]
        stages.append(
            StageReport(
                pp=pp,
                consistent=all(len(set(of_request)) == 1 for of_request in accounts.values()),
                ranks=ranks,
            )
        )
    return Determinism(
        consistent=all(stage.consistent for stage in stages),
        stages=stages,
        worker=view.worker or "",
        global_version=record.global_version or 0,
        retried=[] if record.retried is None else [record.retried],
    )


def jobs_in(state: State | None, tenant: str | None) -> str:
    """Return the key of the zset that lists the jobs of a state.

    It still has the jobs of the state that now read `expired`; for `expired`, it is that of all
    jobs.
    """
    return listing("jobs" if state in (None, State.EXPIRED) else f"jobs-in:{state}", tenant)


def listing(kind: str, tenant: str | None) -> str:
    """Return the key of the zset that lists jobs or captures by creation time: a tenant's, or
    all.
    """
    return f"ms:{kind}" if tenant is None else f"ms:{kind}:{tenant}"
