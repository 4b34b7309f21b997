"""The processes of an engine have the parts of vLLM replaced that they rely on."""

import subprocess
import sys

import pytest

CHECKS = """
from vllm import _custom_ops
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.kv_cache_interface import KVCacheConfig

print(KVCacheConfig(1, [], []).needs_kv_cache_zeroing)
print(SpinCondition.wait.__module__)
print(_custom_ops.scaled_fp8_quant.__module__)
"""
ZEROED, SLEEPS = "True", "midstream.workers.runner.vllm.idle_sleep"
ROUNDS = "midstream.workers.runner.support.cpu_fp8"


@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "patches"),
    [
        # the engine core
        pytest.param("scheduler", [ZEROED, SLEEPS], marks=pytest.mark.matrix),
        ("worker_class", [ZEROED, SLEEPS, ROUNDS]),  # a rank
    ],
)
def test_a_process_has_its_patches_after_the_import_that_vllm_makes(
    process: str, patches: list[str]
) -> None:
    """vLLM imports one class in each process, by name: that import must be enough."""
    run = subprocess.run(
        [sys.executable, "-c", f"import midstream.workers.runner.vllm.{process}\n{CHECKS}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split()[: len(patches)] == patches
