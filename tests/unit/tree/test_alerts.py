"""The alert rules ask for metrics that there are, with labels that these have, and fire when they
should.
"""

import re
import shutil
import subprocess

import pytest
import yaml
from tree import ROOT

RULES = yaml.safe_load((ROOT / "compose/alerts.yml").read_text())["groups"][0]["rules"]


def metrics() -> dict[str, set[str]]:
    """Metric → its labels, as docs/reference/metrics.md lists them; a test holds it to the code."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    rows = re.findall(r"^\| `(midstream_\w+)` \| \w+ \|([^|]*)\|", page, re.MULTILINE)
    return {name: set(re.findall(r"\w+", labels)) for name, labels in rows}


def test_every_metric_and_label_of_the_rules_exists() -> None:
    known = metrics()
    text = " ".join(rule["expr"] for rule in RULES)
    (choice,) = re.findall(r"midstream_\(([\w|]+)\)", text)
    asked = set(re.findall(r"midstream_\w+", text)) - {"midstream_"}
    asked |= {f"midstream_{part}" for part in choice.split("|")}
    assert asked - known.keys() == set()
    labels = set().union(*known.values()) | {"__name__", "part"}
    for rule in RULES:
        used = re.findall(r"by \(([^)]*)\)|\{(\w+)=", rule["expr"])
        for names, label in used:
            assert set(re.findall(r"\w+", names + " " + label)) <= labels, rule["alert"]
        assert rule["annotations"]["summary"]


def test_each_rule_fires_when_it_should() -> None:
    """Prometheus' own tool runs the rules on recorded series."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool on the PATH: the rules were NOT evaluated")
    done = subprocess.run(
        [promtool, "test", "rules", ROOT / "tests/data/alerts_test.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
