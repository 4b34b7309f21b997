"""Workers, relay, store and services on five machines: is anything lost while machines are killed,
cut off, unplugged and slow?
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import numpy as np
import pytest
import s3_kit
from fleet import Fleet
from load import Step
from network import HERE, Network
from tolerances import FP32_ROWS_30_LAYERS
from wait_kit import wait_until

from midstream.client.captures.reader import CaptureReader
from midstream_ops.demo_model import fetch_demo_model

WHERE = {"relay": "relay", "worker": "w1", "worker-2": "w2", "store": "store"}
LEASE_S = 5.0


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever reads the bucket afterwards."""
    for name, value in s3_kit.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def fenced(fleet: Fleet, observed_receipts: int) -> int:
    """Receipts that the relay acknowledged and that changed nothing: of attempts that were over,
    and sent twice.
    """
    with fleet.client() as client:
        marks = sum(int(client.get(key) or 0) for key in client.scan_iter("ms:mark:*"))
    return marks - observed_receipts


def receipts(fleet: Fleet) -> int:
    with fleet.client() as client:
        return sum(int(client.hget(key, "receipts") or 0) for key in client.scan_iter("ms:job:*"))


def test_nothing_is_lost_while_machines_die_and_partition(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"\nmachines with seed {seed}")
    with (
        Network("relay", "w1", "w2", "store", slow={"w2", "store"}) as network,
        Fleet(tmp_path, network, WHERE, lease_s=LEASE_S) as fleet,
    ):

        def cut(*machines: str, seconds: float) -> None:
            network.cut(*machines)
            time.sleep(seconds)
            network.heal()

        def pull(machine: str, seconds: float) -> None:
            network.pull(machine)
            time.sleep(seconds)
            network.plug(machine)

        def kill(name: str) -> None:
            fleet.kill(name)
            time.sleep(1)
            fleet.revive(name)

        def slow(machine: str, seconds: float) -> None:
            network.delay(machine, ms=150, loss=0.02)
            time.sleep(seconds)
            network.delay(machine)

        def kill_redis() -> None:
            fleet.kill_redis()
            time.sleep(1)
            fleet.revive_redis()

        def rest() -> None:
            time.sleep(2)

        steps: list[Step] = [
            ("load alone", rest),
            (
                "worker 1 is cut off for less than half of its lease",
                lambda: cut("w1", seconds=0.4 * LEASE_S),
            ),
            ("rest", rest),
            ("worker 1 is cut off past its lease", lambda: cut("w1", seconds=2 * LEASE_S)),
            ("worker 2 is 300 ms away and loses frames", lambda: slow("w2", 10)),
            ("worker 2 is killed", lambda: kill("worker-2")),
            ("the relay's machine is unplugged", lambda: pull("relay", 6)),
            ("worker 1 reaches Redis, but not the relay", lambda: cut("w1", "relay", seconds=8)),
            (
                "worker 2 reaches the relay, but not Redis",
                lambda: cut("w2", HERE, seconds=2 * LEASE_S),
            ),
            ("the relay is killed", lambda: kill("relay")),
            ("the store is 300 ms away and loses frames", lambda: slow("store", 8)),
            ("the store is cut off from all", lambda: cut("store", seconds=8)),
            ("worker 1 reaches everything but the store", lambda: cut("w1", "store", seconds=8)),
            ("worker 1 is killed", lambda: kill("worker")),
            ("Redis is killed", kill_redis),
            ("the API is killed", lambda: kill("api")),
            (
                "both workers are unplugged",
                lambda: (network.pull("w1"), pull("w2", 4), network.plug("w1")),
            ),
            ("callbacks, which look after lost jobs, are killed", lambda: kill("callbacks")),
        ]
        verdict, observed = fleet.run(steps, seed)
        late = fenced(fleet, receipts(fleet))
        print(f"receipts acknowledged without effect: {late}")
    assert verdict.found == {rule: [] for rule in verdict.RULES}
    assert len(observed) > 300, "the load was too light to show anything"
    assert verdict.seen["again"] > 0, "no job ran again: nothing was lost that had to be"
    assert verdict.seen["harvests"] > 2, "too few harvests to show anything"
    assert late > 0, "no late receipt has arrived: fencing was not tried"


TEXT = (
    "The Eiffel Tower is located in the city of Paris, and the Colosseum is "
    "located in the city of Rome. "
)
JOBS = 4
TOKENS = 160
Result = tuple[list[str], int, list[np.ndarray]]


def real_jobs(fleet: Fleet, disturb: Callable[[], object]) -> list[Result]:
    """Texts, attempt and captured rows (of every prompt: `[positions, hidden]` of layer 15) of each
    job; `disturb` while they run.
    """
    with httpx2.Client(base_url=fleet.url, timeout=120) as http:
        sent = []
        for number in range(JOBS):
            body = {
                "model": "demo", "prompts": [f"{number}. {TEXT}", f"{number}: {TEXT * 2}"],
                "sampling": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
                "capture": {"layers": [15], "positions": "all_prompt"},
            }  # fmt: skip
            sent.append(http.post("/v1/jobs", json=body).raise_for_status().json()["id"])
        wait_until(lambda: http.get(f"/v1/jobs/{sent[0]}").json()["state"] == "running", 60)
        disturb()
        found: list[Result] = []
        for job in sent:
            wait_until(
                lambda: (
                    http.get(f"/v1/jobs/{job}", params={"wait": 60}).json()["state"]  # noqa: B023
                    not in ("queued", "running")
                ),
                180,
            )
            result = http.get(f"/v1/jobs/{job}/result").raise_for_status().json()
            assert result["state"] == "succeeded", result
            with CaptureReader(fleet.settings("api").artifacts, job) as reader:
                assert [reader.manifest(request).attempt for request in reader.requests()] == [
                    result["attempt"]
                ] * 2
                assert all(check.ok for check in reader.verify())
                rows = [
                    reader.array(15, reader.hooks(number)[0], number)
                    for number in reader.requests()
                ]
            found.append(
                ([output["text"] for output in result["outputs"]], result["attempt"], rows)
            )
        return found


@pytest.mark.timeout(900)
def test_a_real_engine_past_its_lease_gives_the_same_rows(tmp_path: Path) -> None:
    """The demo model on a machine of its own; texts and rows are compared with those of an
    undisturbed run.
    """
    settings = {
        "engine": "vllm",
        "engine_options": {},
        "engine.dtype": "float32",
        "model": str(fetch_demo_model()),
        "model_name": "demo",
        "kv_cache_gib": 0.25,
        "engine.max_model_len": 512,
        "lease_s": LEASE_S,
        "certify": False,
    }
    names = ("relay", "callbacks", "worker", "api")
    where = {"relay": "relay", "worker": "w1", "store": "store"}
    with (
        Network("relay", "w1", "store") as network,
        Fleet(tmp_path, network, where, names, **settings) as fleet,
    ):

        def disturb() -> None:
            network.cut("w1")
            time.sleep(2 * LEASE_S)
            network.heal()

        calm = real_jobs(fleet, lambda: None)
        stormy = real_jobs(fleet, disturb)
    assert max(attempt for _, attempt, _ in stormy) > 1, "no job ran again: the cut was too late"
    for (texts, _, rows), (expected_texts, _, expected) in zip(stormy, calm, strict=True):
        assert texts == expected_texts
        for mine, theirs in zip(rows, expected, strict=True):
            assert (
                np.max(np.linalg.norm(mine - theirs, axis=1) / np.linalg.norm(theirs, axis=1))
                < FP32_ROWS_30_LAYERS
            )
