"""The make targets run every folder of each set of tests.

That each test is in a set, and in a folder that is run for it, is checked wherever tests are
collected (`pytest_collection_modifyitems` in tests/conftest.py).
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()


def conftest(config: pytest.Config) -> object:
    return config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))


@pytest.mark.parametrize("name", ["fast", "long", "matrix"])
def test_make_targets_run_every_folder_of_each_set(name: str, pytestconfig: pytest.Config) -> None:
    folders = set(conftest(pytestconfig).SETS[name])  # type: ignore[attr-defined]
    ran = set(re.findall(rf"--set {name}\b[^;]* tests(?:/(\w+))?;", MAKEFILE))
    assert "" in ran or ran >= folders


def test_no_test_is_left_out_by_the_marks_that_targets_name() -> None:
    """What runs apart has a run of its own in the same target."""
    for name, apart in (("fast", {"ranks"}), ("long", {"ranks", "machines"})):
        runs = re.findall(rf'--set {name}\b[^;]*-m ("[^"]*"|\w+)', MAKEFILE)
        left_out = {mark for run in runs for mark in re.findall(r"not (\w+)", run)}
        assert left_out == apart == {run for run in runs if run.isidentifier()}
