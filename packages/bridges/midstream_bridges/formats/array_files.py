"""Reads and writes arrays in `.npy` and `.npz` files, and in files of `torch.save` without torch;
declared sizes are compared with the bytes before memory is allocated.

A file of `torch.save` is a zip archive: `{name}/data.pkl`, a pickle that describes tensors, and one
member `{name}/data/{key}` for the bytes of each storage. The pickle is interpreted here, without
running code that it names, and may contain only containers, numbers, texts and torch's tensor
constructors, as with `torch.load(…, weights_only=True)`.
"""

import io
import math
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from midstream.schemas.base.dtypes import DTYPES, DType, widened
from midstream.schemas.base.errors import Translated
from midstream.schemas.base.limits import (
    MAX_FILE_HEADER,
    MAX_FILE_TENSORS,
    MAX_TENSOR_BYTES,
    MAX_VECTOR_FILE,
)
from midstream.schemas.base.tensors import Tensor
from midstream.storage.formats.tensor_files import npy_header

#: The most members of an archive that are not tensors.
_MAX_OTHER_MEMBERS = 64
#: The most items of a torch file's lists and dictionaries.
MAX_ITEMS = 1 << 16
NPY_MAGIC = b"\x93NUMPY"
#: The name of torch's pickle in its archive.
PICKLE = "data.pkl"
#: First byte of files of torch before 1.6, and of other pickles.
OLD_MAGIC = b"\x80"
_STORAGES: dict[str, DType | None] = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": None,
}
_MARK = object()


class PlainArray(NamedTuple):
    """Contiguous little-endian numbers; unlike `Tensor`, of any number of dimensions."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    def numpy(self) -> np.ndarray:
        """Return a numpy array; bfloat16 becomes float32, exactly."""
        return widened(np.frombuffer(self.data, DTYPES[self.dtype].raw), self.dtype).reshape(
            self.shape
        )

    def tensor(self) -> Tensor:
        """Convert to a `Tensor`, without leading dimensions of size 1 before the last two. Raises
        ValueError for a size or shape that requests reject.
        """
        shape = list(self.shape)
        while len(shape) > 2 and shape[0] == 1:
            del shape[0]
        if len(self.data) > MAX_TENSOR_BYTES or not 1 <= len(shape) <= 2:
            raise ValueError(
                f"it has a tensor of shape {list(self.shape)}; valid: one or two dimensions, at "
                f"most {MAX_TENSOR_BYTES} bytes"
            )
        return Tensor(dtype=self.dtype, shape=shape, data=self.data)


def opened(raw: bytes, stored: bool) -> zipfile.ZipFile:
    """Open an archive, whose number and sizes of members are within the limits. `stored`: they must
    not be compressed.

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
    members = archive.infolist()
    if len({member.filename for member in members}) != len(members):
        raise ValueError("its archive has a member twice")
    if stored and any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("its archive is compressed; torch.save does not compress")
    most = len(raw) if stored else MAX_VECTOR_FILE
    size = sum(member.file_size for member in members)
    if size > most:
        raise ValueError(f"its archive has {size} bytes unpacked; valid: at most {most}")
    return archive


