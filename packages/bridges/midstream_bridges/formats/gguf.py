"""Reads and writes control vectors in GGUF files of llama.cpp, repeng and EasySteer: tensors
`direction.{layer}`, `[hidden_size]`.

llama.cpp adds `direction.N` to the output of layer N, counted from 0 (`l_out-N`), which is
`post_block` of layer N. It has no direction for layer 0; repeng and EasySteer number layers in the
same way, and may write one.
"""

import re
import struct
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from midstream.schemas.base.dtypes import ITEM_BYTES, DType
from midstream.schemas.base.errors import Translated
from midstream.schemas.base.limits import MAX_FILE_TENSORS, MAX_TENSOR_BYTES
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.requests.specs import SteeringSpec

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ARCHITECTURE = "controlvector"
_ALIGNMENT = 32
#: ggml's tensor type → dtype.
_DTYPES: dict[int, DType] = {0: "float32", 1: "float16", 30: "bfloat16"}
#: GGUF's value type → struct code. Strings and arrays have the types `_TEXT` and `_ARRAY`.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT = 8
_ARRAY = 9
_UINT32 = 4
_MAX_KEYS = 1024
_DIRECTION = re.compile(r"direction\.([0-9]{1,6})")
#: Keys under `controlvector.` that describe where the directions come from: those of llama.cpp and
#: repeng, then EasySteer's, some of which have a part for each layer. Any other key may change how
#: a direction is applied, which here is always the addition of 1 × the direction.
_KEYS = frozenset(
    [
        "model_hint",
        "layer_count",
        "method",
        "normalize",
        "normalized",
        "n_positive",
        "n_negative",
        "n_samples",
        "n_components",
        "num_vectors_averaged",
        "token_pos",
        "correct_direction",
        "use_positive_only",
        "streaming",
        "composition",
        "explained_variance",
        "regularization",
        "standardize",
        "C",
        "classification_scores",
        "easysteer",
    ]
)
#: Keys under `general.` that describe a file.
_GENERAL = frozenset({
    "architecture", "alignment", "author", "base_model", "basename", "dataset", "description",
    "doi", "file_type", "finetune", "languages", "license", "name", "organization",
    "quantization_version", "quantized_by", "repo_url", "size_label", "source", "tags",
    "type", "url", "uuid", "version",
})  # fmt: skip


class _EasySteer(msgspec.Struct):
    """Describes the directions of an EasySteer file; null: it does not say of what they are."""

    component: Literal["hidden_states"] | None = None


