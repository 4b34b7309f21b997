"""Dimensions of a row that differ most between the two prompts of a pair, which order a sweep's
columns by rank.

The rows are read from the capture files of the pair's unpatched runs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from midstream.schemas.base.errors import MidstreamError, Translated
from midstream.schemas.requests.source_runs import RunFiles
from midstream.storage.store import ArtifactStore

from ..records.sweep_paths import SiteKey
from ..records.sweeps import PatchPlace

if TYPE_CHECKING:
    import torch


def order_by_difference(
    store: ArtifactStore,
    base: RunFiles,
    source: RunFiles,
    sites: Sequence[SiteKey],
    places: Sequence[PatchPlace],
    most: int,
) -> dict[SiteKey, list[int]]:
    """Returns for each site the `most` dimensions with the largest Σ |base row − source row| over
    `places`, in float64; of equal dimensions the lower comes first. Raises MidstreamError.
    """
    of_base = rows_of_run(store, base, sites)
    of_source = rows_of_run(store, source, sites)
    to = [base.positions.index(place) for place, _ in places]
    of = [source.positions.index(place) for _, place in places]
    order = {}
    for site in sites:
        moved = of_base[site][to].double() - of_source[site][of].double()
        distance = moved.abs().sum(0)
        order[site] = distance.argsort(descending=True, stable=True)[:most].tolist()
    return order


def rows_of_run(
    store: ArtifactStore, files: RunFiles, sites: Sequence[SiteKey]
) -> "dict[SiteKey, torch.Tensor]":
    """Return site → the whole rows of a run, joined from all ranks, `[positions, width]` in the
    dtype of the capture. Call it off the event loop; it imports torch. Raises MidstreamError for
    rows that are missing or damaged.
    """
    from midstream.workers.runner.edits.source_runs import RunStore
    from midstream.workers.runner.hooks.sites import RankSite

    runs = RunStore(store, [RankSite(*site, "single") for site in sites], files.hidden_size)
    with Translated(
        ValueError,
        lambda error: MidstreamError(
            "intervention_failed", f"the rows of an unpatched prompt cannot be read: {error}"
        ),
    ):
        runs.put(files)
    return {site: runs.rows(files.key, *site, files.positions) for site in sites}
