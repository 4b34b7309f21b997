"""Attention patterns from queries and keys equal transformers' eager attentions, and what cannot be
computed is refused.
"""

import importlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from refusal_kit import refuses

from midstream.client.captures import attention
from midstream.client.captures.attention import attention_at, pattern, usable
from midstream.schemas.model.attention import AttentionKind
from midstream.schemas.model.layer_kinds import grouped, of_layers

TOKENS = 24
WINDOW = 7
HEAD = 8
#: Of float32 arithmetic on both sides.
TOLERANCE = 1e-5
_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "initializer_range": 0.5,
}
_LAYERS = [0, 1, 2, 3]
_TURNS = ["sliding_attention", "full_attention"] * 2


def kind(layers: list[int] = _LAYERS, **facts: Any) -> AttentionKind:
    return AttentionKind(
        **({"layers": layers, "heads": 4, "head_dim": HEAD, "scale": HEAD**-0.5} | facts)
    )


#: Name → (transformers' class, its config's own options, the kinds of its layers without sinks).
MODELS: dict[str, tuple[str, dict[str, Any], list[AttentionKind]]] = {
    "llama": ("Llama", _SHAPE, [kind()]),
    "qwen3": ("Qwen3", _SHAPE, [kind()]),
    "mistral": ("Mistral", _SHAPE | {"sliding_window": WINDOW}, [kind(window=WINDOW)]),
    "gemma2": (
        "Gemma2",
        _SHAPE
        | {"query_pre_attn_scalar": 3, "attn_logit_softcapping": 2.0, "sliding_window": WINDOW},
        [
            kind([0, 2], scale=3**-0.5, softcap=2.0, window=WINDOW),
            kind([1, 3], scale=3**-0.5, softcap=2.0),
        ],
    ),
    "gemma3": (
        "Gemma3",
        _SHAPE | {"query_pre_attn_scalar": 3, "sliding_window": WINDOW, "layer_types": _TURNS},
        [kind([0, 2], scale=3**-0.5, window=WINDOW), kind([1, 3], scale=3**-0.5)],
    ),
    "gpt_oss": (
        "GptOss",
        _SHAPE
        | {
            "sliding_window": WINDOW,
            "layer_types": _TURNS,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        [kind([0, 2], window=WINDOW), kind([1, 3])],
    ),
    "llama4": (
        "Llama4",
        _SHAPE
        | {
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 1,
        }
        | {"layer_types": ["chunked_attention", "full_attention"] * 2},
        [kind([0, 2], chunk=WINDOW), kind([1, 3])],
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "initializer_range": 0.5},
        [kind()],
    ),
}


def _reference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[np.ndarray], Any]:
    """Of each layer its (queries, keys) as rows, and its attentions `[heads, query, key]`, all as
    transformers has them; the model.
    """
    family, options, _ = MODELS[name]
    modelling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    eager = modelling.eager_attention_forward
    taken = []

    def recorded(
        module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        taken.append([part[0].transpose(0, 1).flatten(1).numpy() for part in (query, key)])
        return eager(module, query, key, *rest, **more)

    monkeypatch.setattr(modelling, "eager_attention_forward", recorded)
    text = "Text" if family in ("Gemma3", "Llama4") else ""
    config = getattr(transformers, f"{family}{text}Config")(**options)
    causal = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(3)
    config._attn_implementation = "eager"
    model = getattr(transformers, causal)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # some initialise with zeros
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.5)
        found = model(torch.randint(0, 64, (1, TOKENS)), output_attentions=True).attentions
    return taken, [each[0].numpy() for each in found], model


@pytest.mark.parametrize("name", MODELS)
def test_patterns_equal_transformers_eager_attentions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, expected, model = _reference(name, monkeypatch)
    kinds = MODELS[name][2]
    heads = len(expected[0])
    assert len(rows) == len(expected) == 4
    for layer, ((queries, keys), pattern_of_layer) in enumerate(zip(rows, expected, strict=True)):
        facts = attention_at(kinds, layer)
        if name == "gpt_oss":
            facts = msgspec.structs.replace(
                facts, sinks=model.model.layers[layer].self_attn.sinks.tolist()
            )
        found = pattern(queries, keys, facts, range(TOKENS))
        assert found.dtype == np.float32
        assert found.shape == (heads, TOKENS, TOKENS)
        assert np.abs(found - pattern_of_layer).max() <= TOLERANCE, layer
        assert np.ptp(pattern_of_layer[:, -1]) > 0.05, "a pattern that shows something"


