"""Is what killed processes left in /dev/shm removed, and nothing else?"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.broker.processes import leftovers
from midstream.broker.processes.leftovers import FOLDER, remove_left

#: Creates a block and a semaphore, as vLLM does with joblib loaded, prints the block's name, and
#: waits.
CREATOR = """
import multiprocessing, sys, time
from pathlib import Path
from multiprocessing.shared_memory import SharedMemory
from midstream.broker.processes.leftovers import name_after
name_after(Path(sys.argv[1]))
import joblib.externals.loky.backend
block = SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
print(block.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def creator(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", CREATOR, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    if process.poll() is None:
        os.killpg(process.pid, 9)
    process.wait()
    remove_left(tmp_path)


def left(data: Path) -> list[Path]:
    return list(FOLDER.glob(f"*{leftovers._prefix(data)}*"))


def kill(creator: "subprocess.Popen[str]") -> None:
    """With Python's tracker of resources, which would remove them."""
    os.killpg(creator.pid, 9)
    creator.wait()


def test_block_and_semaphore_of_killed_processes_are_removed(
    creator: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    kill(creator)
    assert len(left(tmp_path)) == 2
    remove_left(tmp_path)
    assert left(tmp_path) == []


def test_memory_that_a_living_process_has_mapped_stays(
    creator: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    remove_left(tmp_path)
    assert len(left(tmp_path)) == 2


def test_what_another_stack_left_stays(creator: "subprocess.Popen[str]", tmp_path: Path) -> None:
    kill(creator)
    remove_left(tmp_path / "elsewhere")
    assert len(left(tmp_path)) == 2
