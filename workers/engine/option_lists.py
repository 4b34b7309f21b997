"""vLLM's engine options in three lists: proven with Midstream, wrong with it, unknown. Data only; `option_check` reads it.

Every field of vLLM's `AsyncEngineArgs` is in exactly one list. `python -m midstream.workers.engine.option_lists` prints the tables of
`docs/engine-options.md`, whose part between two comments they are.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Proven:
    """Accepted: an engine with it gave transformers' rows at every hook, plain and edited, and the same tokens."""

    why: str  # what it changes, and so what the proof is worth
    values: tuple[Any, ...] = ()  # those that are proven; another one is as an unknown option; empty: any of its type
    parts: tuple[str, ...] = ()  # of an option that is a table: the proven keys; another one is as an unknown option; empty: any
    on_cpu: str = ""  # why the proof says little: on a CPU it changes nothing


_ENGINE = "start one worker for each engine instead"
_HOSTS = "several machines need `executor = ray`"
_SPLIT = "it divides a batch's rows between passes or ranks, and edits would reach the wrong rows"
_STATE = "it changes what a block of the KV cache holds or where it is; kept rows and cached prompts would not match"
_EXPERTS = "experts or ranks move while requests run"
_OFFLOAD = "vLLM and Midstream would wrap the same modules, which is untested"
_SLEEP = "the hook sites' buffers would leave the device"
_GENERATION = "Midstream serves models that generate"
_OURS = "Midstream's own class is needed"
_JOB = "sampling parameters come with each job"
_NO_EFFECT = "it belongs to vLLM's own HTTP server or statistics, which do not run here: it would have no effect"
_LORA = "adapters are registered with Midstream, whose prefix cache and receipts account for them"

#: Option → our setting for the same thing. Refused, so that each fact is in one place.
OURS: dict[str, str] = {
    "block_size": "block_size",
    "distributed_executor_backend": "executor",
    "dtype": "dtype",
    "enable_prefix_caching": "enable_prefix_caching",
    "enforce_eager": "enforce_eager",
    "kv_cache_memory_bytes": "kv_cache_gib (on a CPU; elsewhere num_gpu_blocks)",
    "enable_lora": "lora_dir",
    "log_config_file": "log_format",
    "log_level": "log_level",
    "logging_config": "log_format",
    "language_model_only": "images_per_prompt",
    "limit_mm_per_prompt": "images_per_prompt",
    "max_cpu_loras": "max_cpu_loras",
    "max_lora_rank": "max_lora_rank",
    "max_loras": "max_loras",
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "model": "model",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "otlp_traces_endpoint": "otel_endpoint",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "served_model_name": "model_name",
    "spec_method": "drafter",
    "spec_model": "draft_model",
    "spec_tokens": "speculative_tokens",
    "speculative_config": "drafter (with speculative_tokens and draft_model)",
    "tensor_parallel_size": "tensor_parallel_size",
}

