"""Does Flower learn from the ledger how jobs ended of which no event told, and only that?"""

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import redis
from flower.events import EventsState

from midstream.broker import flower
from midstream.broker.flower import MissedEnds

WORKER = "w1@machine"


class Seen:
    """What Flower knows, and the ledger that it may ask."""

    def __init__(self, redis_url: str):
        self.state = EventsState(max_tasks_in_memory=1000)
        self.ends = MissedEnds(self.state, redis_url)
        self.ledger = redis.Redis.from_url(redis_url)
        self.clock = SimpleNamespace(now=0.0)

    def hears(self, task_id: str, *events: str) -> None:
        for number, event in enumerate(events):
            frame = {
                "type": f"task-{event}",
                "uuid": task_id,
                "hostname": WORKER,
                "clock": number,
                "local_received": None,
            }
            self.state.event(
                frame | {"timestamp": time.time() - 60 + number, "name": "midstream.generate"}
            )

    def stands(self, job_id: str, state: str, **more: object) -> None:
        self.ledger.hset(f"ms:job:{job_id}", mapping={"state": state, **more})

    def looks(self, times: int = 2) -> None:
        """Look, each time after workers have had their time to report."""
        for _ in range(times):
            asyncio.run(self.ends.look())
            self.clock.now += flower.WORKER_S

    def states(self, *task_ids: str) -> list[str]:
        return [self.state.tasks[task_id].state for task_id in task_ids]


@pytest.fixture
def seen(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    seen = Seen(redis_url)
    clock = SimpleNamespace(monotonic=lambda: seen.clock.now, time=time.time)
    monkeypatch.setattr(flower, "time", clock)
    yield seen
    seen.ledger.close()


def test_job_ends_are_reported_to_flower_as_a_worker_would(seen: Seen) -> None:
    for name in ("succeeded", "failed", "cancelled", "gone"):
        seen.hears(f"job_{name}", "sent", "received", "started")
    seen.hears("job_aborted", "sent")  # no worker ever had it
    finished = seen.state.tasks["job_succeeded"].started + 7.5
    seen.stands("job_succeeded", "succeeded", finished=finished)
    seen.stands(
        "job_failed", "failed", error='{"type":"t","title":"No","status":500,"detail":"it broke"}'
    )
    seen.stands("job_cancelled", "cancelled")
    seen.stands("job_aborted", "aborted")
    seen.hears("job_put_back", "started", "retried")  # and what came then was missed
    seen.stands("job_put_back", "succeeded")
    seen.looks()
    assert seen.states("job_put_back") == ["SUCCESS"]
    ends = seen.states("job_succeeded", "job_failed", "job_cancelled", "job_aborted", "job_gone")
    assert ends == ["SUCCESS", "FAILURE", "REVOKED", "REVOKED", "REVOKED"]
    succeeded = seen.state.tasks["job_succeeded"]
    failed = seen.state.tasks["job_failed"]
    assert succeeded.succeeded == finished
    assert succeeded.runtime == 7.5
    assert succeeded.result == "'succeeded'"
    assert failed.exception == "JobFailed('No: it broke')"
    assert [worker.hostname for worker in seen.state.alive_workers()] == []
    found = seen.state.search_engine.search(seen.state.tasks, state="SUCCESS").task_ids
    assert set(found) == {"job_succeeded", "job_put_back"}


def test_running_and_requeued_jobs_are_not_reported_to_flower(seen: Seen) -> None:
    for state, events in (
        ("running", ("started",)),
        ("cancelling", ("started",)),
        ("queued", ("started", "retried")),
    ):
        seen.hears(f"job_{state}", *events)
        seen.stands(f"job_{state}", state)
    seen.looks(3)
    assert seen.states("job_running", "job_cancelling", "job_queued") == [
        "STARTED",
        "STARTED",
        "RETRY",
    ]


def test_a_jobs_last_task_reports_its_end_and_former_ones_the_next_attempt(seen: Seen) -> None:
    for task_id in ("job_a", "job_a.1", "job_a.2"):
        seen.hears(task_id, "sent", "started")
    seen.stands("job_a", "failed")
    seen.looks()
    assert seen.states("job_a", "job_a.1", "job_a.2") == ["RETRY", "RETRY", "FAILURE"]
    seen.looks(3)
    assert seen.states("job_a", "job_a.1", "job_a.2") == ["RETRY", "RETRY", "FAILURE"]


def test_ends_reported_by_a_worker_are_not_reported_again(seen: Seen) -> None:
    seen.hears("job_a", "started")
    seen.stands("job_a", "succeeded")
    seen.looks(1)
    assert seen.states("job_a") == ["STARTED"], "its worker has its time to report"
    seen.hears("job_a", "succeeded")
    seen.looks()
    assert seen.state.counter[WORKER]["task-succeeded"] == 1


def test_a_job_that_its_receipts_ended_is_reported_at_once(seen: Seen) -> None:
    for job_id, finished in (("job_here", 5.0), ("job_later", 6.0)):
        seen.hears(job_id, "started")
        seen.stands(job_id, "succeeded", generated=5.0, finished=finished)
    asyncio.run(seen.ends.look())
    assert seen.states("job_later", "job_here") == ["SUCCESS", "STARTED"], (
        "the worker of a job that ended with its attempt reports it"
    )


def test_flower_polls_nothing_without_unfinished_tasks() -> None:
    seen = Seen("redis://127.0.0.1:1/0")  # nobody there
    seen.hears("job_a", "started", "succeeded")
    seen.hears("job_b", "started", "retried")
    seen.hears("job_b.1", "started", "failed")
    seen.hears("another task", "started")
    seen.looks()
    seen.hears("job_c", "started")
    with pytest.raises(redis.ConnectionError):
        seen.looks()


def test_unfinished_tasks_beyond_the_batch_size_take_turns(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "MAX_QUERIED", 2)
    for number in range(5):
        seen.hears(f"job_{number}", "started")
        seen.stands(f"job_{number}", "running" if number < 4 else "succeeded")
    seen.looks(4)
    assert seen.states("job_0", "job_4") == ["STARTED", "SUCCESS"]
