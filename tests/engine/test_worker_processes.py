"""When a worker or its engine is killed, are the engine's processes gone, and is the job run again?

Real vLLM.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from stack import Stack
from wait_kit import wait_until, warn_if_late

from midstream.broker.processes import leftovers
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
        "engine.max_model_len": 4096,
        "kv_cache_gib": 0.1,
        "lease_s": 60,
        "tuning.stop_grace_s": 120,
    }
    with Stack(directory, start_timeout_s=400, **settings) as running:
        yield running


def engine_of(stack: Stack) -> list[psutil.Process]:
    """The processes below the worker's."""
    return psutil.Process(stack.pid("worker")).children(recursive=True)


def alive(process: psutil.Process) -> bool:
    """Nobody may ask how an orphan ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def require_gone(processes: list[psutil.Process]) -> None:
    def left() -> list[psutil.Process]:
        return list(filter(alive, processes))

    wait_until(lambda: not left(), why=lambda: f"{left()} still run")


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
    engine = engine_of(stack)
    job_id = start_long_job(stack)
    stack.kill("worker")
    assert len(engine) >= 2, "an engine core and a rank"
    require_gone(engine)
    assert stack.view(job_id).state is State.RUNNING, "it was killed in the middle"
    stack.restart("worker")
    view = stack.wait(job_id)
    assert view.state == State.SUCCEEDED
    assert view.attempt == 2
    assert view.receipts == 2
    assert view.receipts_expected == 2
    with CaptureReader(stack.settings.capture_root, job_id) as reader:
        assert [reader.manifest(request).attempt for request in reader.requests()] == [2, 2]


# field case 37
@pytest.mark.matrix
@pytest.mark.parametrize("victim", ["VLLM::Worker", "VLLM::EngineCor"])
def test_when_a_process_of_the_engine_dies_the_worker_exits_and_the_job_is_run_again(
    stack: Stack, victim: str
) -> None:
    engine = engine_of(stack)
    (process,) = [process for process in engine if process.name().startswith(victim)]
    job_id = start_long_job(stack)
    process.kill()
    assert stack.exit_code("worker") == EXIT_ENGINE_DIED
    assert stack.view(job_id).state is State.QUEUED
    require_gone(engine)
    stack.restart("worker")
    view = stack.wait(job_id)
    assert view.state == State.SUCCEEDED
    assert view.attempt == 2


def left_by(stack: Stack) -> list[Path]:
    """What the worker's processes have in /dev/shm, and their temporary folder."""
    prefix = leftovers._prefix(Path(stack.settings.data_dir))
    folders = leftovers.FOLDER, leftovers.TEMPORARY
    return [path for folder in folders for path in folder.glob(f"*{prefix}*")]


def test_memory_and_files_of_killed_processes_are_gone_after_the_next_start(stack: Stack) -> None:
    # Python's tracker of resources among them, which would remove it
    for process in engine_of(stack):
        process.kill()
    stack.kill("worker")
    left = left_by(stack)
    assert {path.parent for path in left} == {leftovers.FOLDER, leftovers.TEMPORARY}
    stack.restart("worker")
    assert not any(path.exists() for path in left)


def test_a_worker_that_is_killed_while_its_engine_starts_leaves_no_process(stack: Stack) -> None:
    stack.end("worker")
    stack.spawn("worker")

    def found(name: str) -> list[psutil.Process]:
        return [each for each in engine_of(stack) if each.name().startswith(name)]

    wait_until(lambda: found("VLLM::Worker"), 120)
    engine = engine_of(stack)
    # it cannot see by itself that the worker is gone: loading a large model takes minutes
    found("VLLM::EngineCor")[0].suspend()
    stack.kill("worker")
    try:
        require_gone(engine)
    finally:
        for process in filter(alive, engine):
            process.kill()
    stack.restart("worker")


def test_sigterm_stops_an_engine_with_prompts_and_they_run_again(stack: Stack) -> None:
    stack.replace("worker", **{"tuning.stop_grace_s": 0})
    engine = engine_of(stack)
    jobs = [start_long_job(stack), *(stack.submit(["a"], max_tokens=LONG) for _ in range(31))]
    began = time.monotonic()
    assert stack.end("worker") == 0
    warn_if_late(time.monotonic() - began, 3.0, "a stop is over soon, whatever runs")
    require_gone(engine)
    assert leftovers.TEMPORARY not in {path.parent for path in left_by(stack)}
    views = [stack.view(job_id) for job_id in jobs]
    assert {view.state for view in views} <= {State.QUEUED, State.SUCCEEDED}
    assert views[0].state is State.QUEUED
    stack.restart("worker")
    assert stack.wait(jobs[0]).state is State.SUCCEEDED


def test_sigterm_lets_the_engine_finish_what_runs(stack: Stack) -> None:
    engine = engine_of(stack)
    job_id = start_long_job(stack)
    assert stack.end("worker") == 0
    assert stack.wait(job_id).state is State.SUCCEEDED, "its receipts were delivered before the end"
    require_gone(engine)
