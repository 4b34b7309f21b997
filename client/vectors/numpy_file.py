"""Reads and writes `.npy` and `.npz` files. An array's declared size is compared with its bytes
before memory is allocated.
"""

import io
import math
from collections.abc import Mapping

import numpy as np

from ...schemas.base.errors import Translated
from ...storage.formats.tensor_files import npy_header
from .arrays import PlainArray, array_of, member, opened

MAGIC = b"\x93NUMPY"


def read_npy(raw: bytes) -> PlainArray:
    """Read an array: float16 and float32 unchanged, other numbers rounded to float32. Raises
    ValueError.
    """
    stream = io.BytesIO(raw)
    with Translated(ValueError, lambda error: ValueError(f"it is not a numpy file: {error}")):
        shape, fortran, dtype = npy_header(stream)
    if dtype.kind not in "fiu":
        raise ValueError(f"it holds {dtype}; valid: numbers")
    remaining = len(raw) - stream.tell()
    if min(shape, default=1) < 1 or remaining != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"its header says {dtype} of shape {list(shape)!r:.80}, but {remaining} bytes follow"
        )
    values = np.frombuffer(raw, dtype, offset=stream.tell()).reshape(
        shape, order="F" if fortran else "C"
    )
    return array_of(values)


def read_npz(raw: bytes) -> dict[str, PlainArray]:
    """Read the arrays by name. Raises ValueError that names the invalid member."""
    archive = opened(raw, stored=False)
    result = {}
    for name in archive.sizes:
        try:
            result[name.removesuffix(".npy")] = read_npy(member(archive, name))
        except ValueError as error:
            raise ValueError(f"{name!r:.80}: {error}") from error
    return result


def write_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    out = io.BytesIO()
    np.savez(out, **dict(arrays))  # type: ignore[arg-type]  # no site is named like a parameter
    return out.getvalue()
