"""Two models under one name: nothing that was accepted for one is computed by the other. Two
versions either work together or refuse with both of them named.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx2
import msgspec
import pytest
from edge import model_info
from harvest_kit import texts
from ledger_kit import (
    BOOT,
    IDENTITY,
    MODEL,
    WORKER,
    enqueue,
    open_ledger,
    queued_job,
    sent,
    submit_unsent,
    worker_info,
)
from midstream_fake_engine.model import identity_of
from refusal_kit import refuses
from stack import Stack, stack_with
from wait_kit import wait_until

from midstream import __version__
from midstream.broker.ledger.jobs.ledger import new_job_id
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.client import Client
from midstream.schemas.base.records import now, to_msgpack
from midstream.schemas.jobs.jobs import Job, Sampling, State, StoredPrompt
from midstream.schemas.jobs.receipts import receipt_decoder
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.service.compatibility import WIRE, disagreement
from midstream.schemas.settings.settings import Settings, to_environment
from midstream.workers.app import EXIT_ENGINE_DIED, EXIT_NO_ENGINE
from midstream_harvest.names import OVER
from midstream_harvest.reader import open as open_harvest

OTHER = "b" * 64


# ---- the ledger
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", [IDENTITY, ""], ids=["another", "none"])
async def test_a_claim_by_a_worker_of_another_identity_fails_the_job(
    redis_url: str, identity: str
) -> None:
    async with open_ledger(redis_url) as ledger:
        job = await queued_job(ledger, identity=identity)
        assert await ledger.claim(job.id, WORKER, BOOT, 1, OTHER) is None
        view = await ledger.view(job.id)
        assert view.state == State.FAILED
        assert view.attempt == 0
        assert view.identity == identity
        assert view.error.type == "urn:midstream:model_changed"
        assert "b" * 12 in view.error.detail
        assert (identity[:12] or "recorded no identity") in view.error.detail


async def test_no_worker_takes_a_job_without_an_identity(redis_url: str) -> None:
    async with open_ledger(redis_url, on_model_change="wait") as ledger:
        job = await queued_job(ledger, identity="")
        assert await ledger.claim(job.id, WORKER, BOOT, 1, "") is None
        assert (await ledger.view(job.id)).state is State.FAILED


async def test_a_job_waits_for_its_own_model_where_the_setting_says_so(redis_url: str) -> None:
    async with open_ledger(redis_url, on_model_change="wait") as ledger:
        job = await queued_job(ledger)
        assert await ledger.claim(job.id, WORKER, BOOT, 1, OTHER) is None
        assert (await ledger.view(job.id)).state is State.QUEUED
        await Reaper(ledger).sweep(now() + 60)
        assert len(await sent(ledger)) == 2, "its message is sent again"
        claim = await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
        assert claim.attempt == 1, "the refusal was no attempt"


async def test_a_name_has_one_identity_while_a_live_worker_serves_it(redis_url: str) -> None:
    model = model_info(name=MODEL)
    worker = worker_info()
    changed = model_info(name=MODEL, identity=OTHER)

    async with open_ledger(redis_url, lease_s=60) as ledger:
        await ledger.publish_model(model, worker)
        await ledger.publish_model(model, worker_info("w2"))
        for other in ("w3", "w4"):
            with refuses(
                match=r"the live worker 'w[12]' serves 'tiny' with the identity aaaaaaaaaaaa",
                kind="model_changed",
            ):
                await ledger.publish_model(changed, worker_info(other, identity=OTHER))
        assert (await ledger.model(MODEL)).identity == IDENTITY
        assert [each.worker for each in await ledger.workers()] == ["w1", "w2"]
        assert await ledger.serves(MODEL, OTHER) is False
        for gone in ("w1", "w2"):
            await ledger.redis.delete(f"ms:alive:{gone}")
        await ledger.publish_model(changed, worker_info("w3", identity=OTHER))
        assert [each.identity for each in await ledger.workers()] == [OTHER]


async def test_a_worker_may_start_again_with_another_model(redis_url: str) -> None:
    async with open_ledger(redis_url, lease_s=60) as ledger:
        await ledger.publish_model(model_info(name=MODEL), worker_info())
        await ledger.publish_model(
            model_info(name=MODEL, identity=OTHER), worker_info(boot="boot2", identity=OTHER)
        )
        assert [each.identity for each in await ledger.workers()] == [OTHER]


# ---- processes
# --------------------------------------------------------------------------------------------------

NAME = "shared"
LINES = 100
PAIR = {"clean": "hello world", "corrupt": "hello there", "answer": "b", "foil": "c"}
EVERYWHERE = {"layers": "all", "positions": "all_prompt", "tag": "t"}


class Two:
    """A service whose only worker had the model `first`, and then has `second` under the same name;
    what was accepted for the first.
    """

    def __init__(self, stack: Stack, client: Client) -> None:
        self.stack = stack
        self.client = client
        self.first, self.second = (
            identity_of(Settings(model=model)) for model in ("first", "second")
        )
        self.run = client.wait(
            client.submit(
                model=NAME, prompts=["clean words"], capture={**EVERYWHERE, "run": "clean"}
            )
        )
        everywhere = {hook: "all" for hook in HOOKS}  # so that little text has many units
        self.harvest = client.harvests.submit(
            model=NAME, source={"lines": texts(LINES, 400)}, hooks=everywhere, shards={"mib": 1}
        )
        wait_until(lambda: client.harvests.get(self.harvest).units_done > 0)
        stack.kill("worker")
        self.job = client.submit(model=NAME, prompts=["a"], capture=EVERYWHERE)
        self.sweep = client.sweeps.submit(model=NAME, pairs=[PAIR])
        stack.restart("worker", model="second")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    directory = tmp_path_factory.mktemp("identities")
    settings = {
        "model": "first",
        "model_name": NAME,
        "lease_s": 1.5,
        "harvest_stores": str(directory / "rows"),
    }
    with Stack(directory, api=True, **settings) as stack, Client(stack.url) as client:
        yield Two(stack, client)


def test_jobs_and_sweeps_of_the_former_model_fail(two: Two) -> None:
    for view in (two.stack.wait(two.job.id), two.stack.wait(two.sweep.id)):
        assert view.state == "failed"
        assert view.attempt == 0
        assert view.identity == two.first
        assert view.error.type == "urn:midstream:model_changed"
    assert two.stack.result(two.job.id).identity == two.first


def test_a_harvest_that_the_former_model_began_fails(two: Two) -> None:
    wait_until(lambda: two.client.harvests.get(two.harvest).state in OVER)
    view = two.client.harvests.get(two.harvest)
    assert view.state == "failed"
    assert view.identity == two.first
    assert view.error.type == "urn:midstream:model_changed"
    assert 0 < view.documents < LINES


@pytest.mark.parametrize("by_name", [True, False], ids=["name", "job"])
def test_a_source_run_of_the_former_model_is_no_source(two: Two, by_name: bool) -> None:
    source = {"run": "clean" if by_name else two.run.id, "position": 1}
    with refuses(
        match=f"its identity was {two.first[:12]}, and 'shared' is now {two.second[:12]}",
        kind="invalid_request",
        field="patch[0].source.run",
    ):
        two.client.submit(
            model=NAME,
            prompts=["other words"],
            patch=[{"layers": 1, "positions": [1], "source": source}],
        )
    assert two.client.source_runs.get("clean", NAME).identity == two.first


def test_what_the_present_model_computes_says_so_everywhere(two: Two) -> None:
    job = two.client.submit(model=NAME, prompts=["a"], capture=EVERYWHERE)
    view = two.client.wait(job)
    result = two.client.result(job.id)
    assert view.state == "succeeded"
    assert view.identity == two.second
    assert result.identity == two.second
    (raw,) = two.stack.do(lambda ledger: ledger.redis.hvals(f"ms:ticket:{job.id}"))
    assert receipt_decoder.decode(raw).identity == two.second
    with two.client.capture(job) as rows:
        assert rows.manifest().identity == two.second
    assert httpx2.get(f"{two.stack.url}/v1/captures/{job.id}").json()["identity"] == two.second
    assert two.client.model(NAME)["identity"] == two.second
    harvest = two.client.harvests.wait(
        two.client.harvests.submit(model=NAME, source={"lines": ["a"]}, layers=[0]), timeout=60
    )
    assert open_harvest(harvest.uri).manifest.identity == harvest.identity == two.second


def test_a_second_worker_of_another_model_does_not_start(two: Two) -> None:
    two.stack.spawn("worker-2", model="first")
    assert two.stack.exit_code("worker-2") == EXIT_NO_ENGINE
    reason = two.stack.log("worker-2")
    assert f"the live worker 'w1' serves 'shared' with the identity {two.second[:12]}" in reason
    assert "serve this one under another model_name" in reason
    assert two.client.wait(two.client.submit(model=NAME, prompts=["a"])).state == "succeeded"
    two.stack.add("worker-2", model="second")
    assert two.stack.end("worker-2") == 0


@pytest.mark.long
def test_a_worker_whose_name_was_taken_while_it_stood_still_ends(two: Two) -> None:
    two.stack.kill("worker", signal.SIGSTOP)
    wait_until(lambda: not two.stack.do(lambda ledger: ledger.workers()))
    two.stack.add("worker-3", model="first")
    two.stack.kill("worker", signal.SIGCONT)
    assert two.stack.exit_code("worker") == EXIT_ENGINE_DIED
    assert (
        f"the live worker 'w1-3' serves 'shared' with the identity {two.first[:12]}"
        in two.stack.log("worker")
    )
    view = two.client.wait(two.client.submit(model=NAME, prompts=["a"]))
    assert view.state == "succeeded"
    assert view.identity == two.first
    assert view.worker == "w1-3"
    assert two.stack.end("worker-3") == 0
    two.stack.restart("worker", model="first")


# --- Two versions ---------------------------------------------------------------------------------


SERVED = "fake-model"


stack = stack_with(api=True, callbacks=False, lease_s=15)


def ask(stack: Stack) -> httpx2.Response:
    body = {"model": SERVED, "prompts": ["a"], "sampling": {"max_tokens": 2}}
    return httpx2.post(f"{stack.url}/v1/jobs", json=body, headers={"Prefer": "wait=60"}, timeout=90)


# field case 43
def test_a_job_beyond_the_workers_version_fails_naming_both_versions(stack: Stack) -> None:
    job = Job(
        id=new_job_id(),
        kind="generate",
        model=SERVED,
        prompts=[StoredPrompt(token_ids=[1])],
        sampling=Sampling(max_tokens=2),
        created=now(),
        identity=identity_of(stack.settings),
    )
    stack.do(lambda ledger: submit_unsent(ledger, job))
    newer = msgspec.msgpack.encode(msgspec.msgpack.decode(to_msgpack(job)) | {"invented_later": 1})
    fields = {"spec": newer, "written_by": "9.0.0"}
    stack.do(lambda ledger: ledger.redis.hset(f"ms:job:{job.id}", mapping=fields))
    enqueue(stack.app, job.id, job.kind, job.model)
    view = stack.wait(job.id)
    assert view.state == State.FAILED
    assert view.attempt == 1
    assert view.error.type == "urn:midstream:version_mismatch"
    assert (
        f"accepted by midstream 9.0.0; midstream {__version__} cannot read it" in view.error.detail
    )
    assert "invented_later" in view.error.detail


#: Runs a module of the package as a version that speaks another wire.
PROGRAM = """
import runpy, sys
from midstream.schemas import base
base.__version__ = base.version.__version__ = sys.argv[1]
import midstream.schemas.service.compatibility as compatibility
compatibility.WIRE, compatibility.OLDEST_WIRE = int(sys.argv[2]), int(sys.argv[3])
sys.argv = [sys.argv[4]]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def restart_worker(stack: Stack, version: str, wire: int, oldest: int) -> None:
    """The worker again, as a version that speaks `wire` and works with `oldest` and newer."""
    stack.end("worker")
    with (stack.directory / "logs" / "worker.log").open("wb") as output:
        stack.processes["worker"] = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, version, str(wire), str(oldest), "midstream.workers"],
            env=os.environ | to_environment(stack.settings) | {"PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=output,
            cwd=stack.directory,
        )
    stack.wait_ready("worker")


