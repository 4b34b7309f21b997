"""The files of vllm-lens 1.3 (`vllm_lens/_helpers`): tensors in JSON, and its `SteeringVector`,
converted to steering entries.

A tensor is `{"data", "dtype", "original_dtype", "shape", "compression"}`: base64 of the bytes,
compressed with zstandard if `compression` is `zstd`; bfloat16 has `dtype` int16, and its name in
`original_dtype`.
"""

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from midstream.client.values import given
from midstream.client.vectors import rows_of
from midstream.schemas.base.dtypes import ITEM_BYTES, DType
from midstream.schemas.base.errors import Translated
from midstream.schemas.base.json_bounds import TooManyValues, check_json
from midstream.schemas.base.limits import MAX_ENTRIES, MAX_TENSOR_BYTES, Index
from midstream.schemas.prompts.selectors import resolve_hook
from midstream.schemas.requests.specs import SteeringSpec

from .plain import cannot_hold, check, layers_of

#: `original_dtype` → Midstream's dtype; old clients do not send it, and `dtype` is used.
_DTYPES: dict[str, DType] = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "float32": "float32",
    "float16": "float16",
}
#: Midstream's dtype → the numpy dtype in which vllm-lens' clients read the bytes.
STORED: dict[DType, str] = {"float32": "float32", "float16": "float16", "bfloat16": "int16"}
#: The largest window of a zstandard frame, in bytes; no compression level of vllm-lens needs more.
_WINDOW = 1 << 27


