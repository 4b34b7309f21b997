"""When a rank refuses, disagrees or says nothing, does the job end with the reason, and the next job run?"""

from pathlib import Path

import numpy as np
import pytest
from stack import Stack

from midstream.schemas.jobs import State
from midstream.schemas.specs import StoredSteering
from midstream.schemas.tensors import content_hash, from_numpy
from midstream.workers.fake.model import HIDDEN_SIZE

VECTOR = from_numpy(np.ones(HIDDEN_SIZE, dtype=np.float32))
STEERING = [StoredSteering(layers=[1], hook="post_block", positions="all", family="add", tensors=[content_hash(VECTOR)], scale=1.0)]


# field case 21
@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("hold:rank=1", "intervention_failed", "rank 1: refused vector"),
        ("generate:request=1", "intervention_failed", "rank 0 refused prompt 1"),
        ("disagree:rank=1", "ranks_disagree", ""),
        ("silent:rank=1", "receipts_timed_out", "of 4 receipts"),
    ],
)
def test_what_went_wrong_on_a_rank_is_the_jobs_error(tmp_path: Path, fault: str, kind: str, detail: str) -> None:
    patience = 1 if kind == "receipts_timed_out" else 60  # seconds for the receipts: only there they never come
    with Stack(tmp_path, tensor_parallel_size=2, capture_timeout_s=patience, lease_s=15, fault=fault) as stack:
        view = stack.wait(stack.submit(["a", "b"], steering=STEERING, blobs={content_hash(VECTOR): VECTOR}))
        assert view.state is State.FAILED
        assert view.error is not None
        assert view.error.type == f"urn:midstream:{kind}"
        assert detail in view.error.detail
        assert stack.wait(stack.submit(["the next job runs"])).state is State.SUCCEEDED


def test_a_prompt_accepted_for_a_longer_model_fails_with_its_length(tmp_path: Path) -> None:
    """The worker was started again with a smaller `max_model_len` while the job waited; it is submitted past the API's own check."""
    with Stack(tmp_path, max_model_len=8) as stack:
        view = stack.wait(stack.submit(["short", "a prompt of more than eight letters"], max_tokens=4))
        assert view.state is State.FAILED
        assert view.error is not None
        assert (view.error.type, view.error.field) == ("urn:midstream:prompt_too_long", "prompts[1]")
        assert "max_model_len is 8" in view.error.detail
        assert stack.wait(stack.submit(["short"], max_tokens=1)).state is State.SUCCEEDED
