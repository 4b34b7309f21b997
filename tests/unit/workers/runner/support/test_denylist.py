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
    CompilationMode,
    CUDAGraphMode,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    VllmConfig,
)

from midstream.workers.runner.support import denylist
from midstream.workers.runner.support.denylist import RULES, UnsupportedConfigurationError, check


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
    to("kv_transfer_config", KVTransferConfig()),
    to("ec_transfer_config", object()),
    to("cache_config.kv_offloading_size", 1.0),
    to("cache_config.mamba_cache_mode", "align"),
    to("cache_config.use_replayssm", True),
    to("cache_config.enable_mamba_shared_prefix_checkpoint", True),
    to("attention_config.hisparse_config", object()),
    to("attention_config.use_non_causal", True),
    to("weight_transfer_config", object()),
    to("watermark_config", object()),
    (
        "aux_output_config.enabled",
        lambda config: put(config, "aux_output_config.enable_return_routed_experts", True),
    ),
    to("compilation_config.inductor_passes", {"post_grad": "a.pass"}),
]


def test_what_our_settings_lead_to_is_valid(config: VllmConfig) -> None:
    assert check(config) == []
    adapters(config)
    assert check(config) == []
    put(config, "lora_config", None)
    for mode in CUDAGraphMode:
        put(config, "compilation_config.cudagraph_mode", mode)
        assert check(config) == []
    put(config, "parallel_config.tensor_parallel_size", 4)
    put(config, "parallel_config.pipeline_parallel_size", 2)
    put(config, "compilation_config.mode", CompilationMode.VLLM_COMPILE)
    assert check(config) == []


@pytest.mark.parametrize(
    ("name", "alter"), WRONG, ids=[f"{number}-{name}" for number, (name, _) in enumerate(WRONG)]
)
def test_a_value_that_is_known_to_be_wrong_is_refused_by_name(
    config: VllmConfig, name: str, alter: Alter
) -> None:
    alter(config)
    with pytest.raises(UnsupportedConfigurationError, match="is not supported") as refused:
        check(config)
    (line,) = [line for line in str(refused.value).split("; ") if f"{name} is " in line]
    (rule,) = [rule for rule in RULES if rule.name == name]
    assert "valid: " in line
    assert rule.why in line


def test_the_state_of_recurrent_layers_is_refused_with_the_option_that_keeps_it(
    config: VllmConfig,
) -> None:
    put(config, "cache_config.mamba_cache_mode", "align")
    with pytest.raises(UnsupportedConfigurationError, match="set enable_prefix_caching=false"):
        check(config)


UNPROVEN: list[tuple[str, Alter]] = [
    to("parallel_config.distributed_executor_backend", "external_launcher"),
    to("compilation_config.mode", CompilationMode.STOCK_TORCH_COMPILE),
    to("compilation_config.mode", 17),
]


@pytest.mark.parametrize(("name", "alter"), UNPROVEN)
def test_a_value_that_no_test_ran_with_is_a_caveat(
    config: VllmConfig, name: str, alter: Alter
) -> None:
    alter(config)
    (caveat,) = check(config)
    assert caveat.startswith(f"unproven: {name} is ")


def test_every_rule_is_tried() -> None:
    for rules, tried in ((True, WRONG), (False, UNPROVEN)):
        assert {rule.name for rule in RULES if bool(rule.why) == rules} == {
            name for name, _ in tried
        }


def test_a_version_that_no_test_ran_with_is_a_caveat(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denylist.vllm, "__version__", "0.34.0")
    assert check(config) == ["unproven: vLLM 0.34.0: all tests ran with 0.32.0 only"]


def test_all_that_is_wrong_is_named_at_once(config: VllmConfig) -> None:
    put(config, "parallel_config.enable_dbo", True)
    adapters(config, fully_sharded_loras=True)
    with pytest.raises(UnsupportedConfigurationError) as refused:
        check(config)
    for part in (
        "enable_dbo is True, valid: False",
        "fully_sharded_loras is True, valid: False",
    ):
        assert part in str(refused.value)


def test_a_setting_that_vllm_no_longer_has_is_a_caveat(config: VllmConfig) -> None:
    """A later version may have given the feature another name."""
    renamed = SimpleNamespace(
        **{field.name: getattr(config, field.name) for field in fields(config)}
    )
    renamed.parallel_config = SimpleNamespace()
    renamed.parallel_config.worker_cls = config.parallel_config.worker_cls
    caveats = check(renamed)  # type: ignore[arg-type]
    assert "unproven: parallel_config.enable_dbo is not a setting of this vLLM" in caveats


def test_a_rank_refuses_before_it_reads_the_weights(config: VllmConfig) -> None:
    from midstream.workers.runner.vllm.worker_class import MidstreamWorker

    put(config, "parallel_config.prefill_context_parallel_size", 2)
    with pytest.raises(
        UnsupportedConfigurationError, match="prefill_context_parallel_size is 2, valid: 1"
    ):
        MidstreamWorker.load_model(SimpleNamespace(vllm_config=config))  # type: ignore[arg-type]


def test_a_rank_refuses_what_is_unproven_here_but_not_at_the_worker(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midstream.workers.runner.vllm import worker_class

    monkeypatch.setattr(worker_class, "plane_config", lambda: SimpleNamespace(caveats=["other"]))
    put(config, "parallel_config.distributed_executor_backend", "external_launcher")
    with pytest.raises(
        UnsupportedConfigurationError, match="not configured like the worker's: unp"
    ):
        worker_class.MidstreamWorker.load_model(SimpleNamespace(vllm_config=config))  # type: ignore[arg-type]
