"""Renders the results of calls in notebooks: implements `_repr_html_` and `_repr_png_`, and what
else `schemas.base.records` calls by name.
"""

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rich import markup
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import Record
from ...schemas.jobs.jobs import CaptureResults, Determinism, Output
from ...schemas.jobs.results import JobResult
from ...schemas.requests.steering import GlobalView
from ...schemas.service.status import ServiceStatus
from ..captures.patterns import Attention
from ..captures.reader import CaptureReader
from ..sdk.readings import Features, Lens
from ..sdk.wire import Answer
from . import attention as maps, figures, jobs, readings, records, status, steering
from .figures import plot as plot
from .forms import form_of
from .lines import frame as frame, of_kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Characters per line.
_WIDTH = 110
_PRE = (
    "<pre "
    "style=\"white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu "
    "Sans Mono',Consolas,monospace\">{code}</pre>"
)


def result_png(result: Any) -> bytes | None:
    """Return the image of a result whose class has one."""
    draw = form_of(type(result)).png
    return None if draw is None else draw(result)


def record_html(record: Any) -> str | None:
    """Return a result or record as HTML, a page or list of records as their table; None for a type
    that notebooks show as text.
    """
    if render := _HTML.get(type(record)) or form_of(type(record)).html:
        return render(record)
    if records.layout(type(record)).facts:
        return html(*records.parts(record))
    entries = record
    if isinstance(record, Record):
        entries = getattr(record, record.__struct_fields__[0])
    return listing_html(entries) if isinstance(entries, list) else None


def listing_html(listing: Sequence[Any]) -> str | None:
    """Return a list of records of one type as an HTML table; None for an empty list or a type
    without a table.
    """
    if not listing or not records.layout(type(listing[0])).columns:
        return None
    return html(records.listed(listing, type(listing[0])))


def html(*parts: RenderableType) -> str:
    """Return terminal output as HTML, with its colours.

    Text is escaped: it becomes neither markup nor links.
    """
    console = Console(
        file=io.StringIO(),
        width=_WIDTH,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    pieces = []
    for part in parts:
        drawn = console.render_str(part) if isinstance(part, str) else part
        for segment in Segment.simplify(Segment.filter_control(console.render(drawn))):
            style = segment.style.get_html_style(DEFAULT_TERMINAL_THEME) if segment.style else ""
            text = escape(segment.text)
            pieces.append(f'<span style="{style}">{text}</span>' if style else text)
    return _PRE.format(code="".join(pieces))


def png_of(draw: Callable[[], "Figure"]) -> bytes | None:
    """Return a figure as PNG; None without matplotlib."""
    try:
        return figures.png(draw())
    except MidstreamError as error:
        if error.kind != "unavailable":
            raise
        return None


def image_of(name: str, drawn: bytes) -> str:
    return (
        f'<img alt="{name}" style="max-width:100%" '
        f'src="data:image/png;base64,{base64.b64encode(drawn).decode()}"/>'
    )


def _job_html(result: JobResult) -> str:
    for value in of_kind(result):
        if render := form_of(type(value)).html:
            return render(value)
    shown = records.listed(result.outputs, Output)
    return _with_reports(shown, result.capture_results, result.determinism)


def _with_reports(
    shown: Table, captures: CaptureResults | None, determinism: Determinism | None
) -> str:
    """Return a table of texts, captures, and whether the ranks agree on what they applied."""
    parts: list[RenderableType] = [shown]
    if captures is not None and captures.status != "not_requested":
        parts.append(
            f"captures {jobs.coloured(captures.status)}: "
            f"{jobs.count(captures.rows, 'row')}, {jobs.size(captures.bytes)}"
        )
    if determinism is not None:
        parts.append(jobs.determinism_line(determinism))
    return html(*parts)


def answer_html(answer: Answer) -> str:
    """Return texts, captures, and whether the ranks agree."""
    shown = jobs.table("", "request", "text", "finish")
    for number, (text, finish) in enumerate(zip(answer.texts, answer.finish_reasons, strict=True)):
        shown.add_row(str(number), markup.escape(repr(text)), str(finish))
    return _with_reports(shown, answer.capture_results, answer.determinism)


def reader_html(reader: CaptureReader) -> str:
    """Return the captured rows, and what is missing."""
    return html(
        jobs.capture(reader),
        *[f"[yellow]missing:[/] {markup.escape(gap.detail)}" for gap in reader.gaps()],
    )


def attention_html(attention: Attention) -> str:
    """Return the patterns (without matplotlib, as the terminal draws them), and what the heads
    attend to.
    """
    drawn = png_of(lambda: plot(attention, None))
    if drawn is None:
        return html(maps.report(attention))
    return image_of("attention", drawn) + html(maps.strongest(attention))


def lens_html(lens: Lens) -> str:
    """Return the top tokens by layer and position, and the ranks of named tokens."""
    named = [readings.named_table(lens)] if lens.named else []
    return html(readings.lens_table(lens), readings.KEY, *named)


def features_html(features: Features) -> str:
    """Return each token with its most active features."""
    return html(readings.features_table(features))


#: Type → the function that renders it as HTML.
_HTML: dict[type, Callable[[Any], str]] = {
    Answer: answer_html,
    Attention: attention_html,
    CaptureReader: reader_html,
    Features: features_html,
    Lens: lens_html,
    JobResult: _job_html,
    GlobalView: lambda view: html(steering.global_line(view), steering.entries(view.entries)),
    ServiceStatus: lambda now: html(status.status(now, "")),
}
