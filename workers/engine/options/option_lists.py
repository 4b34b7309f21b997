"""Lists of vLLM's engine options: proven with Midstream, refused, unknown.

Data only; `option_check` reads it. Every field of vLLM's `AsyncEngineArgs` is in exactly one list.
`python -m midstream.workers.engine.options.option_lists` prints the tables between the two comments
in `docs/engine-options.md`.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Proven:
    """An accepted option: an engine with it gave transformers' rows at every hook, plain and
    edited, and the same tokens.
    """

    why: str  # what the option changes
    # the proven values (empty: all of its type); other values count as unknown
    values: tuple[Any, ...] = ()
    # the proven keys of an option that is a table (empty: all); other keys count as unknown
    parts: tuple[str, ...] = ()
    on_cpu: str = ""  # why the option changes nothing on a CPU, where the proof then says little


#: Options that are settings of Midstream under the same name.
_SAME = (
    "block_size",
    "dtype",
    "enable_prefix_caching",
    "enforce_eager",
    "log_level",
    "max_cpu_loras",
    "max_lora_rank",
    "max_loras",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "model",
    "pipeline_parallel_size",
    "tensor_parallel_size",
)
#: Option → Midstream's setting for it. These are refused, so that each fact is in one place.
OURS: dict[str, str] = dict(zip(_SAME, _SAME, strict=True)) | {
    "distributed_executor_backend": "executor",
    "master_addr": "node_master",
    "master_port": "node_master",
    "nnodes": "nodes",
    "node_rank": "node_rank",
    "kv_cache_memory_bytes": "kv_cache_gib (on a CPU; elsewhere num_gpu_blocks)",
    "enable_lora": "lora_dir",
    "log_config_file": "log_format",
    "logging_config": "log_format",
    "language_model_only": "images_per_prompt",
    "limit_mm_per_prompt": "images_per_prompt",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "otlp_traces_endpoint": "otel_endpoint",
    "served_model_name": "model_name",
    "spec_method": "drafter",
    "spec_model": "draft_model",
    "spec_tokens": "speculative_tokens",
    "speculative_config": "drafter (with speculative_tokens and draft_model)",
}

#: Why options are refused → the options.
_REFUSED: dict[str, tuple[str, ...]] = {
    (
        "it belongs to vLLM's own HTTP server or statistics, which do not run here: it "
        "would have no effect"
    ): (
        "_api_process_count",
        "_api_process_rank",
        "aggregate_engine_logging",
        "allowed_local_media_path",
        "allowed_media_domains",
        "collect_detailed_traces",
        "cudagraph_metrics",
        "custom_histogram_buckets",
        "disable_log_stats",
        "enable_log_requests",
        "enable_mfu_metrics",
        "enable_mm_processor_stats",
        "io_processor_plugin",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "kv_events_config",
        "per_request_spec_decode_metrics",
        "ray_workers_use_nsight",
        "reasoning_config",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "show_hidden_metrics_for_version",
        "shutdown_timeout",
    ),
    (
        "Midstream keeps its buffer layout and a checksum of its traced code there, as "
        "part of the compile cache's key"
    ): ("additional_config",),
    "a step would return outputs that no receipt covers": (
        "aux_output_config",
        "enable_return_routed_experts",
        "return_sampling_mask",
    ),
    "Midstream serves models that generate": ("convert", "pooler_config", "runner"),
    (
        "it changes what a block of the KV cache holds or where it is; kept rows and "
        "cached prompts would not match"
    ): (
        "cp_kv_cache_interleave_size",
        "dcp_comm_backend",
        "dcp_kv_cache_interleave_size",
        "dcp_q_replicate",
        "decode_context_parallel_size",
        "ec_manager_config",
        "ec_transfer_config",
        "enable_mamba_shared_prefix_checkpoint",
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_transfer_config",
        "mamba_cache_mode",
        "replayssm_buffer_len",
        "use_replayssm",
    ),
    "vLLM and Midstream would wrap the same modules, which is untested": (
        "cpu_offload_gb",
        "cpu_offload_params",
        "offload_backend",
        "offload_group_size",
        "offload_num_in_group",
        "offload_params",
        "offload_prefetch_step",
    ),
    "start one worker for each engine instead": (
        "data_parallel_address",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_multi_port_external_lb",
        "data_parallel_rank",
        "data_parallel_rpc_port",
        "data_parallel_size",
        "data_parallel_size_local",
        "data_parallel_start_rank",
        "disable_nccl_for_dp_synchronization",
        "dp_sync_interval",
    ),
    "it divides a batch's rows between passes or ranks, and edits would reach the wrong rows": (
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "enable_dbo",
        "enable_hc_sp",
        "prefill_context_parallel_size",
        "ubatch_size",
    ),
    "adapters are registered with Midstream, whose prefix cache and receipts account for them": (
        "default_mm_loras",
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
        "enable_tower_connector_lora",
        "fully_sharded_loras",
        "lora_dtype",
        "lora_target_modules",
        "max_lora_cls_labels",
        "specialize_active_lora",
    ),
    "a step computes rows of positions that are not final": ("diffusion_config",),
    (
        "Midstream needs vLLM's default: with cascade attention, the requests of a batch "
        "share the attention over a common prefix"
    ): ("disable_cascade_attn",),
    "experts or ranks move while requests run": (
        "elastic_ep_max_dp_size",
        "enable_elastic_ep",
        "enable_eplb",
        "enable_fault_tolerance",
        "eplb_config",
        "fault_tolerance_config",
    ),
    "no rank would have all logits of a step to grade": ("enable_batch_sharded_sampling",),
    "the hook sites' buffers would leave the device": (
        "enable_nccl_comm_suspend",
        "enable_sleep_mode",
        "sleep_mode_offload_cudagraph",
        "sleep_preserve_parameter_names",
    ),
    "positions that are given as embeddings have no tokens": ("enable_prompt_embeds",),
    "rows depend on tables next to the model, which is untested": ("engram_config",),
    "sampling parameters come with each job": ("generation_config", "override_generation_config"),
    ("settings are passed through environments and logs: set HF_TOKEN, which vLLM reads itself"): (
        "hf_token",
    ),
    "the upper layers would compute only the last row of a prompt": ("kv_sharing_fast_prefill",),
    "a processor could change tokens of any request, and no receipt would show it": (
        "logits_processors",
    ),
    "results are documented as raw log-probabilities": ("logprobs_mode",),
    "Midstream accepts jobs before the engine sees them: see `queue_limit`": (
        "max_num_queued_reqs",
        "max_num_queued_tokens",
    ),
    "the cache's two halves rely on requests being submitted in the order of their preprocessing": (
        "mm_processor_cache_gb",
    ),
    "the hook points belong to the class that the checkpoint names": ("model_class_overrides",),
    "the weights are those of the setting `model`": ("model_weights",),
    "Midstream's own class is needed": ("scheduler_cls", "worker_cls"),
    "the API tokenises with the engine's own tokenizer": ("skip_tokenizer_init", "tokens_only"),
    "it changes which tokens are sampled, which is untested": ("watermark_config",),
    "the weights would change under kept rows and cached prompts": ("weight_transfer_config",),
    "it adds calls to the ranks that no receipt covers": ("worker_extension_cls",),
}
#: Option → why it is refused.
WRONG: dict[str, str] = {name: reason for reason, names in _REFUSED.items() for name in names}

_MEMORY = "how much memory is used, not what is computed"
_STEPS = "which tokens a step has, not what is computed for them"
_LOADING = "how weights are read, not which"
_TIMEOUTS = "how long ranks wait for each other"
_KERNELS = "which kernels compute"
_LOGS = "what is logged"

#: Option → what it changes.
PROVEN: dict[str, Proven] = {
    "async_scheduling": Proven(
        "whether steps overlap", values=(False,), on_cpu="steps never overlap there"
    ),
    "attention_backend": Proven(
        _KERNELS, values=("CPU_ATTN",), on_cpu="ordinary attention has one backend there"
    ),
    "attention_config": Proven(
        _KERNELS, parts=("backend",), on_cpu="ordinary attention has one backend there"
    ),
    "code_revision": Proven("the revision of remote code on the hub"),
    "compilation_config": Proven(_KERNELS, parts=("backend", "custom_ops", "mode")),
    "config_format": Proven("the config's format", values=("auto", "hf")),
    "cpu_distributed_timeout_seconds": Proven(_TIMEOUTS),
    "disable_custom_all_reduce": Proven(_KERNELS, on_cpu="such kernels are off there"),
    "disable_hybrid_kv_cache_manager": Proven(
        "how layers with a window share blocks of the KV cache"
    ),
    "disable_sliding_window": Proven("the longest request: at most as long as the window"),
    "distributed_timeout_seconds": Proven(_TIMEOUTS),
    "enable_chunked_prefill": Proven(_STEPS),
    "enable_logging_iteration_details": Proven(_LOGS),
    "enable_shm_tensor_arena": Proven("how tensors reach other processes"),
    "fail_on_environ_validation": Proven("whether vLLM accepts unknown VLLM_* variables"),
    "gpu_memory_utilization": Proven(_MEMORY, on_cpu="`kv_cache_gib` decides"),
    "hf_config_path": Proven("where the config is"),
    "hf_overrides": Proven("the config, which is checked as if the checkpoint had it"),
    "ir_op_priority": Proven(
        _KERNELS, parts=("rms_norm",), on_cpu="there is no other implementation"
    ),
    "jit_monitor_mode": Proven(_LOGS, values=("warn",), on_cpu="only a GPU's worker reads it"),
    "load_format": Proven("the weights' format", values=("auto", "hf", "safetensors")),
    "long_prefill_token_threshold": Proven(_STEPS),
    "long_prefill_token_threshold_adaptive": Proven(_STEPS),
    "max_num_active_seqs": Proven(_STEPS),
    "max_num_scheduled_tokens": Proven(_STEPS),
    "model_impl": Proven("whose model code runs", values=("auto", "vllm")),
    "model_loader_extra_config": Proven(_LOADING, parts=("enable_multithread_load", "num_threads")),
    "optimization_level": Proven("how much is compiled", values=(0, 1, 2, 3)),
    "performance_mode": Proven(
        _STEPS,
        values=("balanced", "interactivity", "throughput"),
        on_cpu="it sizes graphs of a GPU",
    ),
    "prefill_schedule_interval": Proven(
        "nothing here: only data parallel engines read it, which are refused"
    ),
    "prefix_caching_hash_algo": Proven("how blocks are named", values=("sha256", "sha256_cbor")),
    "revision": Proven("the revision on the hub"),
    "safetensors_load_strategy": Proven(_LOADING, values=("lazy", "eager", "prefetch")),
    "safetensors_prefetch_block_size": Proven(_LOADING),
    "safetensors_prefetch_num_threads": Proven(_LOADING),
    "scheduler_reserve_full_isl": Proven(_STEPS),
    "seed": Proven("what is sampled without a seed of the request's own"),
    "stream_interval": Proven("how many tokens are returned at a time"),
    "swa_bounded_replay": Proven(
        "how much of a window is computed again after the prefix cache",
        on_cpu="only DeepSeek V4.1's code for GPUs reads it",
    ),
    "kv_cache_dtype": Proven("how the KV cache rounds", values=("auto", "bfloat16")),
    "tokenizer": Proven("where the tokenizer is"),
    "tokenizer_mode": Proven("which tokenizer code runs", values=("auto", "hf")),
    "tokenizer_revision": Proven("the tokenizer's revision on the hub"),
    "trust_remote_code": Proven("whether code shipped with the checkpoint runs"),
    "use_fp64_gumbel": Proven("the precision of sampling"),
    "use_tqdm_on_load": Proven(_LOGS),
    "watermark": Proven("how many blocks of the KV cache stay free"),
}

#: Options whose effect on rows was not compared: accepted with `engine_unproven` only.
UNKNOWN: frozenset[str] = frozenset(
    (
        "all2all_backend",
        "allow_deprecated_quantization",
        "cudagraph_capture_sizes",
        "device_ids",
        "download_dir",
        "disable_chunked_mm_input",
        "enable_cumem_allocator",
        "enable_ep_weight_filter",
        "enable_expert_parallel",
        "expert_placement_strategy",
        "enable_flashinfer_autotune",
        "enable_layerwise_nvtx_tracing",
        "enable_mamba_cache_stochastic_rounding",
        "enable_mm_embeds",
        "enable_trace_replay",
        "gdn_prefill_backend",
        "ignore_patterns",
        "interleave_mm_strings",
        "jit_monitor_verbose",
        "kda_decode_backend",
        "kda_prefill_backend",
        "kernel_config",
        "kv_cache_dtype_skip_layers",
        "linear_backend",
        "mamba_backend",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_cache_philox_rounds",
        "mamba_config",
        "mamba_ssm_cache_dtype",
        "mamba_ssu_algorithm",
        "max_cudagraph_capture_size",
        "max_logprobs",
        "max_parallel_loading_workers",
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_only",
        "mm_encoder_tp_mode",
        "mm_hasher_algorithm",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_type",
        "mm_processor_device",
        "mm_processor_kwargs",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "moe_backend",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "prefix_cache_retention_interval",
        "prefix_match_unit",
        "profiler_config",
        "pt_load_map_location",
        "quantization",
        "quantization_config",
        "renderer_num_workers",
        "scheduling_policy",
        "skip_mm_profiling",
        "sparse_indexer_topk_backend",
        "structured_outputs_config",
        "video_pruning_method",
        "video_pruning_rate",
    )
)
