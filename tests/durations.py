"""Records how long each test and fixture takes, and warns of those that are slow.

`.cache/test/durations.json` has an entry for each test that ran: {"seconds": of the test and its
own fixtures; "fixtures": {scope:place::name: seconds}, those that it set up; "outcome"; "tree": the
git tree on which it ran; "quiet": its seconds on a quiet machine}. `python tests/durations.py`
prints the slowest, `python tests/durations.py tree` the present tree. No time fails a run: a slow
machine is not a fault of the tree.
"""

import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from wait_kit import Late

ROOT = Path(__file__).parent.parent
FILE = ROOT / ".cache" / "test" / "durations.json"
#: A fast test that takes longer is marked `slow`, with the reason; a file of fast tests takes no
#: longer at all. Both in seconds of a quiet machine: the time that passes, divided by the processes
#: that run on each core. What takes longer is named at the end, with what to do.
TEST_S = 5.0
FILE_S = 60.0
#: With more processes on each core than this, waits grow faster than the load, and there is no
#: bound. `make test` by itself has up to 4.2.
BUSY = 6.0
SAVE_S = 20.0
NOTED_S = 0.01
#: Outcome of a test whose end was not reported: of a run that was killed, it has not passed.
UNFINISHED = "unfinished"
#: What follows the id of a test in the processes that share the tests.
GROUP = re.compile(r"@[^]@]*$")
#: Fixtures that several tests share count as fixtures, not as part of the test that comes first.
OWN = "function:"


def read() -> dict[str, dict[str, Any]]:
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def tree() -> str:
    """The git tree of the working copy, with changes and new files; empty outside of git."""
    with tempfile.TemporaryDirectory() as folder:
        own = os.environ | {"GIT_INDEX_FILE": str(Path(folder) / "index")}

        def git(*args: str) -> str:
            return subprocess.run(
                ["git", *args], cwd=ROOT, env=own, capture_output=True, text=True, check=False
            ).stdout.strip()

        git("add", "--all")
        return git("write-tree") if git("rev-parse", "--is-inside-work-tree") else ""


def load() -> float:
    """Processes that run or wait for each core, averaged over the last minute."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Durations:
    """A plugin of pytest: each test process measures its fixtures, the one that they report to
    keeps the record.
    """

    def __init__(self, tree: str, bounded: bool):
        self.tree = tree
        self.bounded = bounded
        self.fixtures: Counter[str] = Counter()  # of the present test
        self.tests: dict[str, dict[str, Any]] = {}
        self.excused: set[str] = set()
        self.late: list[str] = []
        self.saved = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        began = time.monotonic()
        try:
            return (yield)
        finally:
            name = f"{fixturedef.scope}:{fixturedef.baseid}::{fixturedef.argname}"
            self.fixtures[name] += time.monotonic() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report: Any = yield
        report.fixtures = {name: round(seconds, 3) for name, seconds in self.fixtures.items()}
        report.load = load()
        self.fixtures.clear()
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = GROUP.sub("", report.nodeid)
        new = {"seconds": 0.0, "quiet": 0.0, "fixtures": {}, "tree": self.tree}
        test = self.tests.setdefault(name, new | {"outcome": UNFINISHED})
        # The report of a test whose process crashed comes from another one, which measured nothing.
        fixtures = getattr(report, "fixtures", {})
        busy = getattr(report, "load", 1.0)
        if test["outcome"] == UNFINISHED and (report.when == "teardown" or not report.passed):
            test["outcome"] = report.outcome
        test["fixtures"] |= {key: s for key, s in fixtures.items() if s >= NOTED_S}
        shared = sum(s for key, s in fixtures.items() if not key.startswith(OWN))
        if report.when != "teardown":  # which may end what many tests shared
            seconds = max(0.0, report.duration - shared)
            test["seconds"] = round(test["seconds"] + seconds, 3)
            if busy <= BUSY:
                test["quiet"] = round(test["quiet"] + seconds / busy, 3)
        if "slow" in report.keywords:
            self.excused.add(name)
        if time.monotonic() - self.saved > SAVE_S:
            self.save()

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        if issubclass(warning_message.category, Late):
            self.late.append(f"{GROUP.sub('', nodeid)} {warning_message.message}")

    def save(self) -> None:
        """Add what ran to the file, which the stages beside this one write too."""
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with FILE.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            draft = FILE.with_suffix(".draft")
            draft.write_text(json.dumps(read() | self.tests, indent=0))
            draft.replace(FILE)
        self.saved = time.monotonic()

    def over(self) -> list[str]:
        """A line for each bound that was passed: what passed it, and what to do."""
        bound = {
            name: test["quiet"] for name, test in self.tests.items() if name not in self.excused
        }
        files: Counter[str] = Counter()
        for name, seconds in bound.items():
            files[name.partition("::")[0]] += seconds
        tests = [
            f"{name} took {seconds:.1f} s of {TEST_S:.0f}: "
            "make it faster, or say why with @pytest.mark.slow"
            for name, seconds in bound.items()
            if seconds > TEST_S
        ]
        return tests + [
            f"{file} took {seconds:.0f} s of {FILE_S:.0f}: make it faster, or move cases to `long`"
            for file, seconds in files.items()
            if seconds > FILE_S
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            self.save()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        over = self.late + (self.over() if self.bounded else [])
        if over:
            terminalreporter.section("warning: slow tests")
            for line in over:
                terminalreporter.write_line(line)


def show() -> None:
    """Print the 40 slowest tests, the slowest files with all that ran for them, and fixtures."""
    tests = read()
    files: Counter[str] = Counter()
    fixtures: Counter[str] = Counter()
    for name, test in tests.items():
        shared = {key: s for key, s in test["fixtures"].items() if not key.startswith(OWN)}
        files[name.partition("::")[0]] += test["seconds"] + sum(shared.values())
        fixtures.update(shared)
    slowest = Counter({name: test["seconds"] for name, test in tests.items()})
    print(f"== {len(tests)} tests, {sum(files.values()):.0f} s in all test processes")
    for title, counted in (
        ("slowest tests", slowest.most_common(40)),
        ("sum by file", files.most_common()),
        ("shared fixtures", fixtures.most_common(20)),
    ):
        print(f"== {title}, in seconds")
        for name, seconds in counted:
            if seconds >= 1:
                print(f"  {seconds:7.1f}  {name}")


if __name__ == "__main__":
    print(tree()) if sys.argv[1:] == ["tree"] else show()
