"""What becomes of accepted jobs when a part of the service is killed, stopped or restarted in the
middle of them?
"""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import Stack, unsuccessful

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.app import EXIT_BAD_SETTINGS, EXIT_ENGINE_DIED, EXIT_NO_ENGINE

CAPTURE = StoredCapture(
    sites={"post_block": [0, 1, 2, 3]}, positions="all", tag="t", layout="packed"
)
TOKEN_S = 0.02


def captured(stack: Stack, job_id: str) -> list[str]:
    return sorted(
        path.name for path in (stack.settings.capture_root / "t" / job_id).glob("*.safetensors")
    )


# field case 37
@pytest.mark.long
def test_a_worker_killed_during_a_job_leaves_one_result_and_no_double_counts(
    tmp_path: Path,
) -> None:
    with Stack(tmp_path, engine_options={"token_s": 0.1}, max_num_seqs=1, lease_s=15) as stack:
        job_id = stack.submit(["first", "second"], max_tokens=30, capture=CAPTURE)
        # the first prompt is captured, durable and reported
        stack.wait(job_id, until=lambda view: view.receipts == 1)
        assert captured(stack, job_id) == ["p0000.a1.pp0.safetensors"]
        stack.kill("worker")
        stack.restart("worker", engine_options={"token_s": 0.001})
        view = stack.wait(job_id)
        assert (view.state, view.attempt, view.receipts, view.receipts_expected) == (
            State.SUCCEEDED,
            2,
            2,
            2,
        )
        result = stack.result(job_id)
        assert [file.path.rpartition("/")[2] for file in result.capture_results.files] == [
            "p0000.a2.pp0.safetensors",
            "p0001.a2.pp0.safetensors",
        ]
        assert [output.index for output in result.outputs] == [0, 1]
        events = stack.do(lambda ledger: ledger.events(job_id))
        assert Counter(event.event for event in events)["done"] == 1


def test_a_restarted_worker_takes_its_jobs_back_without_waiting_for_the_lease(
    tmp_path: Path,
) -> None:
    with Stack(tmp_path, engine_options={"token_s": 1.0}, lease_s=120, callbacks=False) as stack:
        job_id = stack.submit(["a"], max_tokens=50)
        stack.wait_running(job_id)
        stack.kill("worker")
        stack.restart("worker", engine_options={"token_s": 0.001})
        assert stack.wait(job_id).attempt == 2


def test_a_stream_whose_events_a_failover_lost_begins_again(tmp_path: Path) -> None:
    with Stack(tmp_path, engine_options={"token_s": TOKEN_S}, lease_s=60, callbacks=False) as stack:
        job_id = stack.submit(["a", "b"], max_tokens=100, stream=True)
        while (
            said := stack.do(lambda ledger: ledger.redis.hget(f"ms:job:{job_id}", "said"))
        ) is None or int(said) < 20:
            time.sleep(0.01)
        stack.do(lambda ledger: ledger.redis.hincrby(f"ms:job:{job_id}", "said", -10))
        view = stack.wait(job_id)
        assert (view.state, view.attempt) == (State.SUCCEEDED, 2)
        streamed: dict[int, list[int]] = {0: [], 1: []}
        for event in stack.do(lambda ledger: ledger.events(job_id)):
            if event.event == "token" and event.attempt == 2:
                streamed[event.data["index"]] += event.data["token_ids"]
        assert streamed == {
            output.index: output.token_ids for output in stack.result(job_id).outputs
        }


# field case 37
@pytest.mark.long
def test_when_the_engine_dies_the_worker_exits_and_its_jobs_are_run_again(tmp_path: Path) -> None:
    settings = {
        "engine_options": {"token_s": TOKEN_S},
        "lease_s": 60,
        "worker_concurrency": 3,
        "fault": "engine_dies:tokens=60",
    }
    with Stack(tmp_path, callbacks=False, **settings) as stack:
        # no sweeper: the messages themselves must survive
        stack.kill("worker", signal.SIGSTOP)
        jobs = [stack.submit(["a", "b"], max_tokens=40) for _ in range(5)]
        # as many as it may have at once are there when the first begins
        stack.kill("worker", signal.SIGCONT)
        assert stack.exit_code("worker", 60) == EXIT_ENGINE_DIED
        assert "worker failed: the fake engine died after 60 tokens" in stack.log("worker")
        views = [stack.view(job_id) for job_id in jobs]
        assert [(view.state, view.error) for view in views] == [(State.QUEUED, None)] * 5, (
            "released, not left to a lease of a minute"
        )
        stack.restart("worker", fault="")
        views = [stack.wait(job_id) for job_id in jobs]
        assert unsuccessful(views) == {}
        assert sorted(view.attempt for view in views) == [1, 1, 2, 2, 2]
        assert [len(stack.result(job_id).outputs) for job_id in jobs] == [2] * 5


@pytest.mark.long
def test_a_job_that_always_kills_the_engine_fails(tmp_path: Path) -> None:
    with Stack(
        tmp_path,
        engine_options={"token_s": TOKEN_S},
        max_attempts=2,
        lease_s=15,
        fault="engine_dies:tokens=3",
    ) as stack:
        job_id = stack.submit(["a"], max_tokens=40)
        assert stack.exit_code("worker", 60) == EXIT_ENGINE_DIED
        stack.restart("worker")
        assert stack.exit_code("worker", 60) == EXIT_ENGINE_DIED
        view = stack.wait(job_id)
        assert view.state is State.FAILED
        assert view.error is not None
        assert view.error.type == "urn:midstream:worker_lost"


