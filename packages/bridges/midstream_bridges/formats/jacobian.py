"""Converts a file of a Jacobian lens, as neuronpedia/jacobian-lens and TransformerLens write it,
into a folder that can be registered.
"""

from pathlib import Path
from typing import Any

from midstream.schemas.artifacts.jacobian_lenses import SKIP_FIRST, JacobianRecord
from midstream.schemas.base.limits import MAX_TUNED_BYTES
from midstream.storage.formats.lens_files import output_matrix, write

from .array_files import PlainArray, read_torch


def convert(
    file: str | Path, folder: str | Path, checkpoint: str | Path | None = None
) -> list[int]:
    """Write the lens in `file` to `folder`, with the output matrix of the model in the folder
    `checkpoint`, which edits need; return its layers.

    `file`: of torch.save; `{"J": {layer: [hidden, hidden]}, "n_prompts", "d_model", "metadata"}`.
    Memory: about three times the file. Raises ValueError with the reason, OSError.
    """
    path = Path(file)
    if (size := path.stat().st_size) > MAX_TUNED_BYTES:
        raise ValueError(f"{path.name} has {size} bytes; the limit is {MAX_TUNED_BYTES}")
    value = read_torch(path.read_bytes(), MAX_TUNED_BYTES)
    if not (isinstance(value, dict) and isinstance(value.get("J"), dict) and value["J"]):
        raise ValueError(
            f"{path.name} is no Jacobian lens: valid: a dictionary with J, which maps layers to "
            "matrices"
        )
    jacobians = {}
    dtype = "float32"
    width = value.get("d_model")
    for layer, matrix in value["J"].items():
        shape = list(matrix.shape) if isinstance(matrix, PlainArray) else type(matrix).__name__
        if not isinstance(layer, int) or shape != [width, width]:
            raise ValueError(f"{path.name}: J[{layer!r}] is {shape}; valid: [{width}, {width}]")
        jacobians[layer] = matrix.numpy()
        dtype = matrix.dtype
    metadata = value.get("metadata")
    stated: dict[str, Any] = metadata if isinstance(metadata, dict) else {}
    if (target := stated.get("target_layer")) is not None and target <= max(jacobians):
        raise ValueError(
            f"{path.name} maps to the output of layer {target}; valid: the last layer, above "
            "those that it maps"
        )
    numbers = {name: item for name, item in {**stated, **value}.items() if isinstance(item, int)}
    fit = JacobianRecord(
        method="imported",
        prompts=numbers.get("n_prompts", 0),
        skip_first=numbers.get("skip_first_positions", SKIP_FIRST),
        max_tokens=numbers.get("max_seq_len", 0),
        source={"file": path.name} | {str(name): str(stated[name])[:200] for name in stated},
    )
    matrix = None if checkpoint is None else output_matrix(Path(checkpoint))
    write(Path(folder), jacobians, fit, matrix, dtype)
    return sorted(jacobians)
