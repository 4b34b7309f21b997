"""Figures of curves: doses, probes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...schemas.artifacts.probes import Probe, ProbeResult
from ...schemas.base.errors import invalid
from ...schemas.base.records import by_key
from ...schemas.jobs.attributions import CheckedCell
from ...schemas.jobs.doses import DoseCell, DoseResult
from ..probes import Fit
from ..sdk.answers.attribution import Attribution, Score, place_name
from .doses import measure
from .drawing import BLUE, GREEN, RED, new_figure, side_by_side
from .readings import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most curves in one pair of axes; the height of an axis by that of its highest bar.
_CURVES = 10
_HEADROOM = 1.15
#: Inches of a token.
_TOKEN = 0.16


# --- Doses


#: The most layers of a dose's figure.
_LAYERS = 6
#: The most cells with their names in a scatter, and the distance of two names as a share of it.
_NAMED = 8
_LINE = 0.06


def dose_figure(result: DoseResult) -> "Figure":
    """Draw effect, loss and repetition by scale, a column for each layer: the safe range is shaded,
    its ends are ringed, cells that are not safe are crossed, and bounds are dashed. Of more than
    `_LAYERS` layers, those whose safe effects are farthest from the unsteered one, up or down.
    """
    dose = result.dose
    base = result.unsteered
    cells, safe = (by_key((cell.layer, cell) for cell in of) for of in (result.cells, result.safe))
    reach = {
        layer: max(abs(cell.effect - base.effect) for cell in safe.get(layer, [base]))
        for layer in cells
    }
    farthest = sorted(cells, key=lambda layer: -reach[layer])[:_LAYERS]
    rows = (
        (measure(dose.effect), "effect", None),
        ("added loss, nats", "loss", dose.max_loss),
        ("repetition", "repetition", base.repetition + dose.max_repetition),
    )
    figure = new_figure(1.2 + 1.7 * max(len(farthest), 3), 5.0)
    axes = figure.subplots(3, len(farthest), sharex=True, sharey="row", squeeze=False)
    for column, layer in zip(axes.T, [each for each in cells if each in farthest], strict=True):
        every = [msgspec.structs.replace(base, loss=0.0), *cells[layer]]
        for axis, (_, field, bound) in zip(column, rows, strict=True):
            _draw_dose(axis, every, safe.get(layer, []), field, bound)
        column[0].set(title="all layers" if layer is None else f"layer {layer}")
        column[-1].set(xlabel="scale")
    for axis, (label, *_) in zip(axes[:, 0], rows, strict=True):
        axis.set(ylabel=label)
    some = f"{len(farthest)} of {len(cells)} layers, with the largest changes, up or down · "
    of = some if len(farthest) < len(cells) else ""
    marks = "shaded: safe · ring: largest safe scale · cross: not safe · dashed: bound"
    figure.suptitle(f"{of}{marks}")
    return figure


def _draw_dose(
    axis: Any, cells: list[DoseCell], safe: list[DoseCell], field: str, bound: float | None
) -> None:
    """Draw one field of a layer's cells by scale."""
    cells = sorted(cells, key=lambda cell: cell.scale)
    x, y = (np.array([getattr(cell, name) for cell in cells]) for name in ("scale", field))
    good = np.array([cell.safe for cell in cells])
    ends = [0.0, *(cell.scale for cell in safe)]
    axis.axvspan(min(ends), max(ends), color=GREEN, alpha=0.12, linewidth=0)
    axis.axhline(y[x == 0][0], color="0.75", linewidth=0.6)
    if bound is not None:
        axis.axhline(bound, color=RED, linewidth=0.8, linestyle="--")
    axis.plot(x, y, color=BLUE, linewidth=1.2)
    axis.plot(x[good], y[good], "o", color=BLUE, markersize=3.5)
    axis.plot(x[~good], y[~good], "x", color=RED, markersize=4)
    ringed = np.isin(x, ends[1:])
    axis.plot(x[ringed], y[ringed], "o", color=GREEN, markersize=8, fillstyle="none")


# --- Attributions


def draw_bars(axis: Any, scores: Sequence[Score], unit: str) -> None:
    """Draw the strongest edges or features."""
    axis.barh([item.name for item in scores], [item.score for item in scores], color=BLUE)
    axis.tick_params(axis="y", labelsize=6)
    axis.invert_yaxis()
    axis.set(xlabel=unit, title="strongest estimated effects")


