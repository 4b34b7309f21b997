"""Quantised checkpoints: their names, how their rows differ from transformers', and which are
refused.

The rows of a quantised checkpoint are defined as those of its dequantised weights, with the
rounding of activations that the checkpoint specifies. A checkpoint whose rows would differ from
these is refused, or served with a caveat: see `docs/vllm.md`.

On a CPU, vLLM's kernel for quantised layers is tried before any weights are read: in a rank, the
same error would end the engine, and the caller would not see it. vLLM chooses a kernel by the
format only, and one that the processor does not support fails or errs when it runs, not when the
layer is loaded.
"""

import contextlib
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.platforms import current_platform

from ....schemas.base.errors import KindError, Translated
from ....schemas.jobs.certificates import UNPROVEN

#: (vLLM's method, weights, activations) whose rows tests compared with transformers', on a CPU.
#: Kept because an engine's start cannot compare quantised weights: all others have a caveat.
MEASURED = frozenset(
    {
        ("compressed-tensors", "fp8", "fp8"),
    }
)
#: Environment variable: unless it is 0, 4-bit weights run with 8-bit activations on some CPUs,
#: see `engine.options.engine_arguments`.
W4A8 = "VLLM_CPU_INT4_W4A8"
#: `repository:QUANTISATION`, as the GGUF plugin of vLLM takes it.
_GGUF_NAME = re.compile(r":(I?Q\d\w*|BF16|F16|F32)$")


class UnsupportedQuantisationError(KindError):
    """The checkpoint's quantisation is not served, or not on this machine."""

    KIND = "invalid_request"
    FIELD = "model"


class Rounding(NamedTuple):
    """Rounding of a tensor."""

    kind: str  # int4, int8, fp8, …
    scale: str  # what has its own scale: tensor, channel, token, group, block
    dynamic: bool = False  # the scale is computed from the tensor itself

    @property
    def static(self) -> bool:
        return self.scale == "tensor" and not self.dynamic

    def __str__(self) -> str:
        return f"{self.kind} {'static' if self.static else f'per {self.scale}'}"


class Quantisation(NamedTuple):
    """Quantisation of a served checkpoint."""

    name: str  # empty: it is not quantised
    caveats: tuple[str, ...] = ()


class WeightFacts(NamedTuple):
    """Inputs of the rules."""

    method: str  # vLLM's name of the method
    raw: Mapping[str, Any]  # `quantization_config` of the checkpoint
    weights: frozenset[Rounding]
    activations: frozenset[Rounding]
    dtype: torch.dtype = torch.bfloat16
    experts: bool = False  # the model has experts, and they are quantised
    ranks: int = 1  # tensor-parallel
    cpu: bool = True

    @property
    def name(self) -> str:
        parts = [f"{rounding.kind} weights" for rounding in sorted(self.weights)]
        parts += [
            f"{rounding.kind} activations {str(rounding).partition(' ')[2]}"
            for rounding in sorted(self.activations)
        ]
        return f"{self.method}: {', '.join(dict.fromkeys(parts))}" if parts else self.method

    @property
    def measured(self) -> bool:
        activations = {rounding.kind for rounding in self.activations} or {""}
        return bool(self.weights) and all(
            (self.method, weight.kind, kind) in MEASURED
            for weight in self.weights
            for kind in activations
        )

    @property
    def shares_scales(self) -> bool:
        """Return whether activations are rounded with one scale for all rows of a step."""
        return any(rounding.scale == "tensor" and rounding.dynamic for rounding in self.activations)


class WeightRule(NamedTuple):
    """A reason to refuse the checkpoints to which it `applies`, or their caveat."""

    applies: Callable[[WeightFacts], bool]
    text: str


