"""Which layers of a checkpoint does transformers compute for the certificate, in how much memory,
and where does it not?
"""

from pathlib import Path
from typing import Any

import configs
import pytest
import torch
import transformers
from tiny import checkpoint

from midstream.workers.engine.proof.reference import (
    MOST_LAYERS,
    Checkpoint,
    NotComparableError,
    TransformersReference,
    kinds_of,
    truncation,
)


def kept(kinds: str, limit: int = 10**9) -> int:
    return truncation(list(kinds), [100] * len(kinds), 50, limit).layers


@pytest.mark.parametrize(
    ("kinds", "layers"),
    [
        ("aaaa", 1),
        ("abab", 2),
        ("daaa", 2),
        ("aaabaaab", 4),
        ("aaaaaf", 6),
        ("abc", 3),
        ("a" * 30 + "b", MOST_LAYERS),
    ],
)
def test_layers_up_to_the_first_that_completes_all_kinds_are_kept(kinds: str, layers: int) -> None:
    assert kept(kinds) == layers


def test_fewer_layers_are_kept_where_memory_is_short() -> None:
    found = truncation(list("aaab"), [100] * 4, 50, 250)
    assert found.layers == 1
    assert found.kinds == 2
    assert found.missing == 1
    with pytest.raises(NotComparableError, match="compare_memory_gib"):
        truncation(list("ab"), [100] * 2, 50, 100)


#: transformers' class, fields beside those of a tiny config → of twelve layers, those that are
#: kept, and how many kinds there are.
FAMILIES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "dense": ("LlamaForCausalLM", {}, 1, 1),
    "every layer scaled by its number": (
        "GPT2LMHeadModel",
        {"scale_attn_by_inverse_layer_idx": True},
        12,
        12,
    ),
    "sliding, then full": (
        "Gemma3ForCausalLM",
        {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2},
        6,
        2,
    ),
    "windows above a layer": (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 7,
            "layer_types": None,
        },
        8,
        2,
    ),
    "some without positions": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 1, 1, 0] * 3, "layer_types": None},
        4,
        2,
    ),
    "dense, then experts": ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 3}, 4, 2),
    "experts in every second": ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, 2, 2),
    "dense among experts": ("Qwen3MoeForCausalLM", {"mlp_only_layers": [9]}, 10, 2),
    "recurrent, then attention": (
        "Qwen3NextForCausalLM",
        {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3},
        4,
        2,
    ),
    "Mamba, then attention": (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 6},
        6,
        2,
    ),
    "one branch each": (
        "NemotronHForCausalLM",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"] * 4},
        3,
        3,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_kind_of_layer_of_a_family_is_kept(name: str) -> None:
    architecture, fields, layers, kinds = FAMILIES[name]
    many = {("n_layer" if architecture.startswith("GPT2") else "num_hidden_layers"): 12}
    config = configs.tiny_config(architecture, **many, **fields)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    stack = next(
        part for path, part in model.named_modules() if path.rpartition(".")[2] in ("layers", "h")
    )
    found = kinds_of(stack, config.get_text_config())
    assert len(set(found)) == kinds
    assert max(found.index(kind) for kind in set(found)) + 1 == layers


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("llama"))


def reference(path: Path, limit_gib: float = 1.0, **overrides: Any) -> TransformersReference:
    return TransformersReference(
        Checkpoint(
            path=str(path),
            architecture="LlamaForCausalLM",
            overrides=overrides,
            limit_gib=limit_gib,
        )
    )


def test_rows_of_the_first_layers_are_those_of_the_whole_model(llama: Path) -> None:
    whole = transformers.LlamaForCausalLM.from_pretrained(llama, attn_implementation="eager")
    tokens = list(range(5, 25))
    positions = [1, 7, 19]
    with torch.no_grad():
        made = whole(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        last = whole.model.layers[-1].register_forward_hook(
            lambda _module, _inputs, output: states.append(output)
        )
        states: list[torch.Tensor] = []
        whole(torch.tensor([tokens]), use_cache=False)
        last.remove()
    own = reference(llama)
    own.load()
    assert len(own._model.model.layers) == own.truncation.layers == 1
    (rows,) = own.trace(tokens, positions)
    for name, place in (("input", 0), ("output", 1)):
        assert torch.allclose(
            rows[name], made.hidden_states[place][0, positions], rtol=1e-6, atol=1e-6
        )
    assert torch.allclose(
        own.logits(states[0][0, positions]), made.logits[0, positions], rtol=1e-5, atol=1e-5
    )
    assert {"self_attn.output", "mlp.input", "post_attention_layernorm.input"} <= rows.keys()
    own.round(torch.bfloat16)
    (rounded,) = own.trace(tokens, positions)
    assert 1e-4 < float((rounded["output"] - rows["output"]).norm() / rows["output"].norm()) < 0.05


def test_what_transformers_cannot_compute_is_refused_with_the_reason(
    llama: Path, tmp_path: Path
) -> None:
    deeper = reference(llama, tie_word_embeddings=False, attention_bias=True)
    for why, computed in (
        ("compare_memory_gib", lambda: reference(llama, 1e-6)),
        ("transformers fails on its config", lambda: reference(tmp_path)),
        ("quantised", lambda: reference(llama, quantization_config={"quant_method": "fp8"})),
        (r"weights that the checkpoint does not: .*bias", deeper.load),
    ):
        with pytest.raises(NotComparableError, match=why):
            computed()
