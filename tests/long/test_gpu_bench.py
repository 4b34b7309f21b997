"""The GPU benchmarks run on a CPU with the smallest sizes, every stage of them, with the packages
of a GPU machine and killed in every stage: so they cannot rot where there is no GPU.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_packages import environment
from tree import ROOT

#: What each stage must have found there.
WANTED = {
    "smoke": {"row_error": 0, "patched_wrong": 0, "logprob_error": 0},
    "kernels": {},
    "graphs": {"wrong_rows": 0, "family_differences": 0},
    "serving-8b": {},
    "sweeps": {},
    "timeline": {"idle_site_launches": 0},
    "serving-70b-shard": {},
    "serving-30b-a3b": {},
    "pipeline": {},
}
COMMAND = [
    sys.executable,
    str(ROOT / "benchmarks" / "gpu" / "all.py"),
    *("--device", "cpu", "--tiny", "--budget", "7200"),
]


class Benchmark:
    """The command, which can be killed as a limit on its time would kill it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._environment = environment() | {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "BENCH_GPU_TEST": str(out),  # what its processes are recognised by
        }

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*COMMAND, "--out", str(self.out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )

    def status(self, stage: str) -> str:
        path = self.out / f"{stage}.json"
        return json.loads(path.read_text())["status"] if path.exists() else "missing"

    def processes(self) -> list[int]:
        mark = f"BENCH_GPU_TEST={self.out}".encode()
        return [
            int(folder.name)
            for folder in Path("/proc").glob("[0-9]*")
            if mark in _environment(folder).split(b"\0")
        ]

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}"
            for path in (self.out / "logs").glob("*.log")
        )


def _environment(folder: Path) -> bytes:
    try:
        return (folder / "environ").read_bytes()
    except OSError:  # it ended
        return b""


def kill_in(bench: Benchmark, stage: str, *, late: bool) -> None:
    """Kills the command while the stage starts; `late`: when it has left a part of its results."""
    process = bench.start()
    until = time.monotonic() + 1800

    def wait(for_what: str, there: Callable[[], bool]) -> None:
        while not there():
            assert process.poll() is None, f"{stage}: ended before\n{bench.logs()}"
            assert time.monotonic() < until, f"{stage}: {for_what} never came\n{bench.logs()}"
            time.sleep(0.05)

    try:
        wait("the stage", lambda: bench.status(stage) == "running")
        begun = time.monotonic()
        result = bench.out / f"{stage}.result"
        wait("its result", lambda: result.exists() if late else time.monotonic() > begun + 4)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    until = time.monotonic() + 30
    while left := bench.processes():
        assert time.monotonic() < until, f"{stage}: left {left}"
        time.sleep(0.05)


@pytest.mark.matrix  # twenty minutes of two cores
@pytest.mark.timeout(5400)
def test_every_stage_runs_on_a_cpu_after_it_was_killed(tmp_path: Path) -> None:
    bench = Benchmark(tmp_path)
    stages = [*WANTED, "sanitizer"]
    for place, stage in enumerate(stages):
        kill_in(bench, stage, late=place % 2 == 0 and stage != "sanitizer")
        assert bench.status(stage) == "running", "it was killed in the middle"
        assert [bench.status(each) for each in stages[:place]] == ["ok"] * place, bench.logs()
    process = bench.start()
    printed, _ = process.communicate(timeout=900)
    assert process.returncode == 0, printed + bench.logs()
    assert printed.count("not run again") == len(stages) - 1, printed
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {name: record["status"] for name, record in records.items()} == dict.fromkeys(
        WANTED, "ok"
    ) | {"sanitizer": "skipped"}
    for name, figures in WANTED.items():
        found = records[name]["figures"]
        assert {key: found[key]["value"] for key in figures} == figures, name
    assert records["kernels"]["figures"]["cases"]["value"] > 50
    assert records["kernels"]["figures"]["graph_replays"]["value"] > 10
    assert records["timeline"]["figures"]["site_launches"]["value"] >= 1
    assert records["graphs"]["figures"]["rows"]["value"] > 100
    assert records["smoke"]["figures"]["rows"]["value"] > 100
    assert bench.processes() == [], "no process is left"
    left = [path for path in Path("/dev/shm").glob("midstream-gpu-*") if path.is_dir()]
    assert left == [], "no file in memory is left"
    page = (tmp_path / "RESULTS.md").read_text()
    assert all(f"## {name}" in page for name in records)
