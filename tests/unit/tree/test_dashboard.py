"""The dashboard asks for metrics that there are, and its panels do not overlap."""

import json
import re
from collections import Counter

from tree import ROOT

PANELS = json.loads((ROOT / "compose/grafana/dashboards/midstream.json").read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
#: Flower's own, read in its source.
FLOWERS = {"flower_worker_online"}


def test_every_dashboard_metric_exists() -> None:
    """docs/observability.md lists all, which a test of its own holds to the code."""
    page = (ROOT / "docs/observability.md").read_text()
    listed = set(re.findall(r"^\| `(midstream_\w+)` \|", page, re.MULTILINE))
    names = re.findall(r"\b(?:midstream|flower)_\w+", " ".join(QUERIES))
    asked = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
    assert asked - listed - FLOWERS == set()
    assert len(asked) > 25


def test_brackets_of_every_query_close_and_rates_have_a_range() -> None:
    for query in QUERIES:
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query
        assert len(re.findall(r"\b(?:rate|increase)\(", query)) == query.count("["), query


def test_no_two_panels_overlap() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    cells = Counter(
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) < 24
