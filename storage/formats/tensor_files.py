"""Reads tensors of a safetensors or npz file one at a time as float32, after checking all of them.

Files are untrusted: they may be large, damaged, or change while they are read.
"""

import hashlib
import io
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...schemas.base.dtypes import DTYPE_OF_FILE, DTYPES, ITEM_BYTES, widened
from ...schemas.base.errors import Translated, shortened
from ...schemas.base.limits import MAX_FILE_HEADER
from .capture_blobs import DamagedBlob, ReadAt, TensorPlace, TensorPlaces, read_tensors

#: The dtypes that are read, by safetensors' names and by numpy's.
FLOATS = ("F32", "F16", "BF16")
_NUMPY_FLOATS = {"f2", "f4", "f8"}
_TENSORS = 64  # default limit on the tensors in one file


class TensorFileError(ValueError):
    """Fault in a file; the message names the file, then what is valid."""


class TensorFile:
    """An open file. `shapes`: tensor → its shape. `state`: bytes, inode and time of the last change
    when it was opened; they identify its content.
    """

    def __init__(
        self, file: io.BufferedReader, name: str, most: int, tensors: int = _TENSORS
    ) -> None:
        """`name`: the file's name in messages. `most`: the most bytes it may have, also unpacked.
        `tensors`: the most tensors it may have. Raises TensorFileError.
        """
        self._file = file
        self._name = name
        self.state = _state(file)
        self.bytes = self.state[0]
        if self.bytes > most:
            raise TensorFileError(f"{name} has {self.bytes} bytes; the limit is {most}")
        self._zip: zipfile.ZipFile | None = None
        self.metadata: dict[str, str] = {}  # of a safetensors file
        self._places = (
            self._of_npz(most, tensors) if name.endswith(".npz") else self._of_safetensors()
        )
        if len(self._places) > tensors:
            raise TensorFileError(
                f"{name} has {len(self._places)} tensors; valid: at most {tensors}"
            )

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: place.shape for name, place in self._places.items()}

    def digest(self) -> bytes:
        """Return the SHA-256 of the whole file."""
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").digest()

    def read(self, tensor: str, row: int | None = None) -> np.ndarray:
        """Return a tensor as float32, or, of a safetensors file, only one of its rows. Raises
        TensorFileError if some of its bytes are missing.
        """
        place = self._places[tensor]
        if self._zip is not None:
            return self._member(place)
        dtype = DTYPE_OF_FILE[place.dtype]
        shape = place.shape if row is None else place.shape[1:]
        size = ITEM_BYTES[dtype] * math.prod(shape)
        self._file.seek(place.start + (row or 0) * size)
        raw = self._file.read(size)
        if len(raw) != size:
            raise self._changed()
        return (
            widened(np.frombuffer(raw, DTYPES[dtype].raw), dtype)
            .astype(np.float32, copy=False)
            .reshape(shape)
        )

    def check_unchanged(self) -> None:
        """Raises TensorFileError when the file has changed since it was opened: the tensors that
        were read may belong to different versions.
        """
        if _state(self._file) != self.state:
            raise self._changed()

    def _changed(self) -> TensorFileError:
        return TensorFileError(f"{self._name} has changed while it was read")

    # --- The two formats ---

    def _of_safetensors(self) -> TensorPlaces:
        with Translated(DamagedBlob, lambda error: TensorFileError(f"{self._name}: {error}")):
            self.metadata, tensors = whole_header(self._bytes_at, self.bytes)
        for name, place in tensors.items():
            _check_shape(self._name, name, place.shape)
        return tensors

    def _bytes_at(self, start: int, count: int) -> bytes:
        self._file.seek(start)
        return self._file.read(count)

    def _of_npz(self, most: int, tensors: int) -> TensorPlaces:
        """Return tensor → its member, whose bytes begin after its own header."""
        places: TensorPlaces = {}
        try:
            self._zip = zipfile.ZipFile(self._file)
            if sum(member.file_size for member in self._zip.infolist()) > most:
                raise TensorFileError(
                    f"{self._name} has more than {most} bytes unpacked, which is the limit"
                )
            for member in self._zip.infolist()[: tensors + 1]:
                name = member.filename.removesuffix(".npy")
                with self._zip.open(member) as stream:
                    shape, fortran, dtype = self._header(member.filename, stream)
                if dtype.kind != "f" or dtype.str[1:] not in _NUMPY_FLOATS or fortran:
                    raise TensorFileError(
                        f"{self._name}: {name} is {dtype}; valid: float16, "
                        "float32 or float64, in C "
                        "order"
                    )
                _check_shape(self._name, name, list(shape))
                size = dtype.itemsize * math.prod(shape)
                places[name] = TensorPlace(member.filename, dtype.str, list(shape), 0, size)
        except (
            zipfile.BadZipFile,
            NotImplementedError,
            ValueError,
            EOFError,
            OSError,
            RuntimeError,
        ) as error:
            if isinstance(error, TensorFileError):
                raise
            raise TensorFileError(f"{self._name} is not a valid npz file: {error}") from error
        return places

    def _header(self, member: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
        with Translated(
            ValueError, lambda error: TensorFileError(f"{self._name}: {shortened(member)}: {error}")
        ):
            return npy_header(stream)

    def _member(self, place: TensorPlace) -> np.ndarray:
        assert self._zip is not None
        with (
            Translated(
                (zipfile.BadZipFile, ValueError, EOFError, OSError, RuntimeError),
                lambda error: TensorFileError(
                    f"{self._name}: {place.name} cannot be read: {error}"
                ),
            ),
            self._zip.open(place.name) as stream,
        ):
            npy_header(stream)
            raw = stream.read(place.length)
        if len(raw) != place.length:
            raise TensorFileError(f"{self._name}: the bytes of {place.name} are not all there")
        return np.frombuffer(raw, place.dtype).astype(np.float32, copy=False).reshape(place.shape)


@contextmanager
def opened(path: Path, most: int, tensors: int = _TENSORS) -> Iterator[TensorFile]:
    """Opens the file at `path`. Raises TensorFileError."""
    with Translated(
        OSError, lambda error: TensorFileError(f"{path.name} cannot be read: {error.strerror}")
    ):
        file = path.open("rb")
    with file:
        yield TensorFile(file, path.name, most, tensors)


def _state(file: io.BufferedReader) -> tuple[int, int, int]:
    """Returns the bytes, inode and time of the last change."""
    result = os.fstat(file.fileno())
    return result.st_size, result.st_ino, result.st_mtime_ns


def _check_shape(file: str, name: str, shape: list[int]) -> None:
    if not 1 <= len(shape) <= 2 or min(shape) < 1:
        raise TensorFileError(f"{file}: {name} has the shape {shape}; valid: one or two dimensions")


def whole_header(read: ReadAt, size: int) -> tuple[dict[str, str], TensorPlaces]:
    """Returns metadata and tensors of a safetensors file of floats; arguments as in `read_tensors`.

    Raises DamagedBlob naming the tensor.
    """
    metadata, tensors, end = read_tensors(
        read, size, {name: ITEM_BYTES[DTYPE_OF_FILE[name]] for name in FLOATS}, MAX_FILE_HEADER
    )
    if end != size:
        raise DamagedBlob(f"it has {size - end} bytes after its tensors; valid: none")
    return metadata, tensors


def npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Returns shape, Fortran order and dtype of a `.npy` file, or of a member of an npz file.

    numpy evaluates the header as a literal, without running code. Raises ValueError for any error.
    """
    form: Any = np.lib.format
    with Translated(
        Exception,
        lambda error: ValueError(
            f"it has no valid npy header ({shortened(str(error))}); valid: an array as "
            "numpy.save writes it"
        ),
    ):
        version = form.read_magic(stream)
        read = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"npy version {version}")
        shape, fortran, dtype = read(stream)
    return shape, fortran, dtype
