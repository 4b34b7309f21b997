"""Small checkpoints quantised to FP8, written from the definition of the format, and what
transformers computes of them.

A checkpoint of `tiny` is quantised: what vLLM loads, and beside it the same weights dequantised to
fp32, which transformers loads. The format rounds activations too, which is part of the model: the
reference rounds the input of each quantised layer as the format defines it.
"""

import json
from collections.abc import Callable, Sequence
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

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
DTYPES = ("float32", "bfloat16")

Tensors = dict[str, torch.Tensor]


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """The config of a checkpoint in a format of compressed-tensors."""
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"symmetric": True, "dynamic": False} | weights,
            "input_activations": inputs,
        }
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
    }


_FLOAT8 = {"num_bits": 8, "type": "float"}
CONFIG = compressed(
    "float-quantized",
    _FLOAT8 | {"strategy": "channel"},
    _FLOAT8 | {"strategy": "token", "dynamic": True, "symmetric": True},
)


def _codes(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes, with a scale for each row: an output of a weight, or a token of an input."""
    scale = tensor.abs().amax(-1, keepdim=True) / FP8_MAX
    return (tensor / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


# -- checkpoints
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A checkpoint as vLLM loads it, the same dequantised, and names of the quantised layers."""

    quantised: Path
    dequantised: Path
    layers: list[str]

    def reference(self, dtype: torch.dtype = torch.float32) -> "QuantisedReference":
        return QuantisedReference(self, dtype)


class QuantisedReference(Reference):
    """transformers on the dequantised weights; quantised layers round their input first, and add up
    in fp32.
    """

    def __init__(self, made: Made, dtype: torch.dtype):
        super().__init__(made.dequantised, dtype)
        weights = load_file(made.dequantised / "model.safetensors")
        for name in made.layers:
            layer = self._model.get_submodule(name)
            layer.forward = _rounded(layer, weights[f"{name}.weight"])


def _rounded(layer: Any, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(rows: torch.Tensor) -> torch.Tensor:
        codes, scale = _codes(rows.float())
        bias = None if layer.bias is None else layer.bias.float()
        return torch.nn.functional.linear(codes.float() * scale, weight, bias).to(rows.dtype)

    return forward


def make(name: str, folder: Path) -> Made:
    """Quantise the tiny checkpoint `name` below `folder`."""
    plain = checkpoint(name, folder / name / "plain")
    quantised, dequantised = (folder / name / kind for kind in ("quantised", "dequantised"))
    weights = load_file(plain / "model.safetensors")
    compact = dict(weights)
    restored = dict(weights)
    layers = _layers(weights)
    for layer in layers:
        codes, scale = _codes(weights[f"{layer}.weight"])
        compact |= {f"{layer}.weight": codes, f"{layer}.weight_scale": scale}
        restored[f"{layer}.weight"] = codes.float() * scale
    ignored = [
        key.removesuffix(".weight")
        for key in weights
        if key.endswith(("lm_head.weight", "embed_out.weight", ".gate.weight"))
    ]
    _write(plain, quantised, compact, CONFIG | {"ignore": ignored})
    _write(plain, dequantised, restored, None)
    return Made(quantised, dequantised, layers)


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


class QuantisedTruth(Truth):
    """As `Truth`, of a quantised checkpoint."""

    def __init__(self, made: Made, dtype: str):
        super().__init__(
            made.dequantised, dtype, lambda _path, rounded=torch.float32: made.reference(rounded)
        )
        self._made = made

    def errors(self, got: Rows, tokens: list[int], edits: Sequence[Edit] = ()) -> dict[str, float]:
        """As `Truth.errors`; fp32 figures are those of the median row."""
        if self._rounded is not None:
            return super().errors(got, tokens, edits)
        wanted = self._truth.rows(tokens, edits)
        errors = {hook: _relative(got, wanted, hook) for hook in self.hooks}
        assert max(float(each.max()) for each in errors.values()) <= FP32_CODES
        return {hook: float(np.median(each)) for hook, each in errors.items()}