REFUSED = (
    WeightRule(
        lambda facts: facts.cpu and facts.experts,
        "quantised experts need a GPU",
    ),
    WeightRule(
        lambda facts: (
            facts.cpu
            and facts.dtype == torch.float32
            and any("int4" in rounding.kind for rounding in facts.weights)
        ),
        "4-bit weights are not served in float32: set dtype to bfloat16 or float16",
    ),
    WeightRule(
        lambda facts: (
            facts.cpu and any(rounding.scale == "tensor" for rounding in facts.activations)
        ),
        "on CPUs, vLLM may round activations with other scales than the checkpoint's one for a "
        "matrix, or not at all: use a GPU, or dequantise the checkpoint",
    ),
)
CAVEATS = (
    WeightRule(
        lambda facts: bool(facts.activations) and not facts.shares_scales,
        "the quantised layers round their input, as the checkpoint specifies: rows are "
        "those of the dequantised weights with this rounding, "
        "and differ from those of the dequantised weights alone",
    ),
    WeightRule(
        lambda facts: (
            facts.ranks > 1 and any(rounding.scale == "token" for rounding in facts.activations)
        ),
        "with tensor_parallel_size above 1, each rank scales its own part of the input "
        "of o_proj and down_proj: rows differ from those "
        "of one rank by this rounding",
    ),
    WeightRule(
        lambda facts: any(
            rounding.kind == "fp8" and rounding.scale == "tensor" for rounding in facts.weights
        ),
        "where the scales of q_proj, k_proj and v_proj differ, or those of gate_proj "
        "and up_proj, vLLM rounds these weights again with "
        "the largest of them: rows are then those of weights rounded twice",
    ),
    WeightRule(
        lambda facts: bool(
            facts.raw.get("kv_cache_scheme") or facts.raw.get("kv_cache_quant_algo")
        ),
        (
            "the checkpoint asks for a quantised KV cache: attention reads rounded keys "
            "and values, and rows above the first layer differ"
        ),
    ),
    WeightRule(
        lambda facts: (
            facts.cpu
            and os.environ.get(W4A8, "1") != "0"
            and any("int4" in rounding.kind for rounding in facts.weights)
        ),
        (
            f"with {W4A8}=1, vLLM rounds the inputs of 4-bit layers to 8 bits on some CPUs, "
            "which the checkpoint does not ask for"
        ),
    ),
)


def quantisation_of(config: VllmConfig) -> Quantisation:
    """Return the quantisation of a config that vLLM has completed, before the weights are read.

    Raises UnsupportedQuantisationError.
    """
    model = config.model_config
    if model.quantization is None:
        return Quantisation("")
    raw = model.model_arch_config.quantization_config or {}
    return judge(
        WeightFacts(
            model.quantization,
            raw,
            *roundings(model.quantization, raw),
            dtype=model.dtype,
            experts=any(
                getattr(model.hf_text_config, f"{name}_experts", None)
                for name in ("num", "num_local", "n_routed", "moe_num")
            )
            and not _leaves_out_experts(raw),
            ranks=config.parallel_config.tensor_parallel_size,
            cpu=current_platform.is_cpu(),
        )
    )


def judge(facts: WeightFacts) -> Quantisation:
    """Return the quantisation with its caveats; raises UnsupportedQuantisationError with the first
    reason to refuse it.
    """
    for rule in REFUSED:
        if rule.applies(facts):
            raise UnsupportedQuantisationError(
                f"quantisation {facts.name} is not served here: {rule.text}"
            )
    caveats = [
        f"quantised with {facts.name}: {rule.text}." for rule in CAVEATS if rule.applies(facts)
    ]
    if not facts.measured:
        caveats.append(f"{UNPROVEN}quantisation {facts.name}: no test compared its rows")
    return Quantisation(facts.name, tuple(caveats))


def roundings(
    method: str, raw: Mapping[str, Any]
) -> tuple[frozenset[Rounding], frozenset[Rounding]]:
    """Return the roundings of weights and of activations, as far as the checkpoint's config
    states them.
    """
    if method == "compressed-tensors":
        groups = [
            group
            for group in (raw.get("config_groups") or {}).values()
            if isinstance(group, Mapping)
        ]
        return _of_groups(groups, "weights"), _of_groups(groups, "input_activations")
    if method == "fp8":
        blocks = raw.get("weight_block_size")
        dynamic = raw.get("activation_scheme") != "static"
        if blocks:
            return frozenset({Rounding("fp8", "block")}), frozenset(
                {Rounding("fp8", "group", True)}
            )
        # GPU kernels with one dynamic scale are refused after loading, by `refuse_shared_scales`
        by_token = dynamic and not current_platform.is_cpu()
        return frozenset({Rounding("fp8", "tensor")}), frozenset(
            {Rounding("fp8", "token" if by_token else "tensor", dynamic)}
        )
    if "awq" in method or "gptq" in method:
        return frozenset(
            {Rounding(f"int{raw.get('bits') or raw.get('w_bit')}", "group")}
        ), frozenset()
    return frozenset(), frozenset()


