"""Tiny configs of any class of transformers: its own config class, with the sizes that `SIZES` says
for each field it has.

What no rule by field name says is an entry of `OWN`.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from tiny import HIDDEN, INITIALIZER, LAYERS, VOCABULARY, WINDOW, write
from transformers import PretrainedConfig

#: Field of a text config → its value, where the config has the field and it is not null.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": HIDDEN,
    "n_embd": HIDDEN,
    "d_model": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "decoder_layers": LAYERS,
    "intermediate_size": 160,
    "ffn_dim": 160,
    "ffn_hidden_size": 160,
    "decoder_ffn_dim": 160,
    "dense_intermediate_size": 160,
    "intermediate_size_mlp": 160,
    "prefix_dense_intermediate_size": 160,
    "moe_intermediate_size": 96,
    "expert_ffn_hidden_size": 96,
    "shared_expert_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "shared_intermediate_size": 96,
    "share_expert_dim": 96,
    "head_dim": 32,
    "swa_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 4096,
    "n_positions": 4096,
    "max_seq_len": 4096,
    "model_max_length": 4096,
    "initializer_range": INITIALIZER,
    "init_std": INITIALIZER,
    # Experts.
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "zero_expert_num": 2,
    # Latent attention.
    "q_lora_rank": 48,
    "kv_lora_rank": 512,  # with the rotated part of 64, the only size of vLLM's CPU kernel
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 96,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 64,
    # Linear attention and state spaces.
    "linear_key_head_dim": 128,  # the only size of vLLM's CPU kernel
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 32,
    "linear_num_heads": 2,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_headdim": 32,
    "n_mamba_heads": 4,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "mamba_chunk_size": 16,
    "mamba_dt_rank": 8,
    "chunk_size": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "state_size": 16,
    "time_step_rank": 8,
    # Windows: shorter than the prompts.
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_chunk_size": 2 * WINDOW,  # a multiple of the block size
    # Numbers that a fresh config has at one, where leaving them out would not be seen.
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.3,
    "lm_head_multiplier": 0.8,
    "mlp_multipliers": [0.9, 1.2],
    "key_multiplier": 0.8,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 1.1,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.1],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "routed_scaling_factor": 1.5,
    "query_pre_attn_scalar": 32,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 5.0,
    # Gemma 3n and 4.
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 0,
    "global_head_dim": 32,
    "laurel_rank": 16,
    "eos_token_id": 1,
}
#: Null in a fresh config, and set in every released one; other nulls mean something.
FILLED = frozenset(
    {
        "head_dim",
        "num_key_value_heads",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
    }
)
#: Parts of the names of parameters that are made smaller: attention without a scale, or a sharp
#: one, multiplies every rounding.
TAMED: Mapping[str, Mapping[str, float]] = {
    "Glm4MoeLiteForCausalLM": {"q_b_proj": 0.3},
    "Gemma4ForCausalLM": {"q_norm": 0.3},
    "Gemma4ForConditionalGeneration": {"q_norm": 0.3},
    "Gemma4UnifiedForCausalLM": {"q_norm": 0.3},
}
#: Fields of the encoder of images or sound.
ENCODER: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "d_model": HIDDEN,
    "embed_dim": HIDDEN,
    "width": HIDDEN,
    "intermediate_size": 96,
    "encoder_ffn_dim": 96,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "layers": 2,
    "num_attention_heads": 2,
    "encoder_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 32,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": HIDDEN,
    "out_hidden_size": HIDDEN,
    "vision_output_dim": HIDDEN,
    "projector_input_dim": HIDDEN,
    "projector_output_dim": HIDDEN,
    "output_dim": HIDDEN,
    "num_key_value_heads": 2,
    "initializer_range": INITIALIZER,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "vocab_size": VOCABULARY,
    "model_args": None,
}


def rope(sections: list[int], share: float = 1.0, **more: Any) -> dict[str, Any]:
    """Rotary positions of three kinds, as of images: how many of the rotated pairs each has."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections} | more
    return {"rope_parameters": rope | ({"partial_rotary_factor": share} if share != 1 else {})}


