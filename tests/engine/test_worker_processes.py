"""When a worker or its engine is killed, are the engine's processes gone, and is the job run again?

Real vLLM.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import Stack

from midstream.client.captures.reader import CaptureReader
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.app import EXIT_ENGINE_DIED

CAPTURE = StoredCapture(sites={"post_block": [0]}, positions="all_prompt", tag="t")
pytestmark = pytest.mark.long

LONG = 1000  # tokens: about ten seconds for the tiny model


@pytest.fixture(scope="module")
def stack(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    settings = {
        "engine": "vllm",
        "model": str(llama),
        "model_name": "tiny",
        "max_model_len": 4096,
        "kv_cache_gib": 0.1,
        "lease_s": 60,
    }
    with Stack(directory, start_timeout_s=400, **settings) as running:
        yield running


def descendants(pid: int) -> dict[int, str]:
    """Process ids below `pid`, with their names."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (stat := read(folder / "stat")):
            names[int(folder.name)] = stat[stat.index("(") + 1 : stat.rindex(")")]
            parents[int(folder.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    found: dict[int, str] = {}
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= {child: names[child] for child in level}
    return found


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
        return ""


def alive(pid: int) -> bool:
    stat = read(Path(f"/proc/{pid}/stat"))
    return bool(stat) and stat[stat.rindex(")") + 2] != "Z"


def wait_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.05)


def start_long_job(stack: Stack) -> str:
    """A job that runs and is far from its end: where the machine stalled until it was nearly over,
    another is started.
    """
    for _ in range(5):
        job_id = stack.submit(["a prompt", "another"], max_tokens=LONG, capture=CAPTURE)
        view = stack.wait(job_id, until=lambda view: view.state is not State.QUEUED)
        if view.state is State.RUNNING and view.generated is None:
            return job_id
        stack.wait(job_id)
    pytest.fail("no job was seen while it generated")


# field case 37
def test_killing_a_worker_kills_its_engine_and_the_job_is_rerun(stack: Stack) -> None:
    engine = descendants(stack.pid("worker"))
    job_id = start_long_job(stack)
    stack.kill("worker")
    assert len(engine) >= 2, "an engine core and a rank"
    wait_gone(list(engine), 60)
    assert stack.view(job_id).state is State.RUNNING, "it was killed in the middle"
    stack.restart("worker")
    view = stack.wait(job_id)
    assert (view.state, view.attempt, view.receipts, view.receipts_expected) == (
        State.SUCCEEDED,
        2,
        2,
        2,
    )
    with CaptureReader(stack.settings.capture_root, job_id) as reader:
        assert [reader.manifest(request).attempt for request in reader.requests()] == [2, 2]


# field case 37
@pytest.mark.matrix
@pytest.mark.parametrize("victim", ["VLLM::Worker", "VLLM::EngineCor"])  # Linux keeps 15 characters
def test_when_a_process_of_the_engine_dies_the_worker_exits_and_the_job_is_run_again(
    stack: Stack, victim: str
) -> None:
    engine = descendants(stack.pid("worker"))
    (pid,) = [pid for pid, name in engine.items() if name == victim]
    job_id = start_long_job(stack)
    os.kill(pid, signal.SIGKILL)
    assert stack.exit_code("worker") == EXIT_ENGINE_DIED
    assert stack.view(job_id).state is State.QUEUED
    wait_gone(list(engine), 60)
    stack.restart("worker")
    view = stack.wait(job_id)
    assert (view.state, view.attempt) == (State.SUCCEEDED, 2)


def test_sigterm_lets_the_engine_finish_what_runs(stack: Stack) -> None:
    engine = descendants(stack.pid("worker"))
    job_id = start_long_job(stack)
    assert stack.end("worker") == 0
    assert stack.wait(job_id).state is State.SUCCEEDED, "its receipts were delivered before the end"
    wait_gone(list(engine), 60)
