"""Files of tuned and Jacobian lenses, in safetensors.

A tuned lens has an affine map per layer, `{layer}.weight` `[hidden, hidden]` and `{layer}.bias`
`[hidden]`. A Jacobian lens is such a file whose maps have no bias (zeros), with the model's output
matrix as `unembedding` `[vocabulary, hidden]`, which edits need, and the fit's record.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ...schemas.artifacts.jacobian_lenses import JacobianLens, JacobianLensRequest, JacobianRecord
from ...schemas.artifacts.tuned_lenses import StoredTuned, TunedLens
from ...schemas.base.dtypes import DTYPE_OF_FILE, DTYPES, ITEM_BYTES, narrowed
from ...schemas.base.errors import Translated
from ...schemas.base.limits import MAX_TUNED_BYTES
from ...schemas.jobs.models import ModelInfo
from ..file_store import sync
from .capture_blobs import DTYPE_NAMES, DamagedBlob, TensorPlace, read_tensors, safetensors_header
from .folders import folder_below, refused_path
from .tensor_files import TensorFile, TensorFileError, opened

FILE = "lens.safetensors"
#: The most tensors in one file; there are two per layer.
_TENSORS = 4096
_NAME = re.compile(r"(0|[1-9][0-9]{0,5})\.(weight|bias)")
UNEMBEDDING = "unembedding"
#: Key of the metadata that holds the `JacobianRecord`, in JSON.
RECORD = "fit"
#: Ends of the names that checkpoints give the output matrix, and the input embeddings that stand
#: for it in models without one.
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
#: safetensors' dtype → bytes of an element.
_ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1},
    **{"U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1},
}


def folder_of(root: str, path: str) -> Path:
    """Return the folder at `path` below `root`.

    Raises a 400 if it is missing, or outside `root`, for example through a symbolic link.
    """
    return folder_below(root, path, "artifacts_dir/lenses", ((FILE,),))


@contextmanager
def reading(folder: Path) -> Iterator[TensorFile]:
    """Open the file in `folder`.

    Raises TensorFileError, also at the end if the file was changed meanwhile.
    """
    with opened(folder / FILE, MAX_TUNED_BYTES, _TENSORS) as file:
        yield file
        file.check_unchanged()


class LensFiles:
    """The files of registered lenses below the folder `root`. A file is read whole to compare its
    digest whenever its state differs from the last check.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._checked: dict[str, tuple[int, int, int]] = {}  # digest → state of the checked file

    @contextmanager
    def reading(self, lens: StoredTuned | TunedLens) -> Iterator[TensorFile]:
        """Open the file of a lens. Raises TensorFileError, also if it has changed since the lens
        was registered, and what `folder_of` raises.
        """
        with reading(folder_of(self._root, lens.path)) as file:
            if self._checked.get(lens.digest) != file.state:
                if (result := file.digest().hex()) != lens.digest:
                    raise TensorFileError(
                        f"its file has changed since it was registered (now {result[:12]}): "
                        "register it again"
                    )
                self._checked[lens.digest] = file.state
            yield file


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
        layer = int(match[1])
        part = match[2]
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
    with refused_path(TensorFileError), reading(folder) as file:
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


class Matrix(NamedTuple):
    """An output matrix, `[vocabulary, hidden]`."""

    values: np.ndarray  # of numpy's dtype of `dtype`, see `DTYPES`
    dtype: str = "float32"


class JacobianContent(NamedTuple):
    """Contents of a file."""

    digest: str
    layers: list[int]
    bytes: int
    vocabulary: int  # rows of the output matrix; 0: there is none
    fit: JacobianRecord | None


def write(
    folder: Path,
    jacobians: Mapping[int, np.ndarray],
    fit: JacobianRecord,
    unembedding: Matrix | None = None,
    dtype: str = "float32",
) -> None:
    """Write a lens to `folder`, which is created. A reader sees the old file or the new one.

    `jacobians`: layer → `[hidden, hidden]`, stored as `dtype`. Raises ValueError without any,
    OSError.
    """
    if not jacobians:
        raise ValueError("there is no layer to write")
    width = len(next(iter(jacobians.values())))
    size = ITEM_BYTES[dtype]
    name = DTYPE_NAMES[dtype]
    header = []
    for layer in sorted(jacobians):
        header.append((f"{layer}.weight", name, [width, width], size * width**2))
        header.append((f"{layer}.bias", name, [width], size * width))
    if unembedding is not None:
        matrix = np.ascontiguousarray(unembedding.values)
        shape = list(matrix.shape)
        of = DTYPE_NAMES[unembedding.dtype]
        header.append((UNEMBEDDING, of, shape, matrix.nbytes))
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{FILE}.draft"
    with draft.open("wb") as out:
        out.write(safetensors_header(header, {RECORD: msgspec.json.encode(fit).decode()}))
        for layer in sorted(jacobians):
            out.write(narrowed(np.ascontiguousarray(jacobians[layer], "<f4"), dtype).data)
            out.write(bytes(size * width))
        if unembedding is not None:
            out.write(matrix.data)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(folder / FILE)
    sync(folder, folder.parent, folder.parent.parent)  # which may be new, too