#: Option → why it is refused.
WRONG: dict[str, str] = {
    "_api_process_count": _NO_EFFECT,
    "_api_process_rank": _NO_EFFECT,
    "additional_config": "Midstream keeps its buffer layout there, as part of the compile cache's key",
    "aggregate_engine_logging": _NO_EFFECT,
    "allowed_local_media_path": _NO_EFFECT,
    "allowed_media_domains": _NO_EFFECT,
    "aux_output_config": "a step would return outputs that no receipt covers",
    "collect_detailed_traces": _NO_EFFECT,
    "convert": _GENERATION,
    "cp_kv_cache_interleave_size": _STATE,
    "cudagraph_metrics": _NO_EFFECT,
    "custom_histogram_buckets": _NO_EFFECT,
    "data_parallel_address": _ENGINE,
    "data_parallel_backend": _ENGINE,
    "data_parallel_external_lb": _ENGINE,
    "data_parallel_hybrid_lb": _ENGINE,
    "data_parallel_multi_port_external_lb": _ENGINE,
    "data_parallel_rank": _ENGINE,
    "data_parallel_rpc_port": _ENGINE,
    "data_parallel_size": _ENGINE,
    "data_parallel_size_local": _ENGINE,
    "data_parallel_start_rank": _ENGINE,
    "dbo_decode_token_threshold": _SPLIT,
    "dbo_prefill_token_threshold": _SPLIT,
    "dcp_comm_backend": _STATE,
    "dcp_kv_cache_interleave_size": _STATE,
    "dcp_q_replicate": _STATE,
    "decode_context_parallel_size": _STATE,
    "default_mm_loras": _LORA,
    "diffusion_config": "a step computes rows of positions that are not final",
    "disable_cascade_attn": "Midstream needs vLLM's default: a common prefix is not computed once for a batch",
    "disable_log_stats": _NO_EFFECT,
    "disable_nccl_for_dp_synchronization": _ENGINE,
    "dp_sync_interval": _ENGINE,
    "ec_manager_config": _STATE,
    "ec_transfer_config": _STATE,
    "elastic_ep_max_dp_size": _EXPERTS,
    "enable_batch_sharded_sampling": "no rank would have all logits of a step to grade",
    "enable_dbo": _SPLIT,
    "enable_elastic_ep": _EXPERTS,
    "enable_eplb": _EXPERTS,
    "enable_fault_tolerance": _EXPERTS,
    "enable_hc_sp": _SPLIT,
    "enable_log_requests": _NO_EFFECT,
    "enable_mamba_shared_prefix_checkpoint": _STATE,
    "enable_mfu_metrics": _NO_EFFECT,
    "enable_mm_processor_stats": _NO_EFFECT,
    "enable_nccl_comm_suspend": _SLEEP,
    "enable_prompt_embeds": "positions that are given as embeddings have no tokens",
    "enable_return_routed_experts": "a step would return outputs that no receipt covers",
    "enable_sleep_mode": _SLEEP,
    "engram_config": "rows depend on tables beside the model, which is untested",
    "eplb_config": _EXPERTS,
    "fault_tolerance_config": _EXPERTS,
    "fully_sharded_loras": _LORA,
    "generation_config": _JOB,
    "hf_token": "settings are passed through environments and logs: set HF_TOKEN, which vLLM reads itself",
    "io_processor_plugin": _NO_EFFECT,
    "kv_cache_metrics": _NO_EFFECT,
    "kv_cache_metrics_sample": _NO_EFFECT,
    "kv_events_config": _NO_EFFECT,
    "kv_offloading_backend": _STATE,
    "kv_offloading_size": _STATE,
    "kv_sharing_fast_prefill": "the upper layers would compute only the last row of a prompt",
    "kv_transfer_config": _STATE,
    "logits_processors": "a processor could change tokens of any request, and no receipt would show it",
    "logprobs_mode": "results are documented as raw log-probabilities",
    "lora_dtype": _LORA,
    "lora_target_modules": _LORA,
    "mamba_cache_mode": _STATE,
    "master_addr": _HOSTS,
    "master_port": _HOSTS,
    "max_lora_cls_labels": _LORA,
    "max_num_queued_reqs": "Midstream accepts jobs before the engine sees them: see `queue_limit`",
    "max_num_queued_tokens": "Midstream accepts jobs before the engine sees them: see `queue_limit`",
    "mm_processor_cache_gb": "its two halves rely on requests being submitted in the order in which they were processed",
    "model_class_overrides": "the hook points belong to the class that the checkpoint names",
    "model_weights": "the weights are those of the setting `model`",
    "nnodes": _HOSTS,
    "node_rank": _HOSTS,
    "offload_backend": _OFFLOAD,
    "cpu_offload_gb": _OFFLOAD,
    "cpu_offload_params": _OFFLOAD,
    "offload_group_size": _OFFLOAD,
    "offload_num_in_group": _OFFLOAD,
    "offload_params": _OFFLOAD,
    "offload_prefetch_step": _OFFLOAD,
    "override_generation_config": _JOB,
    "per_request_spec_decode_metrics": _NO_EFFECT,
    "pooler_config": _GENERATION,
    "prefill_context_parallel_size": _SPLIT,
    "ray_workers_use_nsight": _NO_EFFECT,
    "reasoning_config": _NO_EFFECT,
    "reasoning_parser": _NO_EFFECT,
    "reasoning_parser_plugin": _NO_EFFECT,
    "replayssm_buffer_len": _STATE,
    "return_sampling_mask": "a step would return outputs that no receipt covers",
    "runner": _GENERATION,
    "scheduler_cls": _OURS,
    "show_hidden_metrics_for_version": _NO_EFFECT,
    "shutdown_timeout": _NO_EFFECT,
    "skip_tokenizer_init": "the API tokenises with the engine's own tokenizer",
    "sleep_mode_offload_cudagraph": _SLEEP,
    "sleep_preserve_parameter_names": _SLEEP,
    "specialize_active_lora": _LORA,
    "enable_mixed_moe_lora_format": _LORA,
    "enable_moe_shared_loras": _LORA,
    "enable_tower_connector_lora": _LORA,
    "tokens_only": "the API tokenises with the engine's own tokenizer",
    "ubatch_size": _SPLIT,
    "use_replayssm": _STATE,
    "watermark_config": "it changes which tokens are sampled, which is untested",
    "weight_transfer_config": "the weights would change under kept rows and cached prompts",
    "worker_cls": _OURS,
    "worker_extension_cls": "it adds calls to the ranks that no receipt covers",
}

