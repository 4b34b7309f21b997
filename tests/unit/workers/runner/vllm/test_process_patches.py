"""The processes of an engine have the parts of vLLM replaced that they rely on."""

import subprocess
import sys
import threading
import time

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from wait_kit import warn_if_late

from midstream.workers.runner.vllm import idle_sleep

CHECKS = """
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.kv_cache_interface import KVCacheConfig

print(KVCacheConfig(1, [], []).needs_kv_cache_zeroing)
print(SpinCondition.wait.__module__)
"""
ZEROED = "True"
SLEEPS = "midstream.workers.runner.vllm.idle_sleep"


@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "patches"),
    [
        # the engine core
        pytest.param("scheduler", [ZEROED, SLEEPS], marks=pytest.mark.matrix),
        ("worker_class", [ZEROED, SLEEPS]),  # a rank
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


def test_a_wait_takes_little_of_a_core_and_is_over_soon() -> None:
    idle_sleep.install()
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=reader.wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join()
    late = []
    for number in range(3):
        sent: list[float] = []

        def send(number: int = number, sent: list[float] = sent) -> None:
            time.sleep(0.1)
            sent.append(time.perf_counter())
            writer.enqueue(number)

        thread = threading.Thread(target=send)
        before = time.thread_time()
        thread.start()
        assert reader.dequeue(timeout=60) == number
        late.append(time.perf_counter() - sent[0])
        used = time.thread_time() - before
        thread.join()
        warn_if_late(used, 0.05, "it spun for half of the 100 ms that it waited")
    warn_if_late(min(late), 0.05, "a message wakes the reader")
