"""Shards of harvests in any store: safetensors files of the rows of several sites at the same
tokens; written whole, read by ranges. Rows become the shard's dtype here, with a scale each if it
needs one.

Tensors: `documents`, `positions` and `token_ids` int64 `[rows]`; `<hook>.<layer>` `[rows, width]`,
and for a dtype with a scale per row `<hook>.<layer>.scale` float32 `[rows]`.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from zlib_ng import zlib_ng

from ..schemas.base.dtypes import DTYPES, narrowed, widened
from ..schemas.base.errors import MidstreamError
from ..schemas.requests.harvest_work import SCALED
from .formats.capture_blobs import TensorPlace, read_tensors, safetensors_header
from .store import ArtifactStore, Buffer, Handle

KEYS = ("documents", "positions", "token_ids")
#: Midstream's name of a dtype → safetensors' name, and numpy's dtype for its bits.
RAW: dict[str, tuple[str, str]] = {
    name: (facts.file, facts.raw) for name, facts in DTYPES.items()
} | {
    "int8": ("I8", "|i1"),
    "float8_e4m3fn": ("F8_E4M3", "|u1"),
}
_OF_FILE = {file: name for name, (file, _) in RAW.items()}
_ITEM_BYTES = {file: int(raw[-1]) for file, raw in RAW.values()}


def site_name(hook: str, layer: int) -> str:
    return f"{hook}.{layer}"


@cache
def _float8_values() -> np.ndarray:
    """Returns the finite values of float8_e4m3fn from 0 up (bits 0 to 126), float32 `[127]`; 4 bits
    of exponent, 3 of mantissa, bias 7.
    """
    bits = np.arange(127)
    exponent, mantissa = bits >> 3, (bits & 7) / 8
    return np.where(
        exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7)
    ).astype(np.float32)


def encoded_rows(rows: np.ndarray, dtype: str, to: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Converts rows (bits of `dtype`) to bits of the dtype `to`; returns them with the scale of
    each row, float32 `[rows]`, or None if `to` has no scales.

    A row that is not finite gets a scale that is not finite: it reads as NaN, never as a number.
    """
    if dtype == to:
        return rows, None
    values = widened(rows, dtype).astype(np.float32, copy=False)
    if to not in SCALED:
        return narrowed(values, to), None
    largest = np.abs(values).max(axis=1, initial=0.0)
    scale = np.where(largest == 0, 1, largest / SCALED[to]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        scaled = np.nan_to_num(values / scale[:, None], nan=0.0, posinf=0.0, neginf=0.0)
    if to == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8), scale
    known = _float8_values()
    middle = (known[1:] + known[:-1]) / 2
    size = np.abs(scaled)
    below = np.searchsorted(middle, size, side="left").astype(np.uint8)
    tie = (
        (below < len(middle))
        & (size == middle[np.minimum(below, len(middle) - 1)])
        & (below % 2 == 1)
    )
    return (below + tie) | (np.signbit(scaled).astype(np.uint8) << 7), scale


def decoded_rows(rows: np.ndarray, dtype: str, scale: np.ndarray | None) -> np.ndarray:
    """Returns stored rows as numbers: float32, or float16 unchanged."""
    if dtype == "float8_e4m3fn":
        magnitude = np.append(_float8_values(), np.float32(np.nan))
        rows = np.concatenate([magnitude, -magnitude])[rows]
    elif dtype == "int8":
        rows = rows.astype(np.float32)
    else:
        rows = widened(rows, dtype)
    return rows if scale is None else rows * scale[:, None]


def shard_buffers(
    tensors: Sequence[tuple[str, str, np.ndarray]], metadata: Mapping[str, str]
) -> tuple[list[Buffer], int, int]:
    """Returns (buffers in order, bytes, CRC32) of a file, without copying.

    `tensors`: (name, dtype, C-contiguous bits).
    """
    buffers: list[Buffer] = [
        safetensors_header(
            [(name, RAW[dtype][0], list(bits.shape), bits.nbytes) for name, dtype, bits in tensors],
            metadata,
        ),
        *(bits.reshape(-1).view(np.uint8).data for _, _, bits in tensors if bits.size),
    ]
    crc = 0
    for buffer in buffers:
        crc = zlib_ng.crc32(buffer, crc)
    return buffers, sum(map(len, buffers)), crc


def shard_tensors(handle: Handle) -> dict[str, TensorPlace]:
    """Returns the tensors of a shard. Raises DamagedBlob if it is not a shard, and OSError."""
    return read_tensors(handle.read, handle.size, _ITEM_BYTES)[1]


def tensor_bits(data: Buffer, tensor: TensorPlace) -> np.ndarray:
    """Returns rows of `tensor`, `[rows, …]`, from their bytes `data`."""
    return np.frombuffer(data, dtype=RAW[dtype_of(tensor)][1]).reshape(-1, *tensor.shape[1:])


def dtype_of(tensor: TensorPlace) -> str:
    """Returns Midstream's name of a tensor's dtype."""
    return _OF_FILE[tensor.dtype]


def put(store: ArtifactStore, key: str, buffers: Sequence[Buffer]) -> None:
    """Write an object; it is durable on return. Raises OSError."""
    store.prepare()
    writer = store.writer()
    try:
        writer.append(key, buffers)
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def checksum(handle: Handle, piece: int = 8 << 20) -> int:
    """Returns the CRC32 of the whole object."""
    crc, at = 0, 0
    while chunk := handle.read(at, piece):
        crc, at = zlib_ng.crc32(chunk, crc), at + len(chunk)
    return crc


def checked(store: ArtifactStore, key: str, crc32: int) -> bytes:
    """Returns an object's bytes. Raises OSError, capture_damaged if its checksum differs."""
    with store.open(key) as handle:
        data = handle.read(0, handle.size)
    if zlib_ng.crc32(data) != crc32:
        raise MidstreamError("capture_damaged", f"{key} is not what was written: its CRC32 differs")
    return data
