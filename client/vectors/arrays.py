"""Arrays as files hold them, and the members of zip archives: bounded before anything is read."""

import io
import math
import zipfile
import zlib
from typing import NamedTuple

import numpy as np

from ...schemas.base.dtypes import DTYPES, ITEM_BYTES, DType, widened
from ...schemas.base.limits import MAX_FILE_TENSORS, MAX_TENSOR_BYTES, MAX_VECTOR_FILE
from ...schemas.base.tensors import Tensor

#: Members of an archive that are no tensors.
_BESIDE = 64


class Array(NamedTuple):
    """Contiguous little-endian numbers; unlike `Tensor`, of any number of dimensions."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    def rows(self) -> "list[Array]":
        """Along the first dimension."""
        size = ITEM_BYTES[self.dtype] * math.prod(self.shape[1:])
        return [
            Array(self.dtype, self.shape[1:], self.data[at : at + size])
            for at in range(0, len(self.data), size)
        ]

    def numpy(self) -> np.ndarray:
        """bfloat16 as float32, exactly."""
        return widened(np.frombuffer(self.data, DTYPES[self.dtype].raw), self.dtype).reshape(
            self.shape
        )

    def tensor(self) -> Tensor:
        """Raises ValueError for what a request cannot hold."""
        if len(self.data) > MAX_TENSOR_BYTES or not 1 <= len(self.shape) <= 2:
            raise ValueError(
                f"it has a tensor of shape {list(self.shape)}; valid: one or two dimensions, at "
                f"most {MAX_TENSOR_BYTES} bytes"
            )
        return Tensor(dtype=self.dtype, shape=list(self.shape), data=self.data)


def array_of(values: np.ndarray) -> Array:
    """float16 and float32 as they are; other numbers are rounded to float32."""
    if values.dtype.kind not in "fiu":
        raise ValueError(f"it holds {values.dtype}; valid: numbers")
    dtype: DType = "float16" if values.dtype == np.float16 else "float32"
    return Array(dtype, values.shape, np.ascontiguousarray(values, DTYPES[dtype].raw).tobytes())


class Archive(NamedTuple):
    """A zip archive whose members have fitting sizes."""

    zip: zipfile.ZipFile
    sizes: dict[str, int]  # member → bytes, unpacked


def opened(raw: bytes, stored: bool) -> Archive:
    """`stored`: its members must not be compressed.

    Raises ValueError, also for one that holds more than MAX_VECTOR_FILE unpacked.
    """
    if raw.count(b"PK\x01\x02") > MAX_FILE_TENSORS + _BESIDE:
        raise ValueError(f"its archive has more than {MAX_FILE_TENSORS} members")
    try:
        archive = zipfile.ZipFile(io.BytesIO(raw))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise ValueError(f"its archive is damaged: {error}") from error
    sizes = {member.filename: member.file_size for member in archive.infolist()}
    if len(sizes) != len(archive.infolist()):
        raise ValueError("its archive has a member twice")
    if stored and any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
        raise ValueError("its archive is compressed: torch.save does not do that")
    most = len(raw) if stored else MAX_VECTOR_FILE
    if sum(sizes.values()) > most:
        raise ValueError(
            f"its archive has {sum(sizes.values())} bytes unpacked; valid: at most {most}"
        )
    return Archive(archive, sizes)


def member(archive: Archive, name: str) -> bytes:
    """Its bytes.

    Raises ValueError for one that is missing or has another size than the archive says.
    """
    if name not in archive.sizes:
        raise ValueError(f"its archive has no {name!r:.80}")
    try:
        with archive.zip.open(name) as stream:
            raw = stream.read(archive.sizes[name] + 1)
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        EOFError,
        OSError,
        RuntimeError,
        zlib.error,
    ) as error:
        raise ValueError(f"its archive is damaged at {name!r:.80}: {error}") from error
    if len(raw) != archive.sizes[name]:
        raise ValueError(
            f"its archive is damaged at {name!r:.80}: it is shorter than the archive says"
        )
    return raw
