"""Layout of a capture blob: a safetensors file with our manifest in its metadata.

Format: 8 bytes little-endian length of the header, the header as JSON (name → dtype, shape, data_offsets), the tensors' bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .captures import FORMAT, Manifest
from .dtypes import DTYPES, ITEM_BYTES
from .tensors import Tensor

#: Our name of a dtype → safetensors'.
DTYPE_NAMES = {name: facts.file for name, facts in DTYPES.items()}
#: safetensors' name of a dtype → bytes of an element.
FILE_ITEM_BYTES = {facts.file: facts.bytes for facts in DTYPES.values()}
#: The header is padded with spaces to this many bytes.
_ALIGNMENT = 8
_LENGTH_BYTES = 8
#: A header beyond this is not one of ours.
_MAX_HEADER = 100_000_000


class DamagedBlob(ValueError):
    """These bytes are not a whole blob of ours; the message says why."""


class DeletedBlob(DamagedBlob):
    """The blob was deleted: its place in a segment was given back to the disk and reads as zeros."""


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
        """`post_block.12` → (`post_block`, 12); None for `positions` and `token_ids`."""
        hook, dot, layer = self.name.rpartition(".")
        return (hook, int(layer)) if dot and layer.isdigit() else None


@dataclass(frozen=True)
class Header:
    manifest: Manifest
    tensors: dict[str, TensorPlace]  # in the order of their bytes
    end: int  # bytes of the whole blob


def encode_header(tensors: Sequence[tuple[str, str, Sequence[int], int]], manifest: Manifest | None, size: int = 0) -> bytes:
    """The bytes before the tensors' own; `tensors`: (name, safetensors dtype, shape, bytes), in order.

    `size`: of the header, a multiple of 8; it is larger only where it has to be.
    """
    return safetensors_header(tensors, {} if manifest is None else {"manifest": msgspec.json.encode(manifest).decode()}, size)


def encode_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A whole safetensors file. The widest elements come first, so that each tensor is aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1].dtype])
    header = safetensors_header([(name, DTYPE_NAMES[tensor.dtype], tensor.shape, len(tensor.data)) for name, tensor in ordered], metadata)
    return b"".join([header, *(tensor.data for _, tensor in ordered)])


def safetensors_header(tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str], size: int = 0) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, length in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    encoded = msgspec.json.encode(header)
    encoded += b" " * max(-len(encoded) % _ALIGNMENT, size - _LENGTH_BYTES - len(encoded))
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def read_header(read: Callable[[int, int], bytes], size: int) -> Header:
    """The header of a blob of `size` bytes; `read(start, count)` gives bytes of it.

    Raises DeletedBlob, or DamagedBlob for what is cut short or none of ours.
    """
    metadata, tensors, end = read_tensors(read, size)
    try:
        manifest = msgspec.json.decode(metadata["manifest"], type=Manifest)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise DamagedBlob(f"it is not a Midstream file: {error!r}") from error
    if manifest.format != FORMAT:
        raise DamagedBlob(f"its format is {manifest.format!r}; this version reads {FORMAT!r}")
    return Header(manifest, tensors, end)


def read_tensors(
    read: Callable[[int, int], bytes], size: int, item_bytes: Mapping[str, int] = FILE_ITEM_BYTES
) -> tuple[dict[str, str], dict[str, TensorPlace], int]:
    """(metadata, tensors in the order of their bytes, bytes of the whole) of a safetensors file; arguments as of `read_header`.

    `item_bytes`: of the dtypes that there may be, as safetensors names them. Raises DeletedBlob, DamagedBlob.
    """
    first = read(0, _LENGTH_BYTES)
    length = int.from_bytes(first, "little")
    if len(first) == _LENGTH_BYTES and length == 0:
        raise DeletedBlob("it was deleted")
    if size < _LENGTH_BYTES or not length <= min(size - _LENGTH_BYTES, _MAX_HEADER):
        raise DamagedBlob(f"it is truncated: {size} bytes do not contain a header")
    start = _LENGTH_BYTES + length
    try:
        header = msgspec.json.decode(read(_LENGTH_BYTES, length))
        metadata = header.pop("__metadata__", {})
        tensors = sorted((_place(name, entry, start, item_bytes) for name, entry in header.items()), key=lambda tensor: tensor.start)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedBlob(f"it is not a Midstream file: {error!r}") from error
    end = max((tensor.start + tensor.length for tensor in tensors), default=start)
    if end > size:
        raise DamagedBlob(f"it is truncated: {size} of {end} bytes")
    return metadata, {tensor.name: tensor for tensor in tensors}, end


def _place(name: str, entry: dict[str, Any], start: int, item_bytes: Mapping[str, int]) -> TensorPlace:
    first, last = entry["data_offsets"]
    count = item_bytes[entry["dtype"]]
    for side in entry["shape"]:
        count *= side
    if first < 0 or last - first != count:
        raise ValueError(f"{name} of shape {entry['shape']} does not fit {last - first} bytes")
    return TensorPlace(name, entry["dtype"], entry["shape"], start + first, last - first)
