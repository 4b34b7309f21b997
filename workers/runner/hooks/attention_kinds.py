"""Attention kinds of the loaded layers, read from vLLM's attention modules; unknown ones are
refused, never guessed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from ....schemas.model.attention import AttentionKind
from ....schemas.model.layer_kinds import grouped
from .architectures import Adapter
from .sites import held_layers

#: Classes whose `forward` computes what `AttentionKind` describes; subclasses do more.
_MODULES = (Attention, ChunkedLocalAttention)
#: Backends' classes of which the same is true.
_IMPLEMENTATIONS = (
    "CPUAttentionBackendImpl", "FlashAttentionImpl", "FlashInferImpl", "TritonAttentionImpl",
)  # fmt: skip

#: This rank's values `[heads]` → those of all ranks of its stage, in the order of the heads.
Gather = Callable[[torch.Tensor], torch.Tensor]


def attention_kinds(
    model: nn.Module, adapter: Adapter, gather: Gather, ranks: int
) -> list[AttentionKind]:
    """Return the attention kinds of the layers on this rank's stage that have attention.

    The result is the same on each of the stage's `ranks`, all of which must call this.
    """
    return grouped(
        kind
        for number, layer in held_layers(model, adapter)
        if (kind := kind_of(number, layer, gather, ranks)) is not None
    )


def kind_of(number: int, layer: nn.Module, gather: Gather, ranks: int) -> AttentionKind | None:
    """Return the kind of one layer; None if it has no attention of any kind."""
    modules = [module for module in layer.modules() if isinstance(module, AttentionLayerBase)]
    if not modules:
        return None
    (module, *rest) = modules
    why = f"it has {len(modules)} attention modules" if rest else _unknown(module)
    if why:
        return AttentionKind(layers=[number], refused=why)
    impl: Any = module.impl

    def values(given: Any) -> list[float]:
        """Return the values of all ranks. `given`: this rank's, `[heads]`, or None."""
        if given is None:
            return []
        local = torch.as_tensor(given, dtype=torch.float32, device=next(layer.parameters()).device)
        return [float(value) for value in gather(local.detach().flatten().contiguous())]

    return AttentionKind(
        layers=[number],
        heads=module.num_heads * ranks,
        head_dim=module.head_size,
        scale=float(impl.scale),
        window=module.sliding_window or 0,
        chunk=module.attention_chunk_size if isinstance(module, ChunkedLocalAttention) else 0,
        softcap=float(impl.logits_soft_cap or 0),
        sinks=values(impl.sinks),
        slopes=values(impl.alibi_slopes),
        text_only=bool(module.use_mm_prefix),
    )


def _unknown(module: Any) -> str:
    """Return why `AttentionKind` cannot describe this module; empty if it can."""
    if type(module) not in _MODULES:
        return f"attention module {type(module).__name__} is not known"
    impl = module.impl
    if type(impl).__name__ not in _IMPLEMENTATIONS:
        return f"attention backend {type(impl).__name__} is not known"
    if lacking := [
        name
        for name in ("scale", "logits_soft_cap", "alibi_slopes", "sinks")
        if not hasattr(impl, name)
    ]:
        return f"attention backend {type(impl).__name__} has no {', '.join(lacking)}"
    if module.attn_type != AttentionType.DECODER:
        return f"its attention is of type {module.attn_type}; patterns need decoder attention"
    if module.kv_sharing_target_layer_name:
        return f"it attends to the keys of {module.kv_sharing_target_layer_name}"
    if module.kv_cache_torch_dtype != module.dtype:
        return f"the KV cache holds its keys as {module.kv_cache_dtype}, not as they are computed"
    if module.use_alibi_sqrt:
        return "its ALiBi takes square roots of distances"
    if impl.alibi_slopes is not None and impl.logits_soft_cap:
        return "ALiBi together with a softcap is not known"
    if getattr(impl, "chunk_lookback", -1) > -1:
        return "its chunks look back"
    return ""
