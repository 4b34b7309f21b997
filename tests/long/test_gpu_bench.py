"""The GPU benchmarks run on a CPU with the smallest sizes, every stage of them: so they cannot rot
where there is no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tree import ROOT

#: What each stage must have found there.
WANTED = {
    "kernels": {},
    "graphs": {"wrong_rows": 0, "family_differences": 0},
    "serving-8b": {},
    "sweeps": {},
    "timeline": {"idle_site_launches": 0},
}


@pytest.mark.matrix  # ten minutes of two cores
@pytest.mark.timeout(900)
def test_every_stage_runs_on_a_cpu_and_fills_the_page(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu" / "all.py"),
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=850, env=environment
    )
    logs = "\n".join(
        path.read_text(errors="replace")[-2000:] for path in (tmp_path / "logs").glob("*.log")
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {name: record["status"] for name, record in records.items()} == dict.fromkeys(
        WANTED, "ok"
    ) | {"pipeline": "skipped"}
    for name, figures in WANTED.items():
        found = records[name]["figures"]
        assert {key: found[key]["value"] for key in figures} == figures, name
    assert records["kernels"]["figures"]["cases"]["value"] > 50
    assert records["kernels"]["figures"]["graph_replays"]["value"] > 10
    assert records["timeline"]["figures"]["site_launches"]["value"] >= 1
    assert records["graphs"]["figures"]["rows"]["value"] > 100
    page = (tmp_path / "RESULTS.md").read_text()
    assert all(f"## {name}" in page for name in records)
    again = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert again.stdout.count("not run again") == len(records), again.stdout