def member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a member's bytes.

    Raises ValueError if it is missing, damaged, or shorter than the archive declares.
    """
    with Translated(KeyError, lambda error: ValueError(f"its archive has no {name!r:.80}")):
        size = archive.getinfo(name).file_size
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
        archive.open(name) as stream,
    ):
        raw = stream.read(size + 1)
    if len(raw) != size:
        raise ValueError(
            f"its archive is damaged at {name!r:.80}: it is shorter than the archive declares"
        )
    return raw


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
    kept: DType = "float16" if dtype == np.float16 else "float32"
    return PlainArray(kept, shape, np.ascontiguousarray(values, DTYPES[kept].raw).tobytes())


def read_npz(raw: bytes) -> dict[str, PlainArray]:
    """Read the arrays by name. Raises ValueError that names the invalid member."""
    archive = opened(raw, stored=False)
    result = {}
    for name in archive.namelist():
        try:
            result[name.removesuffix(".npy")] = read_npy(member(archive, name))
        except ValueError as error:
            raise ValueError(f"{name!r:.80}: {error}") from error
    return result


def write_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    out = io.BytesIO()
    np.savez(out, **dict(arrays))  # type: ignore[arg-type]  # no site is named like a parameter
    return out.getvalue()


@dataclass(frozen=True)
class _Global:
    """A global name in the pickle; it is only compared, never imported."""

    module: str
    name: str


_TENSOR = _Global("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = _Global("torch._utils", "_rebuild_parameter")
_ORDERED = _Global("collections", "OrderedDict")
_BYTES = _Global("_codecs", "encode")  # how torch's pickles hold bytes


@dataclass(frozen=True)
class _Storage:
    dtype: DType | None  # None: float64
    key: str


@dataclass(frozen=True)
class _View:
    """A tensor as the pickle describes it."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch(raw: bytes, most: int = MAX_VECTOR_FILE) -> Any:
    """Return the saved value: a `PlainArray`, or a dictionary or list of `PlainArray`s, numbers and
    texts; float64 is rounded to float32. `most`: limit on the bytes of all arrays.

    Raises ValueError with the reason.
    """
    archive = opened(raw, stored=True)
    pickles = [name for name in archive.namelist() if name.rpartition("/")[2] == PICKLE]
    if len(pickles) != 1:
        raise ValueError(f"it is not a file of torch.save: it has no single {PICKLE}")
    folder = pickles[0].removesuffix(PICKLE)
    if (
        f"{folder}byteorder" in archive.namelist()
        and member(archive, f"{folder}byteorder") != b"little"
    ):
        raise ValueError("it is a big-endian file of torch.save; valid: little-endian")
    size = archive.getinfo(pickles[0]).file_size
    if size > MAX_FILE_HEADER:
        raise ValueError(f"its {PICKLE} has {size} bytes; valid: at most {MAX_FILE_HEADER}")
    with Translated(RecursionError, lambda error: ValueError("it is nested too deeply")):
        return _Storages(archive, f"{folder}data/", most).resolved(
            _interpret(member(archive, pickles[0]))
        )


# --- torch's pickle


def _interpret(pickle: bytes) -> Any:
    """Return the value of a pickle, with `_View`s in place of tensors."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    with Translated(
        (IndexError, KeyError, TypeError),
        lambda error: ValueError(f"its pickle is damaged: {error}"),
    ):
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name == "STOP":
                (value,) = stack
                return value
            _apply(opcode.name, argument, stack, memo)
    raise ValueError("its pickle ends early")


def _apply(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Run one instruction. Raises ValueError for an instruction that a file of tensors does not
    need.
    """
    match name:
        case "PROTO" | "FRAME":
            pass
        case (
            "BININT"
            | "BININT1"
            | "BININT2"
            | "LONG1"
            | "BINFLOAT"
            | ("BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8")
        ):
            stack.append(argument)
        case "NONE" | "NEWTRUE" | "NEWFALSE":
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        case "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "MARK":
            stack.append(_MARK)
        case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
        case "TUPLE":
            stack.append(tuple(_marked(stack)))
        case "LIST":
            stack.append(_marked(stack))
        case "APPEND" | "APPENDS":
            items = _marked(stack) if name == "APPENDS" else [stack.pop()]
            _of(stack[-1], list).extend(items)
        case "SETITEM" | "SETITEMS":
            pairs = _marked(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            if not all(isinstance(key, str | int) for key in pairs[::2]):
                raise ValueError("its dictionaries have keys other than texts and numbers")
            _of(stack[-1], dict).update(zip(pairs[::2], pairs[1::2], strict=True))
        case "BUILD":  # attributes of a state dict: not needed
            stack.pop()
        case "GLOBAL":
            stack.append(_Global(*argument.split(" ", 1)))
        case "STACK_GLOBAL":
            called = stack.pop()
            stack.append(_Global(_of(stack.pop(), str), _of(called, str)))
        case "BINPERSID":
            stack.append(_storage(stack.pop()))
        case "REDUCE":
            arguments = stack.pop()
            stack.append(_reduced(stack.pop(), arguments))
        case _:
            raise ValueError(
                f"its pickle has the instruction {name}: save tensors, or dictionaries of "
                "tensors, with torch.save"
            )


def _marked(stack: list[Any]) -> list[Any]:
    """Remove the last mark and the items above it from the stack; return the items."""
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise ValueError("its pickle is damaged: a mark is missing")
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"its pickle is damaged: a {kind.__name__} is missing")
    return value


def _storage(reference: Any) -> _Storage:
    match reference:
        case (
            "storage",
            _Global(module="torch", name=name),
            str() as key,
            str(),
            int(),
        ) if name in _STORAGES:
            return _Storage(_STORAGES[name], key)
        case ("storage", _Global(name=name), *_):
            raise ValueError(f"it has tensors of {name!r:.80}; valid: {', '.join(_STORAGES)}")
    raise ValueError("its pickle is damaged: a storage is not named as torch.save names it")


