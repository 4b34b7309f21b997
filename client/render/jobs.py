"""Terminal output of jobs, receipts and captures."""

import string
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...schemas.base.records import by_key
from ...schemas.jobs.jobs import (
    CaptureResults,
    Determinism,
    Event,
    FileEntry,
    JobView,
    RankReport,
)
from ...schemas.prompts.selectors import as_ranges
from ...schemas.requests.source_runs import RunPrompt
from ..captures.reader import CaptureReader, VerifyFinding

#: The cell of an entry: a template of text with the entry's fields, such as `{bytes:size}`, or a
#: function that returns rich markup.
Cell = str | Callable[[Any], str]
#: Column, or name of a fact → its cell.
Cells = Mapping[str, Cell]
_COLOURS = {
    "succeeded": "green",
    "ok": "green",
    "running": "cyan",
    "queued": "blue",
    "cancelling": "yellow",
    "partial": "yellow",
    "pending": "blue",
    "failed": "red",
    "error": "red",
    "timed_out": "red",
    "cancelled": "magenta",
    "aborted": "magenta",
    "expired": "dim",
    "ready": "green",
    "deleted": "dim",
    "delivered": "green",
    "refused": "red",
}
#: Columns that are folded only where the others have no room, because users copy their values.
_WHOLE = frozenset(
    [
        *("checksum", "crc32", "job", "state", "id", "run", "name", "digest", "process", "pid"),
        "condition",
    ]
)
#: In characters: the most that a folded word may ask for, and the width of a terminal that cuts
#: nothing.
_WORD = 8
_UNBOUND = 10_000
#: The most rows of a table; a caption counts the rest.
TABLE_ROWS = 24
#: The characters shown of a segment's name.
_SEGMENT_NAME = 20


def coloured(state: str) -> str:
    colour = _COLOURS.get(state, "white")
    return f"[{colour}]{escape(state)}[/]"


def size(count: float) -> str:
    """Return a number of bytes in a readable unit: `1.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def count(number: int, thing: str) -> str:
    """Return a count with its noun: `1 file`, `2 files`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def moment(at: float | None) -> str:
    """Return seconds since the epoch (None: now) as local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def minute(at: float) -> str:
    """Return seconds since the epoch as local time, to the minute."""
    return moment(at)[:16]


def day(at: float) -> str:
    """Return seconds since the epoch as a local date."""
    return moment(at)[:10]


def seconds(start: float | None, end: float | None) -> str:
    return "" if start is None or end is None else f"{end - start:.2f} s"


def _listed(texts: Iterable[str] | None) -> str:
    return ", ".join(texts or ())


#: Format of a field in a template, besides those of Python → the function that writes its value.
_FORMATS: dict[str, Callable[[Any], str]] = {
    "size": size,
    "moment": moment,
    "minute": minute,
    "day": day,
    "ranges": as_ranges,
    "list": _listed,
    "number": lambda items: str(len(items)),
    "limit": lambda most: f"{most:,}" if most else "∞",
    "limit_mib": lambda most: f"{most} MiB" if most else "∞",
}


class _Template(string.Formatter):
    """Fills in a template with the fields of an entry; None is left out."""

    def get_value(self, key: int | str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return getattr(args, str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if written := _FORMATS.get(format_spec):
            return written(value)
        return "" if value is None else format(value, format_spec)


def text_of(cell: Cell, entry: Any) -> str:
    """Return what a cell shows of an entry, as rich markup."""
    return escape(_Template().vformat(cell, entry, {})) if isinstance(cell, str) else cell(entry)


class FittingTable(Table):
    """A table that loses no column on a narrow terminal: whole columns are folded, too, where they
    leave the others less room than a short word.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._needed(console, options) > options.max_width:
            for column in self.columns:
                column.no_wrap = False
                column.overflow = "fold"
        yield from super().__rich_console__(console, options)

    def _needed(self, console: Console, options: ConsoleOptions) -> int:
        """Return the characters that a line takes if whole columns stay whole."""
        free = options.update(width=_UNBOUND)

        def wide(cell: RenderableType, whole: bool) -> int:
            found = Measurement.get(console, free, cell)
            return found.maximum if whole else min(found.minimum, _WORD)

        widths = [
            max(wide(cell, column.no_wrap) for cell in (column.header, *column.cells))
            for column in self.columns
        ]
        gap = 1 + self.padding[1] + self.padding[3]
        return sum(widths) + gap * len(widths)


