"""Do the workers of a model share its jobs, and follow what is desired for everyone, whatever
happens to them and their ranks? And does another model get its own?

Fake engines, everything else real.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE, Dice, make_tokenizer
from stack import Stack

from midstream.broker.ledger.named.steering import Steering
from midstream.client import Client
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.schemas.requests.steering import (
    GlobalSteering,
    Module,
    SteeringTemplate,
    WorkerSteering,
    content_digest,
)
from midstream.workers.serving.attempts import CLAIM_PATIENCE_S

MODEL, OTHER = "fake-model", "other-model"
CAPTURE = StoredCapture(sites={"post_block": [1]}, positions="last_prompt", tag="t")
PATIENCE_S = 60.0


def tensor(number: int) -> Tensor:
    return from_numpy(np.full(HIDDEN_SIZE, number, dtype=np.float32))


def entry(number: int) -> SteeringTemplate:
    return SteeringTemplate(
        layers=[1],
        hook="post_block",
        positions="all",
        family="add",
        tensors=[content_hash(tensor(number))],
    )


def own(number: int) -> list[StoredSteering]:
    return [entry(number).stored("all")]


def blobs(*numbers: int) -> dict[str, Tensor]:
    return {content_hash(tensor(number)): tensor(number) for number in numbers}


def reports(stack: Stack) -> dict[str, WorkerSteering]:
    found = stack.do(lambda ledger: Steering(ledger).reports(MODEL))
    return {report.worker: report for report in found}


def until(
    stack: Stack, holds: Callable[[dict[str, WorkerSteering]], bool]
) -> dict[str, WorkerSteering]:
    deadline = time.monotonic() + PATIENCE_S
    while not holds(found := reports(stack)):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def propose(stack: Stack, *numbers: int) -> str:
    entries = [entry(number) for number in numbers]
    return stack.do(lambda ledger: Steering(ledger).propose(MODEL, entries, blobs(*numbers))).id


def commit(stack: Stack, proposal: str) -> GlobalSteering:
    return stack.do(lambda ledger: Steering(ledger).commit(MODEL, proposal))


def set_global(stack: Stack, *numbers: int, workers: int = 2) -> int:
    """Both phases as the API has them; returns the version."""
    proposal = propose(stack, *numbers)
    until(
        stack,
        lambda found: (
            sum(report.proposal == proposal and report.prepared for report in found.values())
            >= workers
        ),
    )
    version = commit(stack, proposal).version
    until(
        stack,
        lambda found: sum(report.global_version == version for report in found.values()) >= workers,
    )
    return version


def put_module(stack: Stack, number: int) -> str:
    digest = content_digest([entry(number)])
    module = Module(
        name="joy", model=MODEL, digest=digest, entries=[entry(number)], bytes=32, created=0.0
    )
    stack.do(lambda ledger: Steering(ledger).put_module(module, blobs(number)))
    return digest


def plain_text(prompt: str, tokens: int) -> str:
    """What the fake engine makes of a prompt that nothing steers."""
    tokenizer = make_tokenizer()
    dice = Dice(tokenizer, tokenizer.encode(prompt).ids, None, [])
    return "".join(tokenizer.decode([dice.roll()]) for _ in range(tokens))


def text(stack: Stack, job_id: str) -> str:
    view = stack.wait(job_id)
    assert view.state is State.SUCCEEDED, view.error
    return stack.result(job_id).outputs[0].text


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers of two ranks each, and one of another model."""
    settings = {
        "workers": 2,
        "tensor_parallel_size": 2,
        "engine_options": {"token_s": 0.01},
        "worker_concurrency": 8,
        "lease_s": 10,
        "steering_wait_s": 60.0,
    }
    with Stack(tmp_path_factory.mktemp("stack"), api=True, **settings) as running:
        running.spawn("worker-3", model=OTHER)
        running.wait_ready("worker-3")
        yield running


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
    assert listed == {MODEL: 2, OTHER: 1}
    ids = {
        name: [
            client.submit(model=name, prompts=["a"], sampling={"max_tokens": 20}).id
            for _ in range(24)
        ]
        for name in listed
    }
    ran = {name: {client.wait(job).worker for job in jobs} for name, jobs in ids.items()}
    assert ran == {MODEL: {"w1", "w1-2"}, OTHER: {"w1-3"}}


