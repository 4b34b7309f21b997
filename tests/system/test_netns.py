"""What becomes of jobs when the wire between a worker and everything else is cut in the middle of
them, and mended?
"""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from machines_rig import Link, Machines
from receipt_rig import wait_until

from midstream.broker.ledger.jobs.settlement import mark_key
from midstream.schemas.jobs.jobs import Event
from midstream.workers.serving.heartbeat import RENEWALS_PER_LEASE

WHY_NOT = Link.why_not()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there is a second namespace"),
]

TOKEN_S, LEASE_S = 0.05, 8.0
PERIOD_S = LEASE_S / RENEWALS_PER_LEASE
PROMPTS = 2


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(
        tmp_path_factory.mktemp("netns"),
        Link.make(),
        engine_options={"token_s": TOKEN_S},
        lease_s=LEASE_S,
    ) as started:
        yield started


class Caller:
    """Somebody whose answers are held while the wire is cut."""

    def __init__(self, machines: Machines):
        self.machines = machines
        self._http = httpx2.Client(base_url=machines.url, timeout=90)
        self._pool = ThreadPoolExecutor(8)

    def held(self, tokens: int) -> "Future[httpx2.Response]":
        body = {
            "model": "fake-model",
            "prompts": [f"hello {i}" for i in range(PROMPTS)],
            "sampling": {"max_tokens": tokens},
            "capture": {"layers": "all", "positions": "all"},
        }
        return self._pool.submit(
            self._http.post, "/v1/jobs", json=body, headers={"Prefer": "wait=60"}
        )

    def running(self, count: int) -> list[dict[str, Any]]:
        """The `count` jobs that run, as soon as there are so many."""

        def now() -> list[dict[str, Any]]:
            page: dict[str, list[dict[str, Any]]] = self._http.get(
                "/v1/jobs", params={"state": "running"}
            ).json()
            return page["jobs"]

        wait_until(lambda: len(now()) == count)
        return now()

    def view(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get(f"/v1/jobs/{job}").json()
        return found

    def history(self, job: str) -> list[Event]:
        with self.machines.client() as client:
            return [
                msgspec.json.decode(fields[b"e"], type=Event)
                for _, fields in client.xrange(f"ms:events:{job}")
            ]

    def renewed(self, job: str) -> None:
        """Returns when the job's lease has just been renewed."""
        with self.machines.client() as client:
            before = client.hget(f"ms:job:{job}", "lease")
            wait_until(lambda: client.hget(f"ms:job:{job}", "lease") != before)

    def marks(self) -> int:
        """Receipts acknowledged so far, of all streams."""
        with self.machines.client() as client:
            return sum(
                int(client.get(key) or 0) for key in client.scan_iter(mark_key("w1", 0, "*"))
            )


@pytest.fixture
def caller(machines: Machines) -> Caller:
    return Caller(machines)


def ended_once(caller: Caller, answer: httpx2.Response) -> dict[str, Any]:
    """The job's view: it succeeded, with every receipt counted once and of one attempt, and one end
    in its history.
    """
    assert answer.status_code == 200, answer.text
    assert answer.json()["capture_results"]["status"] == "ok"
    assert [output["index"] for output in answer.json()["outputs"]] == list(range(PROMPTS))
    view = caller.view(answer.json()["id"])
    events = caller.history(view["id"])
    assert Counter(event.event for event in events)["done"] == 1
    told = Counter(
        (event.data["request"], event.data["rank"])
        for event in events
        if event.event == "receipt" and event.attempt == view["attempt"]
    )
    assert told == {(request, 0): 1 for request in range(PROMPTS)}
    assert (view["state"], view["receipts"]) == ("succeeded", PROMPTS)
    return view


def test_a_partition_of_half_a_lease_fails_no_job(machines: Machines, caller: Caller) -> None:
    assert machines.link is not None
    # One ends while the wire is cut, so that its receipts wait in the outbox; the other goes on
    # after it.
    answers = [caller.held(120), caller.held(260)]
    caller.renewed(caller.running(2)[0]["id"])
    # The worst moment: the next renewal is the first that is lost. TCP itself sends it again after
    # 3.3 s, and after 6.6 s: too late.
    time.sleep(PERIOD_S - 0.05)
    machines.link.cut()
    time.sleep(LEASE_S / 2)
    machines.link.heal()
    views = [ended_once(caller, answer.result(60)) for answer in answers]
    assert [view["attempt"] for view in views] == [1, 1]


def test_after_a_partition_past_the_lease_jobs_rerun_and_late_receipts_are_ignored(
    machines: Machines, caller: Caller
) -> None:
    assert machines.link is not None
    before = caller.marks()
    answers = [caller.held(30), caller.held(60)]
    caller.running(2)
    machines.link.cut()
    # their leases are over: they wait for a worker again
    wait_until(lambda: caller.running(0) == [], timeout=20)
    time.sleep(1)
    machines.link.heal()
    views = [ended_once(caller, answer.result(60)) for answer in answers]
    assert all(view["attempt"] >= 2 for view in views)
    receipts = sum(view["receipts"] for view in views)
    assert caller.marks() - before > receipts, "no late receipt has arrived: this has shown nothing"
    assert "rejected by the relay" not in machines.log("worker")


def test_a_worker_takes_jobs_again_after_a_partition(machines: Machines, caller: Caller) -> None:
    done = caller.held(4).result(30).json()
    assert done["capture_results"]["status"] == "ok"
    files = [
        machines.settings("api").capture_root / file["path"]
        for file in done["capture_results"]["files"]
    ]
    assert files
    assert all(Path(file).exists() for file in files)
