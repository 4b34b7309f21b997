"""Small quantised checkpoints, written from the definitions of their formats, and what transformers
computes of them.

A checkpoint of `tiny` is quantised in each format: what vLLM loads, and beside it the same weights
dequantised to fp32, which transformers loads. Where a format quantises activations too, that is
part of the model: the reference rounds the input of each quantised layer as the format defines it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fidelity import Rows, Truth, _relative
from reference import Edit, Reference
from safetensors.torch import load_file, save_file
from tiny import checkpoint
from tolerances import FP32_CODES

GROUP = 32
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
#: Column of each 4-bit value in an int32 of AWQ, from its lowest bits.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
#: Layers that vLLM runs as one matrix: they share a scale where a format has one for the whole
#: matrix.
FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor, torch.Tensor], tuple[Tensors, torch.Tensor]]
Round = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Format:
    """A format.

    `quantise`: weight `[out, in]` and its largest size → tensors of the checkpoint, weight
    dequantised.

    `activation`: input `[tokens, in]` and the largest size that calibration saw → the input as the
    format rounds it.
    """

    config: Mapping[str, Any]
    quantise: Quantise
    activation: Round | None = None
    static: bool = False  # with an `input_scale`
    limit: float = INT8_MAX  # of a quantised activation
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


# -- weights
# --------------------------------------------------------------------------------------------------


def _int8_channel(weight: torch.Tensor, _largest: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / INT8_MAX
    codes = (weight / scale).round().clamp(-INT8_MAX, INT8_MAX)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def _int8_tensor(weight: torch.Tensor, _largest: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / INT8_MAX
    codes = (weight / scale).round().clamp(-INT8_MAX, INT8_MAX)
    return {"weight": codes.to(torch.int8), "weight_scale": scale.reshape(1)}, codes * scale


def _fp8_tensor(weight: torch.Tensor, largest: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = largest / FP8_MAX
    codes = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return {"weight": codes, "weight_scale": scale.reshape(())}, codes.float() * scale


def _fp8_own_scales(weight: torch.Tensor, _largest: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return _fp8_tensor(weight, weight.abs().max())


def _fp8_channel(weight: torch.Tensor, _largest: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
    codes = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def _fp8_blocks(weight: torch.Tensor, _largest: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    size = 128
    rows = -(-weight.shape[0] // size)
    columns = -(-weight.shape[1] // size)
    scale = (
        torch.stack(
            [torch.stack([b.abs().max() for b in r.split(size, 1)]) for r in weight.split(size, 0)]
        )
        / FP8_MAX
    )
    assert scale.shape == (rows, columns)
    wide = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[
        : weight.shape[0], : weight.shape[1]
    ]
    codes = (weight / wide).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide


def _packed(codes: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
    """Eight 4-bit codes of the last dimension into an int32, the first in the lowest bits unless
    `order` says otherwise.
    """
    eights = codes.to(torch.int64).unflatten(-1, (-1, 8))
    total = sum(eights[..., column] << 4 * place for place, column in enumerate(order or range(8)))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def _groups(weight: torch.Tensor) -> torch.Tensor:
    return weight.unflatten(1, (-1, GROUP))


def _awq(weight: torch.Tensor, _largest: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """4 bits with a zero point, groups of 32 inputs; scales in fp16."""
    groups = _groups(weight)
    low = groups.amin(-1, keepdim=True)
    high = groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((groups / scale).round() + zero).clamp(0, 15)
    tensors = {
        "qweight": _packed(codes.flatten(1).T, AWQ_ORDER),
        "qzeros": _packed(zero[..., 0].T, AWQ_ORDER),
        "scales": scale[..., 0].T.half(),
    }
    return tensors, ((codes - zero) * scale).flatten(1)


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes 0 to 15 (8 is zero) `[out, in]` and fp16 scales `[out, groups]`."""
    groups = _groups(weight)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    return ((groups / scale).round() + 8).clamp(0, 15).flatten(1), scale[..., 0]