# field case 37
@pytest.mark.long
def test_sigterm_finishes_what_runs_and_leaves_the_rest_in_the_queue(tmp_path: Path) -> None:
    with Stack(
        tmp_path, engine_options={"token_s": 0.05}, worker_concurrency=2, lease_s=15
    ) as stack:
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
        stack.restart("worker", engine_options={"token_s": 0.001})
        views = [stack.wait(job_id) for job_id in jobs]
        assert unsuccessful(views) == {}
        assert {view.attempt for view in views} == {1}


# field case 37
@pytest.mark.long
def test_redis_killed_under_load_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    with Stack(tmp_path, engine_options={"token_s": 0.005}, lease_s=10) as stack:
        accepted: list[str] = []
        for number in range(60):
            if number in (20, 40):
                stack.kill("redis")
                stack.restart("redis")
            with contextlib.suppress(MidstreamError):  # not accepted, and said so
                accepted.append(stack.submit([f"prompt {number}"], max_tokens=10, capture=CAPTURE))
        views = [stack.wait(job_id) for job_id in accepted]
        assert len(accepted) >= 55
        assert unsuccessful(views) == {}
        assert all(len(stack.result(job_id).capture_results.files) == 1 for job_id in accepted)


@pytest.mark.long
# field case 38
def test_a_worker_stalled_past_its_lease_finds_its_late_result_fenced(tmp_path: Path) -> None:
    with Stack(
        tmp_path, workers=2, engine_options={"token_s": TOKEN_S}, lease_s=4, visibility_timeout_s=30
    ) as stack:
        job_id = stack.submit(["a"], max_tokens=150, capture=CAPTURE)
        first = stack.wait_running(job_id).worker
        stalled = "worker" if first == "w1" else "worker-2"
        stack.kill(stalled, signal.SIGSTOP)
        view = stack.wait(job_id)
        assert (view.state, view.attempt) == (State.SUCCEEDED, 2)
        assert view.worker != first
        stack.kill(stalled, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while f"job {job_id} attempt 1 stops: lost" not in stack.log(stalled):
            assert time.monotonic() < deadline, stack.log(stalled)[-2000:]
            time.sleep(0.05)
        assert stack.view(job_id) == view
        assert [
            file.path.rpartition("/")[2] for file in stack.result(job_id).capture_results.files
        ] == ["p0000.a2.pp0.safetensors"]
        assert stack.wait(stack.submit(["next"], max_tokens=2)).state is State.SUCCEEDED


@pytest.mark.long
# field case 38
def test_a_lone_worker_stalled_past_its_lease_discards_the_attempt_and_reruns_it(
    tmp_path: Path,
) -> None:
    with Stack(
        tmp_path, engine_options={"token_s": TOKEN_S}, lease_s=4, visibility_timeout_s=30
    ) as stack:
        job_id = stack.submit(["a"], max_tokens=150, capture=CAPTURE)
        stack.wait_running(job_id)
        stack.kill("worker", signal.SIGSTOP)
        stack.wait(job_id, until=lambda view: view.state is State.QUEUED)
        stack.kill("worker", signal.SIGCONT)
        view = stack.wait(job_id)
        assert (view.state, view.attempt, view.receipts) == (State.SUCCEEDED, 2, 1)
        assert "attempt 1 stops: lost" in stack.log("worker")


@pytest.fixture(scope="module")
def without_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """For workers that do not start, or not to the end."""
    with Stack(tmp_path_factory.mktemp("stack"), workers=0, callbacks=False) as stack:
        yield stack


def test_sigterm_stops_a_worker_whose_engine_is_starting(without_worker: Stack) -> None:
    without_worker.spawn("worker", fault="slow_start:seconds=120")
    without_worker.wait_log("worker", "engine starting")
    assert without_worker.end("worker", 40) == 0


def test_an_engine_that_does_not_start_is_named_on_the_last_line(without_worker: Stack) -> None:
    without_worker.spawn("worker", fault="start:reason=no such architecture")
    assert without_worker.exit_code("worker", 60) == EXIT_NO_ENGINE
    assert without_worker.log("worker").splitlines()[-1] == "worker failed: no such architecture"


def test_an_invalid_global_capture_setting_stops_the_worker(without_worker: Stack) -> None:
    without_worker.spawn("worker", global_capture="pre_mlp:0")
    assert without_worker.exit_code("worker", 60) == EXIT_BAD_SETTINGS
    last = without_worker.log("worker").splitlines()[-1]
    assert last.startswith(
        "worker failed: global_capture: 'pre_mlp' is not a hook: write hook:layers"
    )


def test_a_second_worker_of_the_same_id_is_refused(without_worker: Stack) -> None:
    without_worker.spawn("worker")
    without_worker.wait_ready("worker")
    without_worker.spawn("worker-2", suffix=False)
    assert without_worker.exit_code("worker-2", 60) == EXIT_BAD_SETTINGS
    assert (
        f"worker 'w1' is already running (pid {without_worker.pid('worker')})"
        in without_worker.log("worker-2")
    )
    assert without_worker.wait(without_worker.submit(["still works"])).state is State.SUCCEEDED
