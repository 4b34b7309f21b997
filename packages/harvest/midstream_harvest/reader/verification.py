"""Verifies a harvest: recomputes everything in its manifest from the files."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np

from midstream.schemas.base.errors import MidstreamError
from midstream.storage.formats.capture_blobs import DamagedBlob

from ..files.order import row_order
from ..files.shards import Harvest, Shard, checksum, open as open_harvest, shard_tensors, site_name
from ..records.harvests import ShardEntry, UnitEntry

#: The most faults that are listed.
SHOWN = 100


@dataclass
class Verification:
    """The result of a verification. `faults`: empty if the harvest is complete and undamaged."""

    shards: int = 0
    rows: int = 0
    bytes: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(uri: str, progress: Callable[[int, int], None] | None = None) -> Verification:
    """Verify the checksums of all files, the keys (each once, in the order of the seed, among its
    unit's documents), shapes and counts, and that no document is missing.

    `progress(shards, total)` is called after each shard. Raises `not_found` if there is no
    manifest.
    """
    verification = Verification()
    try:
        harvest = open_harvest(uri)
    except MidstreamError as error:
        if error.kind != "capture_damaged":
            raise
        verification.faults.append(error.detail)
        return verification
    shards = iter(harvest.shards)
    for unit in harvest.units:
        visited = [np.zeros((2, 0), np.int64)]
        for shard in islice(shards, len(unit.shards)):
            try:
                visited.append(_shard(harvest, shard, verification))
            except (OSError, DamagedBlob, MidstreamError, ValueError) as error:
                verification.faults.append(f"shard {verification.shards}: {error}")
            shard.close()
            verification.shards += 1
            if progress is not None:
                progress(verification.shards, len(harvest.shards))
        _check_unit(unit, np.concatenate(visited, axis=1), harvest, verification)
    manifest = harvest.manifest
    for name, listed, counted in (
        ("rows", manifest.rows, verification.rows),
        ("shards", manifest.shards, verification.shards),
        ("bytes", manifest.bytes, verification.bytes),
        ("documents", manifest.documents, sum(item.documents for item in harvest.units)),
    ):
        if listed != counted:
            verification.faults.append(
                f"the manifest says {listed} {name}; the files have {counted}"
            )
    spans = sorted((item.first, item.first + item.documents, item.unit) for item in harvest.units)
    for (_, stop, number), (start, _, following) in pairwise([(0, 0, -1), *spans]):
        if start < stop:
            verification.faults.append(f"units {number} and {following} have documents in common")
        elif start > stop:
            verification.faults.append(f"documents {stop} to {start - 1} are in no unit")
    numbers = [item.unit for item in harvest.units]
    if sorted(numbers) != list(range(len(numbers))):
        verification.faults.append("a unit is missing or listed twice")
    verification.faults[:] = verification.faults[:SHOWN]
    return verification


def _shard(harvest: Harvest, shard: Shard, verification: Verification) -> np.ndarray:
    """Check a shard's files; return its documents and positions, `[2, rows]`."""
    keys = None
    store = harvest.store
    for file in shard.entry.files:
        with store.open(file.key, hold=False) as handle:
            verification.bytes += handle.size
            if handle.size != file.bytes or checksum(handle) != file.crc32:
                verification.faults.append(
                    f"{file.key} is damaged: its size or CRC32 differs from the manifest's"
                )
            tensors = shard_tensors(handle)
        for hook, layers in file.sites.items():
            for layer in layers:
                tensor = tensors.get(site_name(hook, layer))
                shape = [shard.entry.rows, harvest.manifest.widths[hook]]
                if tensor is None or tensor.shape != shape:
                    verification.faults.append(
                        f"{file.key}: {site_name(hook, layer)} does not have shape {shape}"
                    )
        file_keys = Shard(
            harvest.store,
            ShardEntry(rows=shard.entry.rows, files=[file]),
            shard.unit,
            shard.first,
        ).keys()
        if keys is not None and not all(
            np.array_equal(part, first) for part, first in zip(file_keys, keys, strict=True)
        ):
            verification.faults.append(
                f"{file.key}: its keys differ from those of the shard's other stages"
            )
        keys = keys or file_keys
    assert keys is not None, "a shard has a file"
    documents, positions, _ = keys
    name = shard.entry.files[0].key
    if set(shard.sites) != set(harvest.sites):
        verification.faults.append(f"{name}: its sites are not those of the harvest")
    if not np.array_equal(
        row_order(harvest.manifest.shuffle, documents, positions), np.arange(len(documents))
    ):
        verification.faults.append(f"{name}: its rows are not in the order of the seed")
    if len(documents) and not (
        shard.unit.first <= documents.min()
        and documents.max() < shard.unit.first + shard.unit.documents
    ):
        verification.faults.append(f"{name}: it has rows of another unit's documents")
    verification.rows += len(documents)
    return np.stack([documents, positions])


def _check_unit(
    unit: UnitEntry, keys: np.ndarray, harvest: Harvest, verification: Verification
) -> None:
    """Check that no row of a unit occurs twice, and that each document has rows, except the number
    of documents that the manifest lists as skipped. `keys`: `[2, rows]`.
    """
    if np.unique(keys, axis=1).shape[1] != keys.shape[1]:
        verification.faults.append(f"unit {unit.unit} has a row twice")
    manifest = harvest.manifest
    window = harvest.manifest.positions.window
    # with packing, generation, or a window around tokens, other documents may have no row, too
    whole = manifest.fit != "pack" and not manifest.generated and not (window and window.around)
    if not whole:
        return
    present = np.unique(keys[0])
    if len(present) != unit.documents - unit.skipped:
        absent = np.setdiff1d(np.arange(unit.first, unit.first + unit.documents), present)
        shown = ", ".join(map(str, absent[:5].tolist())) + (", …" if len(absent) > 5 else "")
        verification.faults.append(
            f"unit {unit.unit}: {len(absent)} documents have no row ({shown}), and "
            f"{unit.skipped} should have none"
        )
