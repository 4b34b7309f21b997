"""A cancel reaches a job in whatever state it is, over HTTP, with a worker that does one at a time.

A worker that no broadcast reached would hear of it at the next renewal of its leases, which is
later than `Stack.wait` waits. More than a second is a warning, if it is so for several jobs: a
stall of the machine hits one of them, a service that waits hits all.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from stack import Stack, stack_with
from wait_kit import warn_if_late

from midstream.schemas.jobs.jobs import State

#: A worker that no broadcast reaches hears of a cancellation when it renews its leases, which it
#: does three times in each.
LEASE_S = 300.0
BOUND_S = 1.0
TRIES = 2


stack = stack_with(
    api=True,
    callbacks=False,
    **{
        "tuning.dispatch_window": 1,
        "tuning.worker_concurrency": 1,
        "tuning.sweep_cells_in_flight": 1,
        "tuning.visibility_timeout_s": 60,
    },
    engine_options={"token_s": 0.02},
    lease_s=LEASE_S,
    capture_timeout_s=300.0,
)


@contextmanager
def long(stack: Stack, http: httpx2.Client) -> Iterator[str]:
    """A job that keeps the worker busy."""
    job_id = posted(stack, http, max_tokens=4000)
    stack.wait_running(job_id)
    try:
        yield job_id
    finally:
        http.post(f"/v1/jobs/{job_id}/cancel")
        stack.wait(job_id)


def posted(stack: Stack, http: httpx2.Client, max_tokens: int = 4, **body: object) -> str:
    sampling = {"max_tokens": max_tokens, "ignore_eos": True}
    answer = http.post(
        "/v1/jobs",
        json={
            "model": stack.settings.served_model,
            "prompts": ["abc"],
            "sampling": sampling,
            **body,
        },
    )
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def cancelled(stack: Stack, http: httpx2.Client, job_id: str, end: State) -> float:
    """Seconds until the job's end, which must be this one."""
    began = time.time()
    assert http.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    view = stack.wait(job_id)
    assert view.state is end
    assert view.finished is not None
    return view.finished - began


def warn_if_slow(took: list[float]) -> None:
    warn_if_late(min(took), BOUND_S, "a broadcast reaches the worker")


def test_cancel_of_a_queued_job(stack: Stack, http: httpx2.Client) -> None:
    took: list[list[float]] = [[], []]
    for _ in range(TRIES):
        with long(stack, http):
            sent, waiting, last = (posted(stack, http) for _ in range(3))
            took[0].append(cancelled(stack, http, waiting, State.ABORTED))
            took[1].append(cancelled(stack, http, sent, State.ABORTED))
        assert stack.wait(last).state is State.SUCCEEDED, "the one behind them had its turn"
    for each in took:
        warn_if_slow(each)


def test_cancel_while_generating(stack: Stack, http: httpx2.Client) -> None:
    took = []
    for _ in range(TRIES):
        with long(stack, http) as job_id:
            took.append(cancelled(stack, http, job_id, State.CANCELLED))
    warn_if_slow(took)


def test_cancel_right_after_the_claim(stack: Stack, http: httpx2.Client) -> None:
    """The broadcast may come before the worker has heard that the job is its own."""
    took = []
    for _ in range(TRIES):
        job_id = posted(stack, http, max_tokens=4000)
        while stack.view(job_id).state is State.QUEUED:
            pass
        took.append(cancelled(stack, http, job_id, State.CANCELLED))
    warn_if_slow(took)


def test_cancel_while_awaiting_receipts(stack: Stack, http: httpx2.Client) -> None:
    took = []
    stack.end("relay")
    try:
        for _ in range(TRIES):
            job_id = posted(stack, http, capture={"positions": "last_prompt"})
            stack.wait(job_id, until=lambda view: view.generated is not None)
            took.append(cancelled(stack, http, job_id, State.CANCELLED))
    finally:
        stack.restart("relay")
    warn_if_slow(took)


def test_cancel_of_a_running_sweep(stack: Stack, http: httpx2.Client) -> None:
    pair = {
        "clean": "The Eiffel Tower is here",
        "corrupt": "The Colosseum is in here",
        "answer": "P",
        "foil": "R",
    }
    # so many cells that it is not over meanwhile
    body = {
        "model": stack.settings.served_model,
        "pairs": [pair],
        "metric": "logit_diff",
        "hooks": ["pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"],
    }
    took = []
    for _ in range(TRIES):
        answer = http.post("/v1/sweeps", json=body)
        assert answer.status_code == 202, answer.text
        job_id = answer.json()["id"]
        stack.wait(job_id, until=lambda view: view.cells > 0)
        took.append(cancelled(stack, http, job_id, State.CANCELLED))
        view = stack.view(job_id)
        assert 0 < view.cells < view.cells_expected
        assert stack.do(lambda ledger: ledger.tenants.usage("default")).sweep_cells == 0
    warn_if_slow(took)