#: vLLM's CPU experts take the router's weight on their input for one expert only; positions say
#: which layers attend in chunks.
_LLAMA4: dict[str, Any] = {
    "num_experts_per_tok": 1,
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
}
#: As released models with latent attention have it. Plain rotary positions are wrong in vLLM's CPU
#: kernel: see `fidelity`.
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    }
}
#: Architecture → fields of its text config that no rule gives right, with the reason beside them;
#: None takes the field out.
OWN: Mapping[str, Mapping[str, Any]] = {
    # vLLM reads fields of the released configs that transformers' class does not have.
    "AfmoeForCausalLM": {
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1, **YARN},
    "HYV3ForCausalLM": {
        "first_k_dense_replace": 1,
        "route_norm": True,
        "expert_hidden_dim": 96,
        "qk_norm": True,
    },
    "PhiMoEForCausalLM": {"attention_bias": True},
    "Lfm2ForCausalLM": {
        "block_dim": HIDDEN,
        "conv_dim": HIDDEN,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "MiniMaxM2ForCausalLM": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "LongcatFlashForCausalLM": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    # Sizes that vLLM derives in another way.
    "FalconForCausalLM": {"ffn_hidden_size": 4 * HIDDEN},
    "GPTJForCausalLM": {"rotary_dim": 16},
    # Fresh configs have none.
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    # vLLM has experts without a gate on GPUs only.
    "NemotronHForCausalLM": {
        "time_step_min": 1e-8,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    },
    # transformers normalises all groups at once.
    "Mamba2ForCausalLM": {"n_groups": 1},
    "HrmTextForCausalLM": {"num_layers_per_stack": 2, "H_cycles": 1, "L_cycles": 1},
    # vLLM's window is one token more.
    "Cohere2ForCausalLM": {"sliding_window": 4096},
    "Cohere2MoeForCausalLM": {"sliding_window": 4096},
    "Cohere2VisionForConditionalGeneration": {"sliding_window": 4096},
    # vLLM computes it without latent attention, so that any rank does.
    "MiniCPM3ForCausalLM": {
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "qk_head_dim": 64,
        "head_dim": 32,
    },
    "DeepseekV2ForCausalLM": {"n_group": 1, "topk_group": 1, **YARN},
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", **YARN},
    "AXK1ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", **YARN},
    "Glm4vForConditionalGeneration": {**rope([2, 3, 3], 0.5), "attention_bias": True},
    "Glm4vMoeForConditionalGeneration": {
        **rope([2, 1, 1], 0.25),
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": False,
    },
    "Qwen3VLMoeForConditionalGeneration": {"norm_topk_prob": True},
    "GlmOcrForConditionalGeneration": rope([4, 6, 6]),
    "PaddleOCRVLForConditionalGeneration": rope([4, 6, 6]),
    "Qwen2VLForConditionalGeneration": rope([4, 6, 6]),
    "Qwen2_5_VLForConditionalGeneration": rope([4, 6, 6]),
    "Qwen3VLForConditionalGeneration": rope([4, 6, 6], mrope_interleaved=True),
    "Step3p7ForConditionalGeneration": {"sliding_window": WINDOW},
    "HeliumForCausalLM": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "CodeGenForCausalLM": {"n_head": 4, "n_embd": 128, "rotary_dim": 16},
}
#: Class of vLLM's registry → class of transformers, where they are named differently.
NAMED: Mapping[str, str] = {
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
}


def model_class(architecture: str) -> Any:
    """transformers' class. Raises LookupError when it has none."""
    found = getattr(transformers, NAMED.get(architecture, architecture), None)
    if found is None or not hasattr(found, "config_class") or found.config_class is None:
        raise LookupError(f"transformers {transformers.__version__} has no {architecture}")
    return found


def has_class(architecture: str) -> bool:
    """Whether transformers has one."""
    try:
        return bool(model_class(architecture))
    except LookupError:
        return False


def tiny_config(architecture: str, **more: Any) -> PretrainedConfig:
    """transformers' config of that class, tiny. `more`: fields of its text config."""
    kind = model_class(architecture).config_class
    config = kind(
        **shrunk(kind(), {**OWN.get(architecture, {}), **more}, True), architectures=[architecture]
    )
    return config


