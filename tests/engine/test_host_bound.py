"""What times steps on a stand-in for a GPU runs, with requests of every kind: it follows names
inside the ranks, which nothing else here does.
"""

import itertools
import json
import subprocess
import sys

import pytest
from tree import ROOT

MODES = ("churn", "bound")
KINDS = ("stock", "one", "both", "mixed")


@pytest.mark.slow("two engines start, one of vLLM alone")
def test_steps_on_a_stand_in_for_a_gpu_are_timed() -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "host_bound.py"),
            *("--requests", "10", "--generated", "16", "--rounds", "1", "--device-ms", "0.1"),
            *("--modes", *MODES, "--kinds", *KINDS, "--steps", "8"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    found = [(each["mode"], each["kind"]) for each in results]
    assert found == list(itertools.product(MODES, KINDS))
    for each in results:
        assert each["mean"] >= each["device_ms"], "no step is shorter than the device's"
