"""The table of dtypes: sizes, names in files, and conversions for dtypes that numpy lacks.

Imports no numpy.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

#: The dtypes of models, and of tensors in requests.
DType = Literal["float32", "bfloat16", "float16"]
#: The dtypes of stored captured rows; `model`: that of the model.
RowDType = Literal["model", DType]


def bfloat16_to_float32(bits: "np.ndarray") -> "np.ndarray":
    """Convert uint16 bit patterns of bfloat16, of any shape, exactly to float32."""
    return (bits.astype("<u4") << 16).view("<f4")


def float32_to_bfloat16(values: "np.ndarray") -> "np.ndarray":
    """Convert float32 to uint16 bit patterns of bfloat16, rounded to nearest, ties to even."""
    bits = values.view("<u4").astype("<u8")
    rounded: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


class DTypeFacts(NamedTuple):
    """Facts about a dtype. `DTYPES` uses torch's names."""

    bytes: int  # of one element
    file: str  # its name in a safetensors header
    raw: str  # numpy's little-endian dtype; for a dtype that numpy lacks, that of its bit patterns
    largest: float = math.inf  # the largest finite value, if models run in this dtype
    # conversions for a dtype that numpy lacks: bit patterns → float32, and float32 → bit patterns
    widened: Callable[["np.ndarray"], "np.ndarray"] | None = None
    narrowed: Callable[["np.ndarray"], "np.ndarray"] | None = None


DTYPES: dict[str, DTypeFacts] = {
    "float32": DTypeFacts(4, "F32", "<f4", 3.4e38),
    "bfloat16": DTypeFacts(
        2, "BF16", "<u2", 3.38e38, bfloat16_to_float32, float32_to_bfloat16
    ),  # float32's exponent
    "float16": DTypeFacts(2, "F16", "<f2", 65504.0),
    "int64": DTypeFacts(8, "I64", "<i8"),  # of positions and token ids
}
#: Name in a safetensors header → name in `DTYPES`.
DTYPE_OF_FILE = {facts.file: name for name, facts in DTYPES.items()}
#: Bytes of one element.
ITEM_BYTES = {name: facts.bytes for name, facts in DTYPES.items()}


def widened(raw: "np.ndarray", dtype: str) -> "np.ndarray":
    """Convert an array of `DTypeFacts.raw` to numbers: float32 for a dtype that numpy lacks,
    otherwise unchanged.
    """
    convert = DTYPES[dtype].widened
    return raw if convert is None else convert(raw)


def narrowed(values: "np.ndarray", dtype: str) -> "np.ndarray":
    """Convert float32 `values` to `dtype`, as an array of `DTypeFacts.raw`."""
    convert = DTYPES[dtype].narrowed
    return values.astype(DTYPES[dtype].raw) if convert is None else convert(values)
