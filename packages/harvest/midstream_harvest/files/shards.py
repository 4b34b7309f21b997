"""Harvests in any store: shards are written whole; their rows are read in any order, as arrays.

A shard is a safetensors file of the rows of several sites at the same tokens: `documents`,
`positions` and `token_ids` int64 `[rows]`; `<hook>.<layer>` `[rows, width]`, and for a dtype with a
scale per row `<hook>.<layer>.scale` float32 `[rows]`. Rows become the shard's dtype here.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from zlib_ng import zlib_ng

from midstream.schemas.base.dtypes import DTYPES, narrowed, widened
from midstream.schemas.base.errors import MidstreamError, Translated
from midstream.schemas.base.records import Plotted, from_json
from midstream.schemas.prompts.selectors import ALIASES
from midstream.schemas.prompts.sites import hook_layers
from midstream.storage.formats.capture_blobs import TensorPlace, read_tensors, safetensors_header
from midstream.storage.store import ArtifactStore, Buffer, Handle, committed, open_store

from ..records.harvests import (
    FORMAT,
    MANIFEST,
    CheckedFile,
    HarvestManifest,
    PartManifest,
    ShardEntry,
    UnitEntry,
)
from ..records.work import SCALED

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
#: The most shards whose files a `Harvest` keeps open.
OPEN = 16
#: Bytes of an object that are read together for its checksum.
PIECE = 8 << 20
HookLayer = tuple[str, int]


def site_name(hook: str, layer: int) -> str:
    return f"{hook}.{layer}"


@cache
def _float8_values() -> np.ndarray:
    """Returns the finite values of float8_e4m3fn from 0 up (bits 0 to 126), float32 `[127]`; 4 bits
    of exponent, 3 of mantissa, bias 7.
    """
    bits = np.arange(127)
    exponent = bits >> 3
    mantissa = (bits & 7) / 8
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
    with committed(store) as writer:
        writer.append(key, buffers)


def checksum(handle: Handle) -> int:
    """Returns the CRC32 of the whole object."""
    crc = 0
    at = 0
    while chunk := handle.read(at, PIECE):
        crc = zlib_ng.crc32(chunk, crc)
        at += len(chunk)
    return crc


def checked(store: ArtifactStore, file: CheckedFile) -> bytes:
    """Returns an object's bytes. Raises OSError, capture_damaged if its checksum differs."""
    with store.open(file.key) as handle:
        data = handle.read(0, handle.size)
    if zlib_ng.crc32(data) != file.crc32:
        raise MidstreamError(
            "capture_damaged", f"{file.key} is not what was written: its CRC32 differs"
        )
    return data


def units_of(store: ArtifactStore, parts: Iterable[CheckedFile]) -> list[UnitEntry]:
    """Returns the units of parts, from their manifests. Raises what `checked` raises."""
    return [unit for part in parts for unit in from_json(checked(store, part), PartManifest).units]


class RowOrigins(NamedTuple):
    """The origins of rows; each array is int64 `[rows]`."""

    documents: np.ndarray  # number of the document in the source
    positions: np.ndarray  # of the token in the document
    token_ids: np.ndarray


@dataclass(frozen=True)
class _Opened:
    handle: Handle
    tensors: Mapping[str, TensorPlace]


