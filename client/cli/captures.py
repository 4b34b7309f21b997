"""The commands `capture show`, `verify`, `save`, `export`, `list`, `delete`."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.markup import escape

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.captures import CaptureEntry
from ..captures.export import export
from ..captures.reader import CaptureReader
from ..render import jobs as show
from ..sdk.client import Client
from . import options
from .jobs import AsJson, JobId, Url, connect, delete, out, print_list, with_client

Source = Annotated[
    str,
    typer.Argument(
        metavar="JOB|FOLDER",
        help="A job's id, a folder or file of captures, or s3://bucket/prefix.",
    ),
]
Job = Annotated[str | None, typer.Option(help="The job, if the source has captures of several.")]
Tag = Annotated[str | None, typer.Option(help="Which capture of the job; default: the job's own.")]
Partial = Annotated[bool, typer.Option("--partial", help="Accept incomplete captures.")]

capture_app = typer.Typer(
    no_args_is_help=True, help="Inspect, export and delete captured activations."
)


def register(app: typer.Typer) -> None:
    """Add `capture …` to `midstream`."""
    app.add_typer(capture_app, name="capture")


@capture_app.command("show")
def capture_show(
    source: Source,
    values: Annotated[
        str | None,
        typer.Option(metavar="[HOOK:]LAYER", help="Also print these rows of the first request."),
    ] = None,
    job: Job = None,
    tag: Tag = None,
    partial: Partial = False,
    url: Url = None,
) -> None:
    """Show a capture: requests, layers, positions, shapes, norms."""
    reader = open_capture(source, url, job, tag, partial)
    out.print(show.capture(reader))
    for gap in reader.gaps():
        out.print(f"[yellow]missing:[/] {escape(gap.detail)}", soft_wrap=True)
    if values is not None:
        first, (hook, layer) = reader.requests()[0], options.parse_site(values, "--values")
        array = reader.array(layer, hook, first)
        with np.printoptions(precision=4, edgeitems=4, threshold=40):
            out.print(
                f"layer {layer}, request {first}, float32 {list(array.shape)}\n{array}",
                markup=False,
            )
    out.print(f"files: {reader.files[0].parent}", markup=False, soft_wrap=True)
    if names := [name for name in reader.tags if name != reader.tag]:
        out.print(
            f"tag {reader.tag}; other captures: --tag {', '.join(names)}",
            markup=False,
            soft_wrap=True,
        )


@capture_app.command("verify")
def capture_verify(source: Source, job: Job = None, tag: Tag = None, url: Url = None) -> None:
    """Recompute every CRC32 and check that no request, stage, site or position is missing; exits
    non-zero if a check fails.
    """
    result = open_capture(source, url, job, tag, partial=True).verify()
    out.print(show.checks(result))
    wrong = [check for check in result if not check.ok]
    if wrong:
        raise MidstreamError(
            "capture_failed", f"{len(wrong)} of {len(result)} checks failed: {wrong[0].detail}"
        )


@capture_app.command("save")
@with_client
def capture_save(
    client: Client,
    job_id: JobId,
    folder: Annotated[Path, typer.Argument(help="Target folder.")],
    partial: Partial = False,
) -> None:
    """Download a job's capture files and verify them."""
    reader = client.capture(job_id, folder, partial=partial)
    out.print(f"{show.count(len(reader.files), 'file')} in {folder}", markup=False, soft_wrap=True)


@capture_app.command("export")
def capture_export(
    source: Source,
    target: Annotated[
        Path, typer.Argument(help="rows.npz (float32) or rows.safetensors (as captured).")
    ],
    hooks: Annotated[
        str | None, typer.Option(metavar=options.HOOKS_FORM, help="Only these hooks.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Only these layers: 3, 0-5, or 0-5,9.")] = None,
    request: Annotated[
        list[int] | None, typer.Option(help="Only this prompt's rows; repeat as needed.")
    ] = None,
    job: Job = None,
    tag: Tag = None,
    partial: Partial = False,
    url: Url = None,
) -> None:
    """Write chosen rows into one file for other programs."""
    reader = open_capture(source, url, job, tag, partial)
    chosen = None if layers is None else options.parse_layers(layers)
    names = export(
        reader,
        target,
        hooks=options.read_hooks(hooks, chosen) if hooks else (),
        layers="all" if chosen is None else chosen,
        requests=request or (),
    )
    out.print(
        f"{show.count(len(names), 'array')}, {show.size(target.stat().st_size)}: {target}",
        markup=False,
        soft_wrap=True,
    )


@capture_app.command("list")
@with_client
def capture_list(
    client: Client,
    tag: Annotated[str | None, typer.Option(help="Only captures under this tag.")] = None,
    limit: Annotated[int, typer.Option(help="Number of captures.")] = 20,
    json_: AsJson = False,
) -> None:
    """List the newest captures on the server, with their sizes."""
    page = client.captures.list(tag=tag, limit=limit)
    print_list(page, page.captures, CaptureEntry, "captures", json_)


@capture_app.command("delete")
@with_client
def capture_delete(
    client: Client,
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of the jobs.")],
) -> None:
    """Delete the captures of jobs. Job records stay; downloads in progress complete."""
    delete(jobs, client.captures.delete)


def open_capture(
    source: str,
    url: str | None,
    job: str | None = None,
    tag: str | None = None,
    partial: bool = False,
) -> CaptureReader:
    """Open a store, folder or file of captures if `source` names one; otherwise a job's captures
    through the API.
    """
    if "://" in source:
        return CaptureReader(source, job, tag=tag, partial=partial)
    path = Path(source)
    # a job that is stored only in segments has no folder
    if path.exists() or (path.parent / "segments").is_dir():
        return CaptureReader(path, job, tag=tag, partial=partial)
    if "/" in source:
        raise MidstreamError("not_found", f"no such folder: {source}")
    with connect(url) as client:
        return client.capture(source, tag=tag, partial=partial)
