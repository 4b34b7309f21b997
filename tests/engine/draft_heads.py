"""Tiny targets whose text repeats, and drafters for them that propose the last token again: some
drafts are accepted, some are not.

A random model never accepts the drafts of a random head. These targets have tied embeddings and
faint layers, so that a token mostly follows itself, until the layers decide otherwise; an edit
decides so too.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import _GROUPED, CHECKPOINTS, HIDDEN, LAYERS, VOCABULARY, Checkpoint
from transformers import LlamaConfig

#: How faint: at 0 a token follows itself for ever, at 1 hardly ever.
FAINT = 0.17
#: What the head sees of the target: the stream before layer 1, before layer 3, and behind the last
#: layer.
AUX_LAYERS = [1, 3, LAYERS]
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
_ECHO = Checkpoint(
    "LlamaForCausalLM", "LlamaConfig", _GROUPED | {"head_dim": 32, "tie_word_embeddings": True}
)


def echo_target(path: Path) -> Path:
    """A Llama."""
    if not (path / "config.json").exists():
        _ECHO.make(path)
        _make_faint(path)
    return path


def mimo(path: Path) -> Path:
    """MiMo, a Qwen 2 with a layer that predicts one token more.

    transformers reads it as the Qwen 2 that it is.
    """
    if (path / "config.json").exists():
        return path
    made = CHECKPOINTS["qwen2"]
    Checkpoint(
        "Qwen2ForCausalLM", "Qwen2Config", made.options | {"tie_word_embeddings": True}
    ).make(path)
    _make_faint(path)
    file = path / "model.safetensors"
    weights = load_file(file)
    heads, kv_heads = (
        made.options[name] * 32 for name in ("num_attention_heads", "num_key_value_heads")
    )
    noise = _Noise()
    input_proj = noise(HIDDEN, 2 * HIDDEN, size=0.002)
    input_proj[:, :HIDDEN] += torch.eye(HIDDEN)
    layer = {
        "token_layernorm.weight": torch.ones(HIDDEN),
        "hidden_layernorm.weight": torch.ones(HIDDEN),
        "input_proj.weight": input_proj,
        "final_layernorm.weight": weights["model.norm.weight"].clone(),
        **_layer(noise, HIDDEN, heads, kv_heads),
        **{
            f"self_attn.{name}_proj.bias": noise(size)
            for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        },
    }
    weights |= {f"model.mtp_layers.0.{name}": weight for name, weight in layer.items()}
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def glm4_moe(path: Path) -> Path:
    """GLM-4 MoE, with experts."""
    heads = {"head_dim": 32, "partial_rotary_factor": 0.5}
    return _with_next_layer(
        Checkpoint("Glm4MoeForCausalLM", "Glm4MoeConfig", _GROUPED | _EXPERTS | heads), path
    )


def _with_next_layer(made: Checkpoint, path: Path) -> Path:
    """The checkpoint with a layer more, which transformers does not read, and which proposes the
    last token again.
    """
    if (path / "config.json").exists():
        return path
    made.make(path)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    _make_faint(path)
    weights = load_file(file)
    noise = _Noise()
    last = f"model.layers.{LAYERS - 1}."
    after = f"model.layers.{LAYERS}."
    copied = {
        name.replace(last, after): weight
        for name, weight in weights.items()
        if name.startswith(last)
    }
    weights |= {
        name: weight * (0.05 if "o_proj" in name or "down_proj" in name else 1)
        for name, weight in copied.items()
    }
    weights |= {
        f"{after}{name}.weight": torch.ones(HIDDEN)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    weights[f"{after}eh_proj.weight"] = noise(HIDDEN, 2 * HIDDEN, size=0.002)
    weights[f"{after}eh_proj.weight"][:, HIDDEN:] += torch.eye(HIDDEN)
    for name, source in (("shared_head.head", "lm_head"), ("embed_tokens", "model.embed_tokens")):
        weights[f"{after}{name}.weight"] = weights[f"{source}.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    return path


class _Noise:
    """Weights that hardly matter."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)

    def __call__(self, *shape: int, size: float = 0.02) -> torch.Tensor:
        return size * torch.randn(*shape, generator=self._generator)


def _layer(noise: _Noise, width: int, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Weights of a Llama's decoder layer whose attention reads rows of `width`."""
    return {
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
        "self_attn.q_proj.weight": noise(heads, width),
        "self_attn.k_proj.weight": noise(kv_heads, width),
        "self_attn.v_proj.weight": noise(kv_heads, width),
        "self_attn.o_proj.weight": noise(HIDDEN, heads),
        "mlp.gate_proj.weight": noise(160, HIDDEN),
        "mlp.up_proj.weight": noise(160, HIDDEN),
        "mlp.down_proj.weight": noise(HIDDEN, 160),
    }


def _make_faint(path: Path) -> None:
    file = path / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= FAINT
    save_file(weights, file, metadata={"format": "pt"})


def eagle3_head(path: Path, target: Path, **options: Any) -> Path:
    """An EAGLE-3 head: what leaves the target's last layer decides nearly alone, through the
    target's own output matrix.

    `options`: of its config.
    """
    if (path / "config.json").exists():
        return path
    own = load_file(target / "model.safetensors")
    path.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **(_GROUPED | {"head_dim": 32, "num_hidden_layers": 1}),
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=VOCABULARY,
        eagle_aux_hidden_state_layer_ids=AUX_LAYERS,
    )
    config.update(options)
    noise = _Noise()
    fc = noise(HIDDEN, HIDDEN * len(AUX_LAYERS), size=0.002)
    fc[:, -HIDDEN:] += torch.eye(HIDDEN)
    save_file(
        {
            "fc.weight": fc,
            "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
            **{
                f"midlayer.{name}": weight
                for name, weight in _layer(noise, 2 * HIDDEN, 4 * 32, 2 * 32).items()
            },
            "norm.weight": own["model.norm.weight"].clone(),
            "lm_head.weight": own["model.embed_tokens.weight"].clone(),
        },
        path / "model.safetensors",
    )
    config.save_pretrained(path)
    return path