class Shard:
    """The rows of one shard. `first`: the number of its first row in the harvest."""

    def __init__(
        self, store: ArtifactStore, entry: ShardEntry, unit: UnitEntry, first: int
    ) -> None:
        self.entry = entry
        self.unit = unit
        self.first = first
        self._store = store
        self._files: dict[str, _Opened] = {}

    def __len__(self) -> int:
        return self.entry.rows

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": {}}  # a data loader's worker opens its own files

    def close(self) -> None:
        """Close the shard's files; a later read opens them again."""
        for opened in self._files.values():
            opened.handle.close()
        self._files = {}

    @property
    def sites(self) -> list[HookLayer]:
        """The sites of all stages, in the order of the files."""
        return self.entry.hook_layers

    def keys(self, start: int = 0, stop: int | None = None) -> RowOrigins:
        """Return the keys of rows `[start, stop)`. Raises OSError, DamagedBlob."""
        opened = self._open(self.entry.files[0].key)
        return RowOrigins(*[self._read(opened, name, start, stop) for name in KEYS])

    def generated(self) -> np.ndarray:
        """Return whether each row's token was generated, bool `[rows]`."""
        opened = self._open(self.entry.files[0].key)
        if "generated" not in opened.tensors:
            return np.zeros(len(self), bool)
        return self._read(opened, "generated", 0, None).astype(bool)

    def rows(self, hook: str, layer: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows `[start, stop)` of a site, `[rows, width]`: float16 if stored as float16,
        otherwise float32. Raises `not_found`, OSError.
        """
        name = site_name(hook, layer)
        opened = self._open(self._key(hook, layer))
        bits = self._read(opened, name, start, stop)
        scale = (
            self._read(opened, f"{name}.scale", start, stop)
            if f"{name}.scale" in opened.tensors
            else None
        )
        return decoded_rows(bits, dtype_of(opened.tensors[name]), scale)

    def stored(self, hook: str, layer: int) -> np.ndarray:
        """Return all rows of a site like `rows`, but bfloat16 as its bits, uint16."""
        opened = self._open(self._key(hook, layer))
        name = site_name(hook, layer)
        if dtype_of(opened.tensors[name]) != "bfloat16":
            return self.rows(hook, layer)
        return self._read(opened, name, 0, None)

    def _key(self, hook: str, layer: int) -> str:
        for file in self.entry.files:
            if layer in file.sites.get(hook, ()):
                return file.key
        raise MidstreamError(
            "not_found", f"the harvest has no {hook} of layer {layer}", allowed=shown(self.sites)
        )

    def _open(self, key: str) -> _Opened:
        if key not in self._files:
            handle = self._store.open(key, hold=False)
            self._files[key] = _Opened(handle, shard_tensors(handle))
        return self._files[key]

    def _read(self, opened: _Opened, name: str, start: int, stop: int | None) -> np.ndarray:
        tensor = opened.tensors[name]
        start, stop, _ = slice(start, stop).indices(tensor.shape[0])
        item = tensor.length // tensor.shape[0] if tensor.shape[0] else 0
        return tensor_bits(
            opened.handle.read(tensor.start + start * item, max(0, stop - start) * item), tensor
        )


class StreamedUnit:
    """Rows of some consecutive documents, about one shard, in the order of the stream.

    `cursor`: acknowledge it once the rows are safe; `unit`: the entry of the harvest's manifest.
    """

    def __init__(self, unit: UnitEntry, uri: str) -> None:
        self.unit = unit
        self.cursor = unit.unit + 1
        self.shards = [Shard(open_store(uri), entry, unit, 0) for entry in unit.shards]

    def keys(self) -> RowOrigins:
        """Return the keys of all rows."""
        parts = [shard.keys() for shard in self.shards] or [
            RowOrigins(*[np.zeros(0, np.int64)] * 3)
        ]
        return RowOrigins(*[np.concatenate(columns) for columns in zip(*parts, strict=True)])

    def rows(self, layer: int, hook: str = "post_block") -> np.ndarray:
        """Return the rows of a site, `[rows, width]`, in the order of `keys`. Raises `not_found`;
        ValueError for a unit without rows.
        """
        return np.concatenate([shard.rows(hook, layer) for shard in self.shards])


class Harvest(Plotted):
    """A complete harvest.

    Rows are numbered in the order of the shards, which is that of training and mixes documents.
    """

    def __init__(
        self, store: ArtifactStore, manifest: HarvestManifest, units: Sequence[UnitEntry]
    ) -> None:
        """Build a harvest from its manifests; `open` reads them."""
        self.store = store
        self.manifest = manifest
        self.units = list(units)
        entries = [(entry, unit) for unit in units for entry in unit.shards]
        firsts = accumulate((entry.rows for entry, _ in entries), initial=0)
        self.shards = [
            Shard(store, *each, first) for each, first in zip(entries, firsts, strict=False)
        ]
        self._used: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return self.manifest.rows

    def __repr__(self) -> str:
        manifest = self.manifest
        return (
            f"<Harvest {manifest.id} of {manifest.model}: {manifest.rows} rows at "
            f"{shown(self.sites)}, {manifest.shards} shards, {manifest.dtype}>"
        )

    @property
    def sites(self) -> list[HookLayer]:
        """The sites (hook, layer), in the order of the forward pass."""
        return hook_layers(self.manifest.sites)

    @cached_property
    def _firsts(self) -> np.ndarray:
        return np.array([shard.first for shard in self.shards], dtype=np.int64)

    def site(self, hook: str | None, layer: int | None) -> HookLayer:
        """Return the only site that matches `hook` and `layer`; None matches any.

        Raises MidstreamError that lists the sites of the harvest if none or several match.
        """
        matching = [
            site
            for site in self.sites
            if (hook is None or ALIASES.get(hook, hook) == site[0]) and layer in (None, site[1])
        ]
        if len(matching) != 1:
            text = "several sites" if matching else f"no {hook or 'site'} of layer {layer}"
            raise MidstreamError(
                "not_found",
                f"the harvest has {text}: name hook and layer",
                allowed=shown(self.sites),
            )
        return matching[0]

    def rows(
        self,
        index: int | slice | np.ndarray | Sequence[int],
        layer: int | None = None,
        hook: str | None = None,
    ) -> np.ndarray:
        """Return rows of a site by row number: `[rows, width]`, or `[width]` for a single number;
        float32 or float16. Raises IndexError.
        """
        at = self.site(hook, layer)
        return self._gather(index, lambda shard, start, stop: shard.rows(*at, start, stop))

    def keys(self, index: int | slice | np.ndarray | Sequence[int]) -> RowOrigins:
        """Return the keys of rows by row number. Raises IndexError."""
        columns = self._gather(index, lambda shard, *part: np.stack(shard.keys(*part), axis=-1)).T
        return RowOrigins(*columns.astype(np.int64, order="C"))

    def document(
        self, document: int, layer: int | None = None, hook: str | None = None
    ) -> tuple[RowOrigins, np.ndarray]:
        """Return a document's keys and its rows at a site, ordered by position; empty if it has no
        rows.
        """
        found = [np.zeros(0, np.int64)]
        for number, shard in enumerate(self.shards):
            if 0 <= document - shard.unit.first < shard.unit.documents:
                documents = self._touch(number).keys().documents
                found.append(shard.first + np.flatnonzero(documents == document))
        numbers = np.concatenate(found)
        keys = self.keys(numbers)
        order = np.argsort(keys.positions)
        return RowOrigins(*[part[order] for part in keys]), self.rows(numbers[order], layer, hook)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def _gather(
        self,
        index: int | slice | np.ndarray | Sequence[int],
        read: Callable[[Shard, int, int], np.ndarray],
    ) -> np.ndarray:
        numbers = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
        given = np.atleast_1d(np.asarray(numbers, dtype=np.int64))
        needed = np.where(given < 0, given + len(self), given)
        outside = given[(needed < 0) | (needed >= len(self))]
        if len(outside):
            raise IndexError(f"row {outside[0]} is out of range: the harvest has {len(self)} rows")
        shard_numbers = np.searchsorted(self._firsts, needed, side="right") - 1
        parts = []
        order = []
        for number in np.unique(shard_numbers).tolist():
            shard = self._touch(number)
            places = np.flatnonzero(shard_numbers == number)
            inside = needed[places] - shard.first
            low = int(inside.min())
            high = int(inside.max()) + 1
            parts.append(read(shard, low, high)[inside - low])
            order.append(places)
        if not parts:
            first = self.shards[0] if self.shards else None
            return read(first, 0, 0) if first is not None else np.zeros((0, len(KEYS)))
        ordered = np.concatenate(parts)[np.argsort(np.concatenate(order))]
        gathered: np.ndarray = ordered[0] if isinstance(index, int | np.integer) else ordered
        return gathered

    def _touch(self, number: int) -> Shard:
        """Record a use of a shard, close the least recently used shards beyond `OPEN`, and return
        the shard.
        """
        self._used[number] = None
        self._used.move_to_end(number)
        while len(self._used) > OPEN:
            self.shards[self._used.popitem(last=False)[0]].close()
        return self.shards[number]


def open(uri: str) -> Harvest:
    """Open the complete harvest at a folder or URI.

    Raises MidstreamError: `not_found` if it has no manifest, `gone` if it was a stream that did not
    keep its shards, `capture_damaged` if a manifest is
    damaged.
    """
    store = open_store(uri)
    manifest = read_manifest(store)
    if manifest.dropped:
        raise MidstreamError("gone", f"{uri} was a stream: its rows went to its consumers")
    return Harvest(store, manifest, units_of(store, manifest.parts))


def read_manifest(store: ArtifactStore) -> HarvestManifest:
    """Read the manifest of a harvest. Raises `not_found`, `capture_damaged`."""
    with (
        Translated(
            FileNotFoundError,
            lambda error: MidstreamError(
                "not_found",
                f"{store.uri} has no {MANIFEST}: it is not a harvest, or the harvest is not "
                "complete",
            ),
        ),
        store.open(MANIFEST) as handle,
    ):
        data = handle.read(0, handle.size)
    with Translated(
        (msgspec.DecodeError, AttributeError),
        lambda error: MidstreamError(
            "capture_damaged", f"{store.uri}/{MANIFEST} cannot be read: {error}"
        ),
    ):
        if (result := msgspec.json.decode(data).get("format")) != FORMAT:
            raise MidstreamError(
                "capture_damaged",
                f"{store.uri} has the format {result!r}; this version reads {FORMAT!r}",
            )
        return from_json(data, HarvestManifest)


def shown(sites: Sequence[HookLayer]) -> str:
    """List sites by name: `post_block.3, post_block.4`."""
    return ", ".join(site_name(*site) for site in sites)
