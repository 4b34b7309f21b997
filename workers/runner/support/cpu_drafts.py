"""Lets requests with sampling share a step with drafts on vLLM's CPU build.

Three of the functions that it uses there do something else:

- For such a step vLLM gives each drafted position its request's temperature, top-k and top-p. The
  build writes them to a copy in integers and discards the copy, so the logits of every drafted
  position, of greedy requests too, are divided by uninitialised memory.
- The step of a prompt's last token may be filled with drafts -1, which are to be rejected. The
  build reads a probability of another position for them, and so may accept -1 as a token.
- If no request of the step has a draft left, top-k alone fails, and with it the engine.

`install` replaces them, or what calls them. `tests/cpu_kernels.py` compares all that replace Triton
kernels with them.
"""

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

_sample = rejection_sampler.rejection_sample
_restrict = rejection_sampler.apply_top_k_top_p


def install() -> None:
    """Replace them in this process, if it runs on a CPU."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        rejection_sampler.rejection_sample = rejection_sample
        rejection_sampler.apply_top_k_top_p = apply_top_k_top_p


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


def rejection_sample(draft_token_ids: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """Sample as vLLM does, with the draft 0 for each draft -1: the model was fed a 0 there, and any
    draft leaves the distribution as it is. `draft_token_ids`: [positions], int32.
    """
    return _sample(draft_token_ids.clamp(min=0), *others, **named)


def apply_top_k_top_p(logits: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """Mask `logits`, [positions, vocabulary], as vLLM does; without positions there is nothing to
    mask.
    """
    return _restrict(logits, *others, **named) if len(logits) else logits
