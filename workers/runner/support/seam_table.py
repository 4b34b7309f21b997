"""Lists the names inside vLLM that Midstream relies on, but that vLLM does not promise to keep."""

from dataclasses import dataclass

_SCHEDULER = "vllm/scheduler.py"
_ADAPTERS = "vllm/runner_adapters.py"
_BLOCKS = "vllm/kept_blocks.py, vllm/quarantine.py, vllm/scheduler.py"


@dataclass(frozen=True)
class Seam:
    """Names that a module or class of vLLM must have.

    `where`: `module` or `module:Class`. `has`: functions with the parameters that are used, and
    attributes.
    """

    where: str
    has: tuple[str, ...]
    by: str  # the files that rely on these names
    #: Classes in these files that extend vLLM's class, and functions that replace the one of the
    #: same name: they must accept every call that vLLM's accept.
    ours: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return the names without parameters."""
        return [name.partition("(")[0] for name in self.has]


SEAMS: tuple[Seam, ...] = (
    # Workers and runners
    Seam(
        "vllm.v1.worker.gpu_worker:Worker",
        (
            "init_device",
            "load_model",
            "initialize_from_config",
            "get_model",
            "model_runner",
            "vllm_config",
            "rank",
            "device",
        ),
        "vllm/worker_class.py",
        ("MidstreamWorker",),
    ),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker", (), "vllm/worker_class.py", ("MidstreamWorker",)),
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        (
            "execute_model(scheduler_output, intermediate_tensors)",
            "sample_tokens",
            "lora_manager",
            "_prepare_inputs(scheduler_output, num_scheduled_tokens)",
            "_warmup_and_capture(desc)",
            "execute_model_state",
            "input_batch",
            "cudagraph_dispatcher",
            "intermediate_tensors",
            "discard_request_mask",
            "kv_caches",
            "use_aux_hidden_state_outputs",
        ),
        f"{_ADAPTERS}, vllm/zeroed_blocks.py, vllm/worker_class.py, certificate/observed.py",
        ("V1Adapter",),
    ),
    Seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        ("_init_kv_zero_meta", "_zero_block_ids(block_ids)"),
        f"{_ADAPTERS}, vllm/zeroed_blocks.py",
        ("V1Adapter", "CpuBlocks"),
    ),
    Seam("vllm.v1.worker.gpu_model_runner:ExecuteModelState", ("hidden_states",), _ADAPTERS),
    Seam(
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        ("req_ids", "num_reqs", "num_computed_tokens_cpu", "generators"),
        _ADAPTERS,
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        (
            "execute_model(scheduler_output, intermediate_tensors, dummy_run)",
            "sample_tokens",
            "initialize_kv_cache",
            "prepare_attn(input_batch)",
            "execute_model_state",
            "cudagraph_manager",
            "get_draft_model",
            "lora_manager",
            "kv_caches",
            "use_aux_hidden_state_outputs",
        ),
        f"{_ADAPTERS}, vllm/zeroed_blocks.py, vllm/worker_class.py, certificate/observed.py",
        ("V2Adapter",),
    ),
    Seam(
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
        ("_init_kv_zero_meta",),
        f"{_ADAPTERS}, vllm/zeroed_blocks.py",
        ("V2Adapter", "CpuBlocks"),
    ),
    Seam(
        "vllm.v1.worker.utils:KVBlockZeroer",
        ("zero_block_ids(block_ids)", "warmup(num_kv_blocks)"),
        "vllm/zeroed_blocks.py",
        ("CpuBlocks",),
    ),
    Seam("vllm.v1.worker.gpu.model_runner:ExecuteModelState", ("hidden_states",), _ADAPTERS),
    Seam(
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        (
            "req_ids",
            "num_reqs",
            "num_scheduled_tokens",
            "num_computed_tokens_np",
            "cu_num_logits_np",
        ),
        _ADAPTERS,
    ),
    # What the scheduler sends to the ranks
    Seam(
        "vllm.v1.core.sched.output:SchedulerOutput",
        (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "finished_req_ids",
            "preempted_req_ids",
            "scheduled_spec_decode_tokens",
        ),
        f"{_ADAPTERS}, {_SCHEDULER}",
    ),
    Seam(
        "vllm.v1.core.sched.output:NewRequestData",
        ("req_id", "sampling_params", "num_computed_tokens"),
        _ADAPTERS,
    ),
    Seam(
        "vllm.v1.core.sched.output:CachedRequestData",
        ("req_ids", "resumed_req_ids", "num_computed_tokens"),
        _ADAPTERS,
    ),
    Seam("vllm.v1.outputs:ModelRunnerOutput", ("req_ids",), "vllm/quarantine.py"),
    Seam(
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        ("get_output",),
        "vllm/quarantine.py",
        ("get_output",),
    ),
    # Images, and the chat template that places them
    Seam("vllm.multimodal", ("MULTIMODAL_REGISTRY",), "engine/prompts/images.py"),
    Seam("vllm.multimodal.image", ("convert_image_mode",), "engine/prompts/images.py"),
    Seam(
        "vllm.multimodal.processing",
        ("ProcessorInputs", "TimingContext"),
        "engine/prompts/images.py",
    ),
    Seam(
        "vllm.renderers.hf",
        ("resolve_chat_template", "resolve_chat_template_content_format"),
        "engine/prompts/tokenizer.py",
    ),
    # Tool calls, formats and log-probabilities
    Seam("vllm.parser", ("Parser", "ParserManager"), "engine/prompts/tool_calls.py"),
    Seam(
        "vllm.parser.parser_manager:ParserManager",
        (
            (
                "get_parser(tool_parser_name, reasoning_parser_name, enable_auto_tools, "
                "model_name, is_harmony, tool_strict_level, tokenizer)"
            ),
        ),
        "engine/prompts/tool_calls.py",
    ),
    Seam(
        "vllm.parser.abstract_parser:Parser",
        (
            "__init__(tokenizer, tools, model_config)",
            "adjust_request(request)",
            "always_adjust_request",
            "set_prompt_token_ids(prompt_token_ids)",
            "parse(model_output, request, enable_auto_tools, model_output_token_ids)",
            "parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished)",
        ),
        "engine/prompts/tool_calls.py",
    ),
    Seam("vllm.tool_parsers", ("ToolParserManager",), "engine/prompts/tool_calls.py"),
    Seam("vllm.tokenizers", ("cached_tokenizer_from_config",), "engine/prompts/tool_calls.py"),
    Seam(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        (
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "structured_outputs",
            "skip_special_tokens",
            "extract_structured_outputs",
        ),
        "engine/prompts/tool_calls.py",
    ),
    Seam("vllm.logprobs:Logprob", ("logprob", "rank", "decoded_token"), "engine/vllm_output.py"),
    Seam("vllm.exceptions", ("VLLMClientError",), "engine/vllm.py"),
    # The scheduler
    Seam(
        "vllm.v1.core.sched.scheduler:Scheduler",
        (
            "add_request(request)",
            "has_finished_requests",
            "_free_request(request)",
            "schedule",
            "_preempt_request(request)",
            "_reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)",
            "reset_prefix_cache",
            "get_request_counts",
            "update_from_output(scheduler_output, model_runner_output)",
            "_update_request_with_output(request, new_token_ids)",
            "kv_cache_manager",
            "vllm_config",
            "need_mamba_block_aligned_split",
            "max_num_scheduled_tokens",
            "max_num_active_reqs",
            "scheduler_config",
            "policy",
            "_inflight_prefills",
            "running",
            "waiting",
            "requests",
        ),
        f"{_SCHEDULER}, vllm/tenant_steps.py",
        ("_Midstream", "TenantSteps"),
    ),
    Seam("vllm.v1.core.sched.async_scheduler:AsyncScheduler", (), _SCHEDULER, ("_Midstream",)),
    Seam(
        "vllm.v1.core.sched.request_queue:FCFSRequestQueue",
        ("remove_requests(requests)",),
        "vllm/cell_steps.py",
    ),
    Seam(
        "vllm.v1.core.sched.request_queue:RequestQueue",
        (
            "add_request(request)",
            "pop_request",
            "peek_request",
            "prepend_request(request)",
            "prepend_requests(requests)",
            "remove_request(request)",
            "remove_requests(requests)",
        ),
        "vllm/tenant_queue.py",
    ),
    Seam(
        "vllm.v1.core.sched.request_queue",
        ("create_request_queue(policy)", "SchedulingPolicy"),
        "vllm/tenant_queue.py, vllm/tenant_turns.py",
    ),
    Seam(
        "vllm.v1.request:Request",
        (
            "request_id",
            "sampling_params",
            "block_hashes",
            "update_block_hashes",
            "num_preemptions",
            "num_prompt_tokens",
            "all_token_ids",
            "num_computed_tokens",
            "num_tokens",
            "max_tokens",
            "status",
            "has_encoder_inputs",
        ),
        f"{_SCHEDULER}, vllm/cell_steps.py, vllm/kept_blocks.py",
    ),
    Seam(
        "vllm.v1.request:RequestStatus",
        ("FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_LENGTH_CAPPED", "RUNNING"),
        _SCHEDULER,
    ),
    Seam("vllm.v1.engine.core:EngineCore", ("scheduler",), _SCHEDULER),
    # Scores of probes, from the scheduler to the worker
    Seam(
        "vllm.v1.engine:EngineCoreOutput",
        ("request_id", "kv_transfer_params"),
        "probes/probe_news.py",
    ),
    Seam("vllm.v1.engine:EngineCoreOutputs", ("outputs",), "probes/probe_news.py"),
    Seam(
        "vllm.outputs:RequestOutput",
        ("add(next_output, aggregate)", "kv_transfer_params"),
        "engine/vllm_output.py",
        ("add",),
    ),
    # Blocks of the KV cache
    Seam(
        "vllm.v1.core.kv_cache_utils",
        ("generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)",),
        _SCHEDULER,
        ("generate_block_hash_extra_keys",),
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        (
            "block_pool",
            "coordinator",
            "enable_caching",
            "usage",
            "get_computed_blocks(request)",
            "get_blocks(request_id)",
            "create_kv_cache_blocks(blocks)",
            "evict_blocks(block_ids)",
        ),
        _BLOCKS,
        ("get_computed_blocks",),
    ),
    Seam(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        ("single_type_managers",),
        "vllm/kept_blocks.py, vllm/quarantine.py",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
        ("block_size", "req_to_blocks"),
        _BLOCKS,
    ),
    Seam(
        "vllm.v1.core.block_pool:BlockPool",
        (
            "hash_block_size",
            "num_gpu_blocks",
            "touch(blocks)",
            "free_blocks(ordered_blocks)",
            "get_num_free_blocks",
        ),
        _BLOCKS,
    ),
    Seam(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        ("needs_kv_cache_zeroing", "num_blocks"),
        "vllm/zeroed_blocks.py",
    ),
    # Graphs
    Seam(
        "vllm.forward_context",
        ("get_forward_context", "set_forward_context(attn_metadata, vllm_config)"),
        "vllm/graph_families.py, vllm/worker_class.py",
    ),
    Seam(
        "vllm.forward_context:BatchDescriptor",
        ("num_tokens", "num_active_loras"),
        "vllm/graph_families.py",
    ),
    Seam("vllm.forward_context:ForwardContext", ("batch_descriptor",), "vllm/graph_families.py"),
    Seam(
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher",
        (
            "_create_padded_batch_descriptor",
            "add_cudagraph_key(runtime_mode, batch_descriptor)",
            "get_capture_descs",
            "dispatch",
        ),
        "vllm/graph_families.py",
        ("FamilyDispatcher",),
    ),
    Seam(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        ("capture(create_forward_fn)", "dispatch", "run_pw_graph", "_capture_descs"),
        "vllm/graph_families.py",
        ("_Capturing", "_Dispatching"),
    ),
    Seam(
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager",
        (),
        "vllm/graph_families.py",
        ("_Dispatching",),
    ),
    Seam(
        "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor",
        ("cg_mode",),
        "vllm/graph_families.py",
    ),
    # Processes
    Seam(
        "vllm.distributed.device_communicators.shm_broadcast:SpinCondition",
        ("wait(timeout_ms)", "last_read", "busy_loop_s"),
        "vllm/idle_sleep.py",
        ("wait",),
    ),
    Seam(
        "vllm.distributed.utils",
        ("get_pp_indices(num_hidden_layers, pp_rank, pp_size)",),
        "vllm/stages.py",
    ),
    Seam("vllm.distributed.parallel_state", ("_TP",), "support/quantisation.py"),
    Seam(
        "vllm.v1.engine.async_llm:AsyncLLM",
        (
            "from_vllm_config(vllm_config)",
            "generate(prompt, sampling_params, request_id)",
            "abort(request_id)",
            "reset_prefix_cache",
            "collective_rpc(method, timeout, args)",
            "shutdown",
            "errored",
            "dead_error",
            "output_handler",
            "engine_core",
            "vllm_config",
        ),
        "engine/vllm.py",
    ),
    Seam(
        "vllm.utils.system_utils",
        ("get_mp_context()",),
        "engine/early_core.py",
        ("get_mp_context",),
    ),
    Seam(
        "vllm.model_executor.models.registry",
        ("_run_in_subprocess(fn)",),
        "engine/options/engine_arguments.py",
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        ("__init__(vllm_config, monitor_workers)", "start_worker_monitor(inline)"),
        "engine/headless.py",
    ),
    Seam(
        "vllm.v1.engine.core_client:AsyncMPClient",
        ("call_utility_async(method)",),
        "engine/vllm.py",
    ),
    Seam(
        "vllm.engine.arg_utils:AsyncEngineArgs",
        ("create_engine_config(usage_context)",),
        "engine/vllm.py",
    ),
    # Layers
    Seam(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        (),
        "hooks/layer_discovery.py",
    ),
    Seam(
        "vllm.model_executor.layers.attention.attention:Attention",
        (
            "forward(query, key, value)",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "head_size_v",
            "kv_sharing_target_layer_name",
        ),
        "plane/inside_hooks.py",
    ),
    Seam(
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention",
        ("num_heads", "v_head_dim"),
        "plane/inside_hooks.py",
    ),
    Seam(
        "vllm.model_executor.layers.attention",
        ("Attention", "ChunkedLocalAttention"),
        "hooks/layer_kinds.py",
    ),
    Seam("vllm.v1.attention.backend", ("AttentionType",), "hooks/layer_kinds.py"),
    Seam(
        "vllm.model_executor.layers.linear",
        ("ReplicatedLinear",),
        "support/quantisation.py, plane/inside_hooks.py",
    ),
    Seam(
        "vllm.model_executor.layers.linear:LinearBase",
        ("input_size", "output_size"),
        "plane/inside_hooks.py",
    ),
    Seam(
        "vllm.model_executor.layers.linear:RowParallelLinear",
        ("input_is_parallel",),
        "plane/inside_hooks.py",
    ),
    Seam(
        "vllm.model_executor.layers.linear:QKVParallelLinear",
        ("total_num_kv_heads",),
        "plane/inside_hooks.py",
    ),
    Seam(
        "vllm.model_executor.layers.linear:ColumnParallelLinear",
        ("output_partition_sizes",),
        "plane/inside_hooks.py",
    ),
    Seam(
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter",
        ("_compute_routing(hidden_states, router_logits, indices_type)",),
        "hooks/layer_kinds.py",
    ),
    # The certification's ranks
    Seam(
        "vllm.distributed.parallel_state:GroupCoordinator",
        ("cpu_group", "world_size", "rank_in_group"),
        "certificate/together.py",
    ),
    # The output head, after the layers
    Seam(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor",
        (
            "_apply_head(lm_head, hidden_states, embedding_bias)",
            "_gather_logits(logits)",
            "head_dtype",
        ),
        "hooks/output_head.py",
        ("_apply_head", "_gather_logits"),
    ),
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        ("shard_indices", "num_embeddings_per_partition", "tp_size", "quant_method"),
        "hooks/output_head.py",
    ),
    # Drafts
    Seam(
        "vllm.model_executor.model_loader.utils",
        ("get_model_cls(model_config)",),
        "support/drafters.py",
    ),
    Seam(
        "vllm.model_executor.models.interfaces", ("supports_eagle3(model)",), "support/drafters.py"
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler",
        (
            "expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)",
            "rejection_sample",
        ),
        "support/cpu_drafts.py",
        ("expand_batch_to_tokens", "rejection_sample"),
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler",
        ("apply_top_k_top_p(logits, k, p)",),
        "support/cpu_drafts.py",
        ("apply_top_k_top_p",),
    ),
    # Quantised checkpoints
    Seam(
        "vllm.model_executor.layers.fusion.fused_act_quant",
        ("get_input_quant_key",),
        "plane/inside_hooks.py",
    ),
    Seam(
        "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearKernel",
        (),
        "support/quantisation.py",
    ),
    # LoRA adapters of requests
    Seam(
        "vllm.lora.worker_manager:WorkerLoRAManager",
        ("_adapter_manager", "_load_adapter(lora_request)"),
        "plane/loras.py",
    ),
    Seam(
        "vllm.lora.model_manager",
        ("is_supported_lora_module(module_name, module, supported_lora_modules)",),
        "plane/loras.py",
        ("is_supported_lora_module",),
    ),
    Seam(
        "vllm.lora.model_manager:LoRAModelManager",
        (
            "punica_wrapper_mapping",
            "add_adapter(adapter)",
            "remove_adapter(adapter_id)",
            "_last_mapping",
            "lora_index_to_id",
        ),
        "plane/loras.py",
    ),
    Seam("vllm.lora.layers:BaseLayerWithLoRA", (), "plane/loras.py"),
    Seam("vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA", (), "plane/loras.py"),
    Seam(
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
        ("add_lora_linear", "no_lora", "batch_size", "prefill_metadata"),
        "plane/loras.py",
        ("_BySegment",),
    ),
)