# Not the package `gguf`: a file of 65 bytes that declares an array of 2^60 keeps it busy for ever.
class _Reader:
    """A cursor over the file's bytes; never reads or allocates beyond their end."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def take(self, size: int) -> bytes:
        if size > len(self.raw) - self.at:
            raise ValueError("it is not a GGUF file: it ends early")
        self.at += size
        return self.raw[self.at - size : self.at]

    def text(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """Read a value; return None for an array, since no array is needed."""
        if kind == _TEXT:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"it is not a GGUF file: a value has type {kind}")
        inner = self.number("I")
        count = self.number("Q")
        if inner in _SCALARS:
            self.take(struct.calcsize(f"<{_SCALARS[inner]}") * count)
        elif inner == _TEXT:
            for _ in range(count):  # bounded by the file: each text takes at least eight bytes
                self.text()
        else:
            raise ValueError("it is not a control vector: its metadata has arrays of arrays")
        return None


def read(raw: bytes) -> list[SteeringSpec]:
    """Return one entry per direction, ascending by layer, without a hook.

    Raises ValueError with the reason.
    """
    reader = _Reader(raw)
    reader.take(len(MAGIC))
    if (version := reader.number("I")) not in _VERSIONS:
        raise ValueError(
            f"it is a GGUF file of version {version}; valid: "
            f"{', '.join(map(str, _VERSIONS))}, little-endian"
        )
    tensors = reader.number("Q")
    keys = reader.number("Q")
    if tensors > MAX_FILE_TENSORS or keys > _MAX_KEYS:
        raise ValueError(
            f"it has {tensors} tensors and {keys} keys; valid: at most {MAX_FILE_TENSORS} "
            f"and {_MAX_KEYS}"
        )
    metadata = {reader.text(): reader.value(reader.number("I")) for _ in range(keys)}
    _check_keys(metadata)
    places = [_place(reader) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
        raise ValueError(f"its general.alignment is {alignment!r:.80}; valid: a number of bytes")
    data = -(-reader.at // alignment) * alignment
    directions: dict[int, Tensor] = {}
    for name, dtype, elements, offset in places:
        match = _DIRECTION.fullmatch(name)
        if match is None:
            raise ValueError(
                f"its tensor {name!r:.80} is not a direction; valid: direction.N, N a layer"
            )
        layer = int(match[1])
        if layer in directions:
            raise ValueError(f"it has two directions for layer {layer}")
        reader.at = data + offset
        values = reader.take(elements * ITEM_BYTES[dtype])
        directions[layer] = Tensor(dtype=dtype, shape=[elements], data=values)
    return [
        SteeringSpec(layers=layer, vector=tensor) for layer, tensor in sorted(directions.items())
    ]


def _check_keys(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError for a file that is not a control vector, or that may be applied otherwise
    than by adding its directions.
    """
    if (found := metadata.get("general.architecture")) != _ARCHITECTURE:
        raise ValueError(f"its general.architecture is {found!r:.80}; valid: {_ARCHITECTURE!r}")
    for key in metadata:
        group, _, name = key.partition(".")
        known = {_ARCHITECTURE: _KEYS, "general": _GENERAL}.get(group, frozenset())
        if name.partition(".")[0] not in known:
            raise ValueError(
                f"its key {key!r:.80} may change how it is applied, and is not read; valid keys of "
                f"{_ARCHITECTURE}: {', '.join(sorted(_KEYS))}"
            )
    with Translated(
        msgspec.DecodeError,
        lambda error: ValueError(
            f"its directions are not those of layers' outputs: controlvector.easysteer: {error}"
        ),
    ):
        msgspec.json.decode(metadata.get("controlvector.easysteer", "{}"), type=_EasySteer)


def _place(reader: _Reader) -> tuple[str, DType, int, int]:
    """Read the name, dtype, number of elements and offset of the next tensor."""
    name = reader.text()
    dimensions = reader.number("I")
    if dimensions != 1:
        raise ValueError(
            f"its tensor {name!r:.80} has {dimensions} dimensions; valid: one, [hidden_size]"
        )
    elements = reader.number("Q")
    kind = reader.number("I")
    offset = reader.number("Q")
    if kind not in _DTYPES:
        raise ValueError(f"its tensor {name!r:.80} has ggml type {kind}; valid: F32, F16 and BF16")
    if elements * ITEM_BYTES[_DTYPES[kind]] > MAX_TENSOR_BYTES:
        raise ValueError(
            f"its tensor {name!r:.80} has {elements} elements: more than {MAX_TENSOR_BYTES} bytes"
        )
    return name, _DTYPES[kind], elements, offset


def write(directions: Mapping[int, np.ndarray], model: str) -> bytes:
    """Return a control vector that llama.cpp, repeng and EasySteer can read.

    `directions`: layer → float32 `[hidden_size]`.

    Raises ValueError for layer 0, which llama.cpp rejects.
    """
    if 0 in directions:
        raise ValueError(
            "layer 0 cannot be in a GGUF control vector: llama.cpp rejects direction.0; "
            "valid formats: safetensors, npz, pt"
        )
    infos = b""
    offset = 0
    blocks: list[bytes] = []
    for layer, vector in directions.items():
        infos += _text(f"direction.{layer}") + struct.pack("<IQIQ", 1, vector.size, 0, offset)
        blocks.append(_padded(vector.astype("<f4").tobytes()))
        offset += len(blocks[-1])
    keys = [
        _text("general.architecture") + struct.pack("<I", _TEXT) + _text(_ARCHITECTURE),
        _text("controlvector.model_hint") + struct.pack("<I", _TEXT) + _text(model),
        _text("controlvector.layer_count") + struct.pack("<II", _UINT32, len(blocks)),
    ]
    return _padded(
        MAGIC + struct.pack("<IQQ", _VERSIONS[-1], len(blocks), len(keys)) + b"".join(keys) + infos
    ) + b"".join(blocks)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % _ALIGNMENT)
