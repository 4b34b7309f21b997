"""Verification of a harvest: everything that its manifest says is computed again from the files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.harvest_order import row_order
from ...schemas.jobs.harvests import UnitEntry
from ...storage.formats.capture_blobs import DamagedBlob
from ...storage.shards import checksum, shard_tensors, site_name
from .reader import Harvest, Shard
from .reader import open as open_harvest

#: Faults that are listed.
SHOWN = 100


@dataclass
class Verification:
    """Result of a verification. `faults`: empty if the harvest is whole."""

    shards: int = 0
    rows: int = 0
    bytes: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(uri: str, progress: Callable[[int, int], None] | None = None) -> Verification:
    """Checksums of all files, keys (each once, in the order that the seed gives, in their unit's
    documents), shapes, counts, and that no document is left out.

    `progress(shards, of)` is called after each shard. Raises `not_found` where there is no
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
    of: UnitEntry | None = None
    visited: list[np.ndarray] = []
    for number, shard in enumerate(harvest.shards):
        try:
            documents, positions = _shard(harvest, shard, verification)
            if of is not shard.unit:
                _once(of, visited, harvest, verification)
                of, visited = shard.unit, []
            visited.append(np.stack([documents, positions]))
        except (OSError, DamagedBlob, MidstreamError, ValueError) as error:
            verification.faults.append(f"shard {number}: {error}")
        shard.close()
        verification.shards += 1
        if progress is not None:
            progress(number + 1, len(harvest.shards))
    _once(of, visited, harvest, verification)
    for empty in harvest.units:
        if not empty.shards:
            _once(empty, [], harvest, verification)
    made = harvest.manifest
    in_units = sum(unit.documents for unit in harvest.units)
    for name, text, counted in (
        ("rows", made.rows, verification.rows),
        ("shards", made.shards, verification.shards),
        ("bytes", made.bytes, verification.bytes),
        ("documents", made.documents, in_units),
    ):
        if text != counted:
            verification.faults.append(f"the manifest says {text} {name}; the files have {counted}")
    spans = sorted((unit.first, unit.first + unit.documents, unit.unit) for unit in harvest.units)
    for (_, stop, unit), (start, _, following) in pairwise([(0, 0, -1), *spans]):
        if start < stop:
            verification.faults.append(f"units {unit} and {following} have documents in common")
        elif start > stop:
            verification.faults.append(f"documents {stop} to {start - 1} are in no unit")
    numbers = [unit.unit for unit in harvest.units]
    if sorted(numbers) != list(range(len(numbers))):
        verification.faults.append("the units are not all there, each once")
    verification.faults[:] = verification.faults[:SHOWN]
    return verification


def _shard(
    harvest: Harvest, shard: Shard, verification: Verification
) -> tuple[np.ndarray, np.ndarray]:
    keys, store = None, harvest.store
    for file in shard.entry.files:
        with store.open(file.key, hold=False) as handle:
            verification.bytes += handle.size
            if handle.size != file.bytes or checksum(handle) != file.crc32:
                verification.faults.append(
                    f"{file.key} is not what was written: its size or CRC32 differs"
                )
            tensors = shard_tensors(handle)
        for hook, layers in file.sites.items():
            for layer in layers:
                tensor = tensors.get(site_name(hook, layer))
                shape = [shard.entry.rows, harvest.manifest.widths[hook]]
                if tensor is None or tensor.shape != shape:
                    verification.faults.append(
                        f"{file.key}: {site_name(hook, layer)} is not {shape}"
                    )
        own = Shard(
            harvest.store,
            type(shard.entry)(rows=shard.entry.rows, files=[file]),
            shard.unit,
            shard.first,
        ).keys()
        if keys is not None and not all(
            np.array_equal(own_part, first) for own_part, first in zip(own, keys, strict=True)
        ):
            verification.faults.append(
                f"{file.key}: its keys differ from those of the shard's other stages"
            )
        keys = keys or own
    assert keys is not None, "a shard has a file"
    documents, positions, _ = keys
    name = shard.entry.files[0].key
    if set(shard.sites) != set(harvest.sites):
        verification.faults.append(f"{name}: not all sites are there")
    if not np.array_equal(
        row_order(harvest.manifest.shuffle, documents, positions), np.arange(len(documents))
    ):
        verification.faults.append(f"{name}: its rows are not in the order of the seed")
    if len(documents) and not (
        shard.unit.first <= documents.min()
        and documents.max() < shard.unit.first + shard.unit.documents
    ):
        verification.faults.append(f"{name}: it has rows of documents of other units")
    verification.rows += len(documents)
    return documents, positions


def _once(
    unit: UnitEntry | None,
    visited: Sequence[np.ndarray],
    harvest: Harvest,
    verification: Verification,
) -> None:
    """Each row of a unit is there once, and each document has some but those that are said to have
    none.
    """
    if unit is None:
        return
    keys = np.concatenate([np.zeros((2, 0), np.int64), *visited], axis=1)
    if np.unique(keys, axis=1).shape[1] != keys.shape[1]:
        verification.faults.append(f"unit {unit.unit} has a row twice")
    made, present = harvest.manifest, np.unique(keys[0])
    # Of a packed sequence, or one that tokens were generated for, a document may have no row.
    whole = made.fit != "pack" and not made.generated
    if whole and len(present) != unit.documents - unit.skipped:
        absent = np.setdiff1d(np.arange(unit.first, unit.first + unit.documents), present)
        shown = ", ".join(map(str, absent[:5].tolist())) + (", …" if len(absent) > 5 else "")
        verification.faults.append(
            f"unit {unit.unit}: {len(absent)} documents have no row ({shown}), and "
            f"{unit.skipped} should have none"
        )
