"""Does the table in docs/observability.md list the metrics that the processes have, with their kinds and labels? Both ways."""

import re
from typing import NamedTuple

from prometheus_client import REGISTRY
from tree import ROOT

from midstream.api.operations import ledger_metrics as _ledger_metrics  # noqa: F401
from midstream.api.routes import service as _service  # noqa: F401
from midstream.broker.ops import metrics as _metrics  # noqa: F401
from midstream.workers.serving.metrics import OF_RANK, OF_WORKER


class Metric(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]


def listed() -> set[Metric]:
    rows = re.findall(r"^\| `(midstream_\w+)` \| (\w+) \|([\w, ]*)\|", (ROOT / "docs/observability.md").read_text(), re.MULTILINE)
    return {Metric(name, kind, tuple(label.strip() for label in labels.split(",") if label.strip())) for name, kind, labels in rows}


def there() -> set[Metric]:
    found = set()
    for collector in list(REGISTRY._collector_to_names):
        labels = getattr(collector, "_labelnames", None)
        for family in collector.describe() if hasattr(collector, "describe") else ():
            if family.name.startswith("midstream_") and not family.name.startswith("midstream_http"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                found.add(Metric(name, family.type, tuple(getattr(family, "_labelnames", None) or labels or ())))
    for table, own in ((OF_WORKER, ("model",)), (OF_RANK, ("model", "rank"))):
        found |= {Metric(f"midstream_{name}{'_total' * grows}", "counter" if grows else "gauge", own) for name, grows, *_ in table}
    return found


def test_the_table_lists_every_metric_that_there_is() -> None:
    assert there() - listed() == set()


def test_every_metric_of_the_table_is_there() -> None:
    assert listed() - there() == set()
