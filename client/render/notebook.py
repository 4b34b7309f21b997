"""Renders results in notebooks, without any setting there: `_repr_html_` and `_repr_png_` of studies, sweeps, answers and readers."""

import base64
import io
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...schemas.errors import MidstreamError
from ...schemas.jobs import JobPage, JobResult, JobView
from ...schemas.steering import GlobalView, ModuleView
from ...schemas.sweeps import SweepResult

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..captures.patterns import Attention
    from ..captures.reader import CaptureReader
    from ..sdk.lens import Lens
    from ..sdk.wire import Answer

#: Characters in a line of a table.
_WIDTH = 110
_PRE = (
    "<pre style=\"white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace\">{code}</pre>"
)


def register(shell: Any) -> None:
    """Give IPython's shell the renderers of the schemas' types, which have no methods for it."""
    formatters = shell.display_formatter.formatters
    for kind, render in _HTML.items():
        formatters["text/html"].for_type(kind, render)
    formatters["image/png"].for_type(SweepResult, sweep_png)


def html(*parts: "RenderableType") -> str:
    """The terminal's output as HTML, in its colours."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_terminal=True, color_system="truecolor", highlight=False)
    console.print(*parts, sep="\n")
    return console.export_html(inline_styles=True, code_format=_PRE)


def sweep_png(result: SweepResult, pair: int | None = None) -> bytes | None:
    """The heatmap; None without matplotlib."""
    from .figures import png
    from .heatmap import figure

    try:
        return png(figure(result, None, pair))
    except MidstreamError as error:
        if error.kind != "unavailable":
            raise
        return None


def sweep_html(result: SweepResult, pair: int | None = None) -> str:
    """The heatmap, as the terminal draws it where there is no matplotlib, and the strongest cells."""
    from . import sweeps

    drawn = sweep_png(result, pair)
    if drawn is None:
        return html(sweeps.report(result, pair))
    image = f'<img alt="heatmap" style="max-width:100%" src="data:image/png;base64,{base64.b64encode(drawn).decode()}"/>'
    return image + html(sweeps.findings(result, pair))


def _job_html(result: JobResult) -> str:
    from . import jobs

    if result.sweep is not None:
        return sweep_html(result.sweep)
    captures = result.capture_results
    parts: list[RenderableType] = [jobs.outputs(result)]
    if captures.status != "not_requested":
        parts.append(f"captures {jobs.coloured(captures.status)}: {jobs.count(captures.rows, 'row')}, {jobs.size(captures.bytes)}")
    if result.determinism is not None:
        parts.append(jobs.determinism_line(result.determinism))
    return html(*parts)


def answer_html(answer: "Answer") -> str:
    """Texts, captures, and whether the ranks agree on what they applied."""
    from rich.markup import escape

    from . import jobs

    shown = jobs.table("", "request", "text", "finish")
    for number, (text, finish) in enumerate(zip(answer.texts, answer.finish_reasons, strict=True)):
        shown.add_row(str(number), escape(repr(text)), str(finish))
    parts: list[RenderableType] = [shown]
    if answer.capture_results is not None:
        parts.append(f"captures {jobs.coloured(answer.capture_results.status)}: {jobs.count(answer.capture_results.rows, 'row')}")
    if answer.determinism is not None:
        parts.append(jobs.determinism_line(answer.determinism))
    return html(*parts)


def reader_html(reader: "CaptureReader") -> str:
    """The captured rows, and what is missing."""
    from rich.markup import escape

    from . import jobs

    return html(jobs.capture(reader), *[f"[yellow]missing:[/] {escape(gap.detail)}" for gap in reader.gaps()])


def attention_figure(attention: "Attention", path: Any, options: dict[str, Any]) -> Any:
    from .attention_figure import figure

    return figure(attention, path, **options)


def attention_html(attention: "Attention") -> str:
    """The maps as a picture, or as the terminal draws them where there is no matplotlib, and what the heads attend to."""
    from . import attention as maps
    from .attention_figure import figure
    from .figures import png

    try:
        drawn = base64.b64encode(png(figure(attention))).decode()
    except MidstreamError as error:
        if error.kind != "unavailable":
            raise
        return html(maps.report(attention))
    return f'<img alt="attention" style="max-width:100%" src="data:image/png;base64,{drawn}"/>' + html(maps.strongest(attention))


def lens_figure(lens: "Lens", path: Any, places: Any) -> Any:
    """The heat map of a logit lens."""
    from .lens import figure

    return figure(lens, path, places)


def lens_html(lens: "Lens") -> str:
    """Top tokens by layer and position, and the ranks of those that were named."""
    from .lens import named_table, table

    return html(table(lens), *([named_table(lens)] if lens.named else []))


def _shown(module: str, name: str, value: Any) -> str:
    """By a function of the modules that show things on terminals."""
    from importlib import import_module

    return html(getattr(import_module(module, __package__), name)(value))


def _module_html(view: ModuleView) -> str:
    from . import steering

    return html(steering.module(view), steering.entries(view.entries))


def _global_html(view: GlobalView) -> str:
    from . import steering

    return html(steering.global_line(view), steering.entries(view.entries))


#: Type of the schemas → its HTML.
_HTML: dict[type, Callable[[Any], str]] = {
    SweepResult: sweep_html,
    JobResult: _job_html,
    JobView: partial(_shown, ".jobs", "job"),
    JobPage: lambda page: _shown(".jobs", "jobs", page.jobs),
    ModuleView: _module_html,
    GlobalView: _global_html,
}
