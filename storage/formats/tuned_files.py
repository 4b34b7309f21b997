"""Files of tuned lenses: an affine map per layer, `{layer}.weight` `[hidden, hidden]` and
`{layer}.bias` `[hidden]`, in safetensors.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.base.limits import MAX_TUNED_BYTES
from .folders import folder_below
from .tensor_files import TensorFile, TensorFileError, opened

FILE = "lens.safetensors"
#: The most tensors in one file; there are two per layer.
_TENSORS = 4096
_NAME = re.compile(r"(0|[1-9][0-9]{0,5})\.(weight|bias)")


def folder_of(root: str, path: str) -> Path:
    """Return the folder at `path` below `root`.

    Raises a 400 if it is missing, or outside `root`, for example through a symbolic link.
    """
    return folder_below(root, path, "lens_dir", "tuned lenses", ((FILE,),))


@contextmanager
def reading(folder: Path) -> Iterator[TensorFile]:
    """Open the file in `folder`.

    Raises TensorFileError, also at the end if the file was changed meanwhile.
    """
    with opened(folder / FILE, MAX_TUNED_BYTES, _TENSORS) as file:
        yield file
        file.check_unchanged()


def map_of(file: TensorFile, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (W `[hidden, hidden]`, b `[hidden]`) of a layer, float32. Raises TensorFileError."""
    return file.read(f"{layer}.weight"), file.read(f"{layer}.bias")


def layers_of(
    file: TensorFile, num_layers: int, hidden_size: int, besides: Sequence[str] = ()
) -> list[int]:
    """Return the layers that have a map, ascending. `besides`: other tensors that are valid.

    Raises TensorFileError if the file is not a tuned lens for a model of this shape.
    """
    result: dict[int, set[str]] = {}
    for name, shape in file.shapes.items():
        if name in besides:
            continue
        match = _NAME.fullmatch(name)
        if match is None:
            raise TensorFileError(
                f"{FILE}: {name!r} is not a tensor of a tuned lens; valid: 0.weight, 0.bias, "
                "1.weight, …"
            )
        layer, part = int(match[1]), match[2]
        if layer >= num_layers:
            raise TensorFileError(
                f"{FILE}: {name}: this model has no layer {layer}; valid: 0 to {num_layers - 1}"
            )
        needed = [hidden_size] * (2 if part == "weight" else 1)
        if shape != needed:
            raise TensorFileError(
                f"{FILE}: {name} has the shape {shape}; this model needs {needed}"
            )
        result.setdefault(layer, set()).add(part)
    for layer, parts in result.items():
        if len(parts) != 2:
            raise TensorFileError(
                f"{FILE}: layer {layer} has only {parts.pop()}; valid: weight and bias"
            )
    if not result:
        raise TensorFileError(f"{FILE} has no tensors")
    return sorted(result)


@contextmanager
def checked(
    folder: Path, num_layers: int, hidden_size: int, besides: Sequence[str] = ()
) -> Iterator[tuple[TensorFile, list[int]]]:
    """Open the file of a lens that fits the model, with its layers; their maps are finite. Raises a
    400 that names `path`, also for errors inside.
    """
    with (
        Translated(
            TensorFileError,
            lambda error: MidstreamError("invalid_request", str(error), field="path"),
        ),
        reading(folder) as file,
    ):
        layers = layers_of(file, num_layers, hidden_size, besides)
        for layer in layers:
            for name, values in zip(("weight", "bias"), map_of(file, layer), strict=True):
                check_finite(f"{layer}.{name}", values)
        yield file, layers


def check_finite(name: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise TensorFileError(f"{FILE}: {name} has values that are not finite")


def check_on(folder: Path, num_layers: int, hidden_size: int) -> tuple[str, list[int], int]:
    """Return (digest, layers, bytes) of a tuned lens that fits the model.

    Reads the whole file. Raises a 400 that names `path`.
    """
    with checked(folder, num_layers, hidden_size) as (file, layers):
        return file.digest().hex(), layers, file.bytes
