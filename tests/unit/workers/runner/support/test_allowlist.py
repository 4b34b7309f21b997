"""Configurations of vLLM in which rows may be wrong are refused by name, whoever sets them."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationMode,
    CUDAGraphMode,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    OffloadConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)

from midstream.workers.runner.support import allowlist
from midstream.workers.runner.support.allowlist import RULES, UnsupportedConfigurationError, check

#: Fields that say how much, where or when, but not what a step's rows are. Of a section only: a new
#: field of vLLM must be looked at.
HARMLESS: dict[type, set[str]] = {
    VllmConfig: {
        "model_config",
        "cache_config",
        "parallel_config",
        "scheduler_config",
        "device_config",
        "load_config",
        "offload_config",
        "attention_config",
        "aux_output_config",
        "mamba_config",
        "kernel_config",
        "structured_outputs_config",
        "observability_config",
        "logging_config",
        "quant_config",
        "compilation_config",
        "profiler_config",
        "kv_events_config",
        "ec_manager_config",
        "reasoning_config",
        "additional_config",
        "instance_id",
        "optimization_level",
        "performance_mode",
        "shutdown_timeout",
        "speculative_config",
        "lora_config",
    },
    LoRAConfig: {"max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype"},
    ParallelConfig: {
        "pipeline_parallel_size",
        "tensor_parallel_size",
        "data_parallel_size_local",
        "data_parallel_rank",
        "data_parallel_rank_local",
        "data_parallel_master_ip",
        "data_parallel_rpc_port",
        "dp_sync_interval",
        "data_parallel_master_port",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "is_moe_model",
        "enable_ep_weight_filter",
        "eplb_config",
        "expert_placement_strategy",
        "all2all_backend",
        "max_parallel_loading_workers",
        "disable_custom_all_reduce",
        "enable_shm_tensor_arena",
        "elastic_ep_max_dp_size",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "disable_nccl_for_dp_synchronization",
        "ray_workers_use_nsight",
        "ray_runtime_env",
        "placement_group",
        "master_addr",
        "master_port",
        "nnodes",
        "node_rank",
        "numa_bind",
        "numa_bind_nodes",
        "numa_bind_cpus",
        "assigned_physical_gpu_ids",
        "distributed_timeout_seconds",
        "cpu_distributed_timeout_seconds",
        "world_size",
        "rank",
        "_data_parallel_master_port_list",
        "_coord_store_port",
        "dcp_kv_cache_interleave_size",
        "dcp_comm_backend",
        "dcp_q_replicate",
        "cp_kv_cache_interleave_size",
        "_allow_auto_resolve_cp_interleave_size",
        "data_parallel_index",
        "_api_process_count",
        "_api_process_rank",
        "fault_tolerance_config",
        "enable_expert_parallel",
    },
    SchedulerConfig: {
        "runner_type",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "max_num_seqs",
        "max_num_active_seqs",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "enable_chunked_prefill",
        "is_multimodal_model",
        "max_num_encoder_input_tokens",
        "encoder_cache_size",
        "policy",
        "disable_chunked_mm_input",
        "disable_hybrid_kv_cache_manager",
        "scheduler_reserve_full_isl",
        "watermark",
        "prefill_schedule_interval",
        "async_scheduling",
        "stream_interval",
    },
    CacheConfig: {
        "block_size",
        "user_specified_block_size",
        "kv_cache_layout",
        "prefix_match_unit",
        "gpu_memory_utilization",
        "cache_dtype",
        "is_attention_free",
        "num_gpu_blocks_override",
        "sliding_window",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "prefix_cache_retention_interval",
        "kv_cache_dtype_skip_layers",
        "mamba_page_size_padded",
        "skip_page_size_padded",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "replayssm_buffer_len",
        "use_kda_recoverssm",
        "num_gpu_blocks",
        "num_cpu_blocks",
        "effective_attention_block_size",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
        "hash_block_size",
        "cache_hit_alignment_tokens",
        "swa_bounded_replay",
        "kv_cache_memory_bytes",
        "kv_offloading_backend",
        "_block_size_resolved",
    },
    OffloadConfig: {"offload_backend", "uva", "prefetch"},
    AttentionConfig: {
        "backend",
        "minimax_m3_msa_decode_backend",
        "backend_per_kind",
        "flash_attn_version",
        "flash_attn_max_num_splits_for_cuda_graph",
        "tokenspeed_mla_min_split_kv",
        "tq_max_kv_splits_for_cuda_graph",
        "use_trtllm_attention",
        "disable_flashinfer_q_quantization",
        "mla_prefill_backend",
        "use_prefill_query_quantization",
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "sparse_mla_force_mqa",
        "sparse_mla_prefill_workspace_factor",
        "flex_attn_block_m",
        "flex_attn_block_n",
        "flex_attn_q_block_size",
        "flex_attn_kv_block_size",
    },
}


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    LlamaConfig(architectures=["LlamaForCausalLM"], vocab_size=32, **shape).save_pretrained(
        tmp_path
    )
    model = ModelConfig(
        model=str(tmp_path),
        tokenizer=str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
    )
    made = VllmConfig(model_config=model)
    made.parallel_config.worker_cls = "midstream.workers.runner.vllm.worker_class.MidstreamWorker"
    made.scheduler_config.scheduler_cls = (
        "midstream.workers.runner.vllm.scheduler.MidstreamAsyncScheduler"
    )
    return made


def adapters(config: VllmConfig, **options: Any) -> LoRAConfig:
    """As our settings lead to them, but for `options`."""
    made = LoRAConfig(lora_dtype=config.model_config.dtype)
    for name, value in options.items():
        object.__setattr__(made, name, value)
    put(config, "lora_config", made)
    put(config, "model_config.enforce_eager", True)
    return made


def put(config: VllmConfig, path: str, value: Any) -> None:
    *sections, name = path.split(".")
    target: Any = config
    for section in sections:
        target = getattr(target, section)
    object.__setattr__(target, name, value)


def moe(config: VllmConfig) -> None:
    put(config, "parallel_config.data_parallel_size", 2)
    put(config, "parallel_config.tensor_parallel_size", 2)
    put(config, "parallel_config.enable_expert_parallel", True)


Alter = Callable[[VllmConfig], Any]


def to(path: str, value: Any) -> tuple[str, Alter]:
    return path, lambda config: put(config, path, value)


def lora(name: str, value: Any) -> tuple[str, Alter]:
    return f"lora_config.{name}", lambda config: adapters(config, **{name: value})


def model_with(name: str, value: Any) -> tuple[str, Alter]:
    """Of what the real model config computes, another answer."""

    def alter(config: VllmConfig) -> None:
        own = type(config.model_config)
        config.model_config.__class__ = type("Altered", (own,), {name: property(lambda _: value)})

    return f"model_config.{name}", alter


def beside_adapters(path: str, value: Any) -> Alter:
    """Adapters, and another value of something else."""

    def alter(config: VllmConfig) -> None:
        adapters(config)
        put(config, path, value)

    return alter


def adapters_of_experts(config: VllmConfig) -> None:
    adapters(config)
    model_with("is_moe", True)[1](config)


def images(**options: Any) -> Alter:
    """Of a model that takes one."""
    fields = {
        "limit_per_prompt": {"image": 1, "video": 0, "audio": 0},
        "mm_processor_cache_gb": 0,
    } | options
    return lambda config: put(config, "model_config.multimodal_config", MultiModalConfig(**fields))


def seen_both_ways(config: VllmConfig) -> None:
    images()(config)
    model_with("is_mm_prefix_lm", True)[1](config)


WRONG: list[tuple[str, Alter]] = [
    to("parallel_config.enable_dbo", True),
    to("parallel_config.ubatch_size", 2),
    to("parallel_config.prefill_context_parallel_size", 2),
    to("parallel_config.decode_context_parallel_size", 2),
    to("parallel_config.data_parallel_size", 2),
    ("parallel_config.use_sequence_parallel_moe", moe),
    to("parallel_config.enable_hc_sp", True),
    to("parallel_config.enable_eplb", True),
    to("parallel_config.enable_elastic_ep", True),
    to("parallel_config.enable_fault_tolerance", True),
    to("parallel_config.enable_batch_sharded_sampling", True),
    to("parallel_config.distributed_executor_backend", "external_launcher"),
    to("parallel_config.worker_cls", "auto"),
    to("parallel_config.worker_extension_cls", "a.plug.In"),
    to("scheduler_config.scheduler_cls", None),
    to("cache_config.kv_sharing_fast_prefill", True),
    lora("fully_sharded_loras", True),
    lora("target_modules", ["q_proj"]),
    lora("default_mm_loras", {"image": "a"}),
    lora("enable_tower_connector_lora", True),
    lora("specialize_active_lora", True),
    lora("enable_mixed_moe_lora_format", True),
    lora("enable_moe_shared_loras", True),
    lora("max_lora_cls_labels", 2),
    (
        "lora_config.lora_dtype other than model_config.dtype",
        lambda config: adapters(config, lora_dtype=torch.float16),
    ),
    (
        "lora_config with compilation or graphs",
        beside_adapters("model_config.enforce_eager", False),
    ),
    ("lora_config with a model of experts", adapters_of_experts),
    ("lora_config with a quantised model", beside_adapters("model_config.quantization", "awq")),
    (
        "lora_config with speculative_config",
        beside_adapters("speculative_config", SimpleNamespace(method="ngram")),
    ),
    to("model_config.runner_type", "pooling"),
    model_with("is_encoder_decoder", True),
    ("model_config.is_mm_prefix_lm with images", seen_both_ways),
    (
        "model_config.multimodal_config.limit_per_prompt for videos or sounds",
        images(limit_per_prompt={"image": 1, "audio": 0}),
    ),
    ("model_config.multimodal_config.mm_processor_cache_gb", images(mm_processor_cache_gb=4)),
    to("model_config.enable_prompt_embeds", True),
    to("model_config.disable_cascade_attn", False),
    to("model_config.enable_sleep_mode", True),
    to("diffusion_config", object()),
    to("engram_config", object()),
    to("kv_transfer_config", KVTransferConfig()),
    to("ec_transfer_config", object()),
    to("cache_config.kv_offloading_size", 1.0),
    to("cache_config.mamba_cache_mode", "align"),
    to("cache_config.use_replayssm", True),
    to("cache_config.enable_mamba_shared_prefix_checkpoint", True),
    to("attention_config.hisparse_config", object()),
    to("attention_config.use_non_causal", True),
    to("weight_transfer_config", object()),
    to("offload_config.uva.cpu_offload_gb", 1),
    to("offload_config.prefetch.offload_group_size", 2),
    to("watermark_config", object()),
    (
        "aux_output_config.enabled",
        lambda config: put(config, "aux_output_config.enable_return_routed_experts", True),
    ),
    to("compilation_config.mode", CompilationMode.STOCK_TORCH_COMPILE),
    to("compilation_config.mode", 17),
    to("compilation_config.cudagraph_mode", "of a later version"),
    to("compilation_config.cudagraph_copy_inputs", True),
    to("compilation_config.inductor_passes", {"post_grad": "a.pass"}),
]


def test_what_our_settings_lead_to_is_valid(config: VllmConfig) -> None:
    check(config)
    adapters(config)
    check(config)
    put(config, "lora_config", None)
    for mode in CUDAGraphMode:
        put(config, "compilation_config.cudagraph_mode", mode)
        check(config)
    put(config, "parallel_config.tensor_parallel_size", 4)
    put(config, "parallel_config.pipeline_parallel_size", 2)
    put(config, "compilation_config.mode", CompilationMode.VLLM_COMPILE)
    check(config)


@pytest.mark.parametrize(
    ("name", "alter"), WRONG, ids=[f"{number}-{name}" for number, (name, _) in enumerate(WRONG)]
)
def test_a_value_that_is_not_known_to_be_right_is_refused_by_name(
    config: VllmConfig, name: str, alter: Alter
) -> None:
    alter(config)
    with pytest.raises(UnsupportedConfigurationError, match="is not supported") as refused:
        check(config)
    (line,) = [line for line in str(refused.value).split("; ") if f"{name} is " in line]
    (rule,) = [rule for rule in RULES if rule.name == name]
    assert "valid: " in line
    assert rule.why in line


def test_every_rule_is_tried_but_that_of_the_version() -> None:
    assert {rule.name for rule in RULES} == {name for name, _ in WRONG} | {"vllm.__version__"}


def test_all_that_is_wrong_is_named_at_once(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(config, "parallel_config.enable_dbo", True)
    adapters(config, fully_sharded_loras=True)
    monkeypatch.setattr(allowlist.vllm, "__version__", "0.34.0")
    with pytest.raises(UnsupportedConfigurationError) as refused:
        check(config)
    for part in (
        "enable_dbo is True, valid: False",
        "fully_sharded_loras is True, valid: False",
        "'0.34.0', valid: '0.32.0', '0.33.0'",
    ):
        assert part in str(refused.value)


def test_a_setting_that_vllm_no_longer_has_is_refused(config: VllmConfig) -> None:
    """A later version may have given the feature another name."""
    renamed = SimpleNamespace(
        **{field.name: getattr(config, field.name) for field in fields(config)}
    )
    renamed.parallel_config = SimpleNamespace()
    with pytest.raises(
        UnsupportedConfigurationError, match="enable_dbo is not a setting of this vLLM"
    ):
        check(renamed)  # type: ignore[arg-type]


@pytest.mark.parametrize("section", HARMLESS, ids=lambda section: section.__name__)
def test_every_setting_of_vllm_is_either_ruled_or_known_to_be_harmless(section: type) -> None:
    own = {field.name for field in fields(section)}  # type: ignore[arg-type]
    prefix = {
        VllmConfig: "",
        ParallelConfig: "parallel_config.",
        SchedulerConfig: "scheduler_config.",
        CacheConfig: "cache_config.",
        LoRAConfig: "lora_config.",
        OffloadConfig: "offload_config.",
        AttentionConfig: "attention_config.",
    }[section]
    ruled = {
        rule.name.removeprefix(prefix).split(".")[0]
        for rule in RULES
        if rule.name.startswith(prefix)
    } & own
    if section is VllmConfig:
        ruled = {rule.name for rule in RULES} & own
    assert (own - ruled) ^ (HARMLESS[section] - ruled) == set()


def test_a_rank_refuses_before_it_reads_the_weights(config: VllmConfig) -> None:
    from midstream.workers.runner.vllm.worker_class import MidstreamWorker

    put(config, "parallel_config.prefill_context_parallel_size", 2)
    with pytest.raises(
        UnsupportedConfigurationError, match="prefill_context_parallel_size is 2, valid: 1"
    ):
        MidstreamWorker.load_model(SimpleNamespace(vllm_config=config))  # type: ignore[arg-type]
