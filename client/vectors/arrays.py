"""Arrays read from files, and members of zip archives, whose sizes are checked before reading."""

import io
import math
import zipfile
import zlib
from typing import NamedTuple

import numpy as np

from ...schemas.base.dtypes import DTYPES, ITEM_BYTES, DType, widened
from ...schemas.base.errors import Translated
from ...schemas.base.limits import MAX_FILE_TENSORS, MAX_TENSOR_BYTES, MAX_VECTOR_FILE
from ...schemas.base.tensors import Tensor

#: The most members of an archive that are not tensors.
_MAX_OTHER_MEMBERS = 64


class PlainArray(NamedTuple):
    """Contiguous little-endian numbers; unlike `Tensor`, of any number of dimensions."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    def rows(self) -> "list[PlainArray]":
        """Return the arrays along the first dimension."""
        size = ITEM_BYTES[self.dtype] * math.prod(self.shape[1:])
        return [
            PlainArray(self.dtype, self.shape[1:], self.data[at : at + size])
            for at in range(0, len(self.data), size)
        ]

    def numpy(self) -> np.ndarray:
        """Return a numpy array; bfloat16 becomes float32, exactly."""
        return widened(np.frombuffer(self.data, DTYPES[self.dtype].raw), self.dtype).reshape(
            self.shape
        )

    def tensor(self) -> Tensor:
        """Convert to a `Tensor`. Raises ValueError for a size or shape that requests reject."""
        if len(self.data) > MAX_TENSOR_BYTES or not 1 <= len(self.shape) <= 2:
            raise ValueError(
                f"it has a tensor of shape {list(self.shape)}; valid: one or two dimensions, at "
                f"most {MAX_TENSOR_BYTES} bytes"
            )
        return Tensor(dtype=self.dtype, shape=list(self.shape), data=self.data)


def array_of(values: np.ndarray) -> PlainArray:
    """Convert a numpy array: float16 and float32 unchanged, other numbers rounded to float32.
    Raises ValueError if it is not numeric.
    """
    if values.dtype.kind not in "fiu":
        raise ValueError(f"it holds {values.dtype}; valid: numbers")
    dtype: DType = "float16" if values.dtype == np.float16 else "float32"
    return PlainArray(
        dtype, values.shape, np.ascontiguousarray(values, DTYPES[dtype].raw).tobytes()
    )


class Archive(NamedTuple):
    """A zip archive whose number and sizes of members are within the limits."""

    zip: zipfile.ZipFile
    sizes: dict[str, int]  # member → bytes, unpacked


def opened(raw: bytes, stored: bool) -> Archive:
    """Open an archive. `stored`: its members must not be compressed.

    Raises ValueError if the archive is damaged or exceeds a limit, such as MAX_VECTOR_FILE bytes
    unpacked.
    """
    if raw.count(b"PK\x01\x02") > MAX_FILE_TENSORS + _MAX_OTHER_MEMBERS:
        raise ValueError(f"its archive has more than {MAX_FILE_TENSORS} members")
    with Translated(
        (zipfile.BadZipFile, NotImplementedError, ValueError, OSError),
        lambda error: ValueError(f"its archive is damaged: {error}"),
    ):
        archive = zipfile.ZipFile(io.BytesIO(raw))
    sizes = {member.filename: member.file_size for member in archive.infolist()}
    if len(sizes) != len(archive.infolist()):
        raise ValueError("its archive has a member twice")
    if stored and any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
        raise ValueError("its archive is compressed; torch.save does not compress")
    most = len(raw) if stored else MAX_VECTOR_FILE
    if sum(sizes.values()) > most:
        raise ValueError(
            f"its archive has {sum(sizes.values())} bytes unpacked; valid: at most {most}"
        )
    return Archive(archive, sizes)


def member(archive: Archive, name: str) -> bytes:
    """Return a member's bytes.

    Raises ValueError if it is missing, damaged, or shorter than the archive declares.
    """
    if name not in archive.sizes:
        raise ValueError(f"its archive has no {name!r:.80}")
    with (
        Translated(
            (
                zipfile.BadZipFile,
                NotImplementedError,
                ValueError,
                EOFError,
                OSError,
                RuntimeError,
                zlib.error,
            ),
            lambda error: ValueError(f"its archive is damaged at {name!r:.80}: {error}"),
        ),
        archive.zip.open(name) as stream,
    ):
        raw = stream.read(archive.sizes[name] + 1)
    if len(raw) != archive.sizes[name]:
        raise ValueError(
            f"its archive is damaged at {name!r:.80}: it is shorter than the archive declares"
        )
    return raw
