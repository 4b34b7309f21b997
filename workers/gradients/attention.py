"""Attention of the gradient worker's models: transformers' own, with queries, keys and values open
to a watcher.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask

from ...schemas.prompts.selectors import Hook

#: The name under which models use this attention.
NAME = "midstream_gradients"
_WATCHED: tuple[Hook, ...] = ("q", "k", "v")


class Attended(NamedTuple):
    """How a layer turns queries and keys into scores."""

    scale: float
    softcap: float  # 0: none
    mask: torch.Tensor  # [batch, 1, queries, keys]: added to the scores


#: Receives `q`, `k` or `v` and its tensor `[batch, heads, tokens, head size]`; returns what the
#: model goes on with.
AttentionWatcher = Callable[[Hook, torch.Tensor, Attended], torch.Tensor]
WATCHERS: WeakKeyDictionary[nn.Module, AttentionWatcher] = WeakKeyDictionary()


def scores(query: torch.Tensor, key: torch.Tensor, attended: Attended) -> torch.Tensor:
    """Return the scores before the softmax. `query`, `key`: `[batch, heads, tokens, head size]`,
    with as many heads of each.
    """
    result = query @ key.transpose(-1, -2) * attended.scale
    if attended.softcap:
        result = torch.tanh(result / attended.softcap) * attended.softcap
    return result + attended.mask.to(result.dtype)


def repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return key heads `[batch, key heads, …]`, repeated for the query heads that share them."""
    return repeat_kv(tensor, heads // tensor.shape[1])


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if s_aux is not None:
        raise NotImplementedError(f"{type(module).__name__} has attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    watch, own = WATCHERS.get(module), getattr(module, "scaling", scale)
    if watch is not None and scale == 1.0 != own:  # OPT multiplies its queries by the scale before
        query, scale = query / own, own
    attended = Attended(scale, softcap or 0.0, attention_mask)
    if watch is not None:
        query, key, value = map(watch, _WATCHED, (query, key, value), [attended] * 3)
    if not softcap:
        found = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale)
        return found[0], None
    key, value = (repeated(tensor, query.shape[1]) for tensor in (key, value))
    pattern = scores(query, key, attended).softmax(-1, dtype=torch.float32)
    return (pattern.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, eager_mask)
