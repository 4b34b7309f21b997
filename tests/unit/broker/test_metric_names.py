"""Does the table in docs/observability.md list the metrics that the processes have, with their
kinds and labels? Both ways.
"""

import re
from typing import NamedTuple

from prometheus_client import REGISTRY
from tree import CORE, ROOT, imports_of, sources

from midstream.api.routes import service as _service  # noqa: F401
from midstream.broker.telemetry.scraped_metrics import OF_WORKER, ScrapedMetrics
from midstream_webhooks import sender as _sender  # noqa: F401


class Metric(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]


def listed() -> set[Metric]:
    rows = re.findall(
        r"^\| `(midstream_\w+)` \| (\w+) \|([\w, ]*)\|",
        (ROOT / "docs/observability.md").read_text(),
        re.MULTILINE,
    )
    return {
        Metric(name, kind, tuple(label.strip() for label in labels.split(",") if label.strip()))
        for name, kind, labels in rows
    }


def there() -> set[Metric]:
    """Those that any process registers. (A worker registers its own when its engine runs.)"""
    found = set()
    for collector in [*REGISTRY._collector_to_names, ScrapedMetrics(OF_WORKER, list)]:
        if not hasattr(collector, "describe"):
            continue
        labels = getattr(collector, "_labelnames", None)
        for family in collector.describe():
            if family.name.startswith("midstream_") and not family.name.startswith(
                "midstream_http"
            ):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                found.add(
                    Metric(
                        name,
                        family.type,
                        tuple(getattr(family, "_labelnames", None) or labels or ()),
                    )
                )
    return found


#: Modules that make metrics of prometheus_client; all others only update those of
#: `broker/telemetry/metrics.py`.
DECLARE = {"broker/telemetry/metrics.py"}


def test_metrics_are_declared_in_one_module() -> None:
    kinds = {
        f"prometheus_client.{kind}"
        for kind in ("Counter", "Gauge", "Histogram", "Summary", "Info", "Enum")
    }
    declaring = {
        str(path.relative_to(ROOT))
        for path in sources(*CORE)
        if "prometheus_client" in path.read_text()
        for found in imports_of(path)
        if found.module in kinds
    }
    assert declaring == DECLARE


def test_the_metrics_are_those_that_are_documented() -> None:
    assert there() == listed()
