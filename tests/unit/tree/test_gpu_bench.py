"""The GPU benchmarks' stages end apart from one another, are not repeated for nothing, and are
shown beside their goals.
"""

import fcntl
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tree import ROOT

FOLDER = ROOT / "benchmarks" / "gpu"
GOOD = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--json", type=pathlib.Path)
path = parser.parse_known_args()[0].json
path.write_text(json.dumps({"figures": {"cells": {"value": 5}}}))
"""
#: Leaves a part of its result, a child and an orphan in a session of its own, and hangs.
HANGS = """
import argparse, json, pathlib, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--json", type=pathlib.Path)
path = parser.parse_known_args()[0].json
subprocess.Popen(["sleep", "60.25"])
subprocess.run(["sh", "-c", "setsid sleep 60.25 &"])
path.write_text(json.dumps({"figures": {"cells": {"value": 4}}, "partial": True}))
time.sleep(60)
"""
WRONG = GOOD.replace("}}}", '}}, "wrong": "4 is wrong"}')
#: Programs of stages, and the seconds that they get.
PROGRAMS = {
    "good": (GOOD, 20.0),
    "bad": ("print('what went wrong'); raise SystemExit(3)", 20.0),
    "silent": ("", 20.0),
    "hangs": (HANGS, 1.5),
    "wrong": (WRONG, 20.0),
    "last": (GOOD, 20.0),
}
#: Runs those in a process of its own: the benchmarks put themselves on the path.
DRIVER = """
import argparse, json, pathlib, sys
sys.path.insert(0, {folder!r})
import all as benchmarks
benchmarks.GRACE_S, benchmarks.CPU_FACTOR = 0.5, 1.0
given = json.loads(sys.argv[1])
stages = {{name: benchmarks.Stage(path, seconds) for name, (path, seconds) in given.items()}}
asked = argparse.Namespace(
    device="cpu", tiny=True, out=pathlib.Path({out!r}), again={again}, budget={budget}
)
print(json.dumps(benchmarks.run_all(stages, asked)))
"""


def command(
    tmp_path: Path, only: tuple[str, ...], *, again: bool = False, budget: float = 300
) -> list[str]:
    """Runs these stages."""
    stages = {}
    for name in only:
        program, seconds = PROGRAMS[name]
        (tmp_path / f"{name}.py").write_text(program)
        stages[name] = (str(tmp_path / f"{name}.py"), seconds)
    driver = DRIVER.format(
        folder=str(FOLDER), out=str(tmp_path / "out"), again=again, budget=budget
    )
    return [sys.executable, "-c", driver, json.dumps(stages)]


def run(
    tmp_path: Path,
    *,
    again: bool = False,
    budget: float = 300,
    only: tuple[str, ...] = tuple(PROGRAMS),
) -> tuple[list[str], str]:
    """Names of the failed stages, and what was printed."""
    done = subprocess.run(
        command(tmp_path, only, again=again, budget=budget),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def record(tmp_path: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    return found


def test_a_stage_that_fails_or_hangs_is_recorded_and_the_next_goes_on(tmp_path: Path) -> None:
    failed, _ = run(tmp_path)
    assert failed == ["bad", "silent", "hangs", "wrong"]
    assert (
        record(tmp_path, "good")["figures"]
        == record(tmp_path, "last")["figures"]
        == {"cells": {"value": 5}}
    )
    assert record(tmp_path, "bad")["error"] == "ended with 3"
    assert "what went wrong" in record(tmp_path, "bad")["log"]
    assert record(tmp_path, "silent")["error"] == "left no result"
    hung = record(tmp_path, "hangs")
    assert hung["error"] == "did not end within 2 s"
    assert hung["figures"] == {"cells": {"value": 4}}, "what it had found is kept"
    wrong = record(tmp_path, "wrong")
    assert (wrong["error"], wrong["figures"]) == ("4 is wrong", {"cells": {"value": 5}})
    assert left() == [], "what the stage started is still there"


def left() -> list[Path]:
    """Processes that `HANGS` started."""
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"60.25" in _read(path)]


def test_a_killed_benchmark_leaves_no_process_and_goes_on_with_its_stage(tmp_path: Path) -> None:
    """As the limit of a command kills it: SIGKILL, so that it cannot end its stage itself."""
    stages = ("good", "hangs", "last")
    process = subprocess.Popen(command(tmp_path, stages), stdout=subprocess.PIPE, text=True)
    result = tmp_path / "out" / "hangs.result"
    until = time.monotonic() + 60
    while not result.exists() or len(left()) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    while left():
        assert time.monotonic() < until, "what the stage started is still there"
        time.sleep(0.01)
    assert record(tmp_path, "hangs")["status"] == "running"
    first = record(tmp_path, "good")["at"]
    _, printed = run(tmp_path, only=stages, budget=0)
    assert "good: ok before" in printed
    assert record(tmp_path, "hangs")["error"] == "was killed"
    assert record(tmp_path, "hangs")["figures"] == {"cells": {"value": 4}}
    failed, _ = run(tmp_path, only=stages)
    assert failed == ["hangs"], "it began again"
    assert record(tmp_path, "hangs")["error"] == "did not end within 2 s"
    assert record(tmp_path, "good")["at"] == first
    assert record(tmp_path, "last")["status"] == "ok"


def test_a_run_waits_for_what_another_run_left_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(command(tmp_path, ("good",)), stdout=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(5)
    assert process.wait(60) == 0
    assert record(tmp_path, "good")["status"] == "ok"


def test_a_stage_that_ended_as_the_benchmark_was_killed_is_kept(tmp_path: Path) -> None:
    run(tmp_path, only=("good",))
    kept = record(tmp_path, "good")
    result = {"figures": {"cells": {"value": 6}}}
    (tmp_path / "out" / "good.result").write_text(json.dumps(result))
    running = {**kept, "status": "running"}
    (tmp_path / "out" / "good.json").write_text(json.dumps(running))
    _, printed = run(tmp_path, only=("good",))
    assert "ok before, not run again" in printed
    assert record(tmp_path, "good")["figures"] == result["figures"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_stage_runs_again_only_if_it_failed_or_something_changed(tmp_path: Path) -> None:
    def at(name: str) -> float:
        return float(record(tmp_path, name)["at"])

    run(tmp_path, only=("good", "bad"))
    first = at("good"), at("bad")
    run(tmp_path, only=("good", "bad"))
    assert at("good") == first[0]
    assert at("bad") > first[1]
    run(tmp_path, only=("good",), again=True)
    assert at("good") > first[0]
    other = record(tmp_path, "good") | {"key": "other sources", "at": 0.0}
    (tmp_path / "out" / "good.json").write_text(json.dumps(other))
    run(tmp_path, only=("good",))
    assert at("good") > 0


def test_no_stage_begins_when_the_time_is_over(tmp_path: Path) -> None:
    failed, printed = run(tmp_path, only=("good",), budget=0.7 * PROGRAMS["good"][1])
    assert failed == []
    assert "not run" in printed
    assert not (tmp_path / "out" / "good.json").exists()


def test_all_stages_fit_into_18_minutes_and_the_first_four_into_ten() -> None:
    code = f"""if True:
        import json, sys
        sys.path.insert(0, {str(FOLDER)!r})
        import all as it
        print(json.dumps([it.BUDGET_S, it.GRACE_S, [s.seconds for s in it.STAGES.values()]]))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    budget, grace, seconds = json.loads(done.stdout)
    assert budget == 18 * 60
    assert sum(seconds) + grace <= budget
    assert sum(seconds[:4]) + grace <= 580
    assert 60 <= seconds[0] <= 90, "the smoke stage"