def test_the_latch_of_a_conversation_crosses_workers(stack: Stack, client: Client) -> None:
    client.probes.register("p", weight=np.ones(HIDDEN_SIZE), layer=0, model=MODEL, labels=["x"])
    condition = {"at_least": 0.0, "latch": "conversation"}  # scores of the fake engine: positions
    fields = {"probe": "p", "condition": condition, "actions": ["flag"], "mode": "active"}
    client.policies.register("latch", model=MODEL, **fields)
    common = {"model": MODEL, "prompts": ["a"], "policies": ["latch"], "conversation": "c"}
    first = client.run(**common, max_tokens=3, progress=False)
    jobs = [client.submit(**common, sampling={"max_tokens": 20}).id for _ in range(16)]
    assert {client.wait(job).worker for job in jobs} == {"w1", "w1-2"}
    found = [client.result(job).probes for job in (first.id, *jobs)]
    # the number of triggers, and the job whose latch turned the policy on before
    inherited = [(scores.triggers, scores.policy.inherited) for (scores,) in found]
    assert inherited == [(1, "")] + [(0, first.id)] * len(jobs)


def test_global_steering_holds_on_every_rank_of_both_workers_until_cleared(stack: Stack) -> None:
    plain = text(stack, stack.submit(["hello"]))
    steered = text(stack, stack.submit(["hello"], steering=own(1), blobs=blobs(1)))
    version = set_global(stack, 1)
    ranks = [rank for report in reports(stack).values() for rank in report.ranks]
    assert [(rank.global_version, rank.global_digest) for rank in ranks] == [
        (version, content_digest([entry(1)]))
    ] * 4
    jobs = [stack.submit(["hello"]) for _ in range(8)]
    assert {text(stack, job_id) for job_id in jobs} == {steered} != {plain}
    other = stack.do(lambda ledger: Steering(ledger).desired(OTHER))
    assert other.current.version == 0
    for job_id in jobs:
        view, determinism = stack.view(job_id), stack.result(job_id).determinism
        assert (view.receipts, view.receipts_expected) == (2, 2), (
            "what is everyone's is proved of every request"
        )
        assert (determinism.consistent, determinism.global_version) == (True, version)
    cleared = set_global(stack)
    assert cleared > version
    assert text(stack, stack.submit(["hello"])) == plain
    assert stack.view(stack.submit(["hello"])).receipts_expected == 0


def test_a_running_job_keeps_the_global_steering_that_it_began_under(stack: Stack) -> None:
    job_id = stack.submit(["a long one"], max_tokens=500, capture=CAPTURE)
    stack.wait(job_id, until=lambda view: view.state is not State.QUEUED)
    version = set_global(stack, 2)
    applied = max(report.at for report in reports(stack).values())
    assert text(stack, job_id) == plain_text("a long one", 500)
    finished = stack.view(job_id).finished
    assert finished is not None
    assert applied < finished, "or nothing was tried here"
    determinism = stack.result(job_id).determinism
    assert determinism.global_version < version
    set_global(stack)


def test_no_job_starts_under_steering_replaced_by_a_commit(stack: Stack) -> None:
    """Jobs arrive all the time; what a worker says that it began after the decision has the new
    version, on both workers.
    """
    expected = {0: text(stack, stack.submit(["race"], max_tokens=2))}
    expected |= {
        n: text(stack, stack.submit(["race"], max_tokens=2, steering=own(n), blobs=blobs(n)))
        for n in (1, 2, 3)
    }
    decided: list[tuple[float, int, int]] = []  # when, version, content
    jobs: list[str] = []
    for content in (1, 2, 0, 3):
        proposal = propose(stack, *([content] if content else []))
        until(
            stack,
            lambda found, proposal=proposal: (
                sum(r.proposal == proposal for r in found.values()) == 2
            ),
        )
        jobs += [stack.submit(["race"], max_tokens=2, capture=CAPTURE) for _ in range(6)]
        version = commit(stack, proposal).version
        decided.append((time.time(), version, content))
        jobs += [stack.submit(["race"], max_tokens=2, capture=CAPTURE) for _ in range(6)]
    contents = {version: content for _, version, content in decided}
    late, workers = 0, set()
    for job_id in jobs:
        got, view, determinism = (
            text(stack, job_id),
            stack.view(job_id),
            stack.result(job_id).determinism,
        )
        assert view.started is not None
        after = [version for at, version, _ in decided if at < view.started]
        assert determinism.global_version >= max(after, default=0), (
            "began under a state that was no longer desired"
        )
        assert got == expected[contents.get(determinism.global_version, 0)]
        late += bool(after)
        workers.add(view.worker)
    assert late >= 20
    assert len(workers) == 2
    set_global(stack)


