"""Tensors in messages: dtype, shape and little-endian bytes, never pickles or lists of floats."""

import hashlib
import math
from typing import Annotated

import msgspec
import numpy as np

from .dtypes import DTYPES, ITEM_BYTES, DType, widened
from .limits import MAX_TENSOR_BYTES, MAX_TENSOR_DIMS, Index
from .records import Record


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
