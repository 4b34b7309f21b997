"""The commands `submit` and `job …`, and what all commands share."""

import inspect
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ...schemas.base.dtypes import RowDType
from ...schemas.base.errors import MidstreamError, error_of, invalid
from ...schemas.base.records import to_json
from ...schemas.base.settings import load_settings
from ...schemas.jobs.harvests import HarvestView
from ...schemas.jobs.jobs import JobRequest, JobResult, JobView, Output, SamplingRequest, State
from ..images import with_images
from ..render import attributions, doses, jobs, readings, records, sweeps
from ..sdk.answers.attribution import attribution_of
from ..sdk.client import Client
from ..sdk.wire import job_request, returned_rows
from . import options

T = TypeVar("T")

out = Console(soft_wrap=False, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

Url = Annotated[
    str | None,
    typer.Option(help="URL of the API; default: the stack running on the data directory."),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job's id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str | None, typer.Option(help="The model; required only if several are served.")]

DEFAULTS = SamplingRequest()
#: Capture options are grouped in `--help`.
CAPTURE: dict[str, Any] = {"rich_help_panel": "Capture"}

#: Seconds between two polls of a job while a progress bar is shown.
LOOK_S = 0.25

job_app = typer.Typer(no_args_is_help=True, help="List, inspect, await and cancel jobs.")


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.command()(submit)
    app.add_typer(job_app, name="job")


def connect(given: str | None) -> Client:
    return Client(given, load_settings().api_key)


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `client` by the option --url: the command gets a connection to
    the API there.
    """

    @wraps(command)
    def connected(*, url: str | None, **arguments: Any) -> None:
        with connect(url) as client:
            command(client=client, **arguments)

    signature = inspect.signature(command, eval_str=True)
    kept = [each for name, each in signature.parameters.items() if name != "client"]
    url = inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Url)
    vars(connected)["__signature__"] = signature.replace(parameters=[*kept, url])
    return connected


def print_json(record: Any, as_json: bool = True) -> bool:
    """Print a record as JSON if `as_json`; return `as_json`."""
    if as_json:
        print(to_json(record).decode(), flush=True)
    return as_json


def print_record(record: Any, as_json: bool) -> None:
    """Print a record of a type in `render.records`, as JSON or as tables."""
    if not print_json(record, as_json):
        out.print(*records.parts(record), sep="\n")


def print_list(
    answer: Any,
    entries: Sequence[T],
    shown: type[T] | Callable[[Sequence[T]], Any],
    things: str,
    as_json: bool,
) -> None:
    """Print a list as JSON or as a table. `answer`: the response, printed as JSON. `shown`: the
    type of the entries, if it is in `render.records`, or a function that renders them.
    """
    if print_json(answer, as_json):
        return
    if not entries:
        out.print(f"no {things}", style="dim")
    elif isinstance(shown, type):
        out.print(records.listed(entries, shown))
    else:
        out.print(shown(entries))


def detach(view: JobView | HarvestView, wait: bool, as_json: bool) -> None:
    """Without `wait`, print what was submitted, and end the command."""
    if not wait:
        print(to_json(view).decode() if as_json else view.id)
        raise typer.Exit


def delete(names: Sequence[str], call: Callable[[str], Any], done: str = "deleted") -> None:
    """Call `call` with each name, and print the name and `done`."""
    for name in names:
        call(name)
        out.print(f"{name} {done}", markup=False)


@options.with_handling
@with_client
def submit(
    client: Client,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="One or more prompts.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="File with more prompts: one per line, or a JSON list of texts."),
    ] = None,
    body: Annotated[
        Path | None, typer.Option(help="A whole JobRequest as JSON, instead of the options.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="PNG or JPEG file that is part of each prompt, in a chat; repeatable."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first model served.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Capture these layers: all, 3, 0-5, or 0-5,9,-1.", **CAPTURE)
    ] = None,
    hooks: Annotated[
        str | None,
        typer.Option(
            metavar=options.HOOKS_FORM,
            help=(
                "At these hooks, each with its own layers or with --layers; default: post_block."
            ),
            **CAPTURE,
        ),
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            help=(
                "Capture these: last_prompt (default), all_prompt, all_generated, all, image, "
                "image:0, 0,5,-1, 5:9, 5: (from 5 on), or last:64 (the last rows)."
            ),
            **CAPTURE,
        ),
    ] = None,
    span: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT[#N]",
            help="The tokens of this part of the prompt; N: its occurrence from 0, or all.",
            **CAPTURE,
        ),
    ] = None,
    every_n: Annotated[
        int | None, typer.Option(help="Only every n-th generated token.", **CAPTURE)
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="before (default) or after steering at the same site.", **CAPTURE),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"model (default), {options.one_of(get_args(RowDType)[1:])}.", **CAPTURE),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="auto (default), packed, per_file or segment.", **CAPTURE)
    ] = None,
    consumer: Annotated[
        list[str] | None,
        typer.Option(help="Consumers of the rows: filesystem (default), memory, …", **CAPTURE),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Folder name of the capture; default: default.", **CAPTURE)
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(help="Keep the rows as a source run with this name, for --patch.", **CAPTURE),
    ] = None,
    steer: Annotated[
        list[str] | None,
        typer.Option(
            metavar=options.STEER,
            help="Add a vector, apply op=…, or use a named module; repeatable.",
        ),
    ] = None,
    patch: Annotated[
        list[str] | None,
        typer.Option(
            metavar=options.PATCH,
            help="Replace rows by rows of a run, a vector or zeros; repeatable.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Apply this policy; repeatable.")
    ] = None,
    conversation: Annotated[
        str | None, typer.Option(help="The conversation, for policies that latch it.")
    ] = None,
    probe: Annotated[
        list[str] | None,
        typer.Option(
            metavar=options.PROBE,
            help=(
                "Score every token with this probe; action: none, flag, stop, or steer with a "
                "module."
            ),
        ),
    ] = None,
    lens: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS[:TOP_K]",
            help="Most likely next tokens of these layers at the last prompt token.",
        ),
    ] = None,
    features: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SAE[:TOP_K]",
            help="Most active features of this sparse autoencoder; repeatable.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate per prompt.")
    ] = DEFAULTS.max_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = DEFAULTS.temperature,
    *,
    handling: dict[str, Any],  # the options of `with_handling`
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait for the result, or print the id and exit."),
    ] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print receipts and the job's facts.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Submit a job; by default, wait for it and show the result."""
    if body is not None:
        request = options.read_json(body, JobRequest, "body")
    else:
        texts = [*(prompts or []), *(options.read_prompts(file) if file else [])]
        if not texts:
            raise invalid("prompts", "give a prompt, --file or --body")
        chats = [with_images([{"role": "user", "content": text}], image) for text in texts if image]
        fields: dict[str, Any] = {
            "model": model or only_model(client),
            **({"messages": chats} if chats else {"prompts": texts}),
            "sampling": {"max_tokens": max_tokens, "temperature": temperature},
            "steering": options.parse_steering(steer or []),
            "patch": options.parse_patches(patch or []),
            "probes": options.parse_probes(probe or []),
            "policies": policy or [],
            "conversation": conversation,
            "lens": options.parse_lens(lens) if lens else None,
            "features": [options.parse_features(item) for item in features or []],
            **handling,
            "capture": options.parse_capture(
                layers=layers,
                hooks=hooks,
                positions=positions,
                spans=span,
                every_n=every_n,
                at=at,
                dtype=dtype,
                layout=layout,
                consumers=consumer,
                tag=tag,
                run=run,
            ),
        }
        request = job_request(None, fields)
    view = client.submit(request)
    detach(view, wait, json_)
    if not json_:
        follow(client, view)
    report_end(client, client.wait(view.id), json_, verbose)


@job_app.command("show")
@with_client
def job_show(client: Client, job_id: JobId, json_: AsJson = False) -> None:
    """Show a job, with outputs and receipts once it has ended."""
    view = client.jobs.get(job_id)
    if print_json(view, json_):
        return
    out.print(records.one(view))
    if view.state is State.SUCCEEDED:
        print_result(client, client.result(job_id))


@job_app.command("list")
@with_client
def job_list(
    client: Client,
    state: Annotated[State | None, typer.Option(help="Only jobs in this state.")] = None,
    model: Annotated[str | None, typer.Option(help="Only jobs of this model.")] = None,
    limit: Annotated[int, typer.Option(help="Number of jobs.")] = 20,
    json_: AsJson = False,
) -> None:
    """List the newest jobs."""
    page = client.jobs.list(state=state.value if state else None, model=model, limit=limit)
    print_list(page, page.jobs, jobs.jobs, "jobs", json_)


@job_app.command("wait")
@with_client
def job_wait(
    client: Client,
    job_id: JobId,
    timeout: Annotated[float | None, typer.Option(help="Seconds; default: no limit.")] = None,
    json_: AsJson = False,
) -> None:
    """Wait until a job ends; exits non-zero unless it succeeded."""
    report_end(client, client.wait(job_id, timeout), json_)


@job_app.command("result")
@with_client
def job_result(client: Client, job_id: JobId) -> None:
    """Print a job's result as JSON."""
    print_json(client.result(job_id))


@job_app.command("cancel")
@with_client
def job_cancel(client: Client, job_id: JobId) -> None:
    """Cancel a job."""
    out.print(f"{job_id} {jobs.coloured(client.jobs.cancel(job_id).state)}")


@job_app.command("events")
@with_client
def job_events(
    client: Client,
    job_id: JobId,
    after: Annotated[str, typer.Option(help="Resume after this event id.")] = "",
    json_: AsJson = False,
) -> None:
    """Stream a job's events until it ends."""
    for event in client.jobs.events(job_id, after):
        if not print_json(event, json_):
            out.print(jobs.event(event), soft_wrap=True)


def follow(client: Client, view: JobView) -> None:
    """Show a progress bar with the job's state until the job ends. It counts receipts, because
    polls do not report finished prompts.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task(view.id, total=None, note="")
        while view.finished is None:
            note = (
                f"receipts {view.receipts}/{view.receipts_expected}"
                if view.receipts_expected
                else ""
            )
            expected = view.receipts_expected or None
            progress.update(
                task,
                description=f"{view.id} {jobs.coloured(view.state)}",
                total=expected,
                completed=view.receipts,
                note=note,
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
        out.print(records.one(view) if verbose else f"more: midstream job show {view.id}")


def print_result(client: Client, result: JobResult, verbose: bool = True) -> None:
    """Print outputs and readings; receipts if `verbose`, or if the ranks disagree."""
    if result.sweep is not None:
        out.print(sweeps.report(result.sweep))
        return
    if result.attribution:
        out.print(attributions.report(attribution_of(result)))
        return
    if result.dose:
        out.print(*doses.drawn(result.dose), sep="\n")
        return
    if result.fit:
        out.print(records.one(getattr(result.fit, "lens", result.fit)))
        return
    out.print(records.listed(result.outputs, Output))
    if result.probes:
        out.print(readings.scores(result))
    if any(probe.policy for probe in result.probes):
        out.print(readings.decisions(result))
    captures = result.capture_results
    if tokens := readings.tokens(result):
        words = dict(zip(tokens, client.detokenize(result.model, tokens).token_strs, strict=True))
        out.print(*readings.tables(result, words), sep="\n")
    if result.determinism is not None and (verbose or not result.determinism.consistent):
        out.print(jobs.receipts("Receipts", [(result.id, captures, result.determinism)]))
        out.print(jobs.determinism_line(result.determinism), soft_wrap=True)
    # readings capture rows without keeping them
    read_only = (
        captures.status == "ok"
        and not captures.files
        and not captures.consumers
        and bool(tokens or result.readers)
    )
    if captures.status != "not_requested" and not read_only:
        returned = sum(len(report.rows) for report in captures.consumers)
        text = (
            f"{jobs.count(len(captures.files), 'file')}, "
            f"{jobs.count(captures.rows, 'row')}, {jobs.size(captures.bytes)}"
        )
        if returned:
            text = (
                f"{text}; " if captures.files else ""
            ) + f"{jobs.size(returned)} in the response"
        out.print(f"captures {jobs.coloured(captures.status)}: {text}")
        if captures.detail:
            out.print(captures.detail, style="dim", markup=False, soft_wrap=True)
        if returned:
            out.print(jobs.capture(returned_rows(captures)))
    if captures.files:
        out.print(
            f"to inspect them: midstream capture show {result.id}",
            style="bold",
            markup=False,
            soft_wrap=True,
        )


def only_model(client: Client) -> str:
    served = client.models()
    if not served:
        raise MidstreamError("unavailable", "no model is served")
    return served[0]
