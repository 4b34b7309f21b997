"""Is what killed processes left in /dev/shm and among temporary files removed, and nothing else?"""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.broker.processes import leftovers
from midstream.broker.processes.leftovers import FOLDER, TEMPORARY, remove_left

#: Creates a block and a semaphore, as vLLM does with joblib loaded, and a temporary file, prints
#: the block's name, and waits.
CREATOR = """
import multiprocessing, os, sys, tempfile, time
from pathlib import Path
from multiprocessing.shared_memory import SharedMemory
from midstream.broker.processes.leftovers import name_after, own_temporary_folder
name_after(Path(sys.argv[1]))
own_temporary_folder(Path(sys.argv[1]))
tempfile.mkstemp()
assert "midstream" not in os.environ["TORCHINDUCTOR_CACHE_DIR"], "it is kept"
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
    return [
        path for each in (FOLDER, TEMPORARY) for path in each.glob(f"*{leftovers._prefix(data)}*")
    ]


def kill(creator: "subprocess.Popen[str]") -> None:
    """With Python's tracker of resources, which would remove them."""
    os.killpg(creator.pid, 9)
    creator.wait()


def test_block_semaphore_and_files_of_killed_processes_are_removed(
    creator: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    kill(creator)
    assert len(left(tmp_path)) == 3
    remove_left(tmp_path)
    assert left(tmp_path) == []


def test_memory_and_files_of_a_living_process_stay(
    creator: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    remove_left(tmp_path)
    assert len(left(tmp_path)) == 3


def test_what_another_stack_left_stays(creator: "subprocess.Popen[str]", tmp_path: Path) -> None:
    kill(creator)
    remove_left(tmp_path / "elsewhere")
    assert len(left(tmp_path)) == 3


def test_a_temporary_folder_whose_process_number_is_this_ones_is_removed(tmp_path: Path) -> None:
    """In a container, processes that start one after the other have the same number."""
    former = Path(tempfile.mkdtemp(prefix=f"{leftovers._prefix(tmp_path)}{os.getpid()}-"))
    remove_left(tmp_path)
    assert not former.exists()


def test_memory_that_vllm_names_after_a_temporary_file_is_removed_with_it(tmp_path: Path) -> None:
    former = Path(tempfile.mkdtemp(prefix=f"{leftovers._prefix(tmp_path)}{os.getpid()}-"))
    met = former / f"vllm_dist_{uuid.uuid4().hex}"
    met.touch()
    memory = FOLDER / f"{met.name}-tp:0-[0-1]-cpushm_0"
    memory.touch()
    remove_left(tmp_path)
    assert not memory.exists()


def test_a_long_temporary_folder_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes sockets in it, and the path of a socket is short."""
    monkeypatch.setattr(leftovers, "TEMPORARY", Path("/tmp") / ("f" * 40))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    before = tempfile.gettempdir()
    leftovers.own_temporary_folder(tmp_path)
    assert tempfile.gettempdir() == before
