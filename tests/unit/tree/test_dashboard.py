"""Does the dashboard ask for figures that there are, and does Prometheus ask all the processes that
have them?
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD: dict[str, Any] = json.loads(
    (ROOT / "compose/grafana/dashboards/midstream.json").read_text()
)
#: What a histogram is asked for.
SUFFIX = re.compile(r"_(bucket|count|sum)$")
#: Flower's own, read in its source.
FLOWERS = {"flower_worker_online"}


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def asked() -> set[str]:
    names = {
        name
        for expression in expressions()
        for name in re.findall(r"\b(?:midstream|flower)_\w+", expression)
    }
    return {SUFFIX.sub("", name) for name in names}


def listed() -> set[str]:
    """Every metric that docs/observability.md lists, which a test of its own holds to the code."""
    return set(
        re.findall(
            r"^\| `(midstream_\w+)` \|", (ROOT / "docs/observability.md").read_text(), re.MULTILINE
        )
    )


def test_every_dashboard_metric_exists() -> None:
    assert asked() - listed() - FLOWERS == set()
    assert len(asked()) > 25


@pytest.mark.parametrize(
    "topic",
    [
        "jobs_total",
        "queue_depth",
        "job_seconds",
        "receipts_total",
        "desyncs_total",
        "webhook_attempts",
    ],
)
def test_the_dashboard_has_the_operators_panels(topic: str) -> None:
    assert any(topic in expression for expression in expressions())


def test_brackets_of_every_query_close_and_rates_have_a_range() -> None:
    for expression in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression
        assert len(re.findall(r"\b(?:rate|increase)\(", expression)) == expression.count("["), (
            expression
        )


def test_no_two_panels_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]
        assert place["x"] + place["w"] <= 24
