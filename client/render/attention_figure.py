"""Attention patterns as a picture: a panel of tokens by tokens per head, one colour scale
(matplotlib, extra `plots`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.base.errors import invalid
from ..captures.patterns import Attention
from . import figures
from .attention import Panel, panels_of, written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Panels of one picture, at most, and in one row.
MOST, _ROW = 64, 4
#: Inches of a panel: per token, at least and at most; and of what stands around the panels.
_TOKEN, _SIDE, _AROUND = 0.11, (1.5, 4.5), (1.3, 0.9)
#: Most tokens that the axes name.
_NAMED = 64
#: Characters of a token's name.
_NAME = 14


def figure(
    attention: Attention, path: Path | str | None = None, panels: Sequence[Panel] | None = None
) -> "Figure":
    """Draw the patterns of `panels`, (layer, head) each; by default of all heads, or of the
    strongest if they are many.

    `path`: saved there, in the format that its ending names. Raises MidstreamError for a head that
    is not there, too many panels, a missing matplotlib, or a format that it cannot write; OSError.
    """
    if path is not None:
        figures.check(path, "figure")
    chosen = panels_of(attention) if panels is None else list(panels)
    if not 1 <= len(chosen) <= MOST:
        raise invalid(
            "panels", f"{len(chosen)} panels do not make a picture", allowed=f"1 to {MOST}"
        )
    with figures.styled():
        drawn = _draw(attention, chosen)
        if path is not None:
            drawn.savefig(path, dpi=figures.DPI)
    return drawn


def _draw(attention: Attention, panels: Sequence[Panel]) -> "Figure":
    names = [written(token)[:_NAME] for token in attention.tokens]
    side = float(np.clip(_TOKEN * len(names), *_SIDE))
    columns = min(len(panels), _ROW)
    rows = math.ceil(len(panels) / columns)
    size = (columns * (side + 0.15) + _AROUND[0], rows * (side + 0.3) + _AROUND[1])
    drawn: Figure = figures.figure_class()(figsize=size, layout="constrained")
    axes = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    patterns = [attention.of(*panel) for panel in panels]
    most = max(float(pattern.max(initial=0)) for pattern in patterns) or 1.0
    unseen = np.triu(np.ones((len(names), len(names)), dtype=bool), 1)
    for axis, (layer, head), pattern in zip(axes, panels, patterns, strict=False):
        shown = np.where(unseen, np.nan, pattern)
        image = axis.imshow(
            shown, cmap="Blues", vmin=0, vmax=most, interpolation="nearest", aspect="equal"
        )
        axis.set_title(f"layer {layer}, head {head}", fontsize=8)
        axis.tick_params(length=2, width=0.6)
        if len(names) <= _NAMED:
            font = float(np.clip(0.7 * 72 * side / len(names), 2.5, 7.0))
            axis.set_xticks(range(len(names)), names, fontsize=font, rotation=90)
            axis.set_yticks(range(len(names)), names, fontsize=font)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    bar = drawn.colorbar(image, ax=list(axes), aspect=rows * side / 0.09, pad=0.02)
    bar.set_label("share of the query's attention", fontsize=7)
    bar.outline.set_linewidth(0.6)
    drawn.supxlabel("key", fontsize=8)
    drawn.supylabel("query", fontsize=8)
    return drawn
