"""Two models under one name: nothing that was accepted for one is computed by the other."""

import signal
from collections.abc import Iterator

import httpx2
import pytest
from edge import model_info
from harvest_kit import texts
from ledger_kit import (
    BOOT,
    IDENTITY,
    MODEL,
    WORKER,
    open_ledger,
    queued_job,
    sent,
    worker_info,
)
from midstream_fake_engine.model import identity_of
from refusal_kit import refuses
from stack import Stack
from wait_kit import wait_until

from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.client import Client
from midstream.client.harvest import open as open_harvest
from midstream.schemas.base.records import now
from midstream.schemas.jobs.harvests import OVER
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.receipts import receipt_decoder
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.settings.settings import Settings
from midstream.workers.app import EXIT_ENGINE_DIED, EXIT_NO_ENGINE

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
        assert (view.state, view.attempt, view.identity, view.error.type) == (
            State.FAILED,
            0,
            identity,
            "urn:midstream:model_changed",
        )
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
        await Reaper(ledger, ledger.settings).sweep(now() + 60)
        assert len(await sent(ledger)) == 2, "its message is sent again"
        claim = await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
        assert claim.attempt == 1, "the refusal was no attempt"


async def test_a_name_has_one_identity_while_a_live_worker_serves_it(redis_url: str) -> None:
    model, worker = model_info(name=MODEL), worker_info()
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
        assert (
            (await ledger.model(MODEL)).identity,
            [each.worker for each in await ledger.workers()],
        ) == (IDENTITY, ["w1", "w2"])
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
        self.stack, self.client = stack, client
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
        assert (view.state, view.attempt, view.identity, view.error.type) == (
            "failed",
            0,
            two.first,
            "urn:midstream:model_changed",
        )
    assert two.stack.result(two.job.id).identity == two.first


def test_a_harvest_that_the_former_model_began_fails(two: Two) -> None:
    wait_until(lambda: two.client.harvests.get(two.harvest).state in OVER)
    view = two.client.harvests.get(two.harvest)
    assert (view.state, view.identity, view.error.type) == (
        "failed",
        two.first,
        "urn:midstream:model_changed",
    )
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
    assert (view.state, view.identity, result.identity) == ("succeeded", two.second, two.second)
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
    assert (view.state, view.identity, view.worker) == ("succeeded", two.first, "w1-3")
    assert two.stack.end("worker-3") == 0
    two.stack.restart("worker", model="first")
