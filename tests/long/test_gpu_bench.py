"""The GPU benchmarks run on a CPU with the smallest sizes, every stage of them, with the packages
of a GPU machine: so they cannot rot where there is no GPU.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_packages import environment
from tree import ROOT

#: What each stage must have found there.
WANTED = {
    "smoke": {"row_error": 0, "patched_wrong": 0, "logprob_error": 0},
    "why": {},
    "kernels": {},
    "graphs": {"wrong_rows": 0, "family_differences": 0},
    "serving-8b": {},
    "sweeps": {},
    "timeline": {"idle_site_launches": 0},
    "serving-70b-shard": {},
    "serving-30b-a3b": {},
    "pipeline": {},
}
#: Stage, figure, and its least value: so much was tried.
MEASURED = (
    ("kernels", "cases", 51),
    ("kernels", "graph_replays", 11),
    ("timeline", "site_launches", 1),
    ("graphs", "rows", 101),
    ("smoke", "rows", 101),
    ("why", "both", 0.5),
    ("why", "mp_both", 0.5),
    ("why", "rate_memory", 0),
)
COMMAND = [
    sys.executable,
    str(ROOT / "benchmarks" / "gpu" / "all.py"),
    *("--device", "cpu", "--tiny", "--budget", "7200"),
]


def _environment(folder: Path) -> bytes:
    try:
        return (folder / "environ").read_bytes()
    except OSError:  # it ended
        return b""


@pytest.mark.matrix  # ten minutes of two cores
@pytest.mark.timeout(5400)
def test_every_stage_runs_on_a_cpu(tmp_path: Path) -> None:
    own = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "BENCH_GPU_TEST": str(tmp_path),  # what its processes are recognised by
    }
    done = subprocess.run(
        [*COMMAND, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment() | own,
        check=False,
    )
    logs = [path.read_text(errors="replace")[-2000:] for path in tmp_path.glob("logs/*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, *logs])
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {name: record["status"] for name, record in records.items()} == dict.fromkeys(
        WANTED, "ok"
    ) | {"sanitizer": "skipped"}
    for name, figures in WANTED.items():
        found = records[name]["figures"]
        assert {key: found[key]["value"] for key in figures} == figures, name
    for name, figure, least in MEASURED:
        assert records[name]["figures"][figure]["value"] >= least, (name, figure)
    mark = f"BENCH_GPU_TEST={tmp_path}".encode()
    processes = Path("/proc").glob("[0-9]*")
    assert [path for path in processes if mark in _environment(path).split(b"\0")] == []
    left = [path for path in Path("/dev/shm").glob("midstream-gpu-*") if path.is_dir()]
    assert left == [], "no file in memory is left"
    page = (tmp_path / "RESULTS.md").read_text()
    assert all(f"## {name}" in page for name in records)


# --- Why a step is slow

#: Parts of a step (`benchmarks/gpu/step_clock.py`), and the device.
PARTS = (
    *("schedule", "execute", "begin", "choose", "prepare", "plan", "overload"),
    *("forward", "drain", "sample", "wait", "update", "device"),
)
#: Measures the rounds of the stage for each line, with 2 ms more in that part of our engine; prints
#: its notes.
ROUNDS = """
import json, sys, time
sys.path.insert(0, {folder!r})
import kit, stage_why
import step_clock
asked = kit.options("")
asked.out.mkdir()
why = stage_why.Why(asked)
assert {{*step_clock.PARTS, "device"}} == set({parts!r})
for line in sys.stdin:
    why.until, why.inject = time.monotonic() + 60, {{line.strip(): 2.0}}
    found = stage_why.Found()
    stage_why.measure_rounds(why, found)
    print(json.dumps(found.notes), flush=True)
why.end()
"""


@pytest.fixture(scope="module")
def notes_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[str]]]:
    """What the stage notes of a run in which a part takes 2 ms longer."""
    out = tmp_path_factory.mktemp("why") / "out"
    program = ROUNDS.format(folder=str(ROOT / "benchmarks" / "gpu"), parts=PARTS)
    given = ["--device", "cpu", "--tiny", "--out", str(out), "--json", str(out / "why.result")]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def notes(part: str) -> list[str]:
        print(part, file=stdin, flush=True)
        found: list[str] = json.loads(stdout.readline())
        return found

    yield notes
    stdin.close()
    assert process.wait(60) == 0


@pytest.mark.slow("engines on the timed device")
@pytest.mark.parametrize("part", PARTS)
def test_the_part_that_takes_two_milliseconds_longer_is_named(part: str, notes_of) -> None:
    named = "device: forward" if part == "device" else part
    notes = notes_of(part)
    for kind in ("one", "both"):
        told = f"{kind}: {named} takes most of what is added"
        assert any(note.startswith(told) for note in notes), notes