def _reduced(called: Any, arguments: Any) -> Any:
    if isinstance(called, _Global) and isinstance(arguments, tuple):
        if called == _ORDERED and not arguments:
            return {}
        if called == _PARAMETER and arguments and isinstance(arguments[0], _View):
            return arguments[0]
        if called == _TENSOR:
            match arguments:
                case (
                    _Storage() as storage,
                    int() as offset,
                    tuple() as shape,
                    tuple() as strides,
                    *_,
                ) if all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)):
                    return _View(storage, offset, shape, strides)
            raise ValueError("its pickle is damaged: a tensor has no shape")
        if called == _BYTES:
            raise ValueError("it holds bytes, as of a numpy array: save torch.from_numpy(array)")
        raise ValueError(
            f"it holds a {called.module}.{called.name}".replace("\n", " ")[:200]
            + ": save tensors, or dictionaries of tensors"
        )
    raise ValueError("its pickle is damaged: it calls something that is not a name")


# --- torch's bytes


class _Storages:
    """Reads tensors' bytes; the total size of the arrays is bounded."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, most: int) -> None:
        self._archive = archive
        self._folder = folder
        self._read: dict[str, bytes] = {}
        self._left = self._most = most
        self._items = MAX_ITEMS

    def resolved(self, value: Any) -> Any:
        """Replace views by arrays: `value` itself, or its items, also nested ones. Raises
        ValueError for too many: a pickle may name lists many times, in lists that it names often.
        """
        self._items -= 1
        if self._items < 0:
            raise ValueError(f"it holds more than {MAX_ITEMS} items")
        if isinstance(value, dict):
            return {key: self.resolved(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.resolved(item) for item in value]
        return self._array(value) if isinstance(value, _View) else value

    def _array(self, view: _View) -> PlainArray:
        """Return the view as a contiguous array.

        Raises ValueError if elements are missing, or if the view repeats stored elements.
        """
        key = view.storage.key
        dtype = view.storage.dtype
        if key not in self._read:
            self._read[key] = member(self._archive, self._folder + key)
        raw = self._read[key]
        stored_as = np.dtype(DTYPES[dtype].raw if dtype else "<f8")
        size = stored_as.itemsize
        needed = math.prod(view.shape) * size
        if len(view.strides) != len(view.shape) or not 0 < needed <= len(raw):
            raise ValueError(
                f"it has a tensor of shape {list(view.shape)!r:.80} with {len(raw)} bytes; valid: "
                "a contiguous tensor"
            )
        last = view.offset + sum(
            (length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True)
        )
        if (last + 1) * size > len(raw):
            raise ValueError("it has a tensor with missing bytes")
        self._left -= needed
        if self._left < 0:
            raise ValueError(f"its tensors have more than {self._most} bytes")
        stored = np.frombuffer(raw, stored_as, count=len(raw) // size)[view.offset :]
        values = np.lib.stride_tricks.as_strided(
            stored, view.shape, [stride * size for stride in view.strides], writeable=False
        )
        return PlainArray(
            dtype or "float32", view.shape, (values if dtype else values.astype("<f4")).tobytes()
        )


# --- Writing torch's files


def write_torch(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return a file with a dictionary of name → float32 tensor, which `torch.load(…,
    weights_only=True)` can read.
    """
    out = io.BytesIO()
    members = dict[str, bytes]()
    pickle = b"\x80\x02}("  # protocol 2, an empty dictionary, a mark
    for key, (name, values) in enumerate(arrays.items()):
        strides = [math.prod(values.shape[at + 1 :]) for at in range(values.ndim)]
        pickle += _pickled(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(("
        pickle += (
            _pickled("storage")
            + b"ctorch\nFloatStorage\n"
            + _pickled(str(key))
            + _pickled("cpu")
            + _pickled(values.size)
        )
        pickle += (
            b"tQK\x00"
            + _pickled(values.shape)
            + _pickled(tuple(strides))
            + b"\x89ccollections\nOrderedDict\n)RtR"
        )
        members[f"data/{key}"] = values.astype("<f4").tobytes()
    members |= {PICKLE: pickle + b"u.", "byteorder": b"little", "version": b"3\n"}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            # no timestamp, so that equal vectors give equal bytes
            archive.writestr(zipfile.ZipInfo(f"vectors/{name}"), content)
    return out.getvalue()


def _pickled(value: str | int | tuple[int, ...]) -> bytes:
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    return (
        b"J" + struct.pack("<i", value)
        if isinstance(value, int)
        else b"(" + b"".join(map(_pickled, value)) + b"t"
    )
