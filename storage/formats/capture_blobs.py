"""Layout of a capture blob: a safetensors file with Midstream's manifest in its metadata.

Format: 8 bytes little-endian length of the header, the header as JSON (name → dtype, shape,
data_offsets), the tensors' bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from ...schemas.base.dtypes import DTYPES, ITEM_BYTES
from ...schemas.base.errors import Translated, shortened
from ...schemas.base.records import JsonObject
from ...schemas.base.tensors import Tensor
from ...schemas.jobs.captures import FORMAT, Manifest

#: Midstream's name of a dtype → safetensors'.
DTYPE_NAMES = {name: facts.file for name, facts in DTYPES.items()}
#: safetensors' name of a dtype → bytes of an element.
FILE_ITEM_BYTES = {facts.file: facts.bytes for facts in DTYPES.values()}
#: The header is padded with spaces to this many bytes.
_ALIGNMENT = 8
_LENGTH_BYTES = 8
#: A larger header is not Midstream's.
_MAX_HEADER = 100_000_000
_MAX_DIMENSIONS = 16
_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class DamagedBlob(ValueError):
    """These bytes are not a whole blob of Midstream; the message says why."""


# No header has the length 0. Whether zeros are a deletion or damage is for the ledger to say, so
# that segments need no tombstones.
class DeletedBlob(DamagedBlob):
    """The blob was deleted: its range in a segment was erased and reads as zeros."""


@dataclass(frozen=True)
class TensorPlace:
    """A tensor's bytes in a blob: `[start, start + length)`."""

    name: str
    dtype: str  # as safetensors names it
    shape: list[int]
    start: int
    length: int

    @property
    def site(self) -> tuple[str, int] | None:
        """Hook and layer, such as (`post_block`, 12) of `post_block.12`; None for `positions` and
        `token_ids`.
        """
        hook, dot, layer = self.name.rpartition(".")
        return (hook, int(layer)) if dot and layer.isdigit() else None


#: Tensor → its place, in the order of their bytes.
TensorPlaces = dict[str, TensorPlace]
#: Returns bytes of a file, from where they begin and their number.
ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True)
class Header:
    manifest: Manifest
    tensors: TensorPlaces
    end: int  # bytes of the whole blob


def encode_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], manifest: Manifest | None, size: int = 0
) -> bytes:
    """Returns the bytes before those of the tensors.

    `tensors`: (name, safetensors dtype, shape, bytes), in order. `size`: the bytes to pad the
    header to, a multiple of 8; the header is larger only if it must be.
    """
    return safetensors_header(
        tensors,
        {} if manifest is None else {"manifest": msgspec.json.encode(manifest).decode()},
        size,
    )


def encode_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Returns a whole safetensors file. Widest elements come first, so that tensors are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1].dtype])
    header = safetensors_header(
        [
            (name, DTYPE_NAMES[tensor.dtype], tensor.shape, len(tensor.data))
            for name, tensor in ordered
        ],
        metadata,
    )
    return b"".join([header, *(tensor.data for _, tensor in ordered)])


def safetensors_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str],
    size: int = 0,
) -> bytes:
    header: JsonObject = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, length in tensors:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + length],
        }
        offset += length
    encoded = msgspec.json.encode(header)
    encoded += b" " * max(-len(encoded) % _ALIGNMENT, size - _LENGTH_BYTES - len(encoded))
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def read_header(read: ReadAt, size: int) -> Header:
    """Returns the header of a blob of `size` bytes.

    Raises DeletedBlob, and DamagedBlob if the blob is truncated or not Midstream's.
    """
    metadata, tensors, end = read_tensors(read, size)
    with Translated(
        (msgspec.DecodeError, KeyError, TypeError),
        lambda error: DamagedBlob(f"it is not a Midstream file: {error!r}"),
    ):
        manifest = msgspec.json.decode(metadata["manifest"], type=Manifest)
    if manifest.format != FORMAT:
        raise DamagedBlob(f"its format is {manifest.format!r}; this version reads {FORMAT!r}")
    return Header(manifest, tensors, end)


class _Entry(msgspec.Struct):
    """A tensor's entry in a header.

    Files are untrusted, so every number, and the number of dimensions, is bounded.
    """

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def read_tensors(
    read: ReadAt,
    size: int,
    item_bytes: Mapping[str, int] = FILE_ITEM_BYTES,
    most: int = _MAX_HEADER,
) -> tuple[dict[str, str], TensorPlaces, int]:
    """Returns (metadata, tensors, bytes of the whole file) of a safetensors file of `size` bytes.

    `item_bytes`: valid dtype, as safetensors names it → bytes of an element. `most`: limit on the
    bytes of the header. The format requires the bytes of tensors to follow each other without gaps.
    Raises DeletedBlob, and DamagedBlob naming the tensor.
    """
    first = read(0, _LENGTH_BYTES)
    length = int.from_bytes(first, "little")
    if len(first) == _LENGTH_BYTES and length == 0:
        raise DeletedBlob("it was deleted")
    if size < _LENGTH_BYTES or not length <= min(size - _LENGTH_BYTES, most):
        raise DamagedBlob(
            f"it is truncated, or not a safetensors file: {size} bytes do not contain a header"
        )
    start = _LENGTH_BYTES + length
    with Translated(
        (msgspec.DecodeError, RecursionError),
        lambda error: DamagedBlob(f"it has no valid safetensors header: {error}"),
    ):
        entries = msgspec.json.decode(read(_LENGTH_BYTES, length), type=dict[str, msgspec.Raw])
        metadata = (
            msgspec.json.decode(entries.pop("__metadata__", b"null"), type=dict[str, str] | None)
            or {}
        )
    places = [_place(name, entry, start, item_bytes) for name, entry in entries.items()]
    tensors = sorted(places, key=lambda tensor: (tensor.start, tensor.length))
    end = start
    for tensor in tensors:
        if tensor.start != end:
            where = (
                f"at byte {tensor.start - start}, valid: {end - start}, after the tensors before it"
            )
            raise DamagedBlob(f"{shortened(tensor.name)} begins {where}")
        end += tensor.length
    if end > size:
        raise DamagedBlob(
            f"it is truncated: {size} of {end} bytes: those of its tensors are not all there"
        )
    return metadata, {tensor.name: tensor for tensor in tensors}, end


def _place(name: str, raw: msgspec.Raw, start: int, item_bytes: Mapping[str, int]) -> TensorPlace:
    with Translated(
        (msgspec.DecodeError, RecursionError),
        lambda error: DamagedBlob(f"{shortened(name)} has no valid entry in the header: {error}"),
    ):
        entry = msgspec.json.decode(raw, type=_Entry)
    if entry.dtype not in item_bytes:
        raise DamagedBlob(
            f"{shortened(name)} is {shortened(entry.dtype)}; valid: {', '.join(item_bytes)}"
        )
    first, last = entry.data_offsets
    needed = item_bytes[entry.dtype] * math.prod(entry.shape)
    if last - first != needed:
        raise DamagedBlob(
            f"{shortened(name)} has {last - first} bytes; its shape {entry.shape} of "
            f"{entry.dtype} needs {needed}"
        )
    return TensorPlace(name, entry.dtype, entry.shape, start + first, needed)
