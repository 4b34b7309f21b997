"""The GPU benchmarks' stages end apart from one another, a killed run goes on where it was, and the
page has every figure beside its goal.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
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
path.write_text(json.dumps({"figures": {"cells": {"value": 4}}, "partial": True}))
subprocess.Popen(["sleep", "60.25"])
subprocess.run(["sh", "-c", "setsid sleep 60.25 &"])
time.sleep(60)
"""
WRONG = GOOD.replace("}}}", '}}, "wrong": "4 is wrong"}')
#: Programs of stages, and the seconds that they get.
PROGRAMS = {
    "good": (GOOD, 20.0),
    "bad": ("print('what went wrong'); raise SystemExit(3)", 20.0),
    "silent": ("", 20.0),
    "hangs": (HANGS, 2.4),
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
    device="cpu", tiny=True, out=pathlib.Path({out!r}), again=False, budget=300
)
print(json.dumps(benchmarks.run_all(stages, asked)))
"""
#: Prints the program of each stage, and the page of these records.
PAGE = """
import json, sys
sys.path.insert(0, {folder!r})
import all as benchmarks
page = benchmarks.render.page([*benchmarks.STAGES], json.loads(sys.argv[1]))
means = {{
    name: [figure.means for figure in figures.values()]
    for name, figures in benchmarks.render.FIGURES.items()
}}
programs = {{name: stage.program for name, stage in benchmarks.STAGES.items()}}
print(json.dumps([page, means, programs]))
"""


def command(folder: Path, *only: str) -> list[str]:
    """Runs these stages."""
    stages = {}
    for name in only:
        program, seconds = PROGRAMS[name]
        (folder / f"{name}.py").write_text(program)
        stages[name] = (str(folder / f"{name}.py"), seconds)
    driver = DRIVER.format(folder=str(FOLDER), out=str(folder / "out"))
    return [sys.executable, "-c", driver, json.dumps(stages)]


def printed(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def record(folder: Path, name: str) -> Any:
    return json.loads((folder / "out" / f"{name}.json").read_text())


def left() -> list[Path]:
    """Processes that `HANGS` started."""
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"60.25" in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended
        return b""


def test_a_stage_that_fails_or_hangs_is_recorded_and_the_next_goes_on(tmp_path: Path) -> None:
    said = printed(command(tmp_path, *PROGRAMS))
    assert json.loads(said.splitlines()[-1]) == ["bad", "silent", "hangs", "wrong"]
    found = {name: record(tmp_path, name) for name in PROGRAMS}
    assert {name: each.get("error") for name, each in found.items()} == {
        "good": None,
        "bad": "ended with 3",
        "silent": "left no result",
        "hangs": "did not end within 3 s",
        "wrong": "4 is wrong",
        "last": None,
    }
    assert "what went wrong" in found["bad"]["log"]
    assert found["hangs"]["figures"] == {"cells": {"value": 4}}, "what it had found is kept"
    assert found["last"]["figures"] == {"cells": {"value": 5}}
    assert left() == [], "what the stage started is still there"


def test_a_killed_benchmark_leaves_no_process_and_goes_on_with_its_stage(tmp_path: Path) -> None:
    """As the limit of a command kills it: SIGKILL, so that it cannot end its stage itself."""
    stages = ("good", "hangs", "last")
    process = subprocess.Popen(command(tmp_path, *stages), stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (tmp_path / "out" / "hangs.result").exists() or len(left()) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    while left():
        assert time.monotonic() < until, "what the stage started is still there"
        time.sleep(0.01)
    assert record(tmp_path, "hangs")["status"] == "running"
    said = printed(command(tmp_path, *stages))
    assert "good: ok before, not run again" in said
    assert json.loads(said.splitlines()[-1]) == ["hangs"], "it began again"
    assert record(tmp_path, "last")["status"] == "ok"


@pytest.fixture(scope="module")
def rendered() -> tuple[str, dict[str, list[str]], dict[str, str]]:
    """The page of some results, what each stage's figures mean, and its program."""
    usual = {"status": "ok", "key": "k", "at": time.time(), "seconds": 3.0}
    figures = {
        "idle": {"value": 0.4, "low": 0.1, "high": 0.7, "pairs": 9},
        "one_layer": {"value": 1.5},
    }
    records = {
        "serving-8b": usual | {"figures": figures},
        "kernels": usual | {"status": "failed", "error": "ended with 1", "log": "no such kernel"},
        "pipeline": usual | {"status": "skipped", "skipped": "one GPU"},
    }
    program = PAGE.format(folder=str(FOLDER))
    page, means, programs = json.loads(
        printed([sys.executable, "-c", program, json.dumps(records)])
    )
    return page, means, programs


