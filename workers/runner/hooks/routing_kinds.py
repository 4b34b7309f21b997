"""Routing kinds of the loaded layers, found by running vLLM's router; a router that no rule
reproduces is refused.
"""

import itertools
from typing import Any, get_args

import msgspec
import numpy as np
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from ....schemas.model.layer_kinds import grouped
from ....schemas.model.routing import RoutingKind, Scoring, routed
from .architectures import Adapter
from .sites import held_layers

#: Rows of random logits for which a rule must choose the router's experts, and give its weights to
#: this relative error.
_ROWS = 64
_NEAR = 1e-4


def routing_kinds(model: nn.Module, adapter: Adapter) -> list[RoutingKind]:
    """Return the routing kinds of the layers on this rank's stage that choose experts.

    Called after the weights have been read.
    """
    return grouped(
        kind
        for number, layer in held_layers(model, adapter)
        if (kind := kind_of(number, layer)) is not None
    )


def choosers(layer: nn.Module) -> list[Any]:
    """Return the modules of a layer that choose experts."""
    return [
        module
        for module in layer.modules()
        if hasattr(module, "router") and hasattr(module, "routed_experts")
    ]


def kind_of(number: int, layer: nn.Module) -> RoutingKind | None:
    """Return the routing kind of one layer; None if it does not choose experts."""
    runners = choosers(layer)
    if not runners:
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
    experts, top = int(router.global_num_experts), int(router.top_k)
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
