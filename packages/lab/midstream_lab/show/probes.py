"""What training measured of a probe on held-out rows: table, figure, and lines of data frames."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from midstream.client.render.curves import HEADROOM
from midstream.client.render.drawing import BLUE, RED, side_by_side
from midstream.client.render.jobs import facts
from midstream.schemas.artifacts.probes import Probe
from midstream.schemas.base.errors import invalid

from ..client.probes import Fit, Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most curves in one pair of axes.
_CURVES = 10


def measured(metrics: Metrics) -> Table:
    """Return a table of a probe's metrics on held-out rows, and which of two classes it scores."""
    *others, positive = metrics.train
    return facts(
        *[
            ("positive", f"{escape(positive)}; not {escape(other)}")
            for other in others[: len(others) == 1]
        ],
        (
            "AUROC",
            (f"{metrics.auroc:.3f} held out; {metrics.baseline_auroc:.3f} with shuffled labels"),
        ),
        (
            "accuracy",
            (
                f"{metrics.accuracy:.3f} held out; {metrics.baseline_accuracy:.3f} with "
                "shuffled labels"
            ),
        ),
        ("majority", f"{metrics.majority:.3f} for always answering the most frequent class"),
        (
            "trained on",
            escape(", ".join(f"{name}: {count}" for name, count in metrics.train.items())),
        ),
        (
            "held out",
            escape(", ".join(f"{name}: {count}" for name, count in metrics.held_out.items())),
        ),
    )


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
    # the positive class has an outline: two fills would mix to a third colour
    for rows, of, look in (
        (counts.negative, f"not {name}", {"color": BLUE, "alpha": 0.55, "fill": True}),
        (counts.positive, name, {"color": RED, "linewidth": 1.6}),
    ):
        bars.stairs(rows, counts.edges, label=f"{of} ({sum(rows)})", **look)
    if (threshold := content.thresholds[label]) is not None:
        bars.axvline(threshold, color="black", linewidth=0.9, linestyle="--", label="threshold")
    bars.set(
        title="scores of held-out rows",
        xlabel="score, log-odds",
        ylabel="rows",
        ylim=(0, max(*counts.negative, *counts.positive) * HEADROOM),
    )
    bars.yaxis.get_major_locator().set_params(integer=True)
    bars.legend(loc="best")
    return figure


def held_out(trained: Fit | Probe, *, roc: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the bins of a probe's held-out scores, or the points of its ROC curves."""
    content: Any = getattr(trained, "content", trained)
    for label, each in zip(content.labels, trained.held_out, strict=False):
        bins = each.histogram
        names, columns = (
            (("fpr", "tpr"), (each.roc.fpr, each.roc.tpr))
            if roc
            else (
                ("low", "high", "negative", "positive"),
                (bins.edges, bins.edges[1:], bins.negative, bins.positive),
            )
        )
        yield from (
            {"label": label} | dict(zip(names, line, strict=True))
            for line in zip(*columns, strict=False)
        )
