"""One style for all figures, how they are saved, and their axes (matplotlib, extra `plots`)."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.base.errors import MidstreamError, Translated, invalid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Length and width of a tick.
_TICK = {"size": 2, "width": 0.6}
#: Vector files contain text as text, and a `$` in a token is drawn literally.
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "font.size": 8,
    "axes.linewidth": 0.6,
    "axes.titlesize": 8,
    "figure.titlesize": 8,
    "figure.labelsize": 8,
    "hatch.linewidth": 0.4,
    "legend.fontsize": 7,
    "legend.frameon": False,
    **{f"{axis}tick.major.{name}": size for axis in "xy" for name, size in _TICK.items()},
}
#: Fonts for scripts that matplotlib's own font lacks; used if installed.
_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Noto Sans",
    "Arial Unicode MS",
)
#: Dots per inch of a saved figure, and of a figure in a notebook.
DPI = 200
_DPI_SHOWN = 110


#: Colours of curves: those of below and above in heatmaps, and that of what is safe.
BLUE = "#2166ac"
RED = "#b2182b"
GREEN = "#1b7837"


#: From the ground of a cell to teal, as on the page (`lib/heatmap.js`): for values that have no
#: other side, such as probabilities.
_SHADES = ("#f3f7f7", "#bfe2e2", "#70b8bb", "#1c8086", "#064850")


def matplotlib() -> Any:
    """Import matplotlib. Raises MidstreamError if the extra `plots` is not installed."""
    with Translated(
        ImportError,
        lambda error: MidstreamError(
            "unavailable", ("drawing needs matplotlib: pip install 'midstream[plots]'")
        ),
    ):
        import matplotlib
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.font_manager
    return matplotlib


@contextmanager
def styled() -> Iterator[Any]:
    """Yield matplotlib, with our style and fonts within the context. Raises MidstreamError if
    matplotlib is missing.
    """
    module = matplotlib()
    fonts = module.font_manager.fontManager.get_font_names()
    family = {"font.family": ["DejaVu Sans", *(font for font in _FONTS if font in fonts)]}
    with module.rc_context(_STYLE | family):
        yield module


def shades() -> Any:
    """Return the colour map of values that have no other side."""
    return matplotlib().colors.LinearSegmentedColormap.from_list("shades", _SHADES)


def png(drawn: "Figure") -> bytes:
    """Return the figure as a PNG at a notebook's resolution."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DPI_SHOWN)
    return buffer.getvalue()


@cache
def figure_class() -> Any:
    """Return a subclass of matplotlib's `Figure` that notebooks display."""
    from matplotlib.figure import Figure

    return type("Figure", (Figure,), {"_repr_png_": png, "__module__": __name__})


def check(path: Path | str | None, field: str) -> None:
    """Check that a figure can be written to `path`, if one is given, so that an error comes before
    long work.

    Raises MidstreamError that names `field`.
    """
    if path is None:
        return
    formats = matplotlib().figure.Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in formats:
        raise invalid(
            field,
            f"{path}: the extension is not a figure format",
            allowed=", ".join(f".{name}" for name in sorted(formats)),
        )
    if not Path(path).absolute().parent.is_dir():
        raise invalid(field, f"{path}: no such folder")


def saved(path: Path | str | None, draw: Callable[[], "Figure"]) -> "Figure":
    """Draw a figure in our style. If `path` is given, save it there, in the format of its
    extension. Raises OSError, and what `check` raises.
    """
    check(path, "path")
    with styled():
        drawn = draw()
        if path is not None:
            drawn.savefig(path, dpi=DPI)
    return drawn


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches."""
    figure: Figure = figure_class()(figsize=(width, height), layout="constrained")
    return figure


def side_by_side(number: int = 1, width: float = 5.0) -> tuple["Figure", Any]:
    """Return a figure, and its pairs of axes side by side, each `width` inches wide."""
    figure = new_figure(number * width, 3.0)
    return figure, figure.subplots(1, number, squeeze=False)[0]