class LensTensor(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in JSON."""

    data: str
    dtype: str
    shape: Annotated[list[Index], msgspec.Meta(min_length=1, max_length=3)]
    original_dtype: str | None = None
    compression: Literal["zstd"] | None = None


class LensVector(msgspec.Struct, forbid_unknown_fields=True):
    """A `SteeringVector`: `activations` `[layers, hidden_size]`, applied at every position, or
    `[layers, positions, hidden_size]`.

    At each of `layer_indices`: h → h + scale · v, or with `norm_match`, h + scale · ‖h‖ · v̂.
    """

    activations: LensTensor
    layer_indices: list[Index]
    scale: float = 1.0
    norm_match: bool = False
    position_indices: list[Index] | None = None


LensVectors = Annotated[list[LensVector], msgspec.Meta(min_length=1)]


def unpacked(tensor: LensTensor) -> tuple[DType, list[int], bytes]:
    """Return dtype, shape and little-endian bytes.

    Raises ValueError naming the field. Allocates no more memory than the shape needs, and at most
    8 MiB.
    """
    name = tensor.original_dtype or tensor.dtype
    if name not in _DTYPES or tensor.dtype != STORED[_DTYPES[name]]:
        raise ValueError(
            f"activations.dtype: is {tensor.dtype!r} of {name!r}; valid: float32, float16, or "
            "int16 of torch.bfloat16"
        )
    dtype = _DTYPES[name]
    size = math.prod(tensor.shape) * ITEM_BYTES[dtype]
    if not 0 < size <= MAX_TENSOR_BYTES:
        raise ValueError(
            f"activations.shape: {tensor.shape} is {size} bytes; valid: 1 to {MAX_TENSOR_BYTES}"
        )
    import zstandard  # few files need it

    with Translated(
        (binascii.Error, zstandard.ZstdError),
        lambda error: ValueError(f"activations.data: cannot be decoded: {error}"),
    ):
        raw = base64.b64decode(tensor.data, validate=True)
        if tensor.compression:
            raw = (
                zstandard.ZstdDecompressor(max_window_size=_WINDOW)
                .stream_reader(raw)
                .read(size + 1)
            )
    if len(raw) != size:
        raise ValueError(
            f"activations.data: has {len(raw)} bytes or more; {dtype} of shape {tensor.shape} "
            f"needs {size}"
        )
    return dtype, tensor.shape, raw


def read(raw: bytes) -> list[SteeringSpec]:
    """Return the entries in a JSON file. Raises ValueError."""
    with Translated(
        (msgspec.DecodeError, TooManyValues, UnicodeDecodeError),
        lambda error: ValueError(f"it is not valid JSON of a SteeringVector: {error}"),
    ):
        check_json(raw)
        result = msgspec.json.decode(raw)
    return entries_of(result if isinstance(result, list) else [result])


def entries_of(vectors: list[Any]) -> list[SteeringSpec]:
    """Return the entries in `SteeringVector`s, as JSON has them. Raises ValueError."""
    with Translated(
        msgspec.ValidationError,
        lambda error: ValueError(f"it is not a SteeringVector of vllm-lens: {error}"),
    ):
        return [
            spec for vector in msgspec.convert(vectors, LensVectors) for spec in specs_of(vector)
        ]


def specs_of(vector: LensVector) -> list[SteeringSpec]:
    """Convert a vector to equivalent entries at `post_block`: one for each layer, and for each
    position if positions have separate rows.

    Raises ValueError naming the field.
    """
    dtype, shape, raw = unpacked(vector.activations)
    layers = vector.layer_indices
    if len(shape) < 2 or shape[0] != len(layers):
        raise ValueError(
            f"activations: has shape {shape} for {len(layers)} layers; valid: "
            "[layers, hidden_size] or [layers, positions, hidden_size]"
        )
    if len(set(layers)) != len(layers):
        raise ValueError("layer_indices: names a layer twice")
    places: list[dict[str, Any]] = [{}]
    if len(shape) == 3:
        places = [{"positions": [place]} for place in _positions(vector, shape[1])]
    elif vector.position_indices is not None:
        raise ValueError(
            "position_indices: is for activations of shape [layers, positions, hidden_size]"
        )
    common = given(scale=vector.scale, norm_match=vector.norm_match or None)
    rows = rows_of(dtype, shape[-1], raw)
    sites = [{"layers": layer, **place} for layer in layers for place in places]
    return [
        SteeringSpec(vector=row, **site, **common) for site, row in zip(sites, rows, strict=True)
    ]


def _positions(vector: LensVector, count: int) -> list[int]:
    """Return the positions of the `count` rows of each layer. Raises ValueError."""
    layers = vector.layer_indices
    if len(layers) * count > MAX_ENTRIES:
        raise ValueError(
            f"activations: has {len(layers)} layers of {count} positions; valid: at most "
            f"{MAX_ENTRIES} rows in all"
        )
    positions = vector.position_indices
    places = list(range(count)) if positions is None else positions
    if len(places) != count or len(set(places)) != count:
        raise ValueError(
            f"position_indices: has {len(places)} positions for {count} rows; valid: "
            f"{count} different positions"
        )
    return places


def packed(dtype: DType, shape: Sequence[int], raw: bytes) -> dict[str, Any]:
    """Encode a tensor for vllm-lens' clients, without compression."""
    return {
        "data": base64.b64encode(raw).decode(),
        "dtype": STORED[dtype],
        "original_dtype": f"torch.{dtype}",
        "shape": list(shape),
    }


def write(specs: Sequence[SteeringSpec]) -> bytes:
    """Return entries as a JSON file. Raises ValueError for what it cannot hold."""
    check(specs, "vllm-lens", keeps={"norm_match"})
    for index, spec in enumerate(specs):
        if resolve_hook(spec.hook or "post_block") != "post_block":
            raise cannot_hold(index, f"hook {spec.hook}", "vllm-lens")
    return msgspec.json.encode([_vector_of(spec) for spec in specs])


def _vector_of(spec: SteeringSpec) -> dict[str, Any]:
    assert spec.vector is not None
    layers = layers_of(spec) or []
    tensor = spec.vector
    return {
        "activations": packed(
            tensor.dtype, [len(layers), *tensor.shape], tensor.data * len(layers)
        ),
        "layer_indices": layers,
        "scale": 1.0 if spec.scale is None else spec.scale,
        "norm_match": bool(spec.norm_match),
        "position_indices": None,
    }