_MEMORY = "how much memory, not what is computed"
_STEPS = "which tokens a step has, not what is computed for them"
_LOADING = "how weights are read, not which"
_TIMEOUTS = "how long ranks wait for each other"
_KERNELS = "which kernels compute"
_LOGS = "what is logged"

#: Option → what it changes.
PROVEN: dict[str, Proven] = {
    "async_scheduling": Proven("whether steps overlap", values=(False,), on_cpu="steps never overlap there"),
    "attention_backend": Proven(_KERNELS, values=("CPU_ATTN",), on_cpu="ordinary attention has no other there"),
    "attention_config": Proven(_KERNELS, parts=("backend",), on_cpu="ordinary attention has no other there"),
    "code_revision": Proven("the revision of remote code on the hub"),
    "compilation_config": Proven(_KERNELS, parts=("backend", "custom_ops", "mode")),
    "config_format": Proven("the config's format", values=("auto", "hf")),
    "cpu_distributed_timeout_seconds": Proven(_TIMEOUTS),
    "disable_custom_all_reduce": Proven(_KERNELS, on_cpu="such kernels are off there"),
    "disable_hybrid_kv_cache_manager": Proven("how layers with a window share blocks of the KV cache"),
    "disable_sliding_window": Proven("the length of requests: what a window would cut is refused"),
    "distributed_timeout_seconds": Proven(_TIMEOUTS),
    "enable_chunked_prefill": Proven(_STEPS),
    "enable_logging_iteration_details": Proven(_LOGS),
    "enable_shm_tensor_arena": Proven("how tensors reach other processes"),
    "fail_on_environ_validation": Proven("whether vLLM accepts unknown VLLM_* variables"),
    "gpu_memory_utilization": Proven(_MEMORY, on_cpu="`kv_cache_gib` decides"),
    "hf_config_path": Proven("where the config is"),
    "hf_overrides": Proven("the config, which is checked as if the checkpoint had it"),
    "ir_op_priority": Proven(_KERNELS, parts=("rms_norm",), on_cpu="there is no other implementation"),
    "jit_monitor_mode": Proven(_LOGS, values=("warn",), on_cpu="only a GPU's worker reads it"),
    "load_format": Proven("the weights' format", values=("auto", "hf", "safetensors")),
    "long_prefill_token_threshold": Proven(_STEPS),
    "long_prefill_token_threshold_adaptive": Proven(_STEPS),
    "max_num_active_seqs": Proven(_STEPS),
    "max_num_scheduled_tokens": Proven(_STEPS),
    "model_impl": Proven("whose model code runs", values=("auto", "vllm")),
    "model_loader_extra_config": Proven(_LOADING, parts=("enable_multithread_load", "num_threads")),
    "optimization_level": Proven("how much is compiled", values=(0, 1, 2, 3)),
    "performance_mode": Proven(_STEPS, values=("balanced", "interactivity", "throughput"), on_cpu="it sizes graphs of a GPU"),
    "prefill_schedule_interval": Proven("nothing here: only data parallel engines read it, which are refused"),
    "prefix_caching_hash_algo": Proven("how blocks are named", values=("sha256", "sha256_cbor")),
    "revision": Proven("the revision on the hub"),
    "safetensors_load_strategy": Proven(_LOADING, values=("lazy", "eager", "prefetch")),
    "safetensors_prefetch_block_size": Proven(_LOADING),
    "safetensors_prefetch_num_threads": Proven(_LOADING),
    "scheduler_reserve_full_isl": Proven(_STEPS),
    "seed": Proven("what is sampled without a seed of the request's own"),
    "stream_interval": Proven("how many tokens come together"),
    "swa_bounded_replay": Proven(
        "how much of a window is computed again after the prefix cache", on_cpu="only DeepSeek V4.1's code for GPUs reads it"
    ),
    "kv_cache_dtype": Proven("how the KV cache rounds", values=("auto", "bfloat16")),
    "tokenizer": Proven("where the tokenizer is"),
    "tokenizer_mode": Proven("which tokenizer code runs", values=("auto", "hf")),
    "tokenizer_revision": Proven("the tokenizer's revision on the hub"),
    "trust_remote_code": Proven("whether code beside the checkpoint runs"),
    "use_fp64_gumbel": Proven("the precision of sampling"),
    "use_tqdm_on_load": Proven(_LOGS),
    "watermark": Proven("how many blocks of the KV cache stay free"),
}

