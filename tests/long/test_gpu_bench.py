"""The GPU benchmarks run on a CPU with the smallest sizes, every stage of them, with the packages
of a GPU machine: so they cannot rot where there is no GPU.
"""

import json
import subprocess
import sys
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
    "why-70b-shard": {},
    "why-30b-a3b": {},
}
#: Stage, figure, and its least value: so much was tried.
MEASURED = (
    ("kernels", "cases", 51),
    ("kernels", "graph_replays", 11),
    ("graphs", "rows", 101),
    ("smoke", "rows", 101),
    ("why", "both", 0.5),
    ("why-30b-a3b", "both", 0.5),
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
    )
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