def test_a_page_shows_goals_and_what_failed_was_skipped_or_not_run(rendered) -> None:
    page, _, _ = rendered
    assert "| 0.40 % (0.10 to 0.70, 9 pairs) | ≤ 0.5 % | reached |" in page
    assert "| 1.50 % | ≤ 1 % | **not reached** |" in page
    for text in ("**Failed**", "no such kernel", "one GPU", "Not run."):
        assert text in page


def test_the_page_in_the_repository_names_every_stage_and_goal(rendered) -> None:
    _, means, programs = rendered
    page = (FOLDER / "RESULTS.md").read_text()
    assert list(programs) == list(means)
    assert all((FOLDER / program).is_file() for program in programs.values())
    for stage, figures in means.items():
        assert f"## {stage}\n" in page
        assert [text for text in figures if f"| {text} |" not in page] == []


# --- Why a step is slow


def python(program: str, *given: str) -> Any:
    """What the program prints, as JSON; it finds the benchmarks' modules."""
    path = f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
    return json.loads(printed([sys.executable, "-c", path + program, *given]).splitlines()[-1])


#: Prints of each kind what is named and whether it is hidden, of runs that are given as JSON.
ATTRIBUTE = """
import json
import causes
found = causes.attribute(json.loads(sys.argv[1]))
print(json.dumps({kind: [cause.named, cause.hidden] for kind, cause in found.items()}))
"""


def step(slope: float = 7.0, device: float = 6.9, **parts: float | tuple[float, float]) -> Any:
    """A run whose parts take so many ms on the processor, or that and in all."""
    usual: dict[str, Any] = {"schedule": 0.2, "forward": 0.2, "drain": 0.1, "sample": 0.4}
    times = {
        name: took if isinstance(took, tuple) else (took, took)
        for name, took in (usual | {"wait": (0.1, 4.0)} | parts).items()
    }
    return {
        "slope": slope,
        "median": slope,
        "longest": slope,
        "parts": {
            name: {"cpu": cpu, "wall": {"mean": wall}} for name, (cpu, wall) in times.items()
        },
        "device": {"forward": device, "sampling": 0.1},
    }


def test_the_part_that_adds_most_is_named() -> None:
    kinds = {
        "nothing": step(),
        "hidden": step(drain=2.1, wait=(0.1, 2.0)),
        "host": step(9.0, drain=2.1),
        "new": step(9.0, plan=2.0, drain=0.6),
        "waits": step(9.0, wait=(2.1, 6.0)),
        "longer wait": step(9.0, wait=(0.1, 6.0)),
        "lock": step(9.0, sample=(0.4, 2.4)),
        "device": step(9.0, device=8.9, wait=(0.1, 6.0)),
        "launch": step(9.0, device=8.9, forward=2.2),
    }
    runs = {kind: [run] * 3 for kind, run in ({"stock": step()} | kinds).items()}
    assert python(ATTRIBUTE, json.dumps(runs)) == {
        "nothing": ["", False],
        "hidden": ["drain", True],
        "host": ["drain", False],
        "new": ["plan", False],
        "waits": ["wait", False],
        "longer wait": ["", False],
        "lock": ["blocked in sample", False],
        "device": ["device: forward", False],
        "launch": ["forward", False],
    }


def test_a_part_within_the_noise_of_its_rounds_is_not_named() -> None:
    noisy = [step(drain=drain) for drain in (0.1, 1.1, 2.1)]
    assert python(ATTRIBUTE, json.dumps({"stock": [step()] * 3, "both": noisy})) == {
        "both": ["", False]
    }


#: Runs parts of the stage three times, in the first of which one of them raises. Prints which ran,
#: what was wrong, and the figures that were left.
RESUME = """
import json
import kit, stage_why
asked = kit.options("")
asked.out.mkdir()
turns = []
for turn in range(3):
    ran = []
    def part(name, ran=ran, turn=turn):
        def run(why, found):
            ran.append(name)
            found.figures[name] = {"value": 1}
            if name == "breaks" and turn == 0:
                raise RuntimeError("no")
        return run
    why = stage_why.Why(asked)
    why.finish(stage_why.run(why, {name: (1, part(name)) for name in ("one", "breaks", "two")}))
    told = json.loads(asked.json.read_text())
    turns.append([ran, told.get("wrong", ""), sorted(told["figures"])])
print(json.dumps(turns))
"""


