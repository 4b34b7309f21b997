"""Settings of vLLM with which Midstream's rows would be wrong: they are refused by name.

A setting is listed because its other values split, reorder, pad or skip rows of a batch, compute
rows that the scheduler did not count, or replace code that the adapters wrap; or because the
certificate could not show that rows are wrong. No setting of Midstream leads to a refused value; a
vLLM plug-in, an environment variable or the default of a later version may. What no rule names is
served if the certificate and the comparison pass: so a new version of vLLM costs a start, and no
classification of all its settings.
"""

import vllm
from vllm.config import CompilationMode, VllmConfig

from ....schemas.jobs.certificates import UNPROVEN
from . import drafters, seams
from .rules import SettingRule, judge

_SPLIT = "it divides a batch's rows between passes or ranks"
_STATE = "it changes what a block of the KV cache holds, or where it is"
_SEVERAL = "start one worker for each engine instead"
_OURS = "Midstream's own class is needed"
#: The certificate runs without adapters, so it says nothing about rows with them.
_ADAPTERS = "untested, and the certificate runs without adapters"


class UnsupportedConfigurationError(ValueError):
    """vLLM is configured in a way in which rows may be wrong."""


RULES = (
    # Rows of a batch
    SettingRule("parallel_config.enable_dbo", _SPLIT),
    SettingRule("parallel_config.ubatch_size", _SPLIT, (0, 1)),
    SettingRule("parallel_config.prefill_context_parallel_size", _SPLIT, (1,)),
    SettingRule("parallel_config.decode_context_parallel_size", _STATE, (1,)),
    SettingRule("parallel_config.data_parallel_size", _SEVERAL, (1,)),
    SettingRule("parallel_config.use_sequence_parallel_moe", _SPLIT),
    SettingRule("parallel_config.enable_hc_sp", _SPLIT),
    SettingRule("parallel_config.enable_eplb", "experts move between ranks"),
    SettingRule("parallel_config.enable_elastic_ep", "ranks come and go"),
    SettingRule("parallel_config.enable_fault_tolerance", "ranks come and go"),
    SettingRule(
        "parallel_config.enable_batch_sharded_sampling",
        "no rank has all logits of a step to grade",
        (False, None),
    ),
    SettingRule("parallel_config.distributed_executor_backend", valid=("mp", "uni", "ray", None)),
    SettingRule(
        "parallel_config.worker_cls",
        _OURS,
        ("midstream.workers.runner.vllm.worker_class.MidstreamWorker",),
    ),
    SettingRule(
        "parallel_config.worker_extension_cls",
        "it adds calls to the ranks that no receipt covers",
        ("",),
    ),
    SettingRule(
        "scheduler_config.scheduler_cls",
        _OURS,
        tuple(
            f"midstream.workers.runner.vllm.scheduler.{name}"
            for name in ("MidstreamAsyncScheduler", "MidstreamScheduler")
        ),
    ),
    SettingRule(
        "cache_config.kv_sharing_fast_prefill",
        "the upper layers compute only the last row of a prompt",
    ),
    # LoRA
    SettingRule("lora_config.fully_sharded_loras", _ADAPTERS),
    SettingRule("lora_config.target_modules", "adapters would be applied in part", (None,)),
    SettingRule(
        "lora_config.default_mm_loras",
        "requests would get an adapter that they did not name",
        (None,),
    ),
    SettingRule("lora_config.enable_tower_connector_lora", _ADAPTERS),
    SettingRule("lora_config.specialize_active_lora", _ADAPTERS),
    SettingRule("lora_config.enable_mixed_moe_lora_format", _ADAPTERS),
    SettingRule("lora_config.enable_moe_shared_loras", _ADAPTERS),
    SettingRule(
        "lora_config.max_lora_cls_labels", "requests that do not generate report no end", (None,)
    ),
    SettingRule(
        "lora_config.lora_dtype other than model_config.dtype",
        "adapters are computed in the model's dtype",
        read=lambda config: (
            config.lora_config is not None
            and config.lora_config.lora_dtype != config.model_config.dtype
        ),
    ),
    SettingRule(
        "lora_config with compilation or graphs",
        f"with compilation, adapters are {_ADAPTERS}: set enforce_eager",
        read=lambda config: (
            config.lora_config is not None and not config.model_config.enforce_eager
        ),
    ),
    SettingRule(
        "lora_config with a model of experts",
        "vLLM's experts do not run on CPUs once adapters are served, and are untested elsewhere",
        read=lambda config: config.lora_config is not None and config.model_config.is_moe,
    ),
    SettingRule(
        "lora_config with a quantised model",
        _ADAPTERS,
        read=lambda config: (
            config.lora_config is not None and config.model_config.quantization is not None
        ),
    ),
    SettingRule(
        "lora_config with speculative_config",
        _ADAPTERS,
        read=lambda config: (
            config.lora_config is not None and config.speculative_config is not None
        ),
    ),
    SettingRule(
        "model_config.runner_type", "requests that do not generate report no end", ("generate",)
    ),
    SettingRule("model_config.is_encoder_decoder", "an encoder-decoder model has two streams"),
    SettingRule(
        "model_config.is_mm_prefix_lm with images",
        "tokens of an image attend to later ones in transformers' model, which is not "
        "proven of vLLM's",
        read=lambda config: _takes(config, "image") and bool(config.model_config.is_mm_prefix_lm),
    ),
    SettingRule(
        "model_config.multimodal_config.limit_per_prompt for videos or sounds",
        "their positions cannot be named",
        read=lambda config: _takes(config, "video", "audio"),
    ),
    SettingRule(
        "model_config.multimodal_config.mm_processor_cache_gb",
        "prompts would be processed in another order than they are submitted",
        (0,),
    ),
    SettingRule(
        "model_config.enable_prompt_embeds", "positions given as embeddings have no tokens"
    ),
    SettingRule(
        "model_config.disable_cascade_attn",
        "a common prefix would be computed once for a batch: other requests would change the bits",
        (True,),
    ),
    SettingRule("model_config.enable_sleep_mode", "the hook sites' buffers leave the device"),
    SettingRule(
        "diffusion_config", "a step computes rows of positions that are not final", (None,)
    ),
    # State outside the batch
    SettingRule(
        "kv_transfer_config",
        "requests could reuse cached blocks whose rows were not kept: the limit on reuse does not "
        "cover a connector's blocks",
        (None,),
    ),
    SettingRule("ec_transfer_config", _STATE, (None,)),
    SettingRule("cache_config.kv_offloading_size", _STATE, (None,)),
    SettingRule(
        "cache_config.mamba_cache_mode",
        f"{_STATE} (recurrent models: set enable_prefix_caching=false)",
        ("none",),
    ),
    SettingRule("cache_config.use_replayssm", _STATE),
    SettingRule("cache_config.enable_mamba_shared_prefix_checkpoint", _STATE),
    SettingRule("attention_config.hisparse_config", _STATE, (None,)),
    SettingRule(
        "attention_config.use_non_causal", "later positions change the rows of earlier ones"
    ),
    SettingRule(
        "weight_transfer_config", "the weights change under kept rows and cached prompts", (None,)
    ),
    SettingRule(
        "watermark_config", "tokens would be sampled otherwise, and no receipt shows it", (None,)
    ),
    SettingRule("aux_output_config.enabled", "no receipt covers such outputs"),
    # Compilation
    SettingRule(
        "compilation_config.mode",
        valid=(
            CompilationMode.NONE,
            CompilationMode.DYNAMO_TRACE_ONCE,
            CompilationMode.VLLM_COMPILE,
        ),
    ),
    SettingRule(
        "compilation_config.inductor_passes", "a pass may drop or move the hook sites' ops", ({},)
    ),
)


def _takes(config: VllmConfig, *modalities: str) -> bool:
    """Return whether prompts may contain any of these modalities."""
    section = config.model_config.multimodal_config
    return section is not None and any(
        section.get_limit_per_prompt(modality) > 0 for modality in modalities
    )


def check(config: VllmConfig) -> list[str]:
    """Return caveats that name what is unproven: vLLM's version, and values of settings.

    Raises UnsupportedConfigurationError that names every setting whose value is refused.
    """
    verdicts = [judge(RULES, config), drafters.verdict(config)]
    if refused := [clause for verdict in verdicts for clause in verdict.refused]:
        raise UnsupportedConfigurationError(
            "this configuration of vLLM is not supported: " + "; ".join(refused)
        )
    return seams.of_version(vllm.__version__) + [
        UNPROVEN + clause for verdict in verdicts for clause in verdict.unproven
    ]