def shrunk(config: PretrainedConfig, own: Mapping[str, Any], text: bool) -> dict[str, Any]:
    """The arguments of the config class."""
    given: dict[str, Any] = {}
    text_config = config.get_text_config() if text else None
    nested = {
        name: value for name, value in vars(config).items() if isinstance(value, PretrainedConfig)
    }
    if text and getattr(config, "vision_config", 1) is None:  # vLLM's class needs one
        nested["vision_config"] = config.sub_configs["vision_config"]()
    for name, value in nested.items():
        if name.startswith("_"):
            continue
        holds = text and (value is text_config or value.get_text_config() is text_config)
        given[name] = {
            **shrunk(value, own if holds else {}, holds),
            **({"model_type": value.model_type} if value.model_type else {}),
        }
    if text_config is not config and text:
        return given | _token_ids(config)
    if not text:
        return given | {
            name: value
            for name, value in ENCODER.items()
            if getattr(config, name, None) is not None and name not in given
        }
    return given | _text(config, nested) | dict(own)


ENDS = ("eos_token_id", "bos_token_id", "pad_token_id")


def _token_ids(config: PretrainedConfig) -> dict[str, Any]:
    """Ids outside the vocabulary are moved to its end."""
    names = [
        name
        for name, value in config.to_dict().items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    ]
    return {
        name: VOCABULARY - 1 - place for place, name in enumerate(sorted(names)) if name not in ENDS
    }


def _text(config: PretrainedConfig, nested: Mapping[str, Any]) -> dict[str, Any]:
    fields = {**config.to_dict()}
    own_head = fields.get("head_dim") is not None or fields.get("qk_nope_head_dim") is not None
    heads = {
        name: 4 if own_head else 2
        for name in (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "swa_num_attention_heads",
        )
    }
    heads |= {
        name: 2 if own_head else 1
        for name in (
            "num_key_value_heads",
            "num_kv_heads",
            "swa_num_key_value_heads",
            "num_query_groups",
        )
    }
    if fields.get("kv_lora_rank") is not None:
        # of what is rotated
        heads |= {"num_key_value_heads": 4, "head_dim": SIZES["qk_rope_head_dim"]}
    given = {
        name: 0 for name in ("bos_token_id", "pad_token_id") if isinstance(fields.get(name), int)
    } | {
        name: value
        for name, value in {**SIZES, **heads}.items()
        if name in fields and name not in nested and (fields[name] is not None or name in FILLED)
    }
    for name, value in fields.items():
        if (name.endswith("_types") and isinstance(value, list)) or name == "layers_block_type":
            given[name] = _mixed(value, name)
    if (
        fields.get("num_hidden_layers") is None
        and "num_hidden_layers" not in given
        and "num_layers" in fields
    ):
        given["num_layers"] = 2
    rope = fields.get("rope_parameters") or {}
    if sections := rope.get("mrope_section"):
        given["rope_parameters"] = {
            **rope,
            "mrope_section": _sections(sections, rope.get("partial_rotary_factor", 1.0)),
        }
    return given | {name: value for name, value in _token_ids(config).items() if name not in given}


def _sections(sections: list[int], share: float) -> list[int]:
    """Of the rotated pairs of a head of 32: as many of each as they are of a large head."""
    pairs = int(32 * share) // 2
    scaled = [max(1, pairs * each // sum(sections)) for each in sections]
    return [pairs - sum(scaled[1:]), *scaled[1:]]


def _mixed(types: list[str], name: str) -> list[str]:
    """`LAYERS` layers with every kind of the list among them, the commoner kind first; a dense
    layer comes once.
    """
    kinds = list(dict.fromkeys(types))
    if name == "mlp_layer_types" and set(kinds) == {"dense", "sparse"}:
        return ["dense", *["sparse"] * (LAYERS - 1)]
    if len(kinds) == 2 and "linear_attention" in kinds[0]:
        return [kinds[0]] * (LAYERS - 1) + [kinds[1]]
    return [kinds[place % len(kinds)] for place in range(LAYERS)]


def checkpoint(architecture: str, path: Path, **more: Any) -> Path:
    """Write a tiny checkpoint of that class to `path`, unless it is there; returns `path`.

    `more`: fields of its text config.
    """
    seed = zlib.crc32(architecture.encode())
    return write(
        path,
        model_class(architecture),
        tiny_config(architecture, **more),
        architecture,
        seed,
        TAMED.get(architecture, {}),
    )