def check_jacobian(folder: Path, num_layers: int, hidden_size: int) -> JacobianContent:
    """Return the content of a Jacobian lens that fits the model.

    Reads the whole file. Raises a 400 that names `path`.
    """
    with checked(folder, num_layers, hidden_size, (UNEMBEDDING,)) as (file, layers):
        for layer in layers:
            if file.read(f"{layer}.bias").any():
                detail = "has numbers other than 0: register it as a tuned lens"
                raise TensorFileError(f"{FILE}: {layer}.bias {detail}")
        vocabulary, *width = file.shapes.get(UNEMBEDDING, [0, hidden_size])
        if width != [hidden_size]:
            detail = f"{[vocabulary, *width]}; this model needs [vocabulary, {hidden_size}]"
            raise TensorFileError(f"{FILE}: {UNEMBEDDING} has the shape {detail}")
        for row in range(vocabulary):
            check_finite(UNEMBEDDING, file.read(UNEMBEDDING, row))
        raw = file.metadata.get(RECORD)
        with Translated(
            msgspec.DecodeError,
            lambda error: TensorFileError(f"{FILE}: metadata {RECORD!r}: {error}"),
        ):
            fit = None if raw is None else msgspec.json.decode(raw, type=JacobianRecord)
        return JacobianContent(file.digest().hex(), layers, file.bytes, vocabulary, fit)


def lens_of(request: JacobianLensRequest, name: str, model: ModelInfo, root: str) -> JacobianLens:
    """Return what a registration stores. `root`: the folder of lenses.

    Raises a 400 naming the field. Reads the file: not for an event loop.
    """
    content = check_jacobian(folder_of(root, request.path), model.num_layers, model.hidden_size)
    return request.registered(
        JacobianLens,
        name,
        model.name,
        hook="post_block",
        residual=False,
        hidden_size=model.hidden_size,
        **content._asdict(),
    )


def directions(
    file: TensorFile, layers: Sequence[int], tokens: Sequence[int]
) -> dict[tuple[int, int], np.ndarray]:
    """Return (layer, token) → Jᵀ W_U[token], float32 `[hidden]`: the direction of a row whose
    effect on the final residual is that of the token's row of the output matrix.

    The final norm's weight is not part of it, as in the field. Raises TensorFileError.
    """
    rows = np.stack([file.read(UNEMBEDDING, token) for token in tokens])
    result: dict[tuple[int, int], np.ndarray] = {}
    for layer in layers:
        vectors = rows @ map_of(file, layer)[0]
        result |= {(layer, token): row for token, row in zip(tokens, vectors, strict=True)}
    return result


def output_matrix(checkpoint: Path) -> Matrix:
    """Return the output matrix of a checkpoint in safetensors, or the input embeddings of one
    without it.

    Raises ValueError if there is no such matrix of floats, OSError.
    """
    places: dict[str, tuple[np.memmap, TensorPlace]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, "r")

        def bytes_at(start: int, count: int, raw: np.memmap = raw) -> bytes:
            return raw[start : start + count].tobytes()

        try:
            _, tensors, _ = read_tensors(bytes_at, raw.size, _ITEM_BYTES)
        except DamagedBlob as error:
            raise ValueError(f"{path.name}: {error}") from error
        places |= {name: (raw, place) for name, place in tensors.items()}
    for ends in (_HEADS, _EMBEDDINGS):
        for name, (raw, place) in places.items():
            if name.endswith(ends) and place.dtype in DTYPE_OF_FILE and len(place.shape) == 2:
                dtype = DTYPE_OF_FILE[place.dtype]
                values = raw[place.start : place.start + place.length].view(DTYPES[dtype].raw)
                return Matrix(values.reshape(place.shape), dtype)
    names = ", ".join((*_HEADS, *_EMBEDDINGS))
    raise ValueError(f"{checkpoint} has no output matrix of floats in safetensors: {names}")
