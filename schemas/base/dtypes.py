"""The table of dtypes: bytes, names in files, and how numpy reads what it has no dtype for.

Imports no numpy.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

#: What a model runs in, and what tensors of a request may be.
DType = Literal["float32", "bfloat16", "float16"]
#: What captured rows are stored as; `model`: as the model computes them.
RowDType = Literal["model", DType]


def bfloat16_to_float32(bits: "np.ndarray") -> "np.ndarray":
    """`bits`: uint16 patterns of bfloat16, any shape; returns float32 of the same shape,
    exactly.
    """
    wide: np.ndarray = (bits.astype("<u4") << 16).view("<f4")
    return wide


def float32_to_bfloat16(values: "np.ndarray") -> "np.ndarray":
    """float32 as uint16 patterns of bfloat16, rounded to nearest, ties to even."""
    bits = values.view("<u4").astype("<u8")
    narrow: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return narrow


class DTypeFacts(NamedTuple):
    """A dtype; its name is torch's."""

    bytes: int  # of one element
    file: str  # its name in a safetensors header
    raw: str  # numpy's name, little-endian; of what numpy lacks the type of its bit patterns
    largest: float = math.inf  # finite value, where a model may run in it
    widened: Callable[["np.ndarray"], "np.ndarray"] | None = (
        None  # bit patterns → float32, for what numpy lacks
    )
    narrowed: Callable[["np.ndarray"], "np.ndarray"] | None = None  # float32 → bit patterns


DTYPES: dict[str, DTypeFacts] = {
    "float32": DTypeFacts(4, "F32", "<f4", 3.4e38),
    "bfloat16": DTypeFacts(
        2, "BF16", "<u2", 3.38e38, bfloat16_to_float32, float32_to_bfloat16
    ),  # float32's exponent
    "float16": DTypeFacts(2, "F16", "<f2", 65504.0),
    "int64": DTypeFacts(8, "I64", "<i8"),  # of positions and token ids
}
#: A safetensors header's name → ours.
DTYPE_OF_FILE = {facts.file: name for name, facts in DTYPES.items()}
#: Bytes of one element.
ITEM_BYTES = {name: facts.bytes for name, facts in DTYPES.items()}


def widened(raw: "np.ndarray", dtype: str) -> "np.ndarray":
    """Return what `DTypeFacts.raw` holds as numbers: as it is, or float32 for what numpy lacks."""
    convert = DTYPES[dtype].widened
    return raw if convert is None else convert(raw)


def narrowed(values: "np.ndarray", dtype: str) -> "np.ndarray":
    """float32 `values` in another dtype, as `DTypeFacts.raw` holds it."""
    convert = DTYPES[dtype].narrowed
    return values.astype(DTYPES[dtype].raw) if convert is None else convert(values)