def table(
    title: str,
    *columns: str,
    rows: Iterable[Sequence[str]] = (),
    right: Container[str] = (),
    most: int | None = None,
) -> Table:
    """Return a table of `rows`, or of the first `most` of them with the number of the others.

    `right`: columns that are aligned to the right here, besides those that are everywhere.
    """
    result = FittingTable(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in columns:
        whole = column in _WHOLE
        number = column in right or column in (
            "rank",
            "request",
            "req",
            "step",
            "acts",
            "edits",
            "rows",
            "done",
            "size",
            "bytes",
            "layers",
            "positions",
            "tokens",
        )
        result.add_column(
            column,
            justify="right" if number else "left",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
        )
    cells = list(rows)
    for row in cells[:most]:
        result.add_row(*row)
    if most is not None and len(cells) > most:
        result.caption = f"… and {len(cells) - most} more"
    return result


def lines(
    title: str,
    columns: Cells,
    entries: Iterable[Any],
    right: Container[str] = (),
    most: int | None = None,
) -> Table:
    """Return a table with one line per entry: see `table`."""
    return table(
        title,
        *columns,
        rows=([text_of(cell, entry) for cell in columns.values()] for entry in entries),
        right=right,
        most=most,
    )


def bare(title: str | None, gap: int = 2) -> Table:
    """Return an empty table without lines, with `gap` characters between its columns."""
    return Table(
        box=None, pad_edge=False, padding=(0, gap, 0, 0), title=title, title_justify="left"
    )


def facts(*facts: tuple[str, str]) -> Table:
    """Return a table of (name, value) lines, without empty values."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    shown.add_column(style="dim")
    shown.add_column(overflow="fold")
    for name, value in facts:
        if value:
            shown.add_row(name, value)
    return shown


def run_prompts(prompts: Sequence[RunPrompt]) -> Table:
    """Return a table of a source run's rows, for its first `TABLE_ROWS` prompts."""
    shown = table("Rows", "request", "tokens", "hook", "layers", "positions", "dtype", "bytes")
    for prompt in prompts[:TABLE_ROWS]:
        begin = (str(prompt.request), str(prompt.tokens))
        end = (as_ranges(prompt.positions, 8), prompt.dtype, size(prompt.bytes))
        for hook, layers in prompt.sites.items():
            shown.add_row(*begin, hook, as_ranges(layers), *end)
            begin = ("", "")
            end = ("", "", "")
    if len(prompts) > TABLE_ROWS:
        shown.caption = f"… and {len(prompts) - TABLE_ROWS} more"
    return shown


def receipts(
    title: str, jobs: Iterable[tuple[str, CaptureResults | None, Determinism | None]]
) -> Table:
    """Return a table of what every rank reported about every request.

    `jobs`: (id, captures, determinism).
    """
    rows: list[_Receipt] = []
    for job_id, captures, determinism in jobs:
        files = by_key(
            ((file.request, file.rank), file) for file in (captures.files if captures else [])
        )
        stages = determinism.stages if determinism else []
        reports = [report for stage in stages for report in stage.ranks]
        rows += [
            _Receipt(job_id[-4:], report, files.get((report.request, report.rank), []))
            for report in sorted(reports, key=lambda report: (report.request, report.rank))
        ]
    return lines(title, _RECEIPT, rows, most=TABLE_ROWS)


class _Receipt(NamedTuple):
    """What a rank reported about a request."""

    job: str  # the end of its id
    report: RankReport
    files: list[FileEntry]  # that it wrote


def _crc32(row: _Receipt) -> str:
    if len(row.files) > 1:
        return f"{len(row.files)} files"
    return f"{row.files[0].crc32:08x}" if row.files else ""


#: Column of receipts → its cell.
_RECEIPT: Cells = {
    "job": "…{job}",
    "req": "{report.request}",
    "rank": "{report.rank}",
    "step": "{report.step}",
    "acts": "{report.actions}",
    "checksum": "{report.checksum}",
    "edits": "{report.applied}",
    "rows": lambda row: str(sum(file.rows for file in row.files)) if row.files else "",
    "crc32": _crc32,
}


def determinism_line(determinism: Determinism | None) -> str:
    if determinism is None:
        return "determinism: nothing to compare (no intervention, no capture)"
    ranks = len({report.rank for stage in determinism.stages for report in stage.ranks})
    extent = f"{count(ranks, 'rank')} in {count(len(determinism.stages), 'stage')}"
    if determinism.consistent:
        return f"determinism: [green]consistent[/], {extent}, all checksums and action counts agree"
    return f"determinism: [red]ranks disagree[/] ({extent})"


def unedited(view: JobView, determinism: Determinism | None) -> str:
    """Return which prompts of a job that edits rows had no row edited, as where a trigger never
    matches; empty if there is none.
    """
    if not view.steered or determinism is None:
        return ""
    reports = [report for stage in determinism.stages for report in stage.ranks]
    edited = {report.request for report in reports if report.applied}
    idle = {report.request for report in reports} - edited
    if not idle:
        return ""
    return (
        f"no row was edited of prompt {as_ranges(idle)}: no trigger matched, no gate opened, or "
        "the prefix cache had the rows"
    )


def capture(reader: CaptureReader) -> Table:
    """Return a table of the captured rows, by request and hook."""
    shown = table(
        "Captured rows",
        "request",
        "hook",
        "layers",
        "positions",
        "shape",
        "norm, first → last layer",
    )
    for request in reader.requests()[:TABLE_ROWS]:
        positions = reader.positions(request)
        for hook in reader.hooks(request):
            layers = reader.layers(request, hook)
            first = reader.array(layers[0], hook, request)
            last = reader.array(layers[-1], hook, request)
            shown.add_row(
                str(request),
                hook,
                as_ranges(layers),
                as_ranges(positions),
                escape(f"[{len(layers)}, {len(positions)}, {first.shape[-1]}]"),
                " → ".join(
                    f"{(array**2).sum(-1).mean() ** 0.5:.4g}" if len(positions) else "-"
                    for array in (first, last)
                ),
            )
    if len(reader.requests()) > TABLE_ROWS:
        shown.caption = f"… and {len(reader.requests()) - TABLE_ROWS} more requests"
    return shown


def checks(result: Sequence[VerifyFinding]) -> Table:
    """Return a table of checks, failed checks first."""
    failed_first = sorted(result, key=lambda check: check.ok)
    shown = lines("Files compared with their manifests", _CHECK, failed_first[:TABLE_ROWS])
    shown.caption = f"{sum(check.ok for check in result)} of {len(result)} correct"
    return shown


#: Column of checks → its cell.
_CHECK: Cells = {
    # segments have long names that differ at the end
    "file": lambda check: (
        f"…{check.path.name[-_SEGMENT_NAME:]} @{check.offset}"
        if check.path.suffix == ".seg"
        else check.path.name
    ),
    "request": "{request}",
    # a check of something missing has no size and checksum
    "bytes": lambda check: size(check.bytes) if check.bytes else "",
    "crc32": lambda check: f"{check.crc32:08x}" if check.bytes else "",
    "verdict": lambda check: (
        "[green]correct[/]" if check.ok else f"[red]wrong: {escape(check.detail)}[/]"
    ),
}


def event(entry: Event) -> str:
    data: dict[str, Any] = dict(entry.data)
    fields = " ".join(f"{name}={value!r}" for name, value in data.items() if value is not None)
    return f"[dim]{escape(entry.id)}[/] [bold]{entry.event}[/] {escape(fields)}"


def side_by_side(console: Console, left: tuple[str, str], right: tuple[str, str]) -> None:
    """Print two (title, text) panels side by side."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    panels = [
        Panel(Text(text.strip()), title=title, title_align="left", border_style=style)
        for (title, text), style in ((left, "blue"), (right, "magenta"))
    ]
    grid.add_row(*panels)
    console.print(grid)
