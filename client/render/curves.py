"""Figures of curves: probes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...schemas.artifacts.probes import ProbeResult
from ...schemas.base.errors import invalid
from .drawing import BLUE, RED, side_by_side
from .readings import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most curves in one pair of axes; the height of an axis by that of its highest bar.
_CURVES = 10
_HEADROOM = 1.15
#: Inches of a token.
_TOKEN = 0.16


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


def training_figure(trained: Any, label: int = 0) -> "Figure":
    """Draw the ROC curve of each label of a probe on held-out rows, and the histogram of both
    classes of `label`, with its threshold. `trained`: registered, or what `fit` returned.
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
