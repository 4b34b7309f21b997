"""Lets requests with sampling share a step with drafts on vLLM's CPU build.

Two of the functions that replace Triton kernels there do something else:

- For such a step vLLM gives each drafted position its request's temperature, top-k and top-p. The
  build writes them to a copy in integers and discards the copy, so the logits of every drafted
  position, of greedy requests too, are divided by uninitialised memory.
- A step of a prompt's last token is filled with drafts -1, which are to be rejected. The build
  reads a probability of another position for them, and so may accept them.

`install` replaces what calls them. `tests/cpu_kernels.py` compares all such functions with their
kernels.
"""

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

_accept = rejection_sampler._rejection_random_sample


def install() -> None:
    """Replace both callers in this process, if it runs on a CPU."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        # vLLM's is an object, of which the sampler calls this method, too
        vars(_rejection_random_sample)["register_warmup"] = _accept.register_warmup
        rejection_sampler._rejection_random_sample = _rejection_random_sample


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Return [num_tokens]: the value of each request at all of its drafted positions, with
    `replace_to` in place of `replace_from`.

    `x`: [requests]; `cu_num_tokens`: [requests], int32, the positions of a request and of those
    before it.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.where(x != replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)


def _rejection_random_sample(
    output_token_ids: Any,
    cu_num_draft_tokens: Any,
    draft_token_ids: torch.Tensor,
    draft_probs: Any,
    target_probs: Any,
    bonus_token_ids: Any,
    recovered_token_ids: Any,
    uniform_probs: torch.Tensor,
    is_greedy: Any,
    max_spec_len: Any,
    synthetic_conditional_rates: Any,
) -> None:
    """Accept drafts of sampled requests as vLLM does, but no draft -1."""
    _accept(
        output_token_ids,
        cu_num_draft_tokens,
        draft_token_ids.clamp(min=0),
        draft_probs,
        target_probs,
        bonus_token_ids,
        recovered_token_ids,
        uniform_probs.masked_fill(draft_token_ids < 0, torch.inf),  # no probability is as large
        is_greedy,
        max_spec_len,
        synthetic_conditional_rates,
    )
