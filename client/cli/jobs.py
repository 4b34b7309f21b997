"""The commands `wait`, `events` and `cancel`, and how a job's result is printed."""

import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ...schemas.base.errors import MidstreamError, error_of
from ...schemas.base.records import Record
from ...schemas.jobs.jobs import JobView, Output, State
from ...schemas.jobs.results import JobResult
from ...schemas.readings.readings import READINGS
from ..render import jobs, readings, records
from ..render.forms import form_of
from ..render.lines import of_kind
from ..sdk.client import Client
from ..sdk.wire import returned_rows
from .kind import following
from .terminal import AsJson, out, print_json, say, with_client

Id = Annotated[str, typer.Argument(metavar="JOB|HARVEST", help="Its id.")]

#: Seconds between two polls of a job while a progress bar is shown.
LOOK_S = 0.25


def print_view(view: Record, as_json: bool) -> None:
    if not print_json(view, as_json):
        out.print(records.one(view))


@with_client
def wait(
    client: Client,
    id_: Id,
    timeout: Annotated[float | None, typer.Option(help="Seconds; default: no limit.")] = None,
    json_: AsJson = False,
) -> None:
    """Wait until a job or harvest ends, and show its result; exits non-zero unless it succeeded."""
    own = following(id_, "wait")
    if own is None:
        report_end(client, client.wait(id_, timeout), json_)
    else:
        print_view(own(client, id_, timeout), json_)


@with_client
def events(
    client: Client,
    job: Annotated[str, typer.Argument(help="A job's id.")],
    after: Annotated[str, typer.Option(help="Resume after this event id.")] = "",
    json_: AsJson = False,
) -> None:
    """Stream a job's events until it ends."""
    for event in client.jobs.events(job, after):
        if not print_json(event, json_):
            out.print(jobs.event(event), soft_wrap=True)


@with_client
def cancel(client: Client, id_: Id, json_: AsJson = False) -> None:
    """Cancel a job or a harvest; it cannot be resumed."""
    own = following(id_, "cancel")
    print_view(client.jobs.cancel(id_) if own is None else own(client, id_), json_)


def follow(client: Client, view: JobView) -> None:
    """Show a progress bar with the job's state until the job ends. It counts receipts, because
    polls do not report finished prompts.
    """
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=out,
        transient=True,
    ) as progress:
        task = progress.add_task(view.id, total=None, note="")
        while view.finished is None:
            progress.update(
                task,
                description=f"{view.id} {jobs.coloured(view.state)}",
                total=view.receipts_expected or None,
                completed=view.receipts,
                note=f"receipts {view.receipts}/{view.receipts_expected}"
                if view.receipts_expected
                else "",
            )
            time.sleep(LOOK_S)
            view = client.jobs.get(view.id)


def report_end(client: Client, view: JobView, as_json: bool, verbose: bool = True) -> None:
    """Print the result of a job that succeeded; raise the error of one that did not."""
    if view.state is not State.SUCCEEDED:
        if view.error is not None:
            detail = f"job {view.id} {view.state}: {view.error.detail}"
            raise error_of(msgspec.structs.replace(view.error, detail=detail))
        raise MidstreamError("conflict", f"job {view.id} ended in the state {view.state}")
    result = client.result(view.id)
    if not print_json(result, as_json):
        print_result(client, result, verbose)
        if note := jobs.unedited(view, result.determinism):
            out.print(note, soft_wrap=True)
        out.print(records.one(view) if verbose else f"more: midstream get job {view.id}")


def words_of(client: Client, model: str, tokens: Sequence[int]) -> dict[int, str]:
    """Return token id → text of a model's tokens."""
    texts = client.detokenize(model, tokens).token_strs if tokens else []
    return dict(zip(tokens, texts, strict=True))


def print_result(client: Client, result: JobResult, verbose: bool = True) -> None:
    """Print outputs and readings; receipts if `verbose`, or if the ranks disagree."""
    for value in of_kind(result):
        if printed := form_of(type(value)).printed:
            out.print(*printed(value), sep="\n")
            return
    out.print(records.listed(result.outputs, Output))
    if result.probes:
        out.print(readings.scores(result))
    if any(each.decisions or (each.policy and each.policy.inherited) for each in result.probes):
        out.print(readings.decisions(result))
    captures = result.capture_results
    if words := words_of(client, result.model, readings.tokens(result)):
        out.print(*readings.tables(result, words), sep="\n")
    for reading in (result.readers or [])[: readings.PROMPTS]:
        out.print(*records.parts(reading), sep="\n")
    if result.determinism is not None and (verbose or not result.determinism.consistent):
        out.print(jobs.receipts("Receipts", [(result.id, captures, result.determinism)]))
        out.print(jobs.determinism_line(result.determinism), soft_wrap=True)
    # readings capture rows without keeping them
    read_only = (
        captures.status == "ok"
        and not captures.files
        and not captures.consumers
        and any(getattr(result, field) for field in READINGS)
    )
    if captures.status != "not_requested" and not read_only:
        returned = sum(len(report.rows) for report in captures.consumers)
        stored = (
            f"{jobs.count(len(captures.files), 'file')}, "
            f"{jobs.count(captures.rows, 'row')}, {jobs.size(captures.bytes)}"
        )
        parts = [stored] if captures.files or not returned else []
        parts += [f"{jobs.size(returned)} in the response"] if returned else []
        out.print(f"captures {jobs.coloured(captures.status)}: {'; '.join(parts)}")
        if captures.detail:
            out.print(captures.detail, style="dim", markup=False, soft_wrap=True)
        if returned:
            out.print(jobs.capture(returned_rows(captures)))
    if captures.files:
        say(f"to inspect them: midstream get capture {result.id}")


COMMANDS = (wait, events, cancel)
