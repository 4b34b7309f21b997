"""The table of a trained probe's metrics."""

from rich.markup import escape
from rich.table import Table

from midstream.client.render.jobs import facts

from ..client.probes import Metrics


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