#: Rows with and without them were not compared: accepted with `engine_unproven` only.
UNKNOWN: frozenset[str] = frozenset((
    "all2all_backend", "allow_deprecated_quantization", "cudagraph_capture_sizes", "device_ids", "download_dir", "disable_chunked_mm_input",
    "enable_cumem_allocator", "enable_ep_weight_filter", "enable_expert_parallel", "expert_placement_strategy",
    "enable_flashinfer_autotune", "enable_layerwise_nvtx_tracing",
    "enable_mamba_cache_stochastic_rounding", "enable_mm_embeds", "enable_trace_replay", "gdn_prefill_backend", "ignore_patterns",
    "interleave_mm_strings", "jit_monitor_verbose", "kda_decode_backend", "kda_prefill_backend", "kernel_config",
    "kv_cache_dtype_skip_layers", "linear_backend", "mamba_backend",
    "mamba_block_size", "mamba_cache_dtype", "mamba_cache_philox_rounds", "mamba_config", "mamba_ssm_cache_dtype",
    "mamba_ssu_algorithm", "max_cudagraph_capture_size", "max_logprobs", "max_parallel_loading_workers", "media_io_kwargs",
    "mm_device_do_normalize", "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
    "mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path", "mm_encoder_only", "mm_encoder_tp_mode",
    "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_processor_cache_type", "mm_processor_device",
    "mm_processor_kwargs", "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "moe_backend", "numa_bind", "numa_bind_cpus",
    "numa_bind_nodes", "prefix_cache_retention_interval", "prefix_match_unit", "profiler_config", "pt_load_map_location", "quantization",
    "quantization_config", "renderer_num_workers", "scheduling_policy", "skip_mm_profiling", "sparse_indexer_topk_backend",
    "structured_outputs_config", "video_pruning_method", "video_pruning_rate",
))  # fmt: skip


def tables() -> Iterator[str]:
    """The lists as Markdown, for `docs/engine-options.md`."""
    yield "## Proven"
    yield ""
    yield "| option | values | what it changes |"
    yield "|---|---|---|"
    for name, entry in sorted(PROVEN.items()):
        values = ", ".join(f"`{json.dumps(value)}`" for value in entry.values) or ", ".join(f"`{part}`" for part in entry.parts) or "any"
        yield f"| `{name}` | {values} | {entry.why}{f'; on a CPU nothing: {entry.on_cpu}' if entry.on_cpu else ''} |"
    yield ""
    yield "## Refused: a setting of Midstream"
    yield ""
    yield "| option | use the setting |"
    yield "|---|---|"
    yield from (f"| `{name}` | {_named(setting)} |" for name, setting in sorted(OURS.items()))
    yield ""
    yield "## Refused: wrong with Midstream"
    yield ""
    yield "| options | reason |"
    yield "|---|---|"
    for reason in dict.fromkeys(WRONG[name] for name in sorted(WRONG)):
        yield f"| {', '.join(f'`{name}`' for name in sorted(WRONG) if WRONG[name] == reason)} | {reason} |"
    yield ""
    yield "## Unknown"
    yield ""
    yield ", ".join(f"`{name}`" for name in sorted(UNKNOWN))


def _named(setting: str) -> str:
    name, _, more = setting.partition(" ")
    return f"`{name}` {more}".rstrip()


if __name__ == "__main__":
    print("\n".join(tables()))
