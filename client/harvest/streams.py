"""A unit of a harvest's stream as its consumer gets it: rows and keys, held in memory."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from ...schemas.jobs.harvests import UnitEntry
from ...storage.store import ArtifactStore
from .reader import Keys, Shard, shown


class StreamedUnit:
    """Rows of some consecutive documents: about one shard, in the order of the stream.

    `cursor`: acknowledge it once the rows are safe; `unit`: the entry of the harvest's manifest.
    """

    def __init__(self, unit: UnitEntry, files: Mapping[str, bytes]) -> None:
        self.unit, self.cursor = unit, unit.unit + 1
        store, self.shards = cast(ArtifactStore, _Held(files)), list[Shard]()
        for entry in unit.shards:
            self.shards.append(Shard(store, entry, unit, sum(map(len, self.shards))))

    def __len__(self) -> int:
        return self.unit.rows

    def __repr__(self) -> str:
        sites = shown(self.shards[0].sites) if self.shards else "no sites"
        return f"<StreamedUnit {self.unit.unit}: {len(self)} rows at {sites}>"

    def keys(self) -> Keys:
        """Return the keys of all rows."""
        parts = [shard.keys() for shard in self.shards] or [Keys(*[np.zeros(0, np.int64)] * 3)]
        return Keys(*map(np.concatenate, zip(*parts, strict=True)))

    def rows(self, layer: int, hook: str = "post_block") -> np.ndarray:
        """Return the rows of a site, `[rows, width]`, in the order of `keys`. Raises `not_found`,
        ValueError for a unit without rows.
        """
        return np.concatenate([shard.rows(hook, layer) for shard in self.shards])


class _Held:
    """A store of a unit's files."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def open(self, key: str, hold: bool = True) -> Any:
        return _HeldFile(self._files[key])


class _HeldFile:
    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, start: int, count: int) -> bytes:
        return self._data[start : start + count]

    def close(self) -> None:
        """Do nothing: the data is the unit's."""
