"""Metrics are declared in one place, and each says what it counts; `docs/reference/metrics.md` is
written from them, and `test_docs.py` holds it to them.
"""

import code_tables
from tree import CORE, ROOT, imports_of, sources

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


def test_each_metric_says_what_it_counts() -> None:
    assert [name for name, _, _, meaning in code_tables.metrics() if not meaning] == []