@pytest.mark.slow("imports torch")
def test_the_parts_of_a_stage_that_are_done_are_not_run_again(tmp_path: Path) -> None:
    given = ["--device", "cpu", "--tiny", "--out", str(tmp_path / "work")]
    figures = ["breaks", "one", "two"]
    assert python(RESUME, *given, "--json", str(tmp_path / "why.result")) == [
        [["one", "breaks", "two"], "breaks: no", figures],
        [["breaks"], "", figures],
        [["one", "breaks", "two"], "", figures],  # the stage was whole: this is another run
    ]


#: Switches off the sites' launches of a graph of four nodes, as a driver would that does nothing.
#: Prints the nodes that are switched off, and what is launched; then of a graph with another site.
SWITCH = """
import ctypes, json
from types import SimpleNamespace
names, off, launched = {1: b"gemm", 2: b"_sites", 3: b"", 4: b"_sites"}, [], []
def nodes_of(raw, nodes, many):
    many._obj.value = len(names)
    for at, node in enumerate(names if nodes else ()):
        nodes[at] = node
def put(place, value):
    place._obj.value = value
driver = SimpleNamespace(
    cuGraphGetNodes=nodes_of,
    cuGraphNodeGetType=lambda node, kind: put(kind, 0 if names[node.value] else 1),
    cuGraphKernelNodeGetParams_v2=lambda node, found: found.__setitem__(0, node.value),
    cuFuncGetName=lambda name, function: put(name, names[function.value]),
    cuGraphInstantiateWithFlags=lambda ready, raw, flags: put(ready, 9),
    cuGraphNodeSetEnabled=lambda ready, node, on: off.append([node.value, on.value]),
    cuGraphLaunch=lambda ready, stream: launched.append(ready.value),
)
import constants, torch
torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=0)
graph = SimpleNamespace(raw_cuda_graph=lambda: 7)
constants.without_sites(graph, 2, driver)()
try:
    constants.without_sites(graph, 3, driver)
except RuntimeError as error:
    print(json.dumps([off, launched, str(error)]))
"""


@pytest.mark.slow("imports torch")
def test_only_the_launches_of_sites_are_switched_off_in_a_graph() -> None:
    wrong = "2 of 4 nodes launch sites, not 3"
    assert python(SWITCH) == [[[2, 0], [4, 0]], [9], wrong]


#: Compares rows of two modes that a folder has.
COMPARE = """
import json
from pathlib import Path
import stage_graphs
print(json.dumps(stage_graphs.compared(Path(sys.argv[1]), "graphs", "compiled")))
"""


@pytest.mark.slow("imports torch")
def test_rows_that_differ_are_told_apart_by_the_tokens_before_them(tmp_path: Path) -> None:
    """Two requests, of prompts of 2 tokens; the second's tokens differ from position 3 on."""
    places = [[request, position] for request in range(2) for position in range(4)]
    rows = np.ones((8, 4), dtype=np.float32)
    outputs = {"compiled": [[5, 6], [5, 6]], "graphs": [[5, 6], [5, 7]]}
    for mode, of_mode in outputs.items():
        changed = rows.copy()
        if mode == "graphs":
            changed[[2, 7]] += 0.5  # of the first at position 2, of the second at 3
        np.save(tmp_path / f"{mode}.npy", changed)
        np.save(tmp_path / f"{mode}.places.npy", np.array(places))
        (tmp_path / f"{mode}.tokens").write_text(
            json.dumps({"prompts": [2, 2], "outputs": of_mode})
        )
    figures, requests = python(COMPARE, str(tmp_path))
    assert figures["wrong_rows"] == 2
    assert figures["rows_after_equal_tokens"] == figures["requests_after_equal_tokens"] == 1
    assert figures["rows_after_other_tokens"] == figures["other_tokens"] == 1
    assert requests == [[0, 2, 4, 1, 1, 2, "–", "0.5"], [1, 2, 4, 1, 0, 3, 3, "0.5"]]
