"""The steering entries in the value of a file of `torch.save`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from midstream.client.vectors import of_names, without_notes
from midstream.schemas.base.dtypes import DTYPES
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.requests.specs import SteeringSpec

from . import lens_vectors
from .array_files import PlainArray

#: Keys of pyreft's LoReFT files, which EasySteer also reads.
_LOREFT = ("rotate_layer", "weight", "bias")


def entries_of(value: Any) -> list[SteeringSpec]:
    """Return the vectors in the value of a torch file. Raises ValueError."""
    if isinstance(value, PlainArray):
        return of_names({"vector": value.tensor()})
    if (
        isinstance(value, dict)
        and {"activations", "layer_indices"} <= value.keys()
        and isinstance(value["activations"], PlainArray)
    ):
        array = value["activations"]
        fields = value | {"activations": lens_vectors.packed(array.dtype, array.shape, array.data)}
        given = {name: field for name, field in fields.items() if field is not None}
        return lens_vectors.entries_of([given])
    if not isinstance(value, dict) or not any(
        isinstance(item, PlainArray) for item in value.values()
    ):
        raise ValueError(
            "it holds no tensors by name: save a tensor, or a dictionary from a layer or "
            "site to a tensor"
        )
    tensors: dict[str, Tensor] = {}
    for key, item in without_notes(value).items():
        if not isinstance(item, PlainArray):
            raise ValueError(f"its {key!r:.80} is not a tensor; valid: tensors by layer or site")
        if str(key) in tensors:
            raise ValueError(f"it names {key} twice: as a text and as a number")
        tensors[str(key)] = item.tensor()
    return of_names(_loreft(tensors) if "rotate_layer" in tensors else tensors)


def _loreft(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert a LoReFT: pyreft stores R as `[hidden_size, rank]`, and W and b as a linear layer."""
    if tensors.keys() != set(_LOREFT):
        raise ValueError(
            f"its LoReFT has {', '.join(sorted(tensors))}; valid: {', '.join(_LOREFT)}"
        )
    rotation = tensors["rotate_layer"]
    if len(rotation.shape) != 2:
        raise ValueError(f"its rotate_layer has shape {rotation.shape}; valid: [hidden_size, rank]")
    bits = DTYPES[rotation.dtype].raw
    transposed = np.frombuffer(rotation.data, bits).reshape(rotation.shape).T
    return {
        "rotation": Tensor(
            dtype=rotation.dtype, shape=list(transposed.shape), data=transposed.tobytes()
        ),
        "weight": tensors["weight"],
        "bias": tensors["bias"],
    }
