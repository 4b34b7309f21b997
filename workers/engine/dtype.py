"""The dtype that the setting `dtype=auto` stands for, and why."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Choice(NamedTuple):
    dtype: str  # as vLLM's option `dtype`
    why: str


def computes_bfloat16() -> bool:
    """Return whether this processor has instructions for products of bfloat16."""
    if platform.machine() in ("aarch64", "arm64"):
        try:
            return " bf16" in Path("/proc/cpuinfo").read_text()
        except OSError:
            return False
    # private names that vLLM's platform for CPUs calls as well
    supported = torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported
    return any(check() for check in supported)


def choose(setting: str, config: Mapping[str, Any], *, gpu: bool) -> Choice:
    """Return the dtype to serve a checkpoint in.

    `setting`: the setting `dtype`. `config`: the checkpoint's config.json; may be empty. On a CPU,
    `auto` is float32 unless the checkpoint is in bfloat16 and the processor computes with that:
    products in float32 are then faster (docs/vllm.md#what-dtypeauto-stands-for), and the weights
    are the same.
    """
    if setting != "auto":
        return Choice(setting, "set by `dtype`")
    text = {**config, **(config.get("text_config") or {})}
    stored = str(text.get("dtype") or text.get("torch_dtype") or "float32")
    if gpu or not config:
        return Choice("auto", "vLLM's choice for this checkpoint")
    if config.get("quantization_config") or text.get("quantization_config"):
        return Choice("auto", "vLLM's choice for a quantised checkpoint")
    if stored == "float32":
        return Choice("float32", "the checkpoint's own")
    if stored == "bfloat16" and computes_bfloat16():
        return Choice("bfloat16", "the checkpoint's own")
    return Choice("float32", f"this processor has no fast {stored}, the checkpoint's dtype")
