"""The dashboard asks for metrics that there are."""

import json
import re

from tree import ROOT

BOARD = ROOT / "deploy/kubernetes/components/monitors/dashboard.json"
PANELS = json.loads(BOARD.read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
#: Flower's own, read in its source.
FLOWERS = {"flower_worker_online"}


def test_every_dashboard_metric_exists() -> None:
    """docs/reference/metrics.md lists all, which a test of its own holds to the code."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    listed = set(re.findall(r"^\| `(midstream_\w+)` \|", page, re.MULTILINE))
    names = re.findall(r"\b(?:midstream|flower)_\w+", " ".join(QUERIES))
    asked = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
    assert asked - listed - FLOWERS == set()
    assert len(asked) > 25