def draw_scatter(axis: Any, attribution: Attribution, cells: Sequence[CheckedCell]) -> None:
    """Draw estimated against exact effects of cells, with the names of those that disagree most."""
    exact, estimate = (
        np.array([getattr(cell, name) for cell in cells], dtype=float)
        for name in ("exact_effect", "estimate_effect")
    )
    off = np.array([cell.off for cell in cells])
    ends = float(min(exact.min(), estimate.min())), float(max(exact.max(), estimate.max()))
    axis.plot(ends, ends, color="0.6", linewidth=0.8)
    for chosen, colour, name in ((~off, BLUE, "agree"), (off, RED, "off")):
        axis.plot(
            exact[chosen],
            estimate[chosen],
            "o",
            markersize=3.5,
            color=colour,
            label=f"{name} ({chosen.sum()})",
        )
    worst = sorted(np.flatnonzero(off), key=lambda n: -abs(exact[n] - estimate[n]))[:_NAMED]
    middle = (np.mean(estimate[worst or [0]]) - ends[0]) / ((ends[1] - ends[0]) or 1.0)
    height = _LINE * max(len(worst) - 1, 0)
    lowest = float(np.clip(middle - height / 2, 0, 1 - height))
    for place, n in enumerate(sorted(worst, key=lambda n: estimate[n])):
        where = place_name(attribution.estimates.names, cells[n].column, cells[n].feature)
        axis.annotate(
            f"{where}, {cells[n].hook} {cells[n].layer}",
            (exact[n], estimate[n]),
            (1.03, lowest + place * _LINE),
            textcoords="axes fraction",
            fontsize=6,
            va="center",
            # from the name's edge: a line from its middle would cross it out
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5, "relpos": (0, 0.5)},
        )
    known = (
        (attribution.spearman, "rank correlation {:.2f}"),
        (attribution.recall, "recall {:.0%}"),
    )
    said = [text.format(value) for value, text in known if value is not None]
    axis.set(xlabel="exact effect", ylabel="estimated effect", box_aspect=1, anchor="N")
    axis.set(title=" · ".join(said) or "estimate against exact")
    axis.legend(loc="upper left")


# --- Probes


def probe_figure(
    result: ProbeResult,
    *,
    tokens: Sequence[str] = (),
    threshold: float | None = None,
) -> "Figure":
    """Draw the score of each label at each position, or only their aggregates if the request did
    not ask for `tokens`. `tokens`: their texts; `threshold`: by default a policy's `at_least`. The
    first token sets no scale, as on the page: its row is an outlier in most models.
    """
    own = result.policy and result.policy.condition.at_least
    figure, (axis,) = side_by_side(1, max(5.0, len(tokens) * _TOKEN))
    axis.set(ylabel="score", title=result.probe)
    limit = own if threshold is None else threshold
    lines = [] if limit is None else [limit]
    for line in lines:
        axis.axhline(line, color="black", linewidth=0.9, linestyle="--", label="threshold")
    if result.tokens is None:
        axis.bar(result.scores.keys(), result.scores.values())
        return figure
    for label, scores in zip(result.scores, zip(*result.tokens, strict=True), strict=True):
        axis.plot(scores, label=label, marker=".")
    inside = [*np.ravel(result.tokens[1:] or result.tokens), *lines, 0.0]
    room = ((max(inside) - min(inside)) or 1.0) * (_HEADROOM - 1)
    axis.set(xlabel="position", ylim=(min(inside) - room, max(inside) + room))
    words = [shown(word) for word in tokens[: result.positions]]
    if words:
        axis.set_xticks(range(len(words)), words, rotation=90, fontsize=6)
    axis.legend()
    return figure


def training_figure(trained: Fit | Probe, label: int = 0) -> "Figure":
    """Draw the ROC curve of each label on held-out rows, and the histogram of both classes of
    `label`, with its threshold.
    """
    content: Any = getattr(trained, "content", trained)
    held_out = trained.held_out
    if not 0 <= label < len(held_out):
        allowed = f"0 to {len(held_out) - 1}" if held_out else "a probe that was trained by `fit`"
        raise invalid("label", f"{label} has no scores of held-out rows", allowed=allowed)
    figure, (curves, bars) = side_by_side(2, 3.2)
    for name, roc in zip(content.labels[:_CURVES], (each.roc for each in held_out), strict=False):
        curves.plot(roc.fpr, roc.tpr, label=f"{name}: AUROC {roc.auc:.3f}", linewidth=1.2)
    curves.plot((0, 1), (0, 1), color="0.6", linewidth=0.8, linestyle=":")
    curves.set(
        title="ROC on held-out rows",
        xlabel="false positives",
        ylabel="true positives",
        xlim=(0, 1),
        ylim=(0, 1),
        aspect="equal",
    )
    curves.legend(loc="lower right")
    counts = held_out[label].histogram
    name = content.labels[label]
    look = {"fill": True, "alpha": 0.55}
    for rows, of, colour in ((counts.negative, f"not {name}", BLUE), (counts.positive, name, RED)):
        bars.stairs(rows, counts.edges, color=colour, label=f"{of} ({sum(rows)})", **look)
    if (threshold := content.thresholds[label]) is not None:
        bars.axvline(threshold, color="black", linewidth=0.9, linestyle="--", label="threshold")
    bars.set(
        title="scores of held-out rows",
        xlabel="score, log-odds",
        ylabel="rows",
        ylim=(0, max(*counts.negative, *counts.positive) * _HEADROOM),
    )
    bars.yaxis.get_major_locator().set_params(integer=True)
    bars.legend(loc="best")
    return figure