# field case 43
@pytest.mark.parametrize(
    ("version", "wire", "oldest", "upgrade"),
    [("0.0.9", WIRE - 1, 0, "the other"), ("9.0.0", WIRE + 1, WIRE + 1, "this process")],
)
def test_an_incompatible_worker_gets_no_jobs_and_both_versions_are_named(
    stack: Stack, version: str, wire: int, oldest: int, upgrade: str
) -> None:
    restart_worker(stack, version, wire, oldest)
    answer = ask(stack)
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:midstream:version_mismatch"
    detail = answer.json()["detail"]
    assert (
        f"the worker of '{SERVED}' runs midstream {version} (wire {wire}, works with "
        f"{oldest} and newer)"
    ) in detail
    assert f"this process runs midstream {__version__} (wire {WIRE}" in detail
    assert detail.endswith(f"upgrade {upgrade}")

    ready = httpx2.get(f"{stack.url}/readyz")
    assert ready.status_code == 503
    assert ready.json()["ready"] is False
    assert ready.json()["models"] == []
    told = next(why for why in ready.json()["missing"] if why.startswith("worker "))
    assert f"runs midstream {version} (wire {wire}" in told
    assert f"this process runs midstream {__version__}" in told
    seen = httpx2.get(f"{stack.url}/v1/status").json()["workers"]
    assert [
        (worker["healthy"], worker["detail"].endswith(f"upgrade {upgrade}")) for worker in seen
    ] == [(False, True)]


def test_a_newer_compatible_worker_takes_jobs(stack: Stack) -> None:
    restart_worker(stack, "9.0.0", WIRE + 1, WIRE)
    answer = ask(stack)
    assert answer.status_code == 200
    assert answer.json()["state"] == "succeeded"
    assert httpx2.get(f"{stack.url}/readyz").json()["models"] == [SERVED]


def test_overlapping_version_ranges_are_compatible() -> None:
    assert disagreement("x", "1", WIRE, WIRE) is None
    assert disagreement("x", "1", WIRE + 5, WIRE) is None
    assert disagreement("x", "1", 0, 0) is not None, (
        "a version that told no number is older than all that do"
    )
