"""The logit lens equals transformers': stream → final norm → output matrix → log-softmax, whatever the engine does meanwhile."""

from pathlib import Path

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, steer
from lens_kit import Truth, check, lens, lenses
from tiny import LAYERS

ALL = list(range(LAYERS))
NAMED = (7, 123, 499)


@pytest.fixture(scope="module")
def truth(llama: Path) -> Truth:
    return Truth(llama)


def test_lens_equals_transformers_in_chunks_and_beside_others(v1: Host, truth: Truth) -> None:
    """200 tokens in steps of 64, beside a steered, a captured and a short request; the last layer's first is the model's own token."""
    long = v1.job(prompt_of(200), max_tokens=4, capture=lens(ALL, "all", tokens=NAMED))
    short = v1.job(prompt_of(9, seed=3), max_tokens=3, capture=[capture_of(ALL, "all"), lens(ALL, "all", top_k=3)])
    other = v1.job(prompt_of(20, seed=4), max_tokens=8, steering=[steer(v1.vector(np.ones(64)), [1], 3.0)])
    outputs = v1.run(long, short, other)
    for job in (long, short):
        (reading,) = lenses(v1, job)
        tokens = job.prompts[0].token_ids + outputs[job.id][0].token_ids
        assert reading.positions == list(range(len(tokens) - 1))
        assert reading.token_ids == tokens[:-1]
        check(reading, truth.logprobs(tokens[:-1]))
        first = len(job.prompts[0].token_ids) - 1
        assert [row[0] for row in reading.top_tokens[-1][first:]] == outputs[job.id][0].token_ids
    assert v1.receipts(long)[0].files == [], "a reading stores no rows"
