"""What becomes of accepted jobs when their worker is killed, stopped or stalled in the middle of
them, and which workers do not start?
"""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stack import Stack, stack_with, unsuccessful

from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.app import EXIT_BAD_SETTINGS, EXIT_ENGINE_DIED, EXIT_NO_ENGINE
from midstream.workers.engine.identity import WorkerLock

CAPTURE = StoredCapture(
    sites={"post_block": [0, 1, 2, 3]}, positions="all", tag="t", layout="packed"
)
SLOW = {"token_s": 0.02}


stack = stack_with(workers=0)  # each test starts its own on it


@pytest.fixture
def start(stack: Stack) -> Iterator[Callable[..., None]]:
    """Starts a worker with settings of its own, which is gone afterwards."""

    def started(name: str = "worker", **settings: object) -> None:
        stack.add(name, **settings)

    yield started
    for name in ("worker", "worker-2"):
        if name in stack.processes:
            stack.kill(name)


def files(stack: Stack, job_id: str) -> list[str]:
    """Names of the files that the job's result has."""
    found = stack.result(job_id).capture_results.files
    return [file.path.rpartition("/")[2] for file in found]


# field case 37
@pytest.mark.slow("a worker starts again")
def test_a_restarted_worker_runs_its_jobs_again_without_waiting_for_the_lease(
    stack: Stack, start: Callable[..., None], tmp_path: Path
) -> None:
    """There is one result, and nothing counts twice."""
    (tmp_path / "gate").write_text("40")  # tokens: the second prompt does not end
    start(**{"engine.max_num_seqs": 1}, lease_s=300, fault=f"turnstile:file={tmp_path / 'gate'}")
    job_id = stack.submit(["first", "second"], max_tokens=30, capture=CAPTURE)
    # the first prompt is captured, durable and reported
    stack.wait(job_id, until=lambda view: view.receipts == 1)
    folder = stack.settings.capture_root / "t" / job_id
    assert [path.name for path in folder.glob("*.safetensors")] == ["p0000.a1.pp0.safetensors"]
    stack.kill("worker")
    start(lease_s=300)
    view = stack.wait(job_id)
    assert view.state == State.SUCCEEDED
    assert view.attempt == 2
    assert view.receipts == 2
    assert view.receipts_expected == 2
    assert files(stack, job_id) == ["p0000.a2.pp0.safetensors", "p0001.a2.pp0.safetensors"]
    assert [output.index for output in stack.result(job_id).outputs] == [0, 1]
    events = stack.do(lambda ledger: ledger.events(job_id))
    assert Counter(event.event for event in events)["done"] == 1


# field case 37
@pytest.mark.long
def test_when_the_engine_dies_the_worker_exits_and_its_jobs_are_run_again(
    stack: Stack, start: Callable[..., None]
) -> None:
    """Without a sweeper: the messages themselves survive."""
    stack.kill("callbacks")
    start(
        engine_options=SLOW,
        lease_s=300,
        **{"tuning.worker_concurrency": 3},
        fault="engine_dies:tokens=60",
    )
    stack.kill("worker", signal.SIGSTOP)
    jobs = [stack.submit(["a", "b"], max_tokens=40) for _ in range(5)]
    # as many as it may have at once are there when the first begins
    stack.kill("worker", signal.SIGCONT)
    assert stack.exit_code("worker") == EXIT_ENGINE_DIED
    assert "worker failed: the fake engine died after 60 tokens" in stack.log("worker")
    views = [stack.view(job_id) for job_id in jobs]
    assert [(view.state, view.error) for view in views] == [(State.QUEUED, None)] * 5, (
        "released, not left to a lease of minutes"
    )
    start()
    views = [stack.wait(job_id) for job_id in jobs]
    assert unsuccessful(views) == {}
    assert sorted(view.attempt for view in views) == [1, 1, 2, 2, 2]
    assert [len(stack.result(job_id).outputs) for job_id in jobs] == [2] * 5
    stack.restart("callbacks")


