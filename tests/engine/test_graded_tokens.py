"""What the ranks say of the next token is the model's own log-softmax, whoever else is in the
batch. fp32.
"""

from typing import Any

import numpy as np
import pytest
from host import Host, prompt_of, steer
from reference import Reference
from tiny import HIDDEN, VOCABULARY
from tolerances import FP32_LOGPROBS

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.requests.specs import Grade

EVERY = list(range(VOCABULARY))


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    """float64 log-softmax."""
    exact = logits.astype(np.float64)
    exact -= exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def truth(reference: Reference, token_ids: list[int]) -> np.ndarray:
    """Of the token after these: `[vocabulary]`."""
    reference.rows(token_ids)
    return logprobs_of(reference.logits[-1])


def graded(host: Host, *asked: tuple[Job, Grade], **options: Any) -> list[list[float]]:
    """One batch; what the last stage's first rank said of each."""
    answer = host.run_any(
        *(job for job, _ in asked), grades={job.id: [grade] for job, grade in asked}, **options
    )
    assert not answer.errors, answer.errors
    found = []
    for job, _ in asked:
        receipts = host.receipts(job)
        assert [(receipt.status, receipt.message) for receipt in receipts] == [("ok", "")] * len(
            receipts
        )
        (told,) = (receipt.graded for receipt in receipts if receipt.graded)
        found.append(told)
    return found


@pytest.mark.slow("vLLM compiles what ranks log-probabilities")
def test_log_probabilities_equal_transformers_and_neighbours_keep_theirs(
    v1: Host, reference: Reference
) -> None:
    """With vLLM's `logprob_token_ids` instead the neighbours would be told of other tokens."""
    prompts = [
        prompt_of(length, seed=length) for length in (9, 100, 20)
    ]  # one of them in two steps
    asked = [(v1.job(prompt, max_tokens=2), Grade(token_ids=EVERY)) for prompt in prompts]
    neighbours = [
        v1.job(prompt_of(length, seed=40 + length), max_tokens=3, logprobs=5) for length in (11, 21)
    ]
    answer = v1.run_any(
        *(job for job, _ in asked), *neighbours, grades={job.id: [grade] for job, grade in asked}
    )
    assert not answer.errors
    for prompt, (job, _) in zip(prompts, asked, strict=True):
        (receipt,) = v1.receipts(job)
        np.testing.assert_allclose(
            receipt.graded, truth(reference, prompt), atol=FP32_LOGPROBS, rtol=0
        )
    for job in neighbours:
        (output,) = answer.outputs[job.id]
        assert output.logprobs is not None
        tokens = list(job.prompts[0].token_ids)
        for said, token in zip(output.logprobs, output.token_ids, strict=True):
            right = truth(reference, tokens)
            assert {each.token_id for each in said.top[:5]} == set(np.argsort(right)[-5:].tolist())
            for each in said.top:
                assert abs(each.logprob - right[each.token_id]) <= FP32_LOGPROBS
            tokens.append(token)


def test_cached_prompts_are_graded_alike(cached: Host, reference: Reference) -> None:
    prompt = prompt_of(300, seed=84)
    right = truth(reference, prompt)
    for hit in (0, 256):
        job = cached.job(prompt, max_tokens=1)
        answer = cached.run_any(job, grades={job.id: [Grade(EVERY)]})
        assert answer.outputs[job.id][0].cached_tokens == hit
        np.testing.assert_allclose(
            cached.receipts(job)[0].graded, right, atol=FP32_LOGPROBS, rtol=0
        )


def test_preempted_requests_are_graded_once_and_right(cached: Host, reference: Reference) -> None:
    """Seven blocks of KV cache: they grow until they push one another out."""
    prompts = [prompt_of(100, seed=90 + number) for number in range(5)]
    before = cached.call("midstream_status")[0]["preemptions"]
    told = graded(
        cached,
        *((cached.job(prompt, max_tokens=60), Grade(EVERY)) for prompt in prompts),
        together=True,
    )
    assert cached.call("midstream_status")[0]["preemptions"] > before
    for prompt, values in zip(prompts, told, strict=True):
        np.testing.assert_allclose(values, truth(reference, prompt), atol=FP32_LOGPROBS, rtol=0)


@pytest.mark.parametrize(("way", "grader"), [("tp2", 0), ("pp2", 1), ("v2", 0), ("overlapped", 1)])
def test_one_rank_grades_and_all_ranks_confirm(
    request: pytest.FixtureRequest, way: str, grader: int
) -> None:
    """Two tensor-parallel ranks, two pipeline stages, the v2 runner; a steered request among
    them.
    """
    host: Host = request.getfixturevalue(way)
    reference = Reference(request.getfixturevalue("llama" if way == "v2" else "qwen3"))
    vector = np.random.default_rng(7).normal(size=HIDDEN).astype(np.float32)
    plain, steered = (
        host.job(prompt_of(9, seed=95), max_tokens=1, steering=steering)
        for steering in (None, [steer(host.vector(vector), [1])])
    )
    told = graded(host, (plain, Grade(EVERY, keep="plain")), (steered, Grade(EVERY)))
    assert [receipt.rank for receipt in host.receipts(plain) if receipt.graded] == [grader]
    right = truth(reference, prompt_of(9, seed=95))
    np.testing.assert_allclose(told[0], right, atol=FP32_LOGPROBS, rtol=0)
    reference.rows(prompt_of(9, seed=95), [(1, vector, None)])
    moved = logprobs_of(reference.logits[-1])
    np.testing.assert_allclose(told[1], moved, atol=FP32_LOGPROBS, rtol=0)
    assert np.abs(moved - right).max() > 100 * FP32_LOGPROBS
