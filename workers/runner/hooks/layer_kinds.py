"""Attention and routing kinds of the loaded layers: read from vLLM's attention modules, or found by
running vLLM's routers. Unknown ones are refused, never guessed.
"""

import itertools
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np
import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.attention.backend import AttentionType

from ....schemas.model.attention import AttentionKind
from ....schemas.model.layer_kinds import grouped
from ....schemas.model.routing import RoutingKind, Scoring, routed
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
#: Rows of random logits for which a rule must choose the router's experts, and give its weights to
#: this relative error.
_ROWS = 64
_NEAR = 1e-4


def attention_kinds(
    model: nn.Module, adapter: Adapter, gather: Gather, ranks: int
) -> list[AttentionKind]:
    """Return the attention kinds of the layers on this rank's stage that have attention.

    The result is the same on each of the stage's `ranks`, all of which must call this.
    """
    return grouped(
        kind
        for number, layer in held_layers(model, adapter)
        if (kind := attention_of(number, layer, gather, ranks)) is not None
    )


def attention_of(number: int, layer: nn.Module, gather: Gather, ranks: int) -> AttentionKind | None:
    """Return the kind of one layer; None if it has no attention of any kind."""
    modules = [module for module in layer.modules() if isinstance(module, AttentionLayerBase)]
    if not modules:
        return None
    (module, *rest) = modules
    why = f"it has {len(modules)} attention modules" if rest else _unknown(module)
    if why:
        return AttentionKind(layers=[number], refused=why)
    # Read from vLLM's modules, not from the config: families name these values differently, and
    # vLLM may read them in its own way. The modules hold what the kernel gets.
    impl: Any = module.impl

    def values(given: Any) -> list[float]:
        """Return the values of all ranks. `given`: this rank's, `[heads]`, or None."""
        if given is None:
            return []
        local = torch.as_tensor(given, dtype=torch.float32, device=next(layer.parameters()).device)
        # Gathered when the model is loaded, so that every rank's manifest holds all heads.
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
    # What a subclass or another backend adds to a score cannot be seen from outside.
    if type(module) not in _MODULES:
        return f"attention module {type(module).__name__} is not known"
    impl = module.impl
    if type(impl).__name__ not in _IMPLEMENTATIONS:
        return f"attention backend {type(impl).__name__} is not known"
    needed = ("scale", "logits_soft_cap", "alibi_slopes", "sinks")
    lacking = [name for name in needed if not hasattr(impl, name)]
    if lacking:
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
    return "its chunks look back" if getattr(impl, "chunk_lookback", -1) > -1 else ""


def routing_kinds(model: nn.Module, adapter: Adapter) -> list[RoutingKind]:
    """Return the routing kinds of the layers on this rank's stage that choose experts.

    Called after the weights have been read.
    """
    return grouped(
        kind
        for number, layer in held_layers(model, adapter)
        if (kind := routing_of(number, layer)) is not None
    )


def choosers(layer: nn.Module) -> list[Any]:
    """Return the modules of a layer that choose experts."""
    return [
        module
        for module in layer.modules()
        if hasattr(module, "router") and hasattr(module, "routed_experts")
    ]


def routing_of(number: int, layer: nn.Module) -> RoutingKind | None:
    """Return the routing kind of one layer; None if it does not choose experts."""
    if not (runners := choosers(layer)):
        return None
    router = runners[0].router
    if len(runners) > 1:
        return RoutingKind(layers=[number], refused=f"{len(runners)} modules choose experts")
    if not isinstance(router, BaseRouter):
        return RoutingKind(
            layers=[number],
            refused=f"{type(router).__name__} is not a router that can be run on its own",
        )
    try:
        kind = rule_of(router, next(layer.parameters()).device)
    except Exception as error:
        # a vLLM router may raise any exception when it runs without its layer
        return RoutingKind(
            layers=[number], refused=f"{type(router).__name__} cannot be run on its own: {error}"
        )
    if kind is None:
        return RoutingKind(
            layers=[number],
            refused=f"no known rule reproduces the choices of {type(router).__name__}",
        )
    after = float(getattr(runners[0], "routed_scaling_factor", 1.0))
    return msgspec.structs.replace(kind, layers=[number], scale=kind.scale * after)


def rule_of(router: Any, device: torch.device) -> RoutingKind | None:
    """Return the rule that reproduces the router's choices and weights on random logits; None if
    there is none.
    """
    experts = int(router.global_num_experts)
    top = int(router.top_k)
    logits = 2 * torch.randn(_ROWS, experts, generator=torch.Generator().manual_seed(experts))
    routed_rows = router._compute_routing(
        torch.zeros(_ROWS, 1, device=device), logits.to(device), None
    )
    weights, chosen = (np.asarray(item.detach().float().cpu()) for item in routed_rows[:2])
    bias = getattr(router, "e_score_correction_bias", None)
    groups = (
        (int(router.num_expert_group or 1), int(router.topk_group or 1))
        if getattr(router, "num_expert_group", None) is not None
        and getattr(router, "use_grouped_topk", True)
        else (1, 1)
    )
    biases = [] if bias is None else [float(value) for value in bias.detach().float().cpu()]
    for scoring, normalised in itertools.product(get_args(Scoring), (True, False)):
        rule = RoutingKind(
            layers=[],
            experts=experts,
            top=top,
            scoring=scoring,
            normalised=normalised,
            groups=groups[0],
            kept=groups[1],
            bias=biases,
        )
        if (scale := _scale(rule, logits.numpy(), chosen, weights)) is not None:
            return msgspec.structs.replace(rule, scale=scale)
    return None


def _scale(
    rule: RoutingKind, logits: np.ndarray, chosen: np.ndarray, weights: np.ndarray
) -> float | None:
    """Return the factor between the rule's weights and the router's; None if the rule chooses other
    experts, or no single factor fits.
    """
    expert_ids, expert_weights = routed(logits, rule)
    dense, by_rule = np.zeros((2, *logits.shape))
    np.put_along_axis(dense, chosen.astype(np.int64), weights, axis=1)
    np.put_along_axis(by_rule, expert_ids, expert_weights, axis=1)
    scale = float(dense.sum() / by_rule.sum())
    nearest = round(scale, 3)
    scale = nearest if abs(scale - nearest) <= _NEAR * abs(nearest) else scale
    return (
        scale
        if np.array_equal(dense != 0, by_rule != 0)
        and np.allclose(dense, scale * by_rule, rtol=_NEAR, atol=1e-7)
        else None
    )
