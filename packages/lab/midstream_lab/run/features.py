"""Rows that patch one feature of a sparse autoencoder each, or its error: the exact values of an
attribution's features.

They are computed from the rows that the pair's two unpatched runs captured on the vLLM worker, by
the arithmetic of the estimates (`Autoencoder.exchange`), and are written like any cell's row.
"""

import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.tensors import Tensor, from_numpy
from midstream.schemas.requests.source_runs import RunFiles
from midstream.schemas.settings.settings import Settings
from midstream.storage.store import open_store

from ..records.sweeps import StoredSweep, Unit
from .neurons import rows_of_run

if TYPE_CHECKING:
    from midstream.workers.runner.readings.sae import Autoencoder

#: Patched rows that the ranks hold at a time: those of one batch of units.
ROWS = 1024
#: Rows that are encoded at a time.
_ENCODED = 64


_TURN = threading.Lock()
#: Digest → the one autoencoder that this process has loaded: those of several jobs do not add up.
_LOADED: dict[str, "Autoencoder"] = {}


def _loaded(settings: Settings, named: StoredSae) -> "Autoencoder":
    """Return an autoencoder, loaded in place of another. Raises MidstreamError."""
    from midstream.workers.runner.readings.sae import load_registered

    if named.digest not in _LOADED:
        _LOADED.clear()
        _LOADED[named.digest] = load_registered(
            named, settings.artifacts_of("saes"), settings.tuning.sae_cache_mib << 20
        )
    return _LOADED[named.digest]


class FeatureRows:
    """The patched rows of one sweep's features. Call it off the event loop; it imports torch."""

    def __init__(self, settings: Settings, sweep: StoredSweep) -> None:
        assert sweep.attributed is not None
        assert sweep.attributed.sae is not None
        self._settings = settings
        self._sweep = sweep
        self._named = sweep.attributed.sae

    def batches(self, units: Sequence[Unit]) -> Iterator[list[Unit]]:
        """Yield units of one pair in batches of about `ROWS` rows, those of a column together."""
        ordered = sorted(units, key=lambda unit: (unit.column, unit.number))
        start = rows = 0
        for place, unit in enumerate(ordered):
            more = len(self._sweep.pairs[unit.pair].columns[unit.column].places)
            if place > start and rows + more > ROWS:
                yield ordered[start:place]
                start = place
                rows = 0
            rows += more
        if ordered:
            yield ordered[start:]

    def rows(
        self, base: RunFiles, source: RunFiles | None, units: Sequence[Unit]
    ) -> dict[int, list[Tensor]]:
        """Return the number of each unit → the row that is written at each place of its column.

        `base`, `source`: the unpatched runs of the pair; no source in an ablation. `units`: one of
        `batches`. Raises MidstreamError for rows that cannot be read, and for an autoencoder
        that cannot be loaded.
        """
        with _TURN:
            return self._rows(_loaded(self._settings, self._named), base, source, units)

    def close(self) -> None:
        """Drop the autoencoder; another job that has it loads it again."""
        with _TURN:
            _LOADED.pop(self._named.digest, None)

    def _rows(
        self, sae: "Autoencoder", base: RunFiles, source: RunFiles | None, units: Sequence[Unit]
    ) -> dict[int, list[Tensor]]:
        import torch

        site = self._named.hook, self._named.layer
        store = open_store(self._settings.artifacts)

        def read(files: RunFiles) -> torch.Tensor:
            return rows_of_run(store, files, [site])[site].float()

        # Not the gradient worker's rows, which differ from vLLM's by rounding: an exact value would
        # be that of rows that vLLM never computed.
        ours = read(base)
        theirs = None if source is None else read(source)
        mean = None
        if self._sweep.ablation == "mean":
            theirs = ours.mean(0).expand_as(ours)
            mean = sum(sae.encode(part).sum(0) for part in ours.split(_ENCODED)) / len(ours)
        result: dict[int, list[Tensor]] = {unit.number: [] for unit in units}
        for column, members in groupby(units, key=lambda unit: unit.column):
            chosen = list(members)
            places = self._sweep.pairs[chosen[0].pair].columns[column].places
            for start in range(0, len(places), _ENCODED):
                part = places[start : start + _ENCODED]
                to = [base.positions.index(place) for place, _ in part]
                of = to if source is None else [source.positions.index(place) for _, place in part]
                rows = ours[to]
                parts = sae.exchange(rows, None if theirs is None else theirs[of], mean)
                for unit in chosen:
                    assert unit.feature is not None
                    moved = sae.exchanged(rows, parts, unit.feature).numpy()
                    result[unit.number] += map(from_numpy, moved)
        return result
