"""Does Flower show of each job what the ledger says of it, however the job ends?

Flower hears of jobs by Celery's events.
"""

import contextlib
import threading
from collections.abc import Iterator

import pytest
import redis
from celery.events.receiver import EventReceiver
from celery.events.state import Task
from flower.events import EventsState
from ledger_kit import enqueue, receipt
from stack import Stack, stack_with
from wait_kit import wait_until

from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.queue.celery_app import queue_of
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.specs import StoredCapture, StoredSteering

CAPTURE = StoredCapture(sites={"post_block": [0]}, positions="all_prompt", tag="t", layout="packed")
GONE = [
    StoredSteering(
        layers=[1], hook="post_block", positions="all", family="add", tensors=["f" * 64], scale=1.0
    )
]
#: The ends that a job may have, and what Celery calls them.
SHOWN = {
    State.SUCCEEDED: "SUCCESS",
    State.FAILED: "FAILURE",
    State.CANCELLED: "REVOKED",
    State.ABORTED: "REVOKED",
}


class Watcher:
    """Sees what Flower sees, every event in the same state object."""

    def __init__(self, stack: Stack):
        self.state = EventsState(max_tasks_in_memory=1000)
        self._stack = stack
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._over = False
        self._thread.start()
        assert self._listening.wait(60)

    def _run(self) -> None:
        with self._stack.app.connection_for_read() as connection:
            receiver = EventReceiver(
                connection, handlers={"*": self.state.event}, app=self._stack.app
            )
            with receiver.consumer_context(wakeup=True) as (own, _channel, _consumers):
                while not self._over:
                    with contextlib.suppress(TimeoutError):
                        own.drain_events(timeout=0.2)
                    if not self._listening.is_set():
                        # kombu has subscribed; Redis knows it before it answers this
                        with redis.Redis.from_url(self._stack.settings.redis_url) as client:
                            client.ping()
                        self._listening.set()

    def close(self) -> None:
        self._over = True
        self._thread.join(5)

    def task(self, task_id: str, state: str) -> Task:
        """The task once it is in `state`."""
        tasks = self.state.tasks
        wait_until(lambda: task_id in tasks and tasks[task_id].state == state)
        return tasks[task_id]


stack = stack_with(engine_options={"token_s": 0.02}, lease_s=15)


@pytest.fixture(scope="module")
def flower(stack: Stack) -> Iterator[Watcher]:
    watcher = Watcher(stack)
    yield watcher
    watcher.close()


def agrees(stack: Stack, flower: Watcher, job_id: str, end: State) -> Task:
    """Wait for the job's end, in both."""
    assert stack.wait(job_id).state is end
    return flower.task(job_id, SHOWN[end])


def test_a_succeeded_job_is_a_task_with_its_kind_id_queue_worker_and_runtime(
    stack: Stack, flower: Watcher
) -> None:
    job_id = stack.submit(["hello"], max_tokens=10)
    task = agrees(stack, flower, job_id, State.SUCCEEDED)
    assert task.name == "midstream.generate"
    assert task.routing_key == queue_of("fake-model")
    assert job_id in task.args
    assert task.worker.hostname.startswith("w1@")
    assert task.runtime >= 10 * 0.02


def test_a_capture_task_ends_with_its_receipts(stack: Stack, flower: Watcher) -> None:
    stack.kill("relay")
    job_ids = [stack.submit(["hello"], max_tokens=2, capture=CAPTURE) for _ in range(3)]
    whole, failing, unwanted = job_ids
    for job_id in job_ids:
        stack.wait(job_id, until=lambda view: view.generated is not None)
        flower.task(job_id, "STARTED")
    node = flower.state.tasks[whole].worker.hostname
    wait_until(lambda: stack.app.control.inspect([node], timeout=10).active() == {node: []})
    assert {flower.state.tasks[job_id].state for job_id in job_ids} == {"STARTED"}, (
        "their places in the pool are free, and they are not over"
    )
    stack.do(lambda ledger: ledger.request_cancel(unwanted))
    agrees(stack, flower, unwanted, State.CANCELLED)
    failed = receipt(failing, worker="w1", world=1, status="error", message="the disk is full")
    with redis.Redis.from_url(stack.settings.redis_url) as client:
        Settler(client, stack.settings).settle("w1", 0, "epoch of this test", [(1, failed)])
    task = agrees(stack, flower, failing, State.FAILED)
    assert "the disk is full" in task.exception
    stack.restart("relay")
    task = agrees(stack, flower, whole, State.SUCCEEDED)
    assert task.runtime > 0


def test_a_failed_job_is_a_failure_with_its_problem_in_a_line(
    stack: Stack, flower: Watcher
) -> None:
    task = agrees(stack, flower, stack.submit(["abc"], steering=GONE), State.FAILED)
    assert "ffff" in task.exception
    assert "\n" not in task.exception


def test_a_job_cancelled_while_it_runs_is_revoked(stack: Stack, flower: Watcher) -> None:
    job_id = stack.submit(["x"], max_tokens=5000)
    flower.task(job_id, "STARTED")
    stack.do(lambda ledger: ledger.request_cancel(job_id))
    stack.app.control.broadcast("midstream_cancel", arguments={"job_id": job_id})
    agrees(stack, flower, job_id, State.CANCELLED)


def test_a_job_aborted_before_it_began_is_revoked_also_once_its_message_comes_round(
    stack: Stack, flower: Watcher
) -> None:
    stack.kill("worker")
    job_id = stack.submit(["never"])
    flower.task(job_id, "PENDING")
    stack.do(lambda ledger: ledger.request_cancel(job_id))
    agrees(stack, flower, job_id, State.ABORTED)
    stack.restart("worker")
    wait_until(lambda: flower.state.tasks[job_id].started)
    assert flower.state.tasks[job_id].state == "REVOKED"


def test_a_redelivered_message_of_a_finished_job_changes_no_task_state(
    stack: Stack, flower: Watcher
) -> None:
    failed = stack.submit(["abc"], steering=GONE)
    succeeded = stack.submit(["abc"])
    for job_id, end in ((failed, State.FAILED), (succeeded, State.SUCCEEDED)):
        agrees(stack, flower, job_id, end)
        before = flower.state.tasks[job_id].received
        enqueue(stack.app, job_id, "generate", "fake-model")
        wait_until(
            lambda job_id=job_id, before=before: flower.state.tasks[job_id].received != before
        )
    after = stack.submit(["abc"])  # behind them
    agrees(stack, flower, after, State.SUCCEEDED)
    assert [flower.state.tasks[job_id].state for job_id in (failed, succeeded)] == [
        "FAILURE",
        "SUCCESS",
    ]


@pytest.mark.slow("a lease ends")
def test_every_task_of_a_job_ends_with_the_job(stack: Stack, flower: Watcher) -> None:
    job_id = stack.submit(["taken over"], max_tokens=300)
    flower.task(job_id, "STARTED")
    stack.crash("worker")
    assert stack.wait(job_id).state is State.SUCCEEDED
    assert stack.view(job_id).attempt == 2
    for task_id in (job_id, f"{job_id}.1"):
        flower.task(task_id, "SUCCESS")
