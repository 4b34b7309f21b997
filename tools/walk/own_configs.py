"""Tiny configs of the classes of vLLM that transformers does not have.

vLLM's own config class where it has one. Else Llama's, with the fields that vLLM's file reads: in
the released checkpoints these come from Python code beside the weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from configs import YARN, rope, shrunk
from tiny import HIDDEN, LAYERS, VOCABULARY, WINDOW, save_tokenizer
from transformers import PretrainedConfig
from vllm.transformers_utils import configs as of_vllm

_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "num_nextn_predict_layers": 0,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_BAILING: dict[str, Any] = {
    **_EXPERTS,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "use_qk_norm": True,
}
_SARVAM: dict[str, Any] = {**_EXPERTS, "embedding_dropout": 0.0, "use_qk_norm": True}
_STEP: dict[str, Any] = {
    "max_position_embedding": 4096,
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 96,
    "share_expert_dim": 96,
    "share_q_dim": 48,
    "norm_expert_weight": True,
    "moe_layers_enum": "1,2,3",
    "head_dim": 32,
}
#: Whether a file takes `head_dim` or derives it.
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
_DEEPSEEK: dict[str, Any] = {"n_group": 1, "topk_group": 1, **YARN}
_KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_CHATGLM: dict[str, Any] = {
    "num_layers": LAYERS,
    "num_attention_heads": 2,
    "kv_channels": 32,
    "ffn_hidden_size": 160,
    "multi_query_attention": True,
    "multi_query_group_num": 1,
    "add_qkv_bias": True,
    "seq_length": 4096,
    "padded_vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "tie_word_embeddings": False,
    "original_rope": True,
}
#: Of the container that InternVL's releases bring with them, around an encoder of another model.
_CHAT: dict[str, Any] = {
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 4,
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "force_image_size": 56,
    "ps_version": "v2",
    "select_layer": -1,
    "downsample_ratio": 0.5,
    "vit_hidden_size": HIDDEN,
    "projector_hidden_size": HIDDEN,
    "use_msac": False,
    "vision_config": {
        "qkv_bias": True,
        "qk_normalization": False,
        "norm_type": "layer_norm",
        "initializer_factor": 0.1,
        "hidden_act": "gelu",
        "drop_path_rate": 0.0,
        "image_size": 56,
        "patch_size": 14,
    },
}
_ENCODER: dict[str, Any] = {
    "image_size": 56,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "num_channels": 3,
    "in_channels": 3,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "output_dim": HIDDEN,
    "rope_theta": 10000.0,
    "image_token_id": VOCABULARY - 1,
}
_ENCODED: dict[str, Any] = {"vision_config": _ENCODER}
_TILED: dict[str, Any] = {"tile_tag": "2D"}
_MOONDREAM: dict[str, Any] = {
    "config": {
        "text": {
            "dim": HIDDEN,
            "ff_dim": 160,
            "n_layers": LAYERS,
            "vocab_size": VOCABULARY,
            "n_heads": 2,
            "n_kv_heads": 2,
            "moe": {
                "start_layer": 1,
                "n_experts": 8,
                "n_experts_per_tok": 2,
                "expert_inner_dim": 96,
            },
        },
        "vision": {
            "enc_dim": HIDDEN,
            "enc_n_layers": 2,
            "enc_ff_dim": 96,
            "enc_n_heads": 2,
            "proj_inner_dim": 96,
            "crop_size": 56,
        },
    }
}
#: Architecture → fields beside the text config; those of an encoder are added to what it has.
AROUND: Mapping[str, Mapping[str, Any]] = {
    "DeepseekOCR2ForCausalLM": _TILED,
    "DeepseekOCRForCausalLM": _TILED,
    "Eagle2_5_VLForConditionalGeneration": _CHAT,
    "FunAudioChatForConditionalGeneration": {"audio_config": {"pad_token_id": 0}},
    "GLM4VForCausalLM": {
        "vision_config": _ENCODER
        | {"num_positions": 17, "scaling_factor": 1.0, "dropout_prob": 0.0}
    },
    "H2OVLChatModel": _CHAT,
    "HfMoondream": _MOONDREAM,
    "InternVLChatModel": _CHAT,
    "KeyeForConditionalGeneration": _ENCODED,
    "KeyeVL1_5ForConditionalGeneration": _ENCODED,
    "Llama_Nemotron_Nano_VL": _CHAT,
    "LlavaOnevision2ForConditionalGeneration": _ENCODED,
    "Moondream3ForCausalLM": _MOONDREAM,
    "NVLM_D": _CHAT,
    "OpenPanguVLForConditionalGeneration": {"hidden_size": HIDDEN},
    "PixtralForConditionalGeneration": _ENCODED,
    "SkyworkR1VChatModel": _CHAT,
    "StepVLForConditionalGeneration": {"vision_config": {"output_dim": HIDDEN}},
    "UltravoxModel": {"vocab_size": VOCABULARY, "hidden_size": HIDDEN},
    "UnlimitedOCRForCausalLM": _TILED,
}
#: Config class → a nested config that its constructor takes by another name than it has.
RENAMED: Mapping[str, tuple[str, str]] = {
    "DeepseekVLV2Config": ("text_config", "language_config"),
    "UnlimitedOCRConfig": ("text_config", "language_config"),
    "UltravoxConfig": ("wrapped_model_config", "text_config"),
}
#: Model type of a text config → the class that vLLM is to take for it, where the container does not
#: say.
LANGUAGE: Mapping[str, str] = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
#: Architecture → config class, and the fields that no rule gives.
OF: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "BailingMoeForCausalLM": (
        "LlamaConfig",
        _BAILING | {"score_function": None, "moe_router_enable_expert_bias": False},
    ),
    "BailingMoeV2ForCausalLM": ("LlamaConfig", _BAILING),
    "BailingMoeV2_5ForCausalLM": (
        "LlamaConfig",
        _BAILING | _LATENT | {"layer_group_size": 2, "attention_type": 1},
    ),
    "BailingMoeV3ForCausalLM": (
        "BailingMoeV3TextConfig",
        {"layer_group_size": 2, "layer_types": None},
    ),
    "BailingMoeV3VLForConditionalGeneration": (
        "BailingMoeV3VLConfig",
        {"layer_group_size": 2, "layer_types": None},
    ),
    "BagelForConditionalGeneration": ("BagelConfig", {}),
    "ChatGLMForConditionalGeneration": ("ChatGLMConfig", _CHATGLM),
    "ChatGLMModel": ("ChatGLMConfig", _CHATGLM),
    "Cosmos3ForConditionalGeneration": ("Qwen3VLConfig", rope([4, 6, 6], mrope_interleaved=True)),
    "DeepseekForCausalLM": ("LlamaConfig", _EXPERTS),
    "DeepseekOCRForCausalLM": ("DeepseekVLV2Config", _DEEPSEEK),
    "DeepseekOCR2ForCausalLM": ("DeepseekVLV2Config", _DEEPSEEK),
    "DeepseekV41ForCausalLM": ("DeepseekV41Config", {}),
    "DeepseekV4ForConditionalGeneration": ("DeepseekV4Config", {}),
    "DeepseekVLV2ForCausalLM": ("DeepseekVLV2Config", _DEEPSEEK),
    "Dots3NoteForCausalLM": ("Dots3NoteConfig", {}),
    "DotsOCRForCausalLM": ("DotsOCRConfig", {}),
    "ExaoneForCausalLM": (
        "LlamaConfig",
        {"activation_function": "silu", "layer_norm_epsilon": 1e-5},
    ),
    "Eagle2_5_VLForConditionalGeneration": ("LlavaConfig", {}),
    "FunAudioChatForConditionalGeneration": ("FunAudioChatConfig", {}),
    "Glm5NextForCausalLM": ("DeepseekV3Config", {}),
    "InternS1ForConditionalGeneration": ("InternVLConfig", {}),
    "InternS1ProForConditionalGeneration": ("Qwen3VLMoeConfig", {"norm_topk_prob": True}),
    "InternS2PreviewForConditionalGeneration": ("Qwen3_5MoeConfig", {}),
    "InternS2MobiusForConditionalGeneration": ("Qwen3_5MoeConfig", {"num_blocks": 2}),
    "InternVLChatModel": ("LlavaConfig", {}),
    "H2OVLChatModel": ("LlavaConfig", {}),
    "NVLM_D": ("LlavaConfig", {}),
    "SkyworkR1VChatModel": ("LlavaConfig", {}),
    "Llama_Nemotron_Nano_VL": ("LlavaConfig", {}),
    "BeeForConditionalGeneration": ("LlavaOnevisionConfig", {}),
    "GLM4VForCausalLM": ("ChatGLMConfig", _CHATGLM),
    "HCXVisionV2ForCausalLM": ("Qwen2_5_VLConfig", {}),
    "OpenCUAForConditionalGeneration": ("Qwen2_5_VLConfig", rope([4, 6, 6])),
    "KeyeForConditionalGeneration": ("Qwen2VLConfig", {}),
    "KeyeVL1_5ForConditionalGeneration": ("Qwen2VLConfig", {}),
    "MoonshotKimiaForCausalLM": ("Qwen2Config", {}),
    "FireRedASR2ForConditionalGeneration": ("Qwen2Config", {}),
    "FunASRForConditionalGeneration": ("Qwen3Config", {}),
    "IsaacForConditionalGeneration": ("IsaacConfig", rope([4, 6, 6])),
    "IQuestLoopCoderForCausalLM": (
        "LlamaConfig",
        {"max_window_layers": 0, "loop_num": 2, "loop_window_size": WINDOW, "sliding_window": None},
    ),
    "K2HorizonForCausalLM": (
        "LlamaConfig",
        _EXPERTS
        | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
            "moe_gate_bias": False,
            "attention_gate_func": None,
            "layernorm_num_groups": 1,
            "mova_num_experts": 0,
            "mova_num_experts_per_tok": 0,
            "query_key_norm": True,
            "rope_head_dim": 32,
            "router_scaling_factor": 1.5,
            "router_score_func": "sigmoid",
        },
    ),
    "KananaVForConditionalGeneration": ("Qwen2VLConfig", {}),
    "KimiK25ForConditionalGeneration": ("Kimi_K25Config", _DEEPSEEK),
    "KimiK3ForConditionalGeneration": ("KimiK3Config", {}),
    "KimiVLForConditionalGeneration": ("KimiVLConfig", _DEEPSEEK),
    "LightOnOCRForConditionalGeneration": ("Mistral3Config", {}),
    "LlavaOnevision2ForConditionalGeneration": ("LlavaOnevisionConfig", {}),
    "LongcatFlashNgramForCausalLM": ("LongcatFlashConfig", {}),
    "MiDashengLMModel": ("MiDashengLMConfig", {}),
    "MiMoForCausalLM": ("Qwen2Config", {"num_nextn_predict_layers": 0}),
    "MiMoV2ForCausalLM": (
        "LlamaConfig",
        _EXPERTS
        | {
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1],
            "layernorm_epsilon": 1e-5,
            "sliding_window": WINDOW,
            "sliding_window_size": WINDOW,
            "swa_head_dim": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_v_head_dim": 32,
            "v_head_dim": 32,
            "n_shared_experts": None,
        },
    ),
    "MiniCPMForCausalLM": (
        "LlamaConfig",
        {"scale_emb": 2.0, "scale_depth": 1.4, "dim_model_base": 32, "num_experts": 0},
    ),
    "MiniMaxM3SparseForCausalLM": ("MiniMaxM3TextConfig", {}),
    "MistralLarge3ForCausalLM": (
        "DeepseekV3Config",
        _DEEPSEEK | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "Moondream3ForCausalLM": ("Moondream3Config", {}),
    "HfMoondream": ("Moondream3Config", {}),
    "MossTranscribeDiarizeForConditionalGeneration": ("MossTranscribeDiarizeConfig", {}),
    "MuseGlimmerForCausalLM": ("MuseGlimmerTextConfig", {}),
    "NemotronHPuzzleForCausalLM": (
        "NemotronHConfig",
        {
            "time_step_min": 1e-8,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        },
    ),
    "OpenPanguVLForConditionalGeneration": ("Qwen2_5_VLConfig", rope([4, 6, 6])),
    "OpenVLAForActionPrediction": ("OpenVLAConfig", {}),
    "Ovis": ("OvisConfig", {}),
    "Ovis2_5": ("OvisConfig", {}),
    "Ovis2_6ForCausalLM": ("OvisConfig", {}),
    "Ovis2_6_MoeForCausalLM": ("OvisConfig", {}),
    "PanguEmbeddedForCausalLM": ("LlamaConfig", {"bias": True}),
    "PanguProMoEV2ForCausalLM": (
        "LlamaConfig",
        _EXPERTS | {"router_enable_expert_bias": True, "sandwich_norm": True},
    ),
    "PanguUltraMoEForCausalLM": (
        "LlamaConfig",
        _EXPERTS | _LATENT | {"router_enable_expert_bias": True, "sandwich_norm": True},
    ),
    "Param2MoEForCausalLM": (
        "GPT2Config",  # it has no rotary positions of its own, whose form would be another
        _BAILING
        | _HEADS
        | {
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "intermediate_size": 160,
        },
    ),
    "PixtralForConditionalGeneration": ("LlavaConfig", {}),
    "Phi3VForCausalLM": ("Phi3Config", {}),
    "Phi4MMForCausalLM": ("Phi3Config", {}),
    "Phi4ForCausalLMV": ("Phi3Config", {}),
    "Plamo3ForCausalLM": (
        "LlamaConfig",
        {
            "head_dim": 32,
            "interleaved_sliding_window": [WINDOW, None] * 2,
            "layer_types": _KINDS,
            "rope_local_theta": 10000.0,
            "rope_theta": 10000.0,
            "sliding_window": WINDOW,
        },
    ),
    "Qwen2_5OmniModel": ("Qwen2_5OmniConfig", {}),
    "Qwen3ASRRealtimeGeneration": ("Qwen3ASRConfig", {}),
    "RForConditionalGeneration": ("LlavaConfig", {}),
    "Rnj1ForCausalLM": (
        "Gemma3TextConfig",
        {"final_logit_softcapping": None, "layer_types": _KINDS},
    ),
    "SarvamMLAForCausalLM": ("LlamaConfig", _SARVAM | _LATENT),
    "SarvamMoEForCausalLM": (
        "LlamaConfig",
        _SARVAM | {"use_bias": False, "use_qkv_bias": False, "head_dim": 32},
    ),
    "SolarForCausalLM": (
        "LlamaConfig",
        {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]},
    ),
    "Step1ForCausalLM": ("LlamaConfig", {}),
    "Step3TextForCausalLM": ("Step3TextConfig", _STEP),
    "Step3VLForConditionalGeneration": (
        "Step3VLConfig",
        _STEP | {"hidden_act": "silu", "tie_word_embeddings": False},
    ),
    "Step3p5ForCausalLM": (
        "Step3p5Config",
        _STEP | {"max_position_embeddings": 4096, "num_attention_groups": 1},
    ),
    "StepVLForConditionalGeneration": (
        "Step3VLConfig",
        _STEP | {"hidden_act": "silu", "tie_word_embeddings": False},
    ),
    "TeleChat2ForCausalLM": (
        "LlamaConfig",
        {
            "n_head": 2,
            "mlp_bias": True,
            "n_layer": LAYERS,
            "ffn_hidden_size": 160,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "TeleFLMForCausalLM": (
        "LlamaConfig",
        {"use_mup": True, "mup_scale_factor": 1.1, "output_mult": 1.2, "input_mult": 1.3},
    ),
    "UltravoxModel": ("UltravoxConfig", {}),
    "UnlimitedOCRForCausalLM": ("UnlimitedOCRConfig", _DEEPSEEK),
    "VoxtralRealtimeGeneration": ("VoxtralConfig", {}),
}


def config_class(architecture: str) -> str:
    """Its name, in vLLM or in transformers."""
    return OF.get(architecture, ("LlamaConfig", {}))[0]


def own_config(architecture: str) -> PretrainedConfig:
    """A config that vLLM's class may load. Raises LookupError where vLLM has none."""
    from vllm.model_executor.models import registry

    if architecture in registry._TRANSFORMERS_SUPPORTED_MODELS:
        raise LookupError(
            "the model is Python code beside the weights, which vLLM's Transformers backend runs"
        )
    name = config_class(architecture)
    own = OF.get(architecture, ("", {}))[1]
    kind = getattr(of_vllm if name in of_vllm._CLASS_TO_MODULE else transformers, name)
    given = shrunk(kind(), {**(_HEADS if name == "LlamaConfig" else {}), **own}, True)
    for field, value in AROUND.get(architecture, {}).items():
        given[field] = {**given.get(field, {}), **value} if isinstance(value, dict) else value
    if "config" in given:  # it has all of them
        given = {"config": given["config"]}
    if name in RENAMED:
        has, taken = RENAMED[name]
        given[taken] = given.pop(has)
    config = kind(**given, architectures=[architecture])
    text = config.get_text_config()
    if isinstance(text, PretrainedConfig) and text is not config and not text.architectures:
        text.architectures = [LANGUAGE.get(text.model_type, "LlamaForCausalLM")]
    return config


def folder_of(architecture: str, path: Path) -> Path:
    """Write config and tokenizer to `path`: weights are drawn when the engine loads it."""
    config = own_config(architecture)
    save_tokenizer(path)
    # some files ask for it
    words = (path / "tokenizer.json").read_text().replace(f'"w{VOCABULARY - 1}"', '"<image>"')
    (path / "tokenizer.json").write_text(words)
    config.save_pretrained(path)
    has, taken = RENAMED.get(type(config).__name__, ("", ""))
    if has:
        saved = json.loads((path / "config.json").read_text())
        saved[taken] = saved.pop(has)
        (path / "config.json").write_text(json.dumps(saved))
    return path
