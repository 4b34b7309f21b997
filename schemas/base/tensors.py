"""Tensors in messages: dtype, shape and little-endian bytes, never pickles. Requests may also give
lists of numbers.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from .dtypes import DTYPES, ITEM_BYTES, DType, widened
from .limits import MAX_JSON_VALUES, MAX_TENSOR_BYTES, MAX_TENSOR_DIMS, Index
from .records import Record

#: The largest finite float32.
MAX_FLOAT32 = float(np.finfo(np.float32).max)


class Tensor(Record):
    """`data` is C-contiguous little-endian; in JSON it is base64 text."""

    dtype: DType
    shape: Annotated[list[Index], msgspec.Meta(max_length=MAX_TENSOR_DIMS)]
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_TENSOR_BYTES)]

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.data) != expected:
            raise ValueError(
                f"data holds {len(self.data)} bytes; {self.dtype} of shape {self.shape} needs "
                f"{expected}"
            )

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {self.shape})"


#: Content hash → packed tensor.
PackedTensors = dict[str, bytes]
#: Content hash → packed tensor, or image.
PackedBlobs = Mapping[str, bytes]

if TYPE_CHECKING:
    NumbersOrTensor = Tensor
else:
    _Number = Annotated[float, msgspec.Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
    _Row = Annotated[list[_Number], msgspec.Meta(max_length=MAX_JSON_VALUES)]
    #: A tensor as requests give it: numbers, a list for each row of a matrix, or a `Tensor`.
    NumbersOrTensor = (
        Tensor
        | Annotated[list[_Number | _Row], msgspec.Meta(min_length=1, max_length=MAX_JSON_VALUES)]
    )


def pack_numbers(record: Any, *names: str) -> None:
    """Replace lists of numbers in these fields of a record by float32 tensors. Raises ValueError
    for rows of different lengths.
    """
    for name in names:
        value = getattr(record, name)
        if isinstance(value, list):
            try:
                array = np.array(value, dtype=np.float32)
            except ValueError as error:
                raise ValueError(f"{name} has rows of different lengths") from error
            msgspec.structs.force_setattr(record, name, from_numpy(array))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Convert a tensor to numpy; bfloat16, which numpy lacks, becomes float32, exactly."""
    return widened(
        np.frombuffer(tensor.data, dtype=DTYPES[tensor.dtype].raw), tensor.dtype
    ).reshape(tensor.shape)


def from_numpy(array: np.ndarray) -> Tensor:
    """Convert an array to a tensor: float16 stays, other dtypes become float32."""
    dtype: DType = "float16" if array.dtype == np.float16 else "float32"
    contiguous = np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<"))
    return Tensor(dtype=dtype, shape=list(array.shape), data=contiguous.tobytes())


def content_hash(tensor: Tensor) -> str:
    """Return the SHA-256, in hexadecimal, of dtype, shape and bytes: the tensor's name inside
    Midstream.
    """
    digest = hashlib.sha256(msgspec.msgpack.encode((tensor.dtype, tensor.shape)))
    digest.update(tensor.data)
    return digest.hexdigest()
