"""Do the workers of a model share its jobs, and what do they do when their ranks do not apply what
holds for everyone? And does another model get its own?

Fake engines, everything else real. How a change by the API reaches two workers, and what a rank
that refuses it prevents, is tested in test_api_steering.py.
"""

import time
from collections.abc import Callable

import httpx2
import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE
from stack import Stack, stack_with
from wait_kit import wait_until, warn_if_late

from midstream.broker.ledger.named.steering import LedgerSteering
from midstream.client import Client
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.steering import WorkerSteering
from midstream.workers.serving.attempts import CLAIM_PATIENCE_S

MODEL = "fake-model"
OTHER = "other-model"
SHIFT = [{"layers": [1], "vector": [1.0] * HIDDEN_SIZE}]


# Two workers of two ranks each, and one of another model.
stack = stack_with(
    {"worker-3": {"model": OTHER}},
    api=True,
    workers=2,
    **{"engine.tensor_parallel_size": 2},
    engine_options={"token_s": 0.01},
    **{"tuning.worker_concurrency": 8},
    lease_s=10,
    steering_wait_s=60.0,
)


def reports(stack: Stack) -> dict[str, WorkerSteering]:
    found = stack.do(lambda ledger: LedgerSteering(ledger).accounts(MODEL))
    return {account.info.worker: account.report for account in found if account.report}


def until(
    stack: Stack, holds: Callable[[dict[str, WorkerSteering]], bool]
) -> dict[str, WorkerSteering]:
    wait_until(lambda: holds(reports(stack)))
    return reports(stack)


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
    client.probes.put("p", weight=np.ones(HIDDEN_SIZE), layer=0, model=MODEL, labels=["x"])
    condition = {"at_least": 0.0, "latch": "conversation"}  # scores of the fake engine: positions
    fields = {"probe": "p", "condition": condition, "actions": ["flag"], "mode": "active"}
    client.policies.put("latch", model=MODEL, **fields)
    common = {"model": MODEL, "prompts": ["a"], "policies": ["latch"], "conversation": "c"}
    first = client.run(**common, max_tokens=3, progress=False)
    jobs = [client.submit(**common, sampling={"max_tokens": 20}).id for _ in range(16)]
    assert {client.wait(job).worker for job in jobs} == {"w1", "w1-2"}
    found = [client.result(job).probes for job in (first.id, *jobs)]
    # the number of triggers, and the job whose latch turned the policy on before
    inherited = [(scores.triggers, scores.policy.inherited) for (scores,) in found]
    assert inherited == [(1, "")] + [(0, first.id)] * len(jobs)


@pytest.mark.slow("a job runs for seconds")
def test_a_running_job_keeps_the_global_steering_that_it_began_under(
    stack: Stack, client: Client
) -> None:
    plain = client.result(client.wait(client.submit(model=MODEL, prompts=["a"], max_tokens=4)).id)
    job_id = client.submit(model=MODEL, prompts=["a"], max_tokens=500).id
    stack.wait_running(job_id)
    client.global_steering.put(SHIFT, MODEL)
    assert client.global_steering.get(OTHER).version == 0
    assert stack.view(job_id).state is State.RUNNING, "or nothing was tried here"
    assert stack.wait(job_id).state is State.SUCCEEDED
    result = client.result(job_id)
    assert result.outputs[0].text.startswith(plain.outputs[0].text)
    assert result.determinism is None
    client.global_steering.delete(MODEL)


@pytest.mark.long
def test_jobs_are_not_delayed_by_a_quarantined_worker(stack: Stack, client: Client) -> None:
    client.global_steering.put(SHIFT, MODEL)
    stack.replace("worker-2", fault="check_global:rank=1")
    assert until(stack, lambda found: len(found) == 2)["w1-2"].state == "quarantined"
    began = time.monotonic()
    for job_id in [stack.submit(["hello"]) for _ in range(12)]:
        stack.wait(job_id)
    warn_if_late(
        time.monotonic() - began,
        CLAIM_PATIENCE_S,
        "the longest that such a worker keeps a job's message while nobody else serves",
    )
    stack.replace("worker-2")
    client.global_steering.delete(MODEL)


@pytest.mark.slow("a worker starts")
def test_desynced_ranks_are_found_by_the_first_receipt_and_resynced(
    stack: Stack, client: Client
) -> None:
    for name in ("worker", "worker-2"):
        stack.end(name)
    stack.restart("worker-2", fault="desync:rank=1,times=1")
    job_id = client.submit(model=MODEL, prompts=["drill"], steering=SHIFT).id
    bystander = stack.submit(["a bystander"], max_tokens=20)
    view = stack.wait(job_id)
    assert view.state == State.SUCCEEDED, view.error
    assert view.attempt == 2, view.error
    determinism = stack.result(job_id).determinism
    assert determinism.consistent
    (reason,) = determinism.retried
    assert "rank 0" in reason
    assert "rank 1" in reason
    report = until(stack, lambda found: found["w1-2"].resyncs == 1)["w1-2"]
    assert report.state == "serving"
    assert report.desyncs == 1
    assert {(rank.epoch, rank.checksum) for rank in report.ranks} == {(1, report.ranks[0].checksum)}
    following = client.submit(model=MODEL, prompts=["the next"], steering=SHIFT).id
    assert stack.wait(following).state == State.SUCCEEDED
    assert stack.view(following).attempt == 1
    assert stack.wait(bystander).state is State.SUCCEEDED
    assert stack.processes["worker-2"].poll() is None, "the engine lives on"
    stack.restart("worker")
