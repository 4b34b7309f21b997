"""Dimensions of a row that differ most between the two prompts of a pair, which order a sweep's
columns by rank.

The rows are read from the capture files of the pair's unpatched runs.
"""

from collections.abc import Sequence

import numpy as np

from midstream.schemas.base.dtypes import DTYPE_OF_FILE, DTYPES, widened
from midstream.schemas.requests.source_runs import RunFile, RunFiles
from midstream.storage.formats.capture_blobs import Header, read_header
from midstream.storage.store import ArtifactStore

#: (hook, layer)
NeuronSite = tuple[str, int]


def order_by_difference(
    store: ArtifactStore,
    base: RunFiles,
    source: RunFiles,
    sites: Sequence[NeuronSite],
    places: Sequence[tuple[int, int]],
    most: int,
) -> dict[NeuronSite, list[int]]:
    """Returns for each site the `most` dimensions with the largest Σ |base row − source row| over
    `places`, in float64; of equal dimensions the lower comes first.

    `places`: (position in the patched prompt, position in the other prompt). Raises ValueError for
    missing rows, and OSError.
    """
    of_base = _rows_of(store, base, {*sites})
    of_source = _rows_of(store, source, {*sites})
    to = [base.positions.index(place) for place, _ in places]
    of = [source.positions.index(place) for _, place in places]
    order = {}
    for site in sites:
        moved = _rows(of_base, site, base)[to] - _rows(of_source, site, source)[of]
        distance = np.abs(moved).sum(0)
        order[site] = np.argsort(-distance, kind="stable")[:most].tolist()
    return order


def read_rows(store: ArtifactStore, files: RunFiles, site: NeuronSite) -> np.ndarray:
    """Return the rows of a run at one site, `[positions, width]` float64; raises as
    `order_by_difference` does.
    """
    return _rows(_rows_of(store, files, {site}), site, files)


def _rows(
    result: dict[NeuronSite, dict[int, np.ndarray]], site: NeuronSite, files: RunFiles
) -> np.ndarray:
    """Return the whole rows of a site, joined from all ranks: `[positions, width]`."""
    if not (parts := result.get(site)):
        raise ValueError(f"{files.key} has no rows of {site[0]} of layer {site[1]}")
    return np.concatenate([parts[start] for start in sorted(parts)], axis=1)


def _rows_of(
    store: ArtifactStore, files: RunFiles, sites: set[NeuronSite]
) -> dict[NeuronSite, dict[int, np.ndarray]]:
    """Returns site → first column → `[positions, columns]` float64."""
    result: dict[NeuronSite, dict[int, np.ndarray]] = {}
    for file in files.files:
        raw, header = _read(store, file)
        first = header.manifest.columns[0] if header.manifest.columns else 0
        for place in header.tensors.values():
            if place.site in sites:
                dtype = DTYPE_OF_FILE[place.dtype]
                bits = np.frombuffer(
                    raw[place.start : place.start + place.length], DTYPES[dtype].raw
                )
                result.setdefault(place.site, {})[first] = (
                    widened(bits, dtype).reshape(place.shape).astype(np.float64)
                )
    return result


def _read(store: ArtifactStore, file: RunFile) -> tuple[bytes, Header]:
    with store.open(file.path) as handle:
        raw = handle.read(file.offset, file.bytes)
    return raw, read_header(lambda start, count: raw[start : start + count], len(raw))