# field case 37
def test_sigterm_finishes_what_runs_and_leaves_the_rest_in_the_queue(
    stack: Stack, start: Callable[..., None]
) -> None:
    start(
        engine_options=SLOW,
        lease_s=15,
        **{"tuning.worker_concurrency": 2, "tuning.stop_grace_s": 60},
    )
    jobs = [stack.submit(["a"], max_tokens=60, capture=CAPTURE) for _ in range(6)]
    for job_id in jobs[:2]:
        stack.wait(job_id, until=lambda view: view.state is not State.QUEUED)
    assert stack.end("worker") == 0
    states = Counter(
        stack.wait(job_id, until=lambda view: view.state is not State.RUNNING).state
        for job_id in jobs
    )
    assert states[State.SUCCEEDED] >= 2
    assert set(states) == {State.SUCCEEDED, State.QUEUED}
    start()
    views = [stack.wait(job_id) for job_id in jobs]
    assert unsuccessful(views) == {}
    assert {view.attempt for view in views} == {1}


def test_sigterm_gives_back_what_does_not_end_and_counts_no_attempt(
    stack: Stack, start: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "gate").write_text("0")  # tokens: no prompt ends
    last = {"max_attempts": 1}
    start(fault=f"turnstile:file={tmp_path / 'gate'}", **{"tuning.stop_grace_s": 0}, **last)
    job_id = stack.submit(["first", "second"], max_tokens=3, capture=CAPTURE)
    stack.wait_running(job_id)
    assert stack.end("worker") == 0
    assert stack.view(job_id).state is State.QUEUED
    start(**last)
    view = stack.wait(job_id)
    assert view.state is State.SUCCEEDED
    assert view.attempt == 2


# field case 38
@pytest.mark.long
def test_a_worker_stalled_past_its_lease_finds_its_late_result_fenced(
    stack: Stack, start: Callable[..., None]
) -> None:
    """The attempt is run again: by another worker, or where there is none by itself."""
    settings = {"engine_options": SLOW, "lease_s": 4, "tuning.visibility_timeout_s": 30}
    start(**settings)
    alone = stack.submit(["a"], max_tokens=150, capture=CAPTURE)
    stack.wait_running(alone)
    stack.kill("worker", signal.SIGSTOP)
    stack.wait(alone, until=lambda view: view.state is State.QUEUED)
    stack.kill("worker", signal.SIGCONT)
    view = stack.wait(alone)
    assert view.state == State.SUCCEEDED
    assert view.attempt == 2
    assert view.receipts == 1

    job_id = stack.submit(["a"], max_tokens=150, capture=CAPTURE)
    stack.wait_running(job_id)
    stack.kill("worker", signal.SIGSTOP)
    start("worker-2", **settings)
    view = stack.wait(job_id)
    assert view.state == State.SUCCEEDED
    assert view.attempt == 2
    assert view.worker == "w1-2"
    stack.kill("worker", signal.SIGCONT)
    for job in (alone, job_id):
        stack.wait_log("worker", f"job {job} attempt 1 stops: lost")
    assert stack.view(job_id) == view
    assert files(stack, job_id) == ["p0000.a2.pp0.safetensors"]
    assert stack.wait(stack.submit(["next"], max_tokens=2)).state is State.SUCCEEDED


def test_sigterm_stops_a_worker_whose_engine_is_starting(stack: Stack) -> None:
    stack.spawn("worker", fault="slow_start:seconds=120")
    stack.wait_log("worker", "engine starting")
    assert stack.end("worker", 60) == 0


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        ({"fault": "start:reason=no such architecture"}, EXIT_NO_ENGINE, "no such architecture"),
        (
            {"global_capture.sites": "pre_mlp:0"},
            EXIT_BAD_SETTINGS,
            "global_capture: 'pre_mlp' is not a hook: write hook:layers",
        ),
    ],
)
def test_a_worker_that_cannot_start_says_why_on_its_last_line(
    stack: Stack, settings: dict[str, str], code: int, says: str
) -> None:
    stack.spawn("worker", **settings)
    assert stack.exit_code("worker") == code
    assert stack.log("worker").splitlines()[-1].startswith(f"worker failed: {says}")


@pytest.mark.slow("two workers start")
def test_a_second_worker_of_the_same_id_is_refused(stack: Stack) -> None:
    lock = WorkerLock(stack.settings)
    stack.spawn("worker")
    assert stack.exit_code("worker") == EXIT_BAD_SETTINGS
    assert f"worker 'w1' is already running (pid {os.getpid()})" in stack.log("worker")
    lock.release()
