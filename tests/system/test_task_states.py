"""Does what Celery's events say of each job, and so what Flower shows, agree with the ledger,
however a job ends?
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import redis
from celery import Celery
from celery.app.trace import trace_task
from celery.events.receiver import EventReceiver
from celery.events.state import Task
from flower.events import EventsState
from ledger_kit import enqueue, receipt
from redis_kit import handed_over
from stack import Stack, stack_with
from wait_kit import wait_until

from midstream.broker.flower import MissedEnds
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.queue.celery_app import UNACKED, queue_of
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.workers.serving import task_states

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
    """Sees what Flower sees, every event in the same state object, and looks into the ledger as its
    process does.
    """

    def __init__(self, stack: Stack):
        self.state = EventsState(max_tasks_in_memory=1000)
        self._ends = MissedEnds(self.state, stack.settings.redis_url)
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
                    self.look()
                    if not self._listening.is_set():
                        # with the first look kombu has subscribed; Redis knows it before it answers
                        # this
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

    def look(self) -> None:
        """Look into the ledger, as Flower's process does once a second."""
        asyncio.run(self._ends.look())


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
    assert (task.name, task.routing_key) == ("midstream.generate", queue_of("fake-model"))
    assert job_id in task.args
    assert task.worker.hostname.startswith("w1@")
    assert task.runtime >= 10 * 0.02


def test_a_capture_task_ends_with_its_receipts(stack: Stack, flower: Watcher) -> None:
    stack.kill("relay")
    whole, failing, unwanted = job_ids = [
        stack.submit(["hello"], max_tokens=2, capture=CAPTURE) for _ in range(3)
    ]
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


def test_a_job_aborted_before_it_began_is_revoked_when_its_message_comes_round(
    stack: Stack, flower: Watcher
) -> None:
    stack.kill("worker")
    job_id = stack.submit(["never"])
    flower.task(job_id, "PENDING")
    stack.do(lambda ledger: ledger.request_cancel(job_id))
    stack.restart("worker")
    agrees(stack, flower, job_id, State.ABORTED)


def test_a_redelivered_message_of_a_finished_job_changes_no_task_state(
    stack: Stack, flower: Watcher
) -> None:
    failed, succeeded = stack.submit(["abc"], steering=GONE), stack.submit(["abc"])
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
def test_a_fenced_attempt_is_not_the_end_of_a_task(stack: Stack, flower: Watcher) -> None:
    job_id = stack.submit(["taken over"], max_tokens=300)
    flower.task(job_id, "STARTED")
    stack.crash("worker")
    assert stack.wait(job_id).state is State.SUCCEEDED
    assert stack.view(job_id).attempt == 2

    def states() -> set[str]:
        return {
            task.state
            for task_id, task in list(flower.state.tasks.items())
            if task_id.startswith(job_id)
        }

    wait_until(lambda: "SUCCESS" in states() <= {"SUCCESS", "RETRY"})


def test_worker_stats_include_the_engine(stack: Stack) -> None:
    node = f"w1@{socket.gethostname()}"
    shown = stack.app.control.inspect([node], timeout=60).stats()[node]["midstream"]
    assert (shown["model"], shown["tp"], shown["pp"], shown["healthy"]) == (
        "fake-model",
        1,
        1,
        True,
    )


def test_a_task_end_is_reported_after_a_redis_restart(stack: Stack, flower: Watcher) -> None:
    stack.kill("relay")
    job_id = stack.submit(["hello"], max_tokens=2, capture=CAPTURE)
    flower.task(job_id, "STARTED")
    flower.close()  # its own connection would break
    stack.wait(job_id, until=lambda view: view.generated is not None)
    # else the message comes again, and tells
    wait_until(lambda: stack.do(lambda ledger: ledger.redis.hlen(UNACKED)) == 0)
    handed_over(stack.settings.redis_url)  # nobody was promised anything yet
    stack.crash("redis")
    stack.restart("relay")
    assert stack.wait(job_id).state is State.SUCCEEDED
    flower.look()
    assert flower.state.tasks[job_id].state == "SUCCESS"


def test_a_part_that_is_put_back_is_rejected_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = Celery("test", broker="memory://", set_as_current=False)
    rejected: list[bool] = []

    @app.task(name="part")
    def part(job_id: str) -> None:
        raise task_states.PutBack("put back")

    message = app.amqp.as_task_v2("id", "part", args=("job",))
    headers = {**message.headers, "id": "id", "task": "part"}
    request = task_states.TaskRequest(
        SimpleNamespace(
            headers=headers,
            body=message.body,
            delivery_info={},
            properties={},
            payload=message.body,
        ),
        app=app,
        task=part,
        on_reject=lambda _logger, _errors, requeue: rejected.append(requeue),
        on_ack=lambda *_: rejected.append(False),
        decoded=True,
        headers=headers,
        body=message.body,
        connection_errors=(),
        eventer=None,
    )
    with caplog.at_level("INFO"):
        assert trace_task(part, "id", ("job",), {}, request={"id": "id"}, app=app).info is not None
    request.on_failure(SimpleNamespace(exception=task_states.PutBack("put back"), traceback=""))
    assert (rejected, [record.levelname for record in caplog.records]) == ([True], ["INFO"])