def _of_groups(groups: list[Mapping[str, Any]], name: str) -> frozenset[Rounding]:
    result = (group[name] for group in groups if isinstance(group.get(name), Mapping))
    return frozenset(
        Rounding(
            ("" if item.get("symmetric", True) else "asymmetric ")
            + ("fp" if item.get("type") == "float" else "int")
            + str(item.get("num_bits")),
            str(item.get("strategy")),
            bool(item.get("dynamic")),
        )
        for item in result
    )


def _leaves_out_experts(raw: Mapping[str, Any]) -> bool:
    listed = [
        name
        for key in ("ignore", "ignored_layers", "modules_to_not_convert")
        for name in raw.get(key) or ()
    ]
    return any("expert" in str(name) for name in listed)


def refuse_gguf(model: str) -> None:
    """Raises UnsupportedQuantisationError for a GGUF file, a folder of GGUF files or
    `repository:QUANTISATION`, before vLLM reads it.
    """
    path = Path(model)
    files = {file.suffix for file in path.iterdir()} if path.is_dir() else set()
    if (
        model.endswith(".gguf")
        or (".gguf" in files and ".safetensors" not in files)
        or (not files and _GGUF_NAME.search(model))
    ):
        raise UnsupportedQuantisationError(
            "GGUF is not served: vLLM has no code for it, and its plugin none for CPUs. "
            "Have transformers dequantise it into a folder of "
            "safetensors, and serve that: see docs/vllm.md"
        )


def refuse_shared_scales(model: torch.nn.Module) -> None:
    """Raises UnsupportedQuantisationError if a loaded layer rounds all rows of a step with one
    scale computed from them.

    Looks at loaded layers, because a config does not say which kernel vLLM will take.
    """
    for name, module in model.named_modules():
        if any(_shares(part) for part in _parts(module)):
            raise UnsupportedQuantisationError(
                f"{name} rounds all rows of a step with one scale: other requests would change "
                "a request's rows. Use a checkpoint with "
                "static activation scales or with one for each token, or a GPU from compute "
                "capability 8.9"
            )


def _parts(module: torch.nn.Module) -> Iterator[Any]:
    """Yield a layer's kernels, and the configuration of its experts."""
    for holder in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
        if holder is not None:
            yield from vars(holder).values()


def _shares(part: Any) -> bool:
    if isinstance(part, FP8ScaledMMLinearKernel):
        # kernels with their own `apply_weights` do not round activations
        rounds = type(part).apply_weights is FP8ScaledMMLinearKernel.apply_weights
        return rounds and not part.quant_fp8.static and part.quant_fp8.group_shape.is_per_tensor()
    inputs = getattr(part, "_a1", None)  # of vLLM's FusedMoEQuantConfig
    if inputs is None or inputs.dtype not in (torch.float8_e4m3fn, torch.int8):
        return False
    return inputs.scale is None and inputs.shape is not None and inputs.shape.is_per_tensor()


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
    with (
        Translated(
            Exception,
            lambda error: UnsupportedQuantisationError(
                f"quantisation {name} is not served on this processor: vLLM's kernel fails: "
                f"{error}. Use a GPU, or dequantise the checkpoint"
            ),
        ),
        _building(config),
        torch.inference_mode(),
    ):
        error_size = _error(layer, activations, config.model_config.dtype)
    if not error_size <= _TOLERANCE:  # true of NaN too
        raise UnsupportedQuantisationError(
            f"quantisation {name} is not served on this processor: the kernel's sums of "
            f"products are wrong by up to {error_size:.2g} of their size. Use a GPU, or dequantise "
            "the checkpoint"
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
    inputs = layer.input_size
    size = scale * next(
        (_LIMITS[activation.kind] for activation in activations if activation.kind in _LIMITS),
        64,
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
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(raw, Mapping):
        items = raw.items()
    elif isinstance(raw, list):
        items = enumerate(raw)
    for key, value in items:
        if key == "group_size" and isinstance(value, int) and value > 0:
            yield value
        yield from _group_sizes(value)
