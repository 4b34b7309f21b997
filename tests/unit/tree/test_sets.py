"""The make targets run every folder of each set of tests.

That each test is in a set, and in a folder that is run for it, is checked wherever tests are
collected (`pytest_collection_modifyitems` in tests/sets.py).
"""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sets
from durations import Durations

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", ["fast", "long", "matrix"])
def test_make_targets_run_every_folder_of_each_set(name: str) -> None:
    folders = set(sets.SETS[name])
    ran = set(re.findall(rf"--set {name}\b[^;]* \$\(call TESTS,(\w*)\);", MAKEFILE))
    assert "" in ran or ran >= folders


def test_no_test_is_left_out_by_the_marks_that_targets_name() -> None:
    """What runs apart has a run of its own in the same target."""
    for name, apart in (("fast", {"ranks"}), ("long", {"ranks", "machines", "web"})):
        runs = re.findall(rf'--set {name}\b[^;]*-m ("[^"]*"|\w+)', MAKEFILE)
        left_out = {mark for run in runs for mark in re.findall(r"not (\w+)", run)}
        assert left_out == apart == {run for run in runs if run.isidentifier()}


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        ("setup passed", "unfinished"),
        ("setup passed, call passed", "unfinished"),
        ("setup passed, call passed, teardown passed", "passed"),
        ("setup passed, call failed, teardown passed", "failed"),
        ("setup passed, call passed, teardown failed", "failed"),
        ("setup skipped, teardown passed", "skipped"),
    ],
)
def test_a_test_has_passed_only_once_its_end_was_reported(told: str, outcome: str) -> None:
    """`--resume` leaves out what has passed, also after a run that was killed."""
    durations = Durations("tree", bounded=False)
    for when, of in (phase.split() for phase in told.split(", ")):
        facts = {"when": when, "outcome": of, "passed": of == "passed", "keywords": {}}
        report = SimpleNamespace(**facts, nodeid="t@group", fixtures={}, load=1.0, duration=1.0)
        durations.pytest_runtest_logreport(report)
    assert durations.tests["t"]["outcome"] == outcome


@pytest.mark.parametrize("told", ["", "setup"])
def test_a_test_whose_process_crashed_is_recorded_as_failed(told: str) -> None:
    durations = Durations("tree", bounded=True)
    if told:
        facts = {"when": "setup", "outcome": "passed", "passed": True, "keywords": {}}
        durations.pytest_runtest_logreport(
            SimpleNamespace(**facts, nodeid="t", fixtures={"function:a": 1.0}, load=1, duration=2)
        )
    crashed = pytest.TestReport("t", ("t", None, "t"), {}, "failed", "crashed", "???")  # type: ignore[arg-type]
    durations.pytest_runtest_logreport(crashed)
    assert durations.tests["t"]["outcome"] == "failed"
    assert durations.over() == []


def test_the_repository_is_tested_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "mid-stream"
    folder.mkdir()
    for path in ROOT.glob("[!.]*"):
        (folder / path.name).symlink_to(path)
    ran = test_a_test_whose_process_crashed_is_recorded_as_failed.__name__
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"tests/unit/tree/{Path(__file__).name}::{ran}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
