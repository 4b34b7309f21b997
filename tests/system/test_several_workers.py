"""Do several workers of a model share its jobs, does each model get its own, and is nothing lost
while all of it is restarted?
"""

import signal
import threading
import time
import uuid
from collections.abc import Iterator

import httpx2
import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE
from stack import Stack, free_port, unsuccessful

from midstream.client import Client
from midstream.schemas.jobs.jobs import TERMINAL

SHARED, OTHER = "fake-model", "other-model"
API_2 = free_port()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("several")
    with Stack(
        directory,
        api=True,
        workers=2,
        engine_options={"token_s": 0.01},
        worker_concurrency=8,
        lease_s=6.0,
    ) as started:
        start(started, "worker-3")
        start(started, "api-2")
        yield started


def start(stack: Stack, name: str) -> None:
    stack.spawn(name, **{"worker-3": {"model": OTHER}, "api-2": {"api_port": API_2}}.get(name, {}))
    stack.wait_ready(name)


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as found:
        yield found


def test_each_model_is_listed_with_its_workers_and_gets_its_own_jobs(
    stack: Stack, client: Client
) -> None:
    listed = {
        model["id"]: model["workers"]
        for model in httpx2.get(f"{stack.url}/v1/models").json()["data"]
    }
    assert listed == {SHARED: 2, OTHER: 1}
    ids = {
        name: [
            client.submit(model=name, prompts=["a"], sampling={"max_tokens": 20}).id
            for _ in range(40)
        ]
        for name in listed
    }
    ran = {name: {client.wait(job).worker for job in jobs} for name, jobs in ids.items()}
    assert ran == {SHARED: {"w1", "w1-2"}, OTHER: {"w1-3"}}


def test_global_steering_of_a_model_is_that_of_all_its_workers_and_of_no_others(
    stack: Stack, client: Client
) -> None:
    view = client.global_steering.set([{"layers": "all", "vector": [1.0] * 8}], SHARED)
    assert view.applied
    assert {worker.worker for worker in view.workers if worker.global_version == view.version} == {
        "w1",
        "w1-2",
    }
    assert client.global_steering.get(OTHER).version == 0
    client.global_steering.clear(SHARED)


@pytest.mark.long
def test_another_worker_finishes_the_jobs_of_a_killed_one(stack: Stack, client: Client) -> None:
    jobs = [
        client.submit(model=SHARED, prompts=["a"], sampling={"max_tokens": 250}).id
        for _ in range(16)
    ]
    held = [
        job
        for job in jobs
        if stack.wait(
            job, until=lambda view: view.worker is not None or view.state in TERMINAL
        ).worker
        == "w1"
    ]
    stack.kill("worker")
    views = [client.wait(job, 90) for job in jobs]
    start(stack, "worker")
    assert unsuccessful(views) == {}
    again = [view for view in views if view.attempt > 1]
    assert again, "it held nothing when it was killed: this has shown nothing"
    assert {view.id for view in again} <= set(held)
    assert {view.worker for view in again} == {"w1-2"}


class Load(threading.Thread):
    """Submits jobs until told to stop, to whichever API answers, as a client that tries again under
    the same Idempotency-Key.
    """

    def __init__(self, urls: list[str]):
        super().__init__(daemon=True)
        self.urls, self.accepted, self.failed = urls, list[str](), list[str]()
        self.held = 0
        self._enough = threading.Event()

    def run(self) -> None:
        with httpx2.Client(timeout=60) as http:
            while not self._enough.wait(0.1):
                self._one(http, len(self.accepted))

    def _one(self, http: httpx2.Client, number: int) -> None:
        key, waits = uuid.uuid4().hex, number % 5 == 0
        body = {
            "model": SHARED,
            "prompts": ["a"],
            "sampling": {"max_tokens": 5},
            "capture": {"layers": [0]},
        }
        for turn in range(200):
            headers = {"Idempotency-Key": key} | ({"Prefer": "wait=20"} if waits else {})
            try:
                answer = http.post(
                    f"{self.urls[(number + turn) % len(self.urls)]}/v1/jobs",
                    json=body,
                    headers=headers,
                )
            except httpx2.TransportError:  # this one restarts: the other is asked
                time.sleep(0.1)
                continue
            if answer.status_code in (200, 202):
                self.accepted.append(answer.json()["id"])
                self.held += answer.status_code == 200 and waits
                return
            if answer.status_code != 503:
                self.failed.append(answer.text)
                return
            time.sleep(0.1)
        self.failed.append(f"nobody took job {number}")

    def stop(self) -> None:
        self._enough.set()
        self.join(120)
        assert not self.is_alive()


@pytest.mark.long
def test_a_rolling_restart_under_load_loses_nothing(stack: Stack, client: Client) -> None:
    load = Load([stack.url, f"http://127.0.0.1:{API_2}"])
    before = stack.do(lambda ledger: ledger.redis.zcard("ms:jobs"))
    load.start()
    for name in ("callbacks", "relay", "worker", "worker-2", "api", "api-2"):
        # uvicorn ends by the signal, once it is done
        expected = -signal.SIGTERM if name.startswith("api") else 0
        assert stack.end(name) == expected, stack.log(name)[-3000:]
        start(stack, name)
    load.stop()
    assert load.failed == []
    assert load.held > 0
    views = [client.wait(job, 90) for job in load.accepted]
    assert unsuccessful(views) == {}
    assert len(set(load.accepted)) == len(load.accepted)
    assert {view.receipts for view in views} == {1}
    ends = [
        sum(event.event == "done" for event in stack.do(lambda ledger, job=job: ledger.events(job)))
        for job in load.accepted
    ]
    assert set(ends) == {1}
    made = stack.do(lambda ledger: ledger.redis.zcard("ms:jobs")) - before
    assert made == len(load.accepted), "an Idempotency-Key made a second job"
    assert {view.attempt for view in views} == {1}, "SIGTERM lets a worker finish what it holds"


def test_the_latch_of_a_conversation_crosses_workers(stack: Stack, client: Client) -> None:
    client.probes.register("p", weight=np.ones(HIDDEN_SIZE), layer=0, model=SHARED, labels=["x"])
    condition = {"at_least": 0.0, "latch": "conversation"}  # scores of the fake engine: positions
    fields = {"probe": "p", "condition": condition, "actions": ["flag"], "mode": "active"}
    client.policies.register("latch", model=SHARED, **fields)
    common = {"model": SHARED, "prompts": ["a"], "policies": ["latch"], "conversation": "c"}
    first = client.run(**common, max_tokens=3, progress=False)
    jobs = [client.submit(**common, sampling={"max_tokens": 20}).id for _ in range(16)]
    assert {client.wait(job).worker for job in jobs} == {"w1", "w1-2"}
    found = [client.result(job).probes for job in (first.id, *jobs)]
    # the number of triggers, and the job whose latch turned the policy on before
    inherited = [(scores.triggers, scores.policy.inherited) for (scores,) in found]
    assert inherited == [(1, "")] + [(0, first.id)] * len(jobs)
