"""When a rank refuses, disagrees or says nothing, does the job end with the reason, and the next
job run?
"""

from collections.abc import Iterator

import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE
from stack import Stack

from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.specs import StoredSteering

VECTOR = from_numpy(np.ones(HIDDEN_SIZE, dtype=np.float32))
STEERING = [
    StoredSteering(
        layers=[1],
        hook="post_block",
        positions="all",
        family="add",
        tensors=[content_hash(VECTOR)],
        scale=1.0,
    )
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Each test starts a worker of its own on it."""
    with Stack(
        tmp_path_factory.mktemp("stack"), workers=0, tensor_parallel_size=2, lease_s=15
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_worker_afterwards(stack: Stack) -> Iterator[None]:
    yield
    stack.kill("worker")


# field case 21
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("hold:rank=1", "intervention_failed", "rank 1: refused vector"),
        ("generate:request=1", "intervention_failed", "rank 0 rejected prompt 1"),
        ("disagree:rank=1", "ranks_disagree", ""),
        ("silent:rank=1", "receipts_timed_out", "of 4 receipts"),
    ],
)
def test_a_rank_failure_is_the_jobs_error(stack: Stack, fault: str, kind: str, detail: str) -> None:
    if kind == "receipts_timed_out":  # seconds; only there they never come
        stack.kill("callbacks")
        stack.restart("callbacks", capture_timeout_s=1)
        stack.spawn("worker", capture_timeout_s=1, fault=fault)
    else:
        stack.spawn("worker", fault=fault)
    view = stack.wait(
        stack.submit(["a", "b"], steering=STEERING, blobs={content_hash(VECTOR): VECTOR})
    )
    assert view.state is State.FAILED
    assert view.error is not None
    assert view.error.type == f"urn:midstream:{kind}"
    assert detail in view.error.detail
    assert stack.wait(stack.submit(["the next job runs"])).state is State.SUCCEEDED


def test_a_prompt_accepted_for_a_longer_model_fails_with_its_length(stack: Stack) -> None:
    """The worker was started again with a smaller `max_model_len` while the job waited; it is
    submitted past the API's own check.
    """
    stack.spawn("worker", max_model_len=8)
    view = stack.wait(stack.submit(["short", "a prompt of more than eight letters"], max_tokens=4))
    assert view.state is State.FAILED
    assert view.error is not None
    assert (view.error.type, view.error.field) == ("urn:midstream:prompt_too_long", "prompts[1]")
    assert "max_model_len is 8" in view.error.detail
    assert stack.wait(stack.submit(["short"], max_tokens=1)).state is State.SUCCEEDED
