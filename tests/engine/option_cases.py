"""Cases in which an option of vLLM is proven: with it, the engine gives transformers' rows at every
hook, plain and edited.

Every option in the list `PROVEN` has at least one case, and every value that the list names. A case
says on which checkpoint and with which settings the option does something.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny import checkpoint

#: The hub name of what `hub` makes.
HUB_NAME = "midstream/tiny"


@dataclass(frozen=True)
class Case:
    """`value`: of the option, or what makes it from a folder that the case may write to."""

    option: str
    value: Any
    name: str = "llama"  # of the checkpoint
    also: dict[str, Any] = field(default_factory=dict)  # options of vLLM that it needs
    settings: dict[str, Any] = field(default_factory=dict)  # of ours
    ranks: int = 1
    #: Makes from (folder, plain checkpoint) what the engine loads; None: that checkpoint.
    served: Callable[[Path, Path], Path | str] | None = None
    #: Makes from (folder, plain checkpoint) what transformers loads; None: that checkpoint.
    truth: Callable[[Path, Path], Path] | None = None
    fast: bool = False  # also in `make test`

    @property
    def on_hub(self) -> bool:
        return self.served is hub

    @property
    def id(self) -> str:
        shown = self.value if not callable(self.value) else "…"
        return f"{self.option}={json.dumps(shown, default=str)} {self.name}" + (
            f" TP={self.ranks}" if self.ranks > 1 else ""
        )

    def options(self, folder: Path, path: Path) -> dict[str, Any]:
        """What the engine is asked for."""
        return {
            self.option: self.value(folder, path) if callable(self.value) else self.value,
            **self.also,
        }


def copied(folder: Path, path: Path) -> Path:
    """The checkpoint at another place."""
    return Path(shutil.copytree(path, folder / "copy", dirs_exist_ok=True))


def changed(path: Path, **values: Any) -> Path:
    """Overwrite fields of the config."""
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps(config))
    return path


def odd(folder: Path, path: Path) -> Path:
    """With a config that gives other rows."""
    return changed(Path(shutil.copytree(path, folder / "odd")), rms_norm_eps=0.5)


SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
_REMOTE_CONFIG = """
from transformers import LlamaConfig

class RemoteConfig(LlamaConfig):
    model_type = "midstream_remote"
"""


def remote(folder: Path, path: Path) -> Path:
    """The same weights, with a config class that only code beside them knows."""
    made = copied(folder, path)
    (made / "configuration_remote.py").write_text(_REMOTE_CONFIG)
    return changed(
        made,
        model_type="midstream_remote",
        auto_map={"AutoConfig": "configuration_remote.RemoteConfig"},
    )


def hub(folder: Path, path: Path) -> str:
    """A cache of the hub with two revisions: `main` is another model than `wanted`."""
    root = folder / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    for name, source in (("main", checkpoint("mistral", folder / "other")), ("wanted", path)):
        commit = (name.encode().hex() * 40)[:40]
        shutil.copytree(source, root / "snapshots" / commit)
        (root / "refs" / name).write_text(commit)
    return HUB_NAME


COMPILED = {"engine.enforce_eager": False}
CACHED = {
    "engine.enable_prefix_caching": True,
    "engine.max_model_len": 512,
    "engine.block_size": 32,
}

CASES: tuple[Case, ...] = (
    # What is loaded
    Case("tokenizer", lambda folder, path: str(copied(folder, path))),
    Case("hf_config_path", lambda folder, path: str(copied(folder, path)), served=odd),
    Case("tokenizer_mode", "hf"),
    Case("tokenizer_mode", "auto"),
    Case("trust_remote_code", True, served=remote, fast=True),
    Case("revision", "wanted", served=hub),
    Case("tokenizer_revision", "wanted", also={"revision": "wanted"}, served=hub),
    Case("code_revision", "wanted", also={"revision": "wanted"}, served=hub),
    Case("safetensors_load_strategy", "lazy"),
    Case("safetensors_load_strategy", "eager"),
    Case("safetensors_load_strategy", "prefetch"),
    Case("safetensors_prefetch_num_threads", 2, also={"safetensors_load_strategy": "prefetch"}),
    Case(
        "safetensors_prefetch_block_size", 1 << 20, also={"safetensors_load_strategy": "prefetch"}
    ),
    Case("load_format", "auto"),
    Case("load_format", "hf"),
    Case("load_format", "safetensors"),
    Case("config_format", "auto"),
    Case("config_format", "hf"),
    Case("model_loader_extra_config", {"enable_multithread_load": True, "num_threads": 2}),
    Case("use_tqdm_on_load", False),
    Case("model_impl", "auto"),
    Case("model_impl", "vllm"),
    Case(
        "hf_overrides",
        SCALED,
        truth=lambda folder, path: changed(copied(folder, path), **SCALED),
        fast=True,
    ),
    # Numbers and memory
    Case("seed", 1234),
    Case("kv_cache_dtype", "auto", name="qwen3"),
    Case("kv_cache_dtype", "bfloat16", name="qwen3", settings={"engine.dtype": "bfloat16"}),
    Case("gpu_memory_utilization", 0.5),
    Case("attention_backend", "CPU_ATTN"),
    Case("attention_config", {"backend": "CPU_ATTN"}),
    Case("ir_op_priority", {"rms_norm": ["native"]}),
    Case("swa_bounded_replay", False, name="gemma3", settings=CACHED),
    Case("disable_hybrid_kv_cache_manager", True, name="gemma3", settings=CACHED),
    Case("prefix_caching_hash_algo", "sha256", settings=CACHED),
    Case("prefix_caching_hash_algo", "sha256_cbor", settings=CACHED),
    Case("disable_sliding_window", True),
    # Steps
    Case("enable_chunked_prefill", True, settings={"engine.max_num_batched_tokens": 64}),
    Case("enable_chunked_prefill", False),
    Case("max_num_scheduled_tokens", 48),
    Case("long_prefill_token_threshold", 16),
    Case("long_prefill_token_threshold_adaptive", True, also={"long_prefill_token_threshold": 16}),
    Case("max_num_active_seqs", 3),
    Case("scheduler_reserve_full_isl", False),
    Case("prefill_schedule_interval", 2),
    Case("watermark", 0.1),
    Case("async_scheduling", False),
    Case("stream_interval", 3),
    Case("enable_logging_iteration_details", True),
    Case("fail_on_environ_validation", False),
    Case("jit_monitor_mode", "warn"),
    Case("use_fp64_gumbel", True),
    # Compilation
    Case("compilation_config", {"custom_ops": ["all"]}, settings=COMPILED),
    Case("compilation_config", {"custom_ops": ["none"]}, settings=COMPILED),
    Case("compilation_config", {"backend": "eager"}, settings=COMPILED),
    Case("compilation_config", {"mode": 0}, settings=COMPILED),
    Case("optimization_level", 0, settings=COMPILED),
    Case("optimization_level", 1, settings=COMPILED),
    Case("optimization_level", 2, settings=COMPILED),
    Case("optimization_level", 3, settings=COMPILED),
    Case("performance_mode", "balanced", settings=COMPILED),
    Case("performance_mode", "interactivity", settings=COMPILED),
    Case("performance_mode", "throughput", settings=COMPILED),
    # Ranks
    Case("disable_custom_all_reduce", True, ranks=2),
    Case("distributed_timeout_seconds", 300, ranks=2),
    Case("cpu_distributed_timeout_seconds", 300, ranks=2),
    Case("enable_shm_tensor_arena", True, ranks=2),
)