def test_code_of_another_checkout_is_not_measured(tmp_path: Path) -> None:
    """This Python's midstream is an editable install of this one."""
    folder = tmp_path / "benchmarks" / "gpu"
    shutil.copytree(FOLDER, folder)
    done = subprocess.run(
        [sys.executable, str(folder / "all.py"), "--render"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert f"not from {tmp_path}" in done.stderr


# -- the page
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_render", FOLDER / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def told(**changes: Any) -> dict[str, Any]:
    return {"status": "ok", "key": "k", "at": time.time(), "seconds": 3.0, "figures": {}, **changes}


@pytest.mark.parametrize(("value", "verdict"), [(0.4, "reached"), (0.6, "**not reached**")])
def test_a_figure_is_held_against_its_goal(render: ModuleType, value: float, verdict: str) -> None:
    figures = {"idle": {"value": value, "low": 0.1, "high": 0.7, "pairs": 9}}
    page = render.page(["serving-8b"], {"serving-8b": told(figures=figures)})
    assert f"| {value:.2f} % (0.10 to 0.70, 9 pairs) | ≤ 0.5 % | {verdict} |" in page


@pytest.mark.parametrize(
    ("added", "share", "reached"), [(4.0, 50.0, True), (80.0, 95.0, True), (80.0, 50.0, False)]
)
def test_captures_on_disk_are_fast_enough_or_as_fast_as_the_disk(
    render: ModuleType, added: float, share: float, reached: bool
) -> None:
    figures = {"prompt_disk": {"value": added}, "disk_share": {"value": share}}
    (line,) = [
        line
        for line in render.page(["serving-8b"], {"serving-8b": told(figures=figures)}).splitlines()
        if "on the disk" in line
    ]
    assert line.endswith("| reached |") is reached


def test_the_page_shows_what_failed_was_skipped_or_not_run(render: ModuleType) -> None:
    records = {
        "kernels": told(status="failed", error="ended with 1", log="Traceback: no such kernel"),
        "pipeline": told(status="skipped", skipped="one GPU"),
    }
    page = render.page(["kernels", "graphs", "pipeline"], records)
    assert "**Failed**" in page
    assert "Traceback: no such kernel" in page
    assert "Skipped" in page
    assert "one GPU" in page
    assert "Not run." in page


def test_the_smallest_sizes_are_not_taken_for_a_measurement(render: ModuleType) -> None:
    page = render.page(
        ["serving-8b"], {"serving-8b": told(tiny=True, figures={"idle": {"value": 0.1}})}
    )
    assert "measure nothing" in page
    assert "reached" not in page


def test_the_page_in_the_repository_names_every_stage_and_goal(render: ModuleType) -> None:
    page = (FOLDER / "RESULTS.md").read_text()
    for stage, figures in render.FIGURES.items():
        assert f"## {stage}\n" in page
        for figure in figures.values():
            assert f"| {figure.means} |" in page


def test_every_stage_has_figures_and_a_program(render: ModuleType) -> None:
    code = textwrap.dedent(f"""
        import json, sys
        sys.path.insert(0, {str(FOLDER)!r})
        import all as benchmarks
        print(json.dumps({{name: stage.program for name, stage in benchmarks.STAGES.items()}}))
    """)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    programs = json.loads(done.stdout)
    assert list(programs) == list(render.FIGURES)
    assert all((FOLDER / program).is_file() for program in programs.values())
