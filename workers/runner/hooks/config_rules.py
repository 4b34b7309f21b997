"""Configurations that vLLM computes differently from transformers: refused, or served with a
caveat.

Rows must be those of transformers' model. The engine compares itself with transformers when it
starts. These rules cover what that comparison cannot see (positions and windows beyond its prompts,
bidirectional attention), and known differences, which are thus refused before the weights are read,
and also where nothing is compared, as with quantised checkpoints.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....schemas.jobs.certificates import UNPROVEN


class DifferentNumbersError(ValueError):
    """vLLM would compute different numbers from transformers for this configuration; the message
    names the field.
    """


@dataclass(frozen=True)
class ConfigRule:
    """A field of the HF text config, and the values with which it is served; a missing field counts
    as null.
    """

    field: str
    why: str
    served: tuple[Any, ...] = (None, False)  # empty: no value is served
    on_cpu: bool = False  # applies to vLLM's CPU kernels only


_NO_WINDOW = ConfigRule(
    "sliding_window", "vLLM attends within the window, but transformers' model has none", (None,)
)
_LLAMA_FILE = "vLLM's Llama file reads it, but transformers' model does not"
_OWN_OF_LLAMA_FILE = (
    ConfigRule("bias", _LLAMA_FILE),
    ConfigRule("qkv_bias", _LLAMA_FILE),
    ConfigRule("logit_scale", _LLAMA_FILE, (None, 1.0)),
)
_ADDS_BIASES = "vLLM adds biases that the checkpoint does not have"
_NO_BIAS = (
    ConfigRule("attention_bias", _ADDS_BIASES),
    ConfigRule("mlp_bias", _ADDS_BIASES),
)
_OUTPUT_BIAS = ConfigRule("attention_bias", "vLLM drops the bias of o_proj")
_NO_DUAL_CHUNKS = ConfigRule(
    "dual_chunk_attention_config", "transformers' model has no dual chunk attention", (None,)
)
_QWEN = (
    _NO_DUAL_CHUNKS,
    ConfigRule("qk_norm", "transformers' model has no such norm"),
)

_BACKEND_READS = "vLLM's Transformers backend applies it, but transformers' model does not"
_BACKEND = (
    ConfigRule("attn_logit_softcapping", _BACKEND_READS, (None,)),
    ConfigRule("final_logit_softcapping", _BACKEND_READS, (None,)),
    ConfigRule("logit_scale", _BACKEND_READS, (None, 1.0)),
)

#: Rules for every architecture.
EVERYWHERE: tuple[ConfigRule, ...] = (
    ConfigRule(
        "is_causal",
        "prompt tokens would attend to later tokens, which a served model has not computed yet",
        (None, True),
    ),
    ConfigRule("use_bidirectional_attention", "vLLM attends to earlier tokens only"),
)
_SEPARATE_HEADS = (
    "vLLM's CPU kernel for rotary positions is wrong where a query's heads are a "
    "dimension of their own"
)
#: Architecture → its rules. Other values and other architectures are served: the comparison with
#: transformers decides.
RULES: Mapping[str, tuple[ConfigRule, ...]] = {
    "GPT2LMHeadModel": (
        ConfigRule(
            "scale_attn_weights",
            "vLLM scales attention scores by 1 / √head size in any case",
            (None, True),
        ),
        ConfigRule(
            "scale_attn_by_inverse_layer_idx", "vLLM does not scale attention scores by layer"
        ),
        ConfigRule("reorder_and_upcast_attn", "vLLM does not serve it"),
        ConfigRule("add_cross_attention", "vLLM does not serve it"),
        _NO_WINDOW,
    ),
    "GPTNeoXForCausalLM": (*_BACKEND, _NO_WINDOW),
    "GemmaForCausalLM": (
        ConfigRule("attention_bias", "vLLM drops the biases of attention"),
        ConfigRule(
            "hidden_act", "vLLM computes the tanh approximation of gelu", ("gelu_pytorch_tanh",)
        ),
        ConfigRule(
            "hidden_activation",
            "transformers' model reads `hidden_act` instead",
            (None, "gelu_pytorch_tanh"),
        ),
        _NO_WINDOW,
    ),
    "LlamaForCausalLM": (*_OWN_OF_LLAMA_FILE, _NO_WINDOW),
    "MistralForCausalLM": (
        *_OWN_OF_LLAMA_FILE,
        *_NO_BIAS,
        ConfigRule(
            "llama_4_scaling", "transformers' model does not scale queries by position", (None,)
        ),
        ConfigRule("ada_rms_norm_t_cond", "transformers' model has no such norm"),
    ),
    "MixtralForCausalLM": (ConfigRule("hidden_act", "vLLM's experts compute silu", ("silu",)),),
    "OPTForCausalLM": (_NO_WINDOW,),
    "Olmo2ForCausalLM": (*_BACKEND, _NO_WINDOW),
    "OlmoForCausalLM": (*_BACKEND, _NO_WINDOW),
    "Phi3ForCausalLM": (*_OWN_OF_LLAMA_FILE, *_NO_BIAS),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": (_OUTPUT_BIAS, *_QWEN),
    "Qwen3MoeForCausalLM": (
        _OUTPUT_BIAS,
        _NO_DUAL_CHUNKS,
        ConfigRule(
            "shared_expert_intermediate_size", "transformers' model has no shared expert", (None, 0)
        ),
    ),
    "SmolLM3ForCausalLM": _BACKEND,
    "Starcoder2ForCausalLM": _BACKEND,
    "BloomForCausalLM": (
        ConfigRule(
            "model_type",
            "vLLM computes the exact gelu, transformers' model its tanh approximation",
            (),
        ),
    ),
    "FalconForCausalLM": (
        ConfigRule("bias", "vLLM adds the bias of attention to the output of the MLP", (False,)),
    ),
    "Ernie4_5_MoeForCausalLM": (
        ConfigRule(
            "model_type",
            "vLLM's CPU experts leave out the router's correction bias",
            (),
            on_cpu=True,
        ),
    ),
    "Glm4vForConditionalGeneration": (
        ConfigRule(
            "attention_bias",
            "transformers' attention has biases in any case, which vLLM leaves out",
            (True,),
        ),
    ),
    "JetMoeForCausalLM": (
        ConfigRule(
            "model_type",
            "vLLM's Transformers backend computes its attention's experts differently",
            (),
        ),
    ),
    "Lfm2ForCausalLM": (ConfigRule("model_type", _SEPARATE_HEADS, (), on_cpu=True),),
    "Lfm2MoeForCausalLM": (ConfigRule("model_type", _SEPARATE_HEADS, (), on_cpu=True),),
    "MoshiForCausalLM": (
        ConfigRule(
            "model_type", "vLLM's Transformers backend computes its attention differently", ()
        ),
    ),
    "PhiMoEForCausalLM": (
        ConfigRule("lm_head_bias", "vLLM leaves out the bias of the output matrix"),
    ),
    "Mamba2ForCausalLM": (
        ConfigRule(
            "n_groups",
            "vLLM normalises each group separately, transformers' model all groups together",
            (1,),
        ),
    ),
}
#: Architectures whose queries reach the rotary kernel with heads as a dimension of their own,
#: unless positions are scaled by YaRN.
SEPARATE_HEADS = frozenset(
    {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "AXK1ForCausalLM"}
)
#: Architectures whose Mamba layers clamp time steps to at least `time_step_min` in transformers.
LEAST_STEP = frozenset({"NemotronHForCausalLM"})
#: A `time_step_min` up to this has no effect.
LEAST_STEP_MATTERS = 1e-6
#: One up to this, transformers' default, has hardly any.
LEAST_STEP_SERVED = 1e-3
#: Architectures whose window has one token more in vLLM.
WIDER_WINDOW = frozenset({"Cohere2ForCausalLM", "Cohere2MoeForCausalLM"})

#: Architectures whose transformers model rotates whole heads; vLLM rotates a part of each if
#: `partial_rotary_factor` is set.
WHOLE_HEADS = frozenset(
    {
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)

#: The `rope_type`s and the keys of `rope_parameters` that both libraries compute alike, also beyond
#: the lengths that the comparison at start covers: others have a caveat.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_KEYS = frozenset(
    (
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "short_factor",
        "long_factor",
    )
)
#: Further keys of models that rotate by three positions of a token: the pairs of dimensions that
#: each position rotates, and their order.
_SECTIONS = frozenset(("mrope_section", "mrope_interleaved"))
#: Other spellings that the config classes keep and no code reads.
_ROPE_REST = frozenset(("type",))


#: Architectures for which vLLM reorders the dimensions of each head as it loads the weights of
#: queries and keys. Attention patterns, values and all later rows are the same.
REORDERED = frozenset({"Llama4ForCausalLM", "Llama4ForConditionalGeneration"})


def caveats(
    architecture: str,
    config: Any,
    max_model_len: int,
    *,
    backend: bool,
    interleaved: bool | None = None,
) -> tuple[str, ...]:
    """Return sentences on how the rows of a served model differ from transformers'; mostly none.

    `config`: transformers' text config; `max_model_len`: tokens, prompt and generated; `backend`:
    served by vLLM's Transformers backend; `interleaved`: whether transformers' model, regardless of
    the config, interleaves the dimensions of a token's three positions; None: tokens have one
    position. Raises DifferentNumbersError for a config that is not served.
    """
    for rule in (*EVERYWHERE, *RULES.get(architecture, ())):
        value = getattr(config, rule.field, None)
        if value not in rule.served and (not rule.on_cpu or _on_cpu()):
            served = " or ".join("null" if item is None else repr(item) for item in rule.served)
            on_cpu = " on a CPU" if rule.on_cpu and not served else ""
            valid = f"; served: {served}" if served else ""
            raise DifferentNumbersError(
                f"{rule.field}={value!r} is not served{on_cpu}: {rule.why}{valid}"
            )
    window = getattr(config, "sliding_window", None)
    if architecture in WIDER_WINDOW and window is not None and max_model_len > window:
        raise DifferentNumbersError(
            f"sliding_window={window}: vLLM attends to one token more than transformers' "
            f"model does: set max_model_len to {window} or "
            f"less (now {max_model_len})"
        )
    reasons: list[str] = []
    least_step = (architecture in LEAST_STEP and getattr(config, "time_step_min", None)) or 0.0
    if least_step > LEAST_STEP_SERVED:
        raise DifferentNumbersError(
            f"time_step_min={least_step}: transformers' Mamba layers have a least time step, "
            f"vLLM's have none: served up to {LEAST_STEP_SERVED}, with a caveat"
        )
    if least_step > LEAST_STEP_MATTERS:
        reasons.append(
            "time_step_min: transformers' Mamba layers have a least time step, vLLM's have "
            "none; where the least step applies, rows differ slightly"
        )
    if architecture in REORDERED and not backend:
        reasons.append(
            "rows at q, k, q_proj and k_proj: the dimensions of each head are in vLLM's "
            "order: first transformers' even dimensions, then its odd ones"
        )
    for rope in list(_ropes(config)) or [{}]:
        if interleaved is not None:
            _require_sections(rope, interleaved)
        if (
            architecture in SEPARATE_HEADS
            and rope.get("rope_type", "default") == "default"
            and _on_cpu()
        ):
            raise DifferentNumbersError(
                "rope_parameters: the rope_type 'default' is not served on a CPU: "
                f"{_SEPARATE_HEADS}"
            )
        if (
            architecture in WHOLE_HEADS
            and not backend
            and rope.get("partial_rotary_factor") not in (None, 1.0)
        ):
            raise DifferentNumbersError(
                "rope_parameters: partial_rotary_factor is not served: transformers' model "
                "rotates whole heads"
            )
        keys = ROPE_KEYS if interleaved is None else ROPE_KEYS | _SECTIONS
        reasons += _of_rope(rope, config, max_model_len, backend, keys)
    return tuple(dict.fromkeys(reasons))


def as_served(architecture: str, config: Any, max_model_len: int) -> dict[str, Any]:
    """Return config fields that make transformers compute what vLLM does, despite the differences
    that caveats name.
    """
    fields: dict[str, Any] = {}
    if architecture in LEAST_STEP:
        # not 0: transformers takes its logarithm
        fields["time_step_min"] = LEAST_STEP_MATTERS / 100
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_model_len > _original(
        rope, config, max_model_len
    ):
        fields["rope_parameters"] = {**rope, "short_factor": rope["long_factor"]}
    return fields


def _original(rope: Mapping[str, Any], config: Any, max_model_len: int) -> int:
    """Return the number of tokens up to which longrope uses its short factors."""
    return (
        rope.get("original_max_position_embeddings")
        or getattr(config, "max_position_embeddings", None)
        or max_model_len
    )


def _on_cpu() -> bool:
    from vllm.platforms import current_platform  # imported when needed: it takes seconds

    return bool(current_platform.is_cpu())


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of the rotary embeddings: one, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        yield from (value for value in parameters.values() if value)
    elif parameters:
        yield parameters


def _require_sections(rope: Mapping[str, Any], interleaved: bool) -> None:
    """Raises DifferentNumbersError where vLLM, which reads both keys, would rotate rows of images
    differently from transformers' model.
    """
    if not rope.get("mrope_section"):
        raise DifferentNumbersError(
            "rope_parameters: mrope_section is missing: vLLM would rotate by one position, "
            "not by three"
        )
    if (text := rope.get("mrope_interleaved", False)) is not interleaved:
        raise DifferentNumbersError(
            f"rope_parameters: mrope_interleaved={text!r} is not served: transformers' "
            f"model does not read it; served: {interleaved}"
        )


def _of_rope(
    rope: Mapping[str, Any],
    config: Any,
    max_model_len: int,
    backend: bool,
    keys: frozenset[str],
) -> Iterator[str]:
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        yield f"{UNPROVEN}rope_parameters: the rope_type {kind!r}"
    if unknown := sorted(rope.keys() - keys - _ROPE_REST):
        yield f"{UNPROVEN}rope_parameters: {', '.join(unknown)}"
    if kind == "dynamic" and max_model_len > config.max_position_embeddings:
        raise DifferentNumbersError(
            "rope_parameters: with rope_type 'dynamic' vLLM computes only prompts of up to "
            "max_position_embeddings tokens as "
            f"transformers does: set max_model_len to {config.max_position_embeddings} or "
            f"less (now {max_model_len})"
        )
    original = _original(rope, config, max_model_len)
    if kind != "longrope" or max_model_len <= original:
        return
    if backend:
        raise DifferentNumbersError(
            "rope_parameters: with rope_type 'longrope' a request's rows would depend on "
            "the length of others in its batch: "
            f"set max_model_len to original_max_position_embeddings ({original}) or less "
            f"(now {max_model_len})"
        )
    yield (
        "longrope: vLLM computes every prompt with the long factors, because "
        f"max_model_len ({max_model_len}) is more than "
        f"original_max_position_embeddings ({original}); transformers computes those of "
        f"up to {original} tokens with the short ones, "
        f"and their rows differ. With max_model_len={original} all rows are equal."
    )