def test_alibi_patterns_equal_transformers_bloom() -> None:
    torch.manual_seed(5)
    config = transformers.BloomConfig(
        vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.5
    )
    config._attn_implementation = "eager"
    model = transformers.BloomForCausalLM(config).eval()
    fused: list[np.ndarray] = []
    for block in model.transformer.h:
        block.self_attention.query_key_value.register_forward_hook(
            lambda *call: fused.append(call[2][0].detach().numpy())
        )
    with torch.no_grad():
        expected = model(torch.randint(0, 64, (1, TOKENS)), output_attentions=True).attentions
    facts = kind([0, 1], slopes=[2.0 ** -(2 * head + 2) for head in range(4)])
    for rows, attentions in zip(fused, expected, strict=True):
        by_head = rows.reshape(TOKENS, 4, 3, HEAD)
        found = pattern(
            by_head[:, :, 0].reshape(TOKENS, -1),
            by_head[:, :, 1].reshape(TOKENS, -1),
            facts,
            range(TOKENS),
        )
        assert np.abs(found - attentions[0].numpy()).max() <= TOLERANCE


def _rows(count: int, heads: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, heads * HEAD)).astype(np.float32)


def test_rows_sum_to_one_but_for_the_sink_and_are_slices_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries = _rows(TOKENS)
    keys = _rows(TOKENS, 2, 1)
    np.testing.assert_allclose(pattern(queries, keys, kind(), range(TOKENS)).sum(-1), 1, atol=1e-6)
    with_sinks = pattern(queries, keys, kind(sinks=[0.0, 1.0, 50.0, -50.0]), range(TOKENS)).sum(-1)
    assert (with_sinks[1] < 1).all()
    assert (with_sinks[2] < 1e-15).all()
    np.testing.assert_allclose(with_sinks[3], 1, atol=1e-6)
    queries = _rows(TOKENS)
    keys = _rows(TOKENS, 2, 1)
    facts = kind(window=WINDOW, sinks=[0.5, -1.0, 2.0, 0.0])
    whole = pattern(queries, keys, facts, range(TOKENS))
    monkeypatch.setattr(attention, "_BLOCK_BYTES", 8 * TOKENS * 3)  # three queries at a time
    for heads, chosen in (
        (None, [0, 1, 2, 3]),
        (2, [2]),
        (-1, [3]),
        ("1-2", [1, 2]),
        ([3, 0], [0, 3]),
    ):
        found = pattern(queries, keys, facts, range(TOKENS), heads=heads, rows=[TOKENS - 1, 4])
        np.testing.assert_array_equal(found, whole[chosen][:, [TOKENS - 1, 4]])


def test_a_query_whose_keys_are_not_all_there_is_refused_by_name() -> None:
    positions = [*range(4), *range(10, 20)]
    queries = _rows(14)
    keys = _rows(14, 2, 1)
    with refuses(
        "the query of position 10 sees keys 0-10, of which 4-9 were not captured",
        kind="not_found",
        field="positions",
    ):
        pattern(queries, keys, kind(), positions)
    with refuses("position 10 sees keys 7-10, of which 7-9"):
        pattern(queries, keys, kind(window=4), positions)
    # keys 0-3 are there
    assert pattern(queries, keys, kind(), positions, rows=[0, 3]).shape == (4, 2, 14)
    # the window of 13 begins at 10
    shorter = pattern(queries[4:], keys[4:], kind(window=4), positions[4:], rows=[13, 19])
    assert shorter.shape == (4, 2, 10)
    in_chunks = pattern(queries[4:], keys[4:], kind(chunk=5), positions[4:])
    assert np.count_nonzero(in_chunks[0], axis=1).tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]


def test_what_is_not_known_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = _rows(TOKENS)
    keys = _rows(TOKENS, 2, 1)
    with refuses("head 4 is out of range", field="head", allowed="0 to 3"):
        pattern(queries, keys, kind(), range(TOKENS), heads=[4])
    given: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("not queries and keys of 4 heads of width 8", queries[:, :-1], keys, {}),
        ("not queries and keys of 4 heads", queries, _rows(TOKENS, 3), {}),
        ("positions 99 were not captured", queries, keys, {"rows": [99]}),
    ]
    for words, some, others, more in given:
        with refuses(words):
            pattern(some, others, kind(), range(TOKENS), **more)
    monkeypatch.setattr(attention, "MAX_BYTES", 1000)
    with refuses("4 heads × 24 queries × 24 keys"):
        pattern(queries, keys, kind(), range(TOKENS))
    for kinds, why in (
        ([], "does not record how layer 2 attends"),
        ([kind([0, 1])], "does not record how"),
        ([kind([2]), kind([2, 3], window=3)], "ranks disagree on how layer 2"),
        ([kind([2], version=99)], "a newer version"),
        (
            [AttentionKind(layers=[2], refused="attention module MLAAttention is not known")],
            "no attention pattern: attention module MLAAttention",
        ),
    ):
        with refuses(match=why):
            usable(attention_at(kinds, 2), 2)


def test_layers_of_a_kind_are_joined_and_cut() -> None:
    kinds = grouped([kind([2]), kind([1], window=3), kind([0]), kind([0]), kind([3], window=3)])
    assert [(each.layers, each.window) for each in kinds] == [([0, 2], 0), ([1, 3], 3)]
    assert [each.layers for each in of_layers(kinds, {0, 2})] == [[0, 2]]
    assert [each.layers for each in of_layers(kinds, {2, 3})] == [[2], [3]]
