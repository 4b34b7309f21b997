"""Does `midstream doctor --deep` take every measurement, with stock vLLM beside the real stack?"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import checkpoint

from midstream_ops.checks.costs import LEAST_PAIRS
from midstream_ops.checks.promises import PROMISES

COSTS = {"idle", "capture", "steer", "patch"}


@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_the_doctor_measures_every_promise_of_the_real_engines(tmp_path: Path) -> None:
    model = checkpoint("llama", tmp_path / "llama")
    command = [sys.executable, "-m", "midstream.client", "doctor", "--deep", "--model", model]
    command += ["--seconds", "0", "--set", "kv_cache_gib=0.25", "--engine", "max_model_len=1024"]
    command += ["--data-dir", tmp_path / "data", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ}
    )
    print(done.stdout, done.stderr)
    found = {each["about"]: each for each in json.loads(done.stdout)}
    outcomes = {about: each for about, each in found.items() if each["level"] != "info"}
    assert list(outcomes) == [*PROMISES]
    # four pairs on a machine with other tests say nothing of costs; all else has to hold
    failed = {name for name, outcome in outcomes.items() if outcome["level"] == "fail"}
    assert failed <= COSTS, done.stdout + done.stderr
    assert done.returncode == bool(failed)
    for name in COSTS:
        assert len(outcomes[name]["figures"]) == LEAST_PAIRS
        assert all(math.isfinite(figure) and figure > 0 for figure in outcomes[name]["figures"])
    assert found["name"]["found"] == "llama"
    assert "enable_prefix_caching=False" in found["settings"]["found"]
    assert found["vllm"]["found"]
