"""How do a request's files become one safetensors? Headers are parsed and joined, tensor bytes are copied, nothing is loaded.

Format: 8 bytes little-endian header length, JSON header (name → dtype, shape, data_offsets), tensor bytes.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
_ALIGNMENT = 8
#: A header beyond this is not one of ours.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Tensor:
    """Where a tensor's bytes lie: `[start, start + length)` of `path`."""

    name: str
    dtype: str
    shape: list[int]
    path: Path
    start: int
    length: int

    @property
    def layer(self) -> int | None:
        """`post_block.12` → 12; None for `positions` and `token_ids`."""
        _, dot, layer = self.name.rpartition(".")
        return int(layer) if dot and layer.isdigit() else None


def read_header(path: Path) -> list[Tensor]:
    """The tensors of a file, in the order of their bytes. Raises OSError, or ValueError for what is not a safetensors file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path.name} is cut short: {size} bytes hold no header")
        header: dict[str, Any] = json.loads(file.read(length))
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        if not 0 <= first <= last <= size - 8 - length:
            raise ValueError(f"{path.name} is cut short: {name} ends beyond its {size} bytes")
        tensors.append(Tensor(name, entry["dtype"], entry["shape"], path, 8 + length + first, last - first))
    return sorted(tensors, key=lambda tensor: tensor.start)


def select(files: Sequence[Path], layers: frozenset[int] | None) -> list[Tensor]:
    """The tensors of one request's files: the wanted layers in ascending order, and `positions` and `token_ids` once."""
    found: dict[str, Tensor] = {}
    for path in files:
        for tensor in read_header(path):
            if tensor.layer is None or layers is None or tensor.layer in layers:
                found.setdefault(tensor.name, tensor)  # stages share `positions` and `token_ids`
    return sorted(found.values(), key=lambda tensor: (tensor.layer is None, tensor.layer or 0, tensor.name))


def joined(tensors: Sequence[Tensor]) -> tuple[bytes, int]:
    """The header of a file with these tensors, and the whole file's length in bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "midstream.packed.1"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, offset + tensor.length]}
        offset += tensor.length
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded, 8 + len(encoded) + offset


def copied(tensors: Sequence[Tensor]) -> Iterator[bytes]:
    """The tensors' bytes in order, in chunks. Raises OSError; EOFError when a file has become shorter."""
    for tensor in tensors:
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            left = tensor.length
            while left:
                chunk = file.read(min(CHUNK, left))
                if not chunk:
                    raise EOFError(f"{tensor.path.name} ends {left} bytes before {tensor.name} does")
                left -= len(chunk)
                yield chunk
