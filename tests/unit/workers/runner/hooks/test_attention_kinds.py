"""How a layer attends is read from vLLM's modules; what is not known is refused by name, never
guessed.
"""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.v1.attention.backend import AttentionType

from midstream.workers.runner.hooks.attention_kinds import kind_of

_IMPL: dict[str, Any] = {"scale": 0.25, "logits_soft_cap": 0, "alibi_slopes": None, "sinks": None}
_MODULE: dict[str, Any] = {
    "num_heads": 2,
    "head_size": 16,
    "num_kv_heads": 1,
    "sliding_window": None,
    "attn_type": AttentionType.DECODER,
    "kv_sharing_target_layer_name": None,
    "kv_cache_torch_dtype": torch.float32,
    "kv_cache_dtype": "auto",
    "dtype": torch.float32,
    "use_alibi_sqrt": False,
    "use_mm_prefix": False,
}


def layer(
    kind: type = Attention,
    backend: str = "CPUAttentionBackendImpl",
    impl: dict[str, Any] | None = None,
    **facts: Any,
) -> nn.Module:
    """A decoder layer around one attention module that says so of itself."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in (_MODULE | facts).items():
        setattr(module, name, value)
    made = type(backend, (), {})()
    for name, value in (_IMPL | (impl or {})).items():
        setattr(made, name, value)
    module.impl = made
    return nn.Sequential(nn.Linear(2, 2), module)


def read(found: nn.Module, ranks: int = 1) -> Any:
    """As one of `ranks` whose others have the same values and one more each."""
    return kind_of(3, found, lambda own: torch.cat([own + rank for rank in range(ranks)]), ranks)


def test_facts_are_those_of_the_module_over_all_ranks() -> None:
    impl = {
        "logits_soft_cap": 5.0,
        "sinks": nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.bfloat16)),
    }
    kind = read(layer(impl=impl, sliding_window=7, use_mm_prefix=True), ranks=2)
    assert (kind.layers, kind.heads, kind.head_dim, kind.scale, kind.window, kind.softcap) == (
        [3],
        4,
        16,
        0.25,
        7,
        5.0,
    )
    assert (kind.sinks, kind.slopes, kind.text_only, kind.refused) == (
        [0.5, -1.0, 1.5, 0.0],
        [],
        True,
        "",
    )
    assert read(layer(ChunkedLocalAttention, attention_chunk_size=32)).chunk == 32
    assert read(layer(impl={"alibi_slopes": torch.tensor([0.5, 0.25])})).slopes == [0.5, 0.25]
    assert read(layer(impl={"logits_soft_cap": None})).softcap == 0


class Sharper(Attention):
    """Does something that nothing is known of."""


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: layer(Sharper), "attention module Sharper is not known"),
        (lambda: layer(backend="NewImpl"), "attention backend NewImpl is not known"),
        (lambda: layer(attn_type=AttentionType.ENCODER_ONLY), "patterns need decoder attention"),
        (
            lambda: layer(kv_sharing_target_layer_name="model.layers.1.attn"),
            "attends to the keys of model.layers.1.attn",
        ),
        (
            lambda: layer(kv_cache_torch_dtype=torch.uint8, kv_cache_dtype="fp8"),
            "the KV cache holds its keys as fp8",
        ),
        (lambda: layer(use_alibi_sqrt=True), "square roots of distances"),
        (
            lambda: layer(impl={"alibi_slopes": [1.0], "logits_soft_cap": 2.0}),
            "ALiBi together with a softcap",
        ),
        (lambda: layer(impl={"chunk_lookback": 1}), "its chunks look back"),
        (lambda: nn.Sequential(layer(), layer()), "2 attention modules"),
    ],
)
def test_what_is_not_known_is_refused_by_name(made: Any, words: str) -> None:
    kind = read(made())
    assert words in kind.refused
    assert (kind.layers, kind.heads) == ([3], 0)


def test_a_backend_that_does_not_say_all_is_refused() -> None:
    found = layer()
    del found[1].impl.sinks
    assert read(found).refused == "attention backend CPUAttentionBackendImpl has no sinks"
    assert read(nn.Linear(2, 2)) is None
