"""Code that all figures share: matplotlib (extra `plots`), style, formats, and display in
notebooks.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.base.errors import MidstreamError, invalid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Text stays text in vector files, and a `$` in a token a dollar.
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "font.size": 8,
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.4,
}
#: Of scripts that matplotlib's own font lacks; those that are installed.
_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Noto Sans",
    "Arial Unicode MS",
)
#: Of a saved figure and of one that a notebook shows.
DPI, _DPI_SHOWN = 200, 110


def matplotlib() -> Any:
    """The module. Raises MidstreamError without the extra `plots`."""
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.font_manager
    except ImportError as error:
        detail = "drawing needs matplotlib: pip install 'midstream[plots]'"
        raise MidstreamError("unavailable", detail) from error
    return matplotlib


@contextmanager
def styled() -> Iterator[Any]:
    """matplotlib, with our style and fonts while the context lasts.

    Raises MidstreamError without it.
    """
    module = matplotlib()
    fonts = module.font_manager.fontManager.get_font_names()
    family = {"font.family": ["DejaVu Sans", *(font for font in _FONTS if font in fonts)]}
    with module.rc_context(_STYLE | family):
        yield module


def png(drawn: "Figure") -> bytes:
    """The figure as notebooks show it."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DPI_SHOWN)
    return buffer.getvalue()


@cache
def figure_class() -> Any:
    """matplotlib's figure, which a notebook displays as it is."""
    from matplotlib.figure import Figure

    return type("Figure", (Figure,), {"_repr_png_": png, "__module__": __name__})


def check(path: Path | str, field: str) -> None:
    """Raises MidstreamError that names `field` unless a figure can be written there: better said
    before long work than behind it.
    """
    formats = matplotlib().figure.Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in formats:
        raise invalid(
            field,
            f"{path}: the extension is not a figure format",
            allowed=", ".join(f".{name}" for name in sorted(formats)),
        )
    if not Path(path).absolute().parent.is_dir():
        raise invalid(field, f"{path}: no such folder")
