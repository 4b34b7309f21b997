"""Terminal output of probes."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from ...schemas.artifacts.probes import Probe, ProbeResult
from ...schemas.jobs.jobs import JobResult
from ...schemas.prompts.selectors import as_ranges
from ..probes import Metrics
from .jobs import facts, table
from .steering import DIGEST

#: Labels of a probe that a list shows.
_SHOWN = 4
#: Runs of steered tokens that a result shows.
_RUNS = 6


def listed(probes: Sequence[Probe]) -> Table:
    """One line per name."""
    shown = table("Probes", "name", "digest", "site", "labels", "watches", "description")
    for probe in probes:
        labels = ", ".join(probe.content.labels[:_SHOWN]) + (
            ", …" if len(probe.content.labels) > _SHOWN else ""
        )
        cells = (
            probe.name,
            probe.digest[:DIGEST],
            _site(probe),
            labels,
            probe.watch or "",
            probe.description,
        )
        shown.add_row(*map(escape, cells))
    return shown


def one(probe: Probe) -> Table:
    """All about one name."""
    pairs = zip(probe.content.labels, probe.content.thresholds, strict=True)
    return facts(
        ("probe", escape(probe.name)),
        ("model", escape(probe.model)),
        (
            "digest",
            probe.digest[:DIGEST]
            + (f" (replaced {probe.replaced[:DIGEST]})" if probe.replaced else ""),
        ),
        ("site", _site(probe)),
        (
            "labels",
            escape(
                ", ".join(
                    label if threshold is None else f"{label} ≥ {threshold:.4g}"
                    for label, threshold in pairs
                )
            ),
        ),
        (
            "aggregation",
            probe.content.aggregation
            + (f", decay {probe.content.decay:g}" if probe.content.decay else ""),
        ),
        ("watches", "" if probe.watch is None else f"all traffic, {probe.watch}"),
        ("description", escape(probe.description)),
    )


def measured(metrics: Metrics) -> Table:
    """Return what a probe is worth on rows that it was not trained on."""
    return facts(
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
        ("majority", f"{metrics.majority:.3f} for always the same answer"),
        (
            "trained on",
            escape(", ".join(f"{name}: {count}" for name, count in metrics.train.items())),
        ),
        (
            "held out",
            escape(", ".join(f"{name}: {count}" for name, count in metrics.held_out.items())),
        ),
    )


def scores(result: JobResult) -> Table:
    """One line per prompt, probe and label."""
    steered = any(probe.gate is not None for probe in result.probes)
    shown = table(
        "Scores",
        "prompt",
        "probe",
        "label",
        "score",
        "tokens",
        "crossed at",
        *(["steered at"] if steered else []),
    )
    for probe in result.probes:
        where = [_steered_at(probe)] if steered else []
        for label, score in probe.scores.items():
            crossed = str(probe.crossed.get(label, "")) + (
                " (stopped)" if probe.stopped and label in probe.crossed else ""
            )
            shown.add_row(
                *map(
                    escape,
                    (
                        str(probe.request),
                        probe.probe,
                        label,
                        f"{score:.4f}",
                        str(probe.positions),
                        crossed,
                        *where,
                    ),
                )
            )
    return shown


def _steered_at(result: ProbeResult) -> str:
    return as_ranges(
        (place for first, last in result.gate or [] for place in range(first, last + 1)), _RUNS
    )


def _site(probe: Probe) -> str:
    return f"{probe.content.hook}.{probe.content.layer}" + (
        " after" if probe.content.at == "after" else ""
    )
