"""Converts files of Jacobian lenses of other tools into a folder that can be registered: artifacts
of neuronpedia/jacobian-lens and of TransformerLens, and checkpoints of fits.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...schemas.artifacts.jacobian_lenses import SKIP_FIRST, JacobianRecord
from ...schemas.base.limits import MAX_TUNED_BYTES
from ...storage.formats.jacobian_files import output_matrix, write
from . import torch_file
from .arrays import Array


def convert(
    file: str | Path, folder: str | Path, checkpoint: str | Path | None = None
) -> list[int]:
    """Write the lens in `file` to `folder`, with the output matrix of the model in the folder
    `checkpoint`, which edits need; return its layers.

    `file`: of torch.save; `{"J": {layer: [hidden, hidden]}, "n_prompts", "d_model", …}`, or
    `{"jacobian_sum": …, "n_done", …}`, whose sums are divided by the number of prompts. Memory:
    about three times the file. Raises ValueError with the reason, OSError.
    """
    path = Path(file)
    if (size := path.stat().st_size) > MAX_TUNED_BYTES:
        raise ValueError(f"{path.name} has {size} bytes; the limit is {MAX_TUNED_BYTES}")
    value = torch_file.read(path.read_bytes(), MAX_TUNED_BYTES)
    key = "J" if isinstance(value, dict) and "J" in value else "jacobian_sum"
    if not isinstance(value, dict) or not isinstance(value.get(key), dict) or not value[key]:
        raise ValueError(
            f"{path.name} is no Jacobian lens: valid: a dictionary with J or jacobian_sum, which "
            "maps layers to matrices"
        )
    prompts = value.get("n_prompts" if key == "J" else "n_done", 0)
    if not isinstance(prompts, int) or (key != "J" and prompts < 1):
        raise ValueError(f"{path.name} states {prompts!r} prompts; valid: a number of 1 or more")
    jacobians, dtype = {}, "float32"
    for layer, matrix in value[key].items():
        width = value.get("d_model") or (isinstance(matrix, Array) and matrix.shape[0])
        if not (isinstance(layer, int) and isinstance(matrix, Array)) or matrix.shape != (
            width,
            width,
        ):
            shape = list(matrix.shape) if isinstance(matrix, Array) else type(matrix).__name__
            raise ValueError(f"{path.name}: {key}[{layer!r}] is {shape}; valid: [{width}, {width}]")
        dtype = matrix.dtype if key == "J" else "float32"
        jacobians[layer] = matrix.numpy() / (1 if key == "J" else prompts)
    metadata = value.get("metadata")
    stated: dict[str, Any] = (metadata if isinstance(metadata, dict) else {}) | {
        name: value[name] for name in ("model_name", "corpus", "target_layer") if name in value
    }
    if "target_layer" in stated and stated["target_layer"] <= max(jacobians):
        raise ValueError(
            f"{path.name} maps to the output of layer {stated['target_layer']}; valid: the last "
            "layer, above those that it maps"
        )
    fit = JacobianRecord(
        method="imported",
        prompts=prompts,
        skip_first=_number(stated, "skip_first_positions", value.get("skip_first", SKIP_FIRST)),
        max_tokens=_number(stated, "max_seq_len", 0),
        source={"file": path.name} | {str(name): str(stated[name])[:200] for name in stated},
    )
    write(
        Path(folder),
        jacobians,
        fit,
        None if checkpoint is None else output_matrix(Path(checkpoint)),
        dtype,
    )
    return sorted(jacobians)


def _number(stated: Mapping[str, Any], name: str, default: int) -> int:
    value = stated.get(name, default)
    return value if isinstance(value, int) else default
