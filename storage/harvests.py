"""Gives random access to a harvest's rows, as numpy arrays, from any store."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from ..schemas.base.errors import MidstreamError, Translated
from ..schemas.base.records import Plotted, from_json
from ..schemas.jobs.harvests import (
    FORMAT,
    MANIFEST,
    HarvestManifest,
    PartManifest,
    ShardEntry,
    UnitEntry,
)
from ..schemas.prompts.selectors import ALIASES
from .formats.capture_blobs import TensorPlace
from .shards import (
    KEYS,
    checked,
    decoded_rows,
    dtype_of,
    shard_tensors,
    site_name,
    tensor_bits,
)
from .store import ArtifactStore, Handle, open_store

#: The most shards whose files a `Harvest` keeps open.
OPEN = 16
HookLayer = tuple[str, int]


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
        self.entry, self.unit, self.first = entry, unit, first
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
        return [
            (hook, layer)
            for file in self.entry.files
            for hook, layers in file.sites.items()
            for layer in layers
        ]

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
        opened, name = self._open(self._key(hook, layer)), site_name(hook, layer)
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
        self.unit, self.cursor = unit, unit.unit + 1
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
        self.store, self.manifest, self.units = store, manifest, list(units)
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
        return [(hook, layer) for hook, layers in self.manifest.sites.items() for layer in layers]

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
        parts, order = [], []
        for number in np.unique(shard_numbers).tolist():
            shard = self._touch(number)
            places = np.flatnonzero(shard_numbers == number)
            inside = needed[places] - shard.first
            low, high = int(inside.min()), int(inside.max()) + 1
            parts.append(read(shard, low, high)[inside - low])
            order.append(places)
        if not parts:
            first = self.shards[0] if self.shards else None
            return read(first, 0, 0) if first is not None else np.zeros((0, len(KEYS)))
        ordered = np.concatenate(parts)[np.argsort(np.concatenate(order))]
        result: np.ndarray = ordered[0] if isinstance(index, int | np.integer) else ordered
        return result

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
    units = [
        unit
        for part in manifest.parts
        for unit in from_json(checked(store, part.key, part.crc32), PartManifest).units
    ]
    return Harvest(store, manifest, units)


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
