"""vLLM's engine options that are refused, with the reason, those that are proven, and those
that are no part of a model's identity.

Data only; `option_check` reads it. An option on no list is passed to vLLM, and a caveat calls it
unproven: the certificate and the comparison with transformers decide whether the engine starts.
"""

from typing import Any

#: Option → Midstream's setting for it. These are refused, so that each fact is in one place.
OURS: dict[str, str] = {
    "distributed_executor_backend": "executor",
    "kv_cache_memory_bytes": "kv_cache_gib (on a CPU; elsewhere engine.num_gpu_blocks_override)",
    "enable_lora": "engine.max_loras",
    "log_level": "log_level",
    "log_config_file": "log_format",
    "logging_config": "log_format",
    "model": "model",
    "language_model_only": "images_per_prompt",
    "limit_mm_per_prompt": "images_per_prompt",
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
    "it changes which tokens are sampled, and no receipt would show it": ("watermark_config",),
    "the weights would change under kept rows and cached prompts": ("weight_transfer_config",),
    "it adds calls to the ranks that no receipt covers": ("worker_extension_cls",),
}
#: Option → why it is refused.
WRONG: dict[str, str] = {name: reason for reason, names in _REFUSED.items() for name in names}

#: Option → the values (of a table: the keys) with which an engine gave transformers' rows at every
#: hook, plain and edited, and the same tokens; empty: all values of its type. Kept so that ordinary
#: options have no caveat; `tests/engine/option_cases.py` has a case for each, and
#: `tests/machines/test_nodes.py` for those of several machines.
PROVEN: dict[str, tuple[Any, ...]] = {
    "async_scheduling": (False,),
    "attention_backend": ("CPU_ATTN",),
    "attention_config": ("backend",),
    "code_revision": (),
    "compilation_config": ("backend", "custom_ops", "mode"),
    "config_format": ("auto", "hf"),
    "cpu_distributed_timeout_seconds": (),
    "disable_custom_all_reduce": (),
    "disable_hybrid_kv_cache_manager": (),
    "disable_sliding_window": (),
    "distributed_timeout_seconds": (),
    "enable_chunked_prefill": (),
    "enable_logging_iteration_details": (),
    "enable_shm_tensor_arena": (),
    "fail_on_environ_validation": (),
    "gpu_memory_utilization": (),
    "hf_config_path": (),
    "hf_overrides": (),
    "ir_op_priority": ("rms_norm",),
    "jit_monitor_mode": ("warn",),
    "kv_cache_dtype": ("auto", "bfloat16"),
    "load_format": ("auto", "hf", "safetensors"),
    "long_prefill_token_threshold": (),
    "long_prefill_token_threshold_adaptive": (),
    "master_addr": (),
    "master_port": (),
    "max_num_active_seqs": (),
    "max_num_scheduled_tokens": (),
    "model_impl": ("auto", "vllm"),
    "model_loader_extra_config": ("enable_multithread_load", "num_threads"),
    "nnodes": (),
    "node_rank": (),
    "optimization_level": (0, 1, 2, 3),
    "performance_mode": ("balanced", "interactivity", "throughput"),
    "prefill_schedule_interval": (),
    "prefix_caching_hash_algo": ("sha256", "sha256_cbor"),
    "revision": (),
    "safetensors_load_strategy": ("lazy", "eager", "prefetch"),
    "safetensors_prefetch_block_size": (),
    "safetensors_prefetch_num_threads": (),
    "scheduler_reserve_full_isl": (),
    "seed": (),
    "stream_interval": (),
    "swa_bounded_replay": (),
    "tokenizer": (),
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_revision": (),
    "trust_remote_code": (),
    "use_fp64_gumbel": (),
    "use_tqdm_on_load": (),
    "watermark": (),
}

#: Options that decide how a model is served and not what it computes, beyond the rounding that
#: another division or kernel of the same computation brings. A model's identity has all others.
SERVING = frozenset({
    "async_scheduling", "attention_backend", "compilation_config",
    "cpu_distributed_timeout_seconds", "cpu_offload_gb", "cpu_offload_params",
    "cudagraph_capture_sizes", "device_ids", "disable_chunked_mm_input",
    "disable_custom_all_reduce", "disable_hybrid_kv_cache_manager",
    "distributed_timeout_seconds", "download_dir", "enable_chunked_prefill",
    "enable_cumem_allocator", "enable_ep_weight_filter", "enable_expert_parallel",
    "enable_flashinfer_autotune", "enable_layerwise_nvtx_tracing",
    "enable_logging_iteration_details", "enable_shm_tensor_arena",
    "expert_placement_strategy", "fail_on_environ_validation", "gpu_memory_utilization",
    "ir_op_priority", "jit_monitor_mode", "jit_monitor_verbose",
    "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
    "master_addr", "master_port",
    "max_cudagraph_capture_size", "max_logprobs", "max_num_active_seqs",
    "max_num_scheduled_tokens", "max_parallel_loading_workers", "mm_encoder_tp_mode",
    "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc",
    "nnodes", "node_rank", "numa_bind", "numa_bind_cpus",
    "numa_bind_nodes", "offload_backend", "offload_group_size", "offload_num_in_group",
    "offload_params", "offload_prefetch_step", "optimization_level", "performance_mode",
    "prefill_schedule_interval", "prefix_cache_retention_interval",
    "prefix_caching_hash_algo", "profiler_config", "pt_load_map_location",
    "renderer_num_workers", "revision", "safetensors_load_strategy",
    "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads",
    "scheduler_reserve_full_isl", "scheduling_policy", "seed", "skip_mm_profiling",
    "stream_interval", "swa_bounded_replay", "tokenizer", "trust_remote_code",
    "use_tqdm_on_load", "watermark",
})  # fmt: skip
