"""Do jobs get the source runs that they are patched with, on two workers of four ranks, whatever
becomes of processes and files?

Two tensor-parallel ranks in each of two pipeline stages; fake engines, everything else real.
"""

import time
from collections.abc import Callable

import pytest
from ledger_kit import enqueue
from midstream_fake_engine.model import NUM_LAYERS
from stack import Stack, stack_with
from wait_kit import wait_until

from midstream.broker.ledger.named.source_runs import LedgerRuns
from midstream.schemas.jobs.jobs import State
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.source_runs import RunRow, RunView, row_name, run_key
from midstream.schemas.requests.specs import StoredCapture, StoredSteering

MODEL = "fake-model"
TEXT = "The Eiffel Tower is in the city of"


# One worker, of which a rank once fails to load a run; a second one comes later.
stack = stack_with(
    **{"engine.tensor_parallel_size": 2, "engine.pipeline_parallel_size": 2},
    engine_options={"token_s": 0.02},
    fault="put_run:rank=3,times=1",
    callbacks=False,
)


def make_run(stack: Stack, name: str) -> str:
    """The job whose captures, at every site and position, have this name from now on."""
    everywhere = StoredCapture(
        sites={hook: list(range(NUM_LAYERS)) for hook in HOOKS}, positions="all_prompt", tag="t"
    )
    job = stack.submit([TEXT], max_tokens=1, capture=everywhere, run=name)
    assert stack.wait(job).state is State.SUCCEEDED
    return job


def patch(job: str, layer: int = 2, position: int = 3) -> list[StoredSteering]:
    """A row of the run into the same place."""
    return [
        StoredSteering(
            layers=[layer],
            hook="post_block",
            positions=[position],
            family="replace",
            tensors=[row_name(RunRow(run_key(job, 0, "t"), "post_block", layer, position))],
            numbers=[1.0],
        ),
    ]


def patched(stack: Stack, name: str, job: str, *, max_tokens: int = 4, send: bool = True) -> str:
    return stack.submit(
        ["The Colosseum"], max_tokens=max_tokens, steering=patch(job), runs={name: job}, send=send
    )


def text(stack: Stack, job: str) -> str:
    """Of a job that must have succeeded, with every rank's word for it."""
    view = stack.wait(job)
    assert view.state is State.SUCCEEDED, view.error
    result = stack.result(job)
    assert result.determinism.consistent
    (stage_0, stage_1) = result.determinism.stages
    assert [rank.applied for rank in (*stage_0.ranks, *stage_1.ranks)] == [0, 0, 1, 1], (
        "layer 2 is the second stage's"
    )
    return result.outputs[0].text


def refused(stack: Stack, job: str) -> tuple[str, str]:
    """The error of a job that must have failed without an output."""
    view = stack.wait(job)
    assert view.state is State.FAILED
    assert stack.result(job).outputs == []
    return view.error.type.removeprefix("urn:midstream:"), view.error.detail


def ended(stack: Stack, job: str) -> float:
    finished = stack.view(job).finished
    assert finished is not None
    return finished


def view(stack: Stack, name: str) -> RunView:
    return stack.do(lambda ledger: LedgerRuns(ledger).view(MODEL, name))


def delete(stack: Stack, name: str) -> None:
    stack.do(lambda ledger: LedgerRuns(ledger).delete(MODEL, name))


def until(stack: Stack, name: str, holds: Callable[[RunView], bool]) -> RunView:
    wait_until(lambda: holds(view(stack, name)))
    return view(stack, name)


# field case 28
def test_a_rank_that_cannot_read_a_run_fails_that_job_and_serves_the_next(stack: Stack) -> None:
    job = make_run(stack, "unreadable")
    kind, detail = refused(stack, patched(stack, "unreadable", job))
    assert kind == "intervention_failed"
    assert "run 'unreadable'" in detail
    assert "rank 3: injected fault" in detail
    assert text(stack, patched(stack, "unreadable", job))


def test_source_runs_are_loaded_on_every_rank_of_any_worker(stack: Stack) -> None:
    stack.add("worker-2", fault="")
    job = make_run(stack, "eiffel")
    found = view(stack, "eiffel")
    assert (found.state, found.job) == ("ready", job)
    assert found.prompts[0].sites == {hook: [0, 1, 2, 3] for hook in HOOKS}, "of both stages"
    assert found.prompts[0].positions == list(range(len(TEXT)))
    views, texts, deadline = [], set(), time.monotonic() + 60
    while {each.worker for each in views} != {"w1", "w1-2"}:
        # a worker may have been quick enough to take several
        assert time.monotonic() < deadline, views
        jobs = [patched(stack, "eiffel", job) for _ in range(12)]
        texts |= {text(stack, job) for job in jobs}
        views += [stack.view(job) for job in jobs]
    assert (len(texts), views[0].runs) == (1, {"eiffel": job})
    until(stack, "eiffel", lambda found: found.held_by == ["w1", "w1-2"] and found.in_use == 0)


# field case 31, 36
@pytest.mark.slow("a job runs for seconds")
def test_a_run_deleted_while_a_job_uses_it_stays_with_that_job_and_serves_no_other(
    stack: Stack,
) -> None:
    job = make_run(stack, "in-use")
    running = patched(stack, "in-use", job, max_tokens=250)
    assert until(stack, "in-use", lambda found: found.in_use == 1).state == "ready"
    following = [patched(stack, "in-use", job, send=False) for _ in range(4)]
    delete(stack, "in-use")
    assert stack.do(lambda ledger: LedgerRuns(ledger).lookup(MODEL, "in-use")) is None
    for each in following:
        enqueue(stack.app, each, "generate", MODEL)
    why = f"run 'in-use': source run {run_key(job, 0, 't')}: its captures were deleted"
    assert {refused(stack, each) for each in following} == {("intervention_failed", why)}, (
        "also where it is still in memory"
    )
    assert text(stack, running)
    assert max(ended(stack, each) for each in following) < ended(stack, running), (
        "or nothing was tried here"
    )
