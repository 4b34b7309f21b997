"""Source runs on this rank, and their rows.

A run is the captured rows of one prompt of a settled job. Every rank reads the capture files
independently, and keeps the rows that its own sites need; so no rank waits for another, and a rank
that fails reports the reason.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....schemas.base.dtypes import DTYPES
from ....schemas.jobs.receipts import READ_LATER
from ....schemas.prompts.selectors import Hook, as_ranges
from ....schemas.prompts.sites import hook_layers
from ....schemas.requests.source_runs import RunFile, RunFiles, RunRow, parse_row, run_key
from ....storage.formats.capture_blobs import Header, read_header
from ....storage.store import TRANSIENT, ArtifactStore
from ..hooks.sites import RankSite

#: safetensors' name of a dtype → torch's; rows are kept in the dtype of their capture.
_DTYPES = {facts.file: getattr(torch, name) for name, facts in DTYPES.items()}
#: Ranges that messages list at most.
_SHOWN_RANGES = 16


@dataclass(frozen=True)
class _LoadedRun:
    places: dict[int, int]  # position → index in `rows`
    # site of this rank → whole rows `[positions, size]`, on the CPU
    rows: dict[tuple[str, int], torch.Tensor]
    crc32: int  # of the rows


# One rank that reads for the others would need a collective, in which all wait when one fails. The
# price is one read for each rank, of a file that is in the page cache.
class RunStore:
    """Source runs of one rank. Methods refuse by LookupError or ValueError, and change nothing
    then.
    """

    def __init__(self, store: ArtifactStore, sites: Sequence[RankSite], hidden_size: int) -> None:
        self._store = store
        self._hidden_size = hidden_size
        self._sites: set[tuple[str, int]] = {(site.hook, site.layer) for site in sites}
        self._runs: dict[str, _LoadedRun] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def names(self) -> list[tuple[str, int]]:
        """Return (key, CRC32 of the rows) of each run, sorted: equal on all ranks of a stage."""
        return sorted((key, run.crc32) for key, run in self._runs.items())

    def put(self, files: RunFiles) -> None:
        """Read the run's rows at this rank's sites; a no-op if it has the run, because the content
        of a key never changes.

        Raises ValueError for files that are missing, damaged, of another run or incomplete, and for
        paths outside the capture root.
        """
        if files.key in self._runs:
            return
        if files.hidden_size not in (0, self._hidden_size):
            raise ValueError(
                f"run {files.key}: its rows have {files.hidden_size} elements, but the model's "
                f"have {self._hidden_size}"
            )
        if not files.positions:
            raise ValueError(f"run {files.key}: it has no rows")
        needed = self._sites.intersection(hook_layers(files.sites))
        parts: dict[tuple[str, int], list[_Part]] = {}
        if needed:
            for file in files.files:
                try:
                    for site, part in self._read(files, file, needed).items():
                        parts.setdefault(site, []).append(part)
                except (OSError, ValueError, MemoryError) as error:
                    transient = isinstance(error, OSError) and error.errno in TRANSIENT
                    raise ValueError(
                        f"run {files.key}: {file.path}: "
                        f"{f'{READ_LATER}: ' if transient else ''}{error}"
                    ) from error
        if missing := needed - parts.keys():
            raise ValueError(f"run {files.key}: none of its files contains {_site(*min(missing))}")
        rows = {}
        for site, value in parts.items():
            try:
                rows[site] = _whole(value)
            except ValueError as error:
                raise ValueError(f"run {files.key}: {_site(*site)} {error}") from error
        crc = 0
        for site in sorted(rows):
            crc = zlib.crc32(
                rows[site].view(torch.uint8).numpy(), zlib.crc32(_site(*site).encode(), crc)
            )
        places = {position: place for place, position in enumerate(files.positions)}
        self._runs[files.key] = _LoadedRun(places, rows, crc)

    def drop(self, keys: Sequence[str]) -> None:
        """Drop runs; unknown keys are ignored. Running requests have copies of their rows in the
        steering table.
        """
        for key in keys:
            self._runs.pop(key, None)

    def clear(self) -> None:
        self._runs.clear()

    def row(self, name: str) -> torch.Tensor:
        """Return the whole row that `name` (see `schemas.requests.source_runs.row_name`) stands
        for: float32, on the CPU; a mean is computed in float64.

        Raises LookupError when this rank lacks the run, its site or a position, ValueError when a
        value is not finite or `name` is invalid.
        """
        run_row = parse_row(name)
        run, rows = self._find(run_row.key, run_row.hook, run_row.layer)
        if run_row.position is not None:
            values = rows[self._places(run_row, run, (run_row.position,))[0]].float()
        else:
            chosen = rows[self._places(run_row, run, run_row.mean)] if run_row.mean else rows
            values = chosen.double().mean(0).float()
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name}: has values that are not finite")
        return values

    def rows(self, key: str, hook: Hook, layer: int, positions: Sequence[int]) -> torch.Tensor:
        """Return rows `[len(positions), size]` in the dtype of the capture, on the CPU; a view
        where their places are consecutive.

        Raises LookupError.
        """
        run, rows = self._find(key, hook, layer)
        places = self._places(RunRow(key, hook, layer, None), run, positions)
        if places and places == list(range(places[0], places[0] + len(places))):
            return rows[places[0] : places[0] + len(places)]
        return rows[places]

    def _find(self, key: str, hook: Hook, layer: int) -> tuple[_LoadedRun, torch.Tensor]:
        if (run := self._runs.get(key)) is None:
            raise LookupError(f"source run {key} is not on this rank")
        if (rows := run.rows.get((hook, layer))) is None:
            raise LookupError(
                f"source run {key} has no rows of {_site(hook, layer)}"
                + ("" if (hook, layer) in self._sites else ", which is not on this rank")
            )
        return run, rows

    def _places(self, run_row: RunRow, run: _LoadedRun, positions: Sequence[int]) -> list[int]:
        """Return the indices of the rows of `positions`. Raises LookupError."""
        try:
            return [run.places[position] for position in positions]
        except KeyError:
            lacking = as_ranges(
                [position for position in positions if position not in run.places], _SHOWN_RANGES
            )
            raise LookupError(
                f"source run {run_row.key} has no row of {_site(run_row.hook, run_row.layer)} at "
                f"position {lacking}"
            ) from None

    def _read(
        self, files: RunFiles, file: RunFile, needed: set[tuple[str, int]]
    ) -> "dict[tuple[str, int], _Part]":
        """Return one blob's rows at the needed sites. Raises OSError, ValueError, MemoryError."""
        with self._store.open(file.path) as handle:
            header = read_header(
                lambda start, count: handle.read(file.offset + start, count), file.bytes
            )
            self._check(files, header)
            places = {
                place.site: place
                for place in header.tensors.values()
                if place.site is not None and place.site in needed
            }
            if not places:  # the blob has rows of another stage
                return {}
            raw = handle.read(file.offset, file.bytes)
            if len(raw) != file.bytes or zlib.crc32(raw) != file.crc32:
                raise ValueError("its content has changed since the capture")
        rows = {}
        row = header.manifest.row
        columns = header.manifest.columns
        size = self._hidden_size if row is None else row.size
        start, stop = columns or (0, size)
        shape = [len(files.positions), stop - start]
        for site, place in places.items():
            if place.shape != shape or place.dtype not in _DTYPES:
                raise ValueError(f"{place.name} is {place.dtype} {place.shape}, not {shape}")
            # copied, so that the blob's other rows are not held as well
            content = bytearray(memoryview(raw)[place.start : place.start + place.length])
            rows[site] = _Part(
                start, size, torch.frombuffer(content, dtype=_DTYPES[place.dtype]).view(place.shape)
            )
        return rows

    def _check(self, files: RunFiles, header: Header) -> None:
        manifest = header.manifest
        if (key := run_key(manifest.job, manifest.request, manifest.tag)) != files.key:
            raise ValueError(f"these are rows of {key}")
        if manifest.positions != files.positions:
            in_file = as_ranges(manifest.positions, _SHOWN_RANGES)
            in_run = as_ranges(files.positions, _SHOWN_RANGES)
            raise ValueError(f"it has positions {in_file}, but the run has {in_run}")


class _Part(NamedTuple):
    """Columns of a site's rows, as one rank recorded them."""

    start: int
    size: int  # of the whole row
    rows: torch.Tensor  # `[positions, columns]`


def _whole(parts: list[_Part]) -> torch.Tensor:
    """Join parts to whole rows. Raises ValueError unless they have every column exactly once."""
    ordered = sorted(parts, key=lambda part: part.start)
    reached = 0
    for part in ordered:
        if part.start < reached:
            raise ValueError("occurs in two of its files")
        if part.start > reached:
            break
        reached += part.rows.shape[1]
    if reached != ordered[0].size:
        raise ValueError(f"is in its files only up to dimension {reached} of {ordered[0].size}")
    return ordered[0].rows if len(ordered) == 1 else torch.cat([part.rows for part in ordered], 1)


def _site(hook: str, layer: int) -> str:
    return f"{hook} of layer {layer}"
