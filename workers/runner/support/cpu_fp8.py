"""Lets vLLM's CPU build load and run FP8 weights with one scale per matrix.

That build declares the rounding to FP8 without implementing it, and Llama's MLP calls a kernel that
fuses SiLU and rounding, which only GPUs have. `install` implements the rounding by its definition,
and makes the MLP round in a separate step, as all other layers do.
"""

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.platforms import current_platform

_FP8 = torch.float8_e4m3fn


def install() -> None:
    """Make both changes to vLLM, once per process, if it runs on a CPU."""
    original = ops.scaled_fp8_quant
    if not current_platform.is_cpu() or original.__module__ == __name__:
        return

    def scaled_fp8_quant(
        input: torch.Tensor, scale: torch.Tensor | None = None, *args: Any, **named: Any
    ) -> Any:
        if scale is None or scale.numel() != 1 or args or named:
            return original(input, scale, *args, **named)
        limit = torch.finfo(_FP8).max
        return (input.float() / scale).clamp(-limit, limit).to(_FP8), scale

    ops.scaled_fp8_quant = scaled_fp8_quant
    fused_act_quant._FUSED_ACT_QUANT.clear()
