"""Tries vLLM's kernel for quantised layers on this processor, before any weights are read. In a
rank, the same error would end the engine, and the caller would not see it.

vLLM chooses a kernel by the format only, and a kernel that the processor does not support fails or
errs when it runs, not when the layer is loaded: without VNNI, oneDNN's int8 products saturate in 16
bits or come from halved weights, and vLLM's build for AVX2 has no kernel for 4-bit weights.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.platforms import current_platform

from . import cpu_fp8
from .quantisation import Rounding, UnsupportedQuantisationError, refuse_shared_scales, roundings

logger = logging.getLogger(__name__)

#: Texts in vLLM's errors where it has no kernel for a format on this machine. Other errors may only
#: come from building a layer without its model, and are ignored.
_NO_KERNEL = (
    "failed to find a kernel",
    "no compressed-tensors compatible scheme",
    "not support",
    "please install",
)
#: Outputs of the test layer. Kernels for CPUs take multiples of 32.
_OUTPUTS = 64
#: Rows of the test batches: one as in decoding, a few, and more than a block of any kernel.
_ROWS = (1, 4, 80)
#: Codes of int8 weights. Products of pairs of the largest code saturate in 16 bits; small odd codes
#: expose a kernel that halves the weights.
_CODES = (127, 1, 3, 65)
#: The largest code of a rounded activation.
_LIMITS = {"int8": 127, "fp8": 448}
#: Largest error, relative to the sum of the products' absolute values. vLLM's builds for older
#: processors truncate sums to bf16 twice (1/128); where products saturate or weights are halved,
#: some sum is off by a third or more.
_TOLERANCE = 1 / 64


def check_kernels(config: VllmConfig, name: str) -> None:
    """Raises UnsupportedQuantisationError if vLLM's kernel for layers of `config` is missing, uses
    one scale for all rows, or computes wrong sums.

    The kernel is chosen for a layer like the model's `down_proj` on the meta device, within
    milliseconds and before any process of the engine starts. On a CPU, a small layer then runs it.
    Kernels of experts are not chosen this way: rules of `quantisation` refuse them.
    """
    hidden = config.model_config.get_hidden_size()
    size = getattr(config.model_config.hf_text_config, "intermediate_size", None) or hidden
    layer = _layer(config, name, size if isinstance(size, int) else hidden, hidden, "meta")
    if layer is None:
        return
    refuse_shared_scales(torch.nn.ModuleDict({"down_proj": layer}))
    if current_platform.is_cpu():
        cpu_fp8.install()  # the layer must round to FP8 as the layers of the ranks do
        _try(config, name)


def _layer(
    config: VllmConfig, name: str, inputs: int, outputs: int, device: str
) -> ReplicatedLinear | None:
    """Return a layer in the format of `config`, with unset weights; None where vLLM builds such a
    layer only as part of a model.
    """
    try:
        with _building(config), torch.device(device):
            return ReplicatedLinear(
                inputs,
                outputs,
                bias=False,
                params_dtype=config.model_config.dtype,
                quant_config=config.quant_config,
                prefix="model.layers.0.mlp.down_proj",
            )
    except Exception as error:
        if not any(words in str(error).lower() for words in _NO_KERNEL):
            logger.info("kernels for %s are not known before the model is loaded: %s", name, error)
            return None
        why = " ".join(str(error).split()).removesuffix("Reasons:").strip()
        raise UnsupportedQuantisationError(
            f"quantisation {name} is not served here: vLLM says: {why}"
        ) from error


@contextlib.contextmanager
def _building(config: VllmConfig) -> Iterator[None]:
    """Set the globals that vLLM reads while it builds a layer: its parameters read the
    tensor-parallel rank, its kernels the default dtype.
    """
    before = parallel_state._TP, torch.get_default_dtype()
    parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1)
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config):
            yield
    finally:
        parallel_state._TP, default = before
        torch.set_default_dtype(default)


def _try(config: VllmConfig, name: str) -> None:
    """Raises UnsupportedQuantisationError if the sums of a layer with extreme weights are wrong."""
    # vLLM's int4 kernels use AMX without asking Linux for it, which would kill the process
    torch.cpu._init_amx()
    raw = config.model_config.model_arch_config.quantization_config or {}
    layer = _layer(config, name, math.lcm(256, *_group_sizes(raw)), _OUTPUTS, "cpu")
    activations = roundings(config.model_config.quantization or "", raw)[1]
    if layer is None or getattr(_weights(layer), "dtype", None) not in _FILL:
        return
    try:
        with _building(config), torch.inference_mode():
            error_size = _error(layer, activations, config.model_config.dtype)
    except Exception as error:
        raise UnsupportedQuantisationError(
            f"quantisation {name} is not served on this processor: vLLM's kernel fails: "
            f"{error}. Use one with AVX-512, or dequantise "
            "the checkpoint"
        ) from error
    if not error_size <= _TOLERANCE:  # true of NaN too
        raise UnsupportedQuantisationError(
            f"quantisation {name} is not served on this processor: the kernel's sums of "
            f"products are wrong by up to {error_size:.2g} of their "
            "size. Int8 products need VNNI (avx512_vnni or avx_vnni in /proc/cpuinfo). Use "
            "such a processor, or dequantise the checkpoint"
        )


def _weights(layer: ReplicatedLinear) -> Any:
    return next(
        (
            getattr(layer, name)
            for name in ("weight", "qweight", "weight_packed")
            if hasattr(layer, name)
        ),
        None,
    )


def _error(layer: Any, activations: frozenset[Rounding], dtype: torch.dtype) -> float:
    """Return the largest error of a sum, relative to the sum of its products' absolute values.

    Every input is plus or minus the largest value of its rounding, so that rounding is exact.
    """
    draws = torch.Generator().manual_seed(0)
    scale = 2.0**-6
    weights = _weights(layer)
    for parameter in layer.parameters():  # scales; zero points and orders of groups are integers
        parameter.data.fill_(scale if parameter.dtype.is_floating_point else 0)
    weights.data.copy_(_FILL[weights.dtype](weights.shape, draws))
    # `[outputs, inputs]`; read now, because vLLM rearranges the weights when it prepares them
    codes = weights.detach().float() if weights.dtype != torch.int32 else None
    inputs, size = (
        layer.input_size,
        scale
        * next(
            (_LIMITS[activation.kind] for activation in activations if activation.kind in _LIMITS),
            64,
        ),
    )
    layer.quant_method.process_weights_after_loading(layer)
    # 4-bit weights are packed by the format, so the kernel itself computes each single product.
    products = (
        layer(size * torch.eye(inputs, dtype=dtype))[0].float()
        if codes is None
        else size * scale * codes.T
    )
    worst = 0.0
    for rows in _ROWS:
        signs = torch.randint(0, 2, (rows, inputs), generator=draws).float() * 2 - 1
        signs[0] = 1.0
        sums = layer((size * signs).to(dtype))[0].float()
        worst = max(worst, float(((sums - signs @ products).abs() / products.abs().sum(0)).max()))
    return worst


def _int8_codes(shape: torch.Size, draws: torch.Generator) -> torch.Tensor:
    """Return codes `shape`: half of the outputs have codes of one sign, half of both signs."""
    codes = torch.tensor(_CODES).repeat(shape[0] // len(_CODES))[:, None].expand(shape).clone()
    half = shape[0] // 2
    codes[half:] *= torch.randint(0, 2, (shape[0] - half, shape[1]), generator=draws) * 2 - 1
    return codes


_FILL: Mapping[torch.dtype, Callable[[torch.Size, torch.Generator], torch.Tensor]] = {
    torch.int8: _int8_codes,
    torch.float8_e4m3fn: lambda shape, draws: (
        (torch.randint(0, 2, shape, generator=draws) * 2.0 - 1) * _LIMITS["fp8"]
    ),
    torch.int32: lambda shape, draws: torch.randint(-(1 << 31), 1 << 31, shape, generator=draws),
}


def _group_sizes(raw: Any) -> Iterator[int]:
    """Yield every `group_size` in a quantisation config."""
    for key, value in (
        raw.items() if isinstance(raw, Mapping) else enumerate(raw) if isinstance(raw, list) else ()
    ):
        if key == "group_size" and isinstance(value, int) and value > 0:
            yield value
        yield from _group_sizes(value)