def test_a_refusing_rank_prevents_the_change_on_all_ranks(stack: Stack) -> None:
    before = {worker: report.global_version for worker, report in reports(stack).items()}
    stack.end("worker-2")
    stack.restart("worker-2", fault="prepare:rank=1")
    proposal = propose(stack, 1)
    found = until(
        stack, lambda found: sum(report.proposal == proposal for report in found.values()) == 2
    )
    assert found["w1"].prepared
    assert (found["w1-2"].prepared, found["w1-2"].refusal) == (False, "rank 1: injected fault")
    stack.do(lambda ledger: Steering(ledger).abort(MODEL, proposal))
    with pytest.raises(MidstreamError, match="abandoned"):
        commit(stack, proposal)
    found = until(stack, lambda found: not any(report.proposal for report in found.values()))
    assert {worker: report.global_version for worker, report in found.items()} == before


@pytest.mark.long
def test_a_returning_worker_syncs_steering_before_its_first_job(stack: Stack) -> None:
    steered = text(stack, stack.submit(["late"], steering=own(3), blobs=blobs(3)))
    for name in ("worker", "worker-2"):
        stack.end(name)
    digest = put_module(stack, 2)
    version = commit(stack, propose(stack, 3)).version
    job_id = stack.submit(["late"])
    for name in ("worker", "worker-2"):
        stack.restart(name, fault="")
    assert text(stack, job_id) == steered
    assert stack.view(job_id).attempt == 1
    found = until(stack, lambda found: len(found) == 2)
    assert {
        (rank.global_version, rank.modules["joy"])
        for report in found.values()
        for rank in report.ranks
    } == {(version, digest)}
    changed = put_module(stack, 1)
    until(
        stack,
        lambda found: all(
            rank.modules["joy"] == changed for report in found.values() for rank in report.ranks
        ),
    )
    set_global(stack)


@pytest.mark.long
def test_jobs_are_not_delayed_by_a_quarantined_worker(stack: Stack) -> None:
    set_global(stack, 2)
    stack.end("worker-2")
    stack.restart("worker-2", fault="prepare:rank=1")
    assert until(stack, lambda found: len(found) == 2)["w1-2"].state == "quarantined"
    began = time.monotonic()
    for job_id in [stack.submit(["hello"]) for _ in range(12)]:
        stack.wait(job_id)
    assert time.monotonic() - began < CLAIM_PATIENCE_S, (
        "the longest that such a worker keeps a job's message while nobody else serves"
    )
    stack.end("worker-2")
    stack.restart("worker-2")
    set_global(stack)


def test_a_commit_that_one_rank_refuses_is_rolled_back_and_applied_after_a_resync(
    stack: Stack,
) -> None:
    stack.end("worker-2")
    stack.restart("worker-2", fault="commit:rank=1,times=1")
    # The start itself commits what is desired: the fault strikes there, and the worker begins jobs
    # with equal ranks all the same.
    until(stack, lambda found: len(found) == 2)
    version = set_global(stack, 1)
    report = reports(stack)["w1-2"]
    assert (report.state, report.desyncs, report.resyncs) == ("serving", 1, 1)
    assert {(rank.global_version, rank.epoch) for rank in report.ranks} == {(version, 1)}
    assert len({rank.checksum for rank in report.ranks}) == 1
    set_global(stack)


@pytest.mark.long
@pytest.mark.parametrize("on_desync", ["retry", "fail"])
def test_desynced_ranks_are_found_by_the_first_receipt_and_resynced(
    tmp_path: Path, on_desync: str
) -> None:
    settings = {
        "tensor_parallel_size": 2,
        "engine_options": {"token_s": 0.01},
        "lease_s": 10,
        "on_desync": on_desync,
    }
    with Stack(tmp_path, **settings, fault="desync:rank=1,times=1") as stack:
        job_id = stack.submit(["drill"], steering=own(1), blobs=blobs(1))
        bystander = stack.submit(["a bystander"], max_tokens=20)
        view = stack.wait(job_id)
        if on_desync == "retry":
            assert (view.state, view.attempt) == (State.SUCCEEDED, 2), view.error
            determinism = stack.result(job_id).determinism
            assert determinism.consistent
            (reason,) = determinism.retried
            assert "rank 0" in reason
            assert "rank 1" in reason
        else:
            assert view.state is State.FAILED
            assert view.error.type == "urn:midstream:ranks_disagree"
        report = until(stack, lambda found: found["w1"].resyncs == 1)["w1"]
        assert (report.state, report.desyncs) == ("serving", 1)
        assert {(rank.epoch, rank.checksum) for rank in report.ranks} == {
            (1, report.ranks[0].checksum)
        }
        following = stack.submit(["the next"], steering=own(1), blobs=blobs(1))
        assert (stack.wait(following).state, stack.view(following).attempt) == (State.SUCCEEDED, 1)
        assert stack.wait(bystander).state is State.SUCCEEDED
        assert (
            stack.log("worker").count("ERROR midstream.workers.serving.steering: ranks diverged")
            == 1
        )
        assert stack.processes["worker"].poll() is None, "the engine lives on"
