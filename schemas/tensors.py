"""How does a tensor cross a wire? As dtype, shape and raw little-endian bytes, never as pickle or a list of floats."""

import hashlib
import math
from typing import Annotated, Literal

import msgspec
import numpy as np

from .base import Record
from .limits import MAX_TENSOR_BYTES, MAX_TENSOR_DIMS, Index

DType = Literal["float32", "float16", "bfloat16"]

#: Bytes of one element.
ITEM_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class Tensor(Record):
    """`data` is C-contiguous little-endian; in JSON it is base64 text."""

    dtype: DType
    shape: Annotated[list[Index], msgspec.Meta(max_length=MAX_TENSOR_DIMS)]
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_TENSOR_BYTES)]

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.data) != expected:
            raise ValueError(f"data holds {len(self.data)} bytes; {self.dtype} of shape {self.shape} needs {expected}")


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """`bits`: uint16 patterns of bfloat16, any shape; returns float32 of the same shape, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor as numpy; bfloat16, which numpy lacks, is widened exactly to float32."""
    if tensor.dtype == "bfloat16":
        return bfloat16_to_float32(np.frombuffer(tensor.data, dtype="<u2")).reshape(tensor.shape)
    return np.frombuffer(tensor.data, dtype=np.dtype(tensor.dtype).newbyteorder("<")).reshape(tensor.shape)


def from_numpy(array: np.ndarray) -> Tensor:
    """float16 stays, everything else is sent as float32; shape is kept."""
    dtype: DType = "float16" if array.dtype == np.float16 else "float32"
    contiguous = np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<"))
    return Tensor(dtype=dtype, shape=list(array.shape), data=contiguous.tobytes())


def content_hash(tensor: Tensor) -> str:
    """SHA-256 hex of dtype, shape and bytes: the tensor's name everywhere inside Midstream."""
    digest = hashlib.sha256(msgspec.msgpack.encode((tensor.dtype, tensor.shape)))
    digest.update(tensor.data)
    return digest.hexdigest()