def _restored(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (_groups(codes - 8) * scale[..., None]).flatten(1)


def _gptq(weight: torch.Tensor, _largest: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale = _four_bits(weight)
    tensors = {
        "qweight": _packed(codes).T,
        # one less than the zero point
        "qzeros": _packed(torch.full((scale.shape[1], weight.shape[0]), 7)),
        "scales": scale.T.half(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }
    return tensors, _restored(codes, scale)


def _packed_group(weight: torch.Tensor, _largest: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale = _four_bits(weight)
    return {
        "weight_packed": _packed(codes),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }, _restored(codes, scale)


# -- activations
# --------------------------------------------------------------------------------------------------


def _int8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (rows / scale).round().clamp(-128, 127) * scale


def _fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (rows / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale


def _of_token(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(-1, keepdim=True)


# -- formats
# --------------------------------------------------------------------------------------------------


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    """The config of a checkpoint in the compressed-tensors format."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False} | weights,
        "input_activations": inputs,
    }
    groups = {"group_0": group}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
    }


_INT8 = {"num_bits": 8, "type": "int"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
_TENSOR = {"strategy": "tensor", "dynamic": False, "symmetric": True}
_HALF = ("float16", "bfloat16")

FORMATS: dict[str, Format] = {
    "int8 per token": Format(
        _compressed("int-quantized", _INT8 | {"strategy": "channel"}, _INT8 | _TOKEN),
        _int8_channel,
        lambda rows, _: _int8(rows, _of_token(rows) / INT8_MAX),
    ),
    "int8 static": Format(
        _compressed("int-quantized", _INT8 | {"strategy": "tensor"}, _INT8 | _TENSOR),
        _int8_tensor,
        lambda rows, largest: _int8(rows, largest / INT8_MAX),
        static=True,
    ),
    "fp8 static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        _fp8_tensor,
        lambda rows, largest: _fp8(rows, largest / FP8_MAX),
        static=True,
        limit=FP8_MAX,
        dtypes=_HALF,
    ),
    "fp8 per token": Format(
        _compressed("float-quantized", _FLOAT8 | {"strategy": "channel"}, _FLOAT8 | _TOKEN),
        _fp8_channel,
        lambda rows, _: _fp8(rows, _of_token(rows) / FP8_MAX),
    ),
    "fp8 per tensor": Format(
        _compressed("float-quantized", _FLOAT8 | {"strategy": "tensor"}, _FLOAT8 | _TENSOR),
        _fp8_tensor,
        lambda rows, largest: _fp8(rows, largest / FP8_MAX),
        static=True,
        limit=FP8_MAX,
    ),
    "awq": Format(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        _awq,
        dtypes=_HALF,
    ),
    "gptq": Format(
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "desc_act": False,
            "lm_head": False,
        },
        _gptq,
        dtypes=_HALF,
    ),
    "int4 groups": Format(
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
            None,
        ),
        _packed_group,
        dtypes=_HALF,
    ),
}
#: Not served on every machine, or with other rows: named in tests of that.
OTHERS: dict[str, Format] = {
    "fp8 static, own scales": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        _fp8_own_scales,
        lambda rows, largest: _fp8(rows, largest / FP8_MAX),
        static=True,
        limit=FP8_MAX,
        dtypes=_HALF,
    ),
    "fp8 dynamic": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        _fp8_tensor,
        lambda rows, _: _fp8(rows, _of_token(rows) / FP8_MAX),
        dtypes=_HALF,
    ),
    "fp8 blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        _fp8_blocks,
        dtypes=("bfloat16",),
    ),
}


# -- checkpoints
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A checkpoint as vLLM loads it, the same dequantised, and the largest input of each quantised
    layer in calibration.
    """

    quantised: Path
    dequantised: Path
    form: Format
    largest: Tensors

    def reference(self, dtype: torch.dtype = torch.float32) -> "QuantisedReference":
        return QuantisedReference(self, dtype)


class QuantisedReference(Reference):
    """transformers on the dequantised weights; quantised layers round their input first, and add up
    in fp32.
    """

    def __init__(self, made: Made, dtype: torch.dtype):
        super().__init__(made.dequantised, dtype)
        if made.form.activation is None:
            return
        weights = load_file(made.dequantised / "model.safetensors")
        for name, largest in made.largest.items():
            layer = self._model.get_submodule(name)
            layer.forward = _rounded(
                layer, weights[f"{name}.weight"], made.form.activation, largest
            )


def _rounded(
    layer: Any, weight: torch.Tensor, activation: Round, largest: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(rows: torch.Tensor) -> torch.Tensor:
        bias = None if layer.bias is None else layer.bias.float()
        return torch.nn.functional.linear(activation(rows.float(), largest), weight, bias).to(
            rows.dtype
        )

    return forward


def make(name: str, form: str, folder: Path) -> Made:
    """Quantise the tiny checkpoint `name` below `folder`."""
    wanted = (FORMATS | OTHERS)[form]
    plain = checkpoint(name, folder / name / "plain")
    quantised, dequantised = (
        folder / name / f"{form} {kind}".replace(" ", "-") for kind in ("quantised", "dequantised")
    )
    largest = _calibrate(plain)
    weights = load_file(plain / "model.safetensors")
    compressed = dict(weights)
    restored = dict(weights)
    for layer in _layers(weights):
        del compressed[f"{layer}.weight"]
        tensors, restored[f"{layer}.weight"] = wanted.quantise(
            weights[f"{layer}.weight"], _largest_weight(weights, layer)
        )
        if wanted.static:
            # experts are in no static format here
            tensors["input_scale"] = (largest[layer] / wanted.limit).reshape(())
        compressed |= {f"{layer}.{key}": value for key, value in tensors.items()}
    rest = [
        key.removesuffix(".weight")
        for key in weights
        if key.endswith(("lm_head.weight", "embed_out.weight", ".gate.weight"))
    ]
    ignored = (
        {"ignore": rest}
        if wanted.config["quant_method"] == "compressed-tensors"
        else {"ignored_layers": rest}
    )
    for path, content, config in (
        (quantised, compressed, dict(wanted.config) | ignored),
        (dequantised, restored, None),
    ):
        _write(plain, path, content, config)
    return Made(quantised, dequantised, wanted, largest)


def _write(plain: Path, path: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for file in plain.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantization} if quantization else {}))
    )
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )


def _layers(weights: Tensors) -> list[str]:
    """The matrices of the decoder layers, without the routers of experts."""
    matrices = (name for name, tensor in weights.items() if tensor.ndim == 2 and ".layers." in name)
    return [name.removesuffix(".weight") for name in matrices if not name.endswith(".gate.weight")]


def _largest_weight(weights: Tensors, layer: str) -> torch.Tensor:
    """Of the layer's matrix, or of all that vLLM joins with it."""
    parent, _, leaf = layer.rpartition(".")
    parts = next((group for group in FUSED if leaf in group), {leaf})
    return torch.stack([weights[f"{parent}.{part}.weight"].abs().max() for part in parts]).max()


def _calibrate(plain: Path) -> Tensors:
    """Quantised layer → the largest number that it reads on some random tokens."""
    reference = Reference(plain)
    largest = {}
    model = reference._model
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    ]
    for name in linear:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, inputs, name=name: largest.__setitem__(name, inputs[0].abs().max())
        )
    tokens = torch.randint(4, 500, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens, use_cache=False)
    return largest


class QuantisedTruth(Truth):
    """As `Truth`, of a quantised checkpoint."""

    def __init__(self, made: Made, dtype: str):
        super().__init__(
            made.dequantised, dtype, lambda _path, rounded=torch.float32: made.reference(rounded)
        )
        self._made = made

    def errors(self, got: Rows, tokens: list[int], edits: Sequence[Edit] = ()) -> dict[str, float]:
        """As `Truth.errors`; where activations are rounded, fp32 figures are those of the median
        row.
        """
        if self._rounded is not None or self._made.form.activation is None:
            return super().errors(got, tokens, edits)
        wanted = self._truth.rows(tokens, edits)
        errors = {hook: _relative(got, wanted, hook) for hook in self.hooks}
        assert max(float(each.max()) for each in errors.values()) <= FP32_CODES
        return {hook: float(np.median(each)) for hook, each in errors.items()}
