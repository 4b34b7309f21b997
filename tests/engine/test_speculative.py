"""Speculative decoding: drafts that the model rejects leave no row, size or score behind.

v1 runner, n-gram drafts, fp32. What holds of every drafter is in `test_drafters.py`.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error, steer
from nursery import Nursery
from probe_kit import Weights, new_maximum, scores_of, tokens_of
from reference import Reference
from rows_kit import check_rows
from size_kit import both_sides, check_sizes
from test_graded_tokens import EVERY, truth
from tiny import HIDDEN, LAYERS
from tolerances import FP32_LOGPROBS, FP32_ROWS

from midstream.schemas.requests.specs import Grade

pytestmark = pytest.mark.long

ALL = list(range(LAYERS))


@pytest.fixture(scope="module")
def speculating(
    llama: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    host = nursery.host(
        tmp_path_factory.mktemp("speculating") / "engine",
        llama,
        speculative_tokens=3,
        hooks="all,inside",
    )
    yield host
    host.close()


def test_rows_of_rejected_drafts_never_appear_and_accepted_ones_are_right(
    speculating: Host, reference: Reference
) -> None:
    # field case 7
    """Prompts that repeat themselves, so that drafts are made; a random model rejects most of
    them.
    """
    vector = np.random.default_rng(4).normal(size=HIDDEN).astype(np.float32)
    name = speculating.vector(vector)
    plain = [
        speculating.job(prompt_of(12, seed=n) * 3, max_tokens=24, capture=capture_of(ALL, "all"))
        for n in range(6)
    ]
    steered = speculating.job(
        prompt_of(10) * 3,
        max_tokens=24,
        capture=capture_of(ALL, "all"),
        steering=[steer(name, [1], 2.0)],
    )
    before = speculating.call("midstream_status")[0]["token_rows"]
    answers = speculating.run(*plain, steered)
    computed = speculating.call("midstream_status")[0]["token_rows"] - before
    for job in (*plain, steered):
        edits = [(1, 2.0 * vector, None)] if job.id == steered.id else []
        check_rows(speculating, reference, job, answers[job.id], edits)
    (sizes,) = speculating.receipts(steered)[0].sizes
    assert sizes.rows == len(steered.prompts[0].token_ids) + 24 - 1, "rows of drafts count"
    fed = sum(len(job.prompts[0].token_ids) + 24 - 1 for job in (*plain, steered))
    assert computed > fed + 20  # so many rows more were computed for drafts that were rejected


def test_sizes_and_limits_hold_among_drafts(speculating: Host) -> None:
    vector = speculating.vector(np.random.default_rng(4).normal(size=HIDDEN).astype(np.float32))
    job, failed = (
        speculating.job(
            prompt_of(10) * 3,
            max_tokens=24,
            capture=both_sides([1]),
            steering=[steer(vector, [1], 5.0, "all_generated", limit=limit)],
        )
        for limit in (0.5, -0.5)
    )
    speculating.run_any(job, failed)
    (largest,) = check_sizes(speculating, job, [1], range(30, 53))
    assert 0.49 < largest <= 0.5
    assert speculating.receipts(failed)[0].kind == "edit_too_large"
    assert "position 30 is" in speculating.receipts(failed)[0].message


def test_prompts_cached_up_to_their_last_token_are_graded_by_its_row(
    speculating: Host, reference: Reference
) -> None:
    """vLLM computes that token with placeholder drafts behind it."""
    prompt = prompt_of(257, seed=41)
    right = truth(reference, prompt)
    for hit in (0, 256):
        job = speculating.job(
            prompt, max_tokens=2, capture=capture_of(ALL, "last_prompt") if hit else None
        )
        before = speculating.call("midstream_status")[0]["token_rows"]
        answer = speculating.run_any(job, grades={job.id: [Grade(EVERY)]})
        assert answer.outputs[job.id][0].cached_tokens == hit
        (receipt,) = speculating.receipts(job)
        assert (receipt.status, receipt.message) == ("ok", "")
        np.testing.assert_allclose(receipt.graded, right, atol=FP32_LOGPROBS, rtol=0)
    assert speculating.call("midstream_status")[0]["token_rows"] - before >= 4, (
        "the last token was computed without drafts"
    )
    assert (
        relative_error(speculating.capture(job).array(2), reference.post_block(prompt)[2][-1:])
        <= FP32_ROWS
    )


def test_a_probe_ends_a_request_among_its_drafts(speculating: Host) -> None:
    """Accepted drafts up to the token that crosses are returned; rows of rejected ones decide
    nothing.
    """
    for seed in range(3):
        weights, prompt = Weights(100 + seed, k=16), prompt_of(12, seed=seed) * 3
        free = speculating.job(
            prompt, max_tokens=24, probes=[weights.probe(speculating, LAYERS - 1)]
        )
        tokens = speculating.run(free)[free.id][0].token_ids
        scores = tokens_of(scores_of(speculating, free)["p"])
        assert len(scores) == 36 + 23
        label, position, threshold = new_maximum(scores, 38, 58)
        thresholds = [threshold if number == label else None for number in range(16)]
        probe = weights.probe(speculating, LAYERS - 1, "stop", thresholds=thresholds)
        job = speculating.job(
            prompt, max_tokens=24, probes=[probe], capture=capture_of([LAYERS - 1], "all")
        )
        (output,) = speculating.run(job)[job.id]
        assert (output.finish_reason, output.token_ids) == ("probe:p", tokens[: position - 36 + 1])
        assert speculating.capture(job).positions(0) == list(range(position + 1))
        assert scores_of(speculating, job)["p"].crossed[label] == position
