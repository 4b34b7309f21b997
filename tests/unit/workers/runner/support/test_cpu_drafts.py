"""What vLLM's CPU build runs in place of Triton kernels does what the kernels do."""

import json
import subprocess
import sys

import pytest
from tree import ROOT


@pytest.mark.slow("imports vLLM in a process of its own, in which Triton is there")
def test_each_substitute_of_a_kernel_on_a_cpu_does_what_the_kernel_does() -> None:
    """Substitutes that no engine runs are left out; a new one that is compared with nothing is a
    fault.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "cpu_kernels.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    faults = json.loads(done.stdout)
    assert faults == dict.fromkeys(faults)
