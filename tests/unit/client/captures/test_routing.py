"""The rule by which a layer chooses experts is found by running vLLM's router, and gives what
transformers' router gives.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.models.llama4 import Llama4MoE

from midstream.client.captures.attention import routing_at
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.model.routing import VERSION, RoutingKind, routed
from midstream.workers.runner.hooks.layer_kinds import routing_of

EXPERTS = 12
TOP = 3
TOKENS = 40
CONFIG = SimpleNamespace(
    hidden_size=EXPERTS,
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    num_experts_per_tok=TOP,
    routed_scaling_factor=2.5,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    topk_method="group_limited_greedy",
)
BIAS = torch.linspace(-0.4, 0.4, EXPERTS)[
    torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(3))
]


def theirs(module: Callable[[Any], Any], **options: Any) -> Any:
    """transformers' router whose logits are its input."""
    made = module(SimpleNamespace(**{**vars(CONFIG), **options}))
    made.weight.data = torch.eye(EXPERTS)
    return made


def biased() -> Any:
    made = theirs(DeepseekV3TopkRouter)
    made.e_score_correction_bias.copy_(BIAS)
    return made


def of_llama(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores, _ = theirs(Llama4Router)(logits)
    return logits, *torch.topk(scores, TOP)


#: What vLLM's model asks of its router, and transformers' router of the same model.
ROUTERS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Any]]] = {
    "olmoe": ({"renormalize": False}, theirs(OlmoeTopKRouter, norm_topk_prob=False)),
    "qwen3-moe": ({"renormalize": True}, theirs(OlmoeTopKRouter)),
    "gpt-oss": ({"renormalize": True}, theirs(GptOssTopKRouter)),
    "llama4": (
        {"renormalize": False, "custom_routing_function": Llama4MoE.custom_routing_function},
        of_llama,
    ),
    "deepseek-v2": (
        {
            "renormalize": False,
            "use_grouped_topk": True,
            "num_expert_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        theirs(DeepseekV2TopkRouter),
    ),
    "deepseek-v3": (
        {
            "renormalize": True,
            "use_grouped_topk": True,
            "num_expert_group": 4,
            "topk_group": 2,
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5,
            "e_score_correction_bias": BIAS,
        },
        biased(),
    ),
}


class Layer(nn.Module):
    """A decoder layer, as far as its experts are concerned."""

    def __init__(self, router: Any, after: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.experts = nn.Module()
        self.experts.router = router
        self.experts.routed_experts = object()
        self.experts.routed_scaling_factor = after


def dense(chosen: Any, weights: Any) -> np.ndarray:
    found = np.zeros((TOKENS, EXPERTS))
    np.put_along_axis(
        found, np.asarray(chosen, dtype=np.int64), np.asarray(weights, dtype=np.float64), axis=1
    )
    return found


@pytest.mark.parametrize("name", ROUTERS)
def test_the_rule_found_gives_what_the_router_of_transformers_gives(name: str) -> None:
    options, truth = ROUTERS[name]
    kind = routing_of(7, Layer(CPURouter(TOP, EXPERTS, **options)))
    assert kind.layers == [7]
    assert kind.refused == ""
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(11))
    _, weights, chosen = truth(logits)
    own = routed(logits.numpy(), kind)
    assert own[0].shape == own[1].shape == (TOKENS, TOP)
    assert (np.diff(own[1], axis=1) <= 0).all()
    assert np.abs(dense(*own) - dense(chosen, weights.detach())).max() <= 1e-6


def test_what_the_layer_multiplies_the_sum_with_is_part_of_the_weights() -> None:
    kind = routing_of(0, Layer(CPURouter(TOP, EXPERTS, renormalize=True), after=2.5))
    assert kind.scale == 2.5
    assert routed(np.zeros((1, EXPERTS)), kind)[1].sum() == pytest.approx(2.5)


def test_a_router_that_no_rule_reproduces_is_refused_with_its_class() -> None:
    class Odd(CPURouter):
        def _compute_routing(self, *arguments: Any, **options: Any) -> Any:
            weights, chosen = super()._compute_routing(*arguments, **options)
            return weights.square(), chosen

    class Broken(CPURouter):
        def _compute_routing(self, *arguments: Any, **options: Any) -> Any:
            raise ValueError("it reads token ids")

    assert "the choices of Odd" in refused(Odd(TOP, EXPERTS))
    assert "it reads token ids" in refused(Broken(TOP, EXPERTS))
    assert "object is not a router" in refused(object())
    assert "2 modules choose experts" in refused(CPURouter(TOP, EXPERTS), twice=True)


def refused(router: Any, *, twice: bool = False) -> str:
    layer: nn.Module = Layer(router)
    if twice:
        layer.others = Layer(router).experts
    kind = routing_of(0, layer)
    assert kind is not None
    with pytest.raises(MidstreamError) as error:
        routing_at([kind], 0)
    return error.value.detail


def test_a_layer_without_experts_has_no_rule() -> None:
    assert routing_of(0, nn.Linear(2, 2)) is None
    with pytest.raises(MidstreamError, match="does not record how layer 3 chooses experts"):
        routing_at([RoutingKind(layers=[1])], 3)
    with pytest.raises(MidstreamError, match="newer version"):
        routing_at([RoutingKind(layers=[1], version=VERSION + 1)], 1)
