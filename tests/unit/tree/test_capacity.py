"""docs/capacity.md has what the simulator of `benchmarks/capacity.py` makes of the runs."""

import json
import re

import pytest
from tree import ROOT


def test_the_page_has_what_the_simulator_makes_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import capacity

    found = json.loads(capacity.DATA.read_text())
    page = capacity.PAGE.read_text()
    for name, table in capacity.tables(found).items():
        assert re.search(rf"<!-- {name}: [a-z ]* -->\n\n{re.escape(table)}\n<!-- end -->", page), (
            f"{name}: run benchmarks/capacity.py page"
        )
    checked = capacity.check(found)
    assert {run["workers"] for run, _ in checked} == {1, 4, 16}
    errors = [abs(said / run["per_s"] - 1) for run, said in checked if not run["fitted"]]
    assert len(errors) >= 3
    assert max(errors) < 0.15
