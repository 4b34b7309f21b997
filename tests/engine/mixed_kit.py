"""Requests with and without sampling in the same steps, on an engine with drafts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from host import Host, prompt_of
from reference import Reference

TOP_K = 3
TOP_P = 0.5
#: Those of the last two restrict tokens to some that the model's logits tell.
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.2, "top_p": TOP_P},
    {"temperature": 1.5, "top_k": TOP_K},
]


def check_mixed(host: Host, reference: Reference, ways: Sequence[dict[str, Any]] = SAMPLED) -> None:
    """Beside sampled requests, greedy ones return what the model chooses, and sampled ones what
    their top-k and top-p allow.

    A prompt repeats itself, so that n-grams are found, or is one token, whose step vLLM fills with
    drafts that are none.
    """
    prompts = [*(prompt_of(12, seed=200 + number) * 3 for number in range(3)), prompt_of(1)]
    greedy = [host.job(prompt, max_tokens=20) for prompt in prompts]
    sampled = [
        (host.job(prompt, max_tokens=20, seed=number, **options), options)
        for options in ways
        for number, prompt in enumerate(prompts)
    ]
    outputs = host.run(*greedy, *(job for job, _ in sampled))

    def choices(prompt: list[int], tokens: list[int]) -> np.ndarray:
        """[tokens, vocabulary]: the logits from which each was chosen."""
        reference.rows(prompt + tokens)
        return np.asarray(reference.logits[len(prompt) - 1 : -1])

    for job in greedy:
        (output,) = outputs[job.id]
        prompt = job.prompts[0].token_ids
        logits = choices(prompt, output.token_ids)
        assert output.token_ids == np.argmax(logits, axis=-1).tolist()
    for job, options in sampled:
        (output,) = outputs[job.id]
        prompt = job.prompts[0].token_ids
        assert len(output.token_ids) == 20
        for token, of_step in zip(output.token_ids, choices(prompt, output.token_ids), strict=True):
            larger = of_step > of_step[token] + 1e-4
            if "top_k" in options:
                assert larger.sum() < TOP_K, (job.id, token)
            if "top_p" in options:
                weights = np.exp((of_step - of_step.max()) / options["temperature"])
                assert weights[larger].sum() < TOP_P * weights.sum(), (job.id, token)
