"""Watches: the scores of one request on a rank, and what is computed of its recordings' rows."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.probes import ProbeScore, StoredProbe
from .aggregates import aggregate

#: Positions for which a watch has room at first; it grows by doubling.
_ROOM = 256


class ProbeError(RuntimeError):
    """A token could not be scored."""


@dataclass(frozen=True)
class Plan:
    """What is computed of one recording's rows: equal plans are computed together."""

    ports: tuple[int, ...]
    probes: tuple[tuple[str, ...], ...]  # of each port: digests
    columns: tuple[int, ...]  # of the watch: where the scores go, port after port, probe after probe, label after label


class Watch:
    """The scores of one request on this rank: `scores[position, column]`, a column for each label of each probe. NaN: not computed."""

    def __init__(self, probes: Sequence[StoredProbe]) -> None:
        self.probes = list(probes)
        ends = np.cumsum([len(probe.content.labels) for probe in probes]).tolist()
        self.columns = [range(end - len(probe.content.labels), end) for probe, end in zip(probes, ends, strict=True)]
        self.scores = np.full((_ROOM, ends[-1]), np.nan, dtype=np.float32)
        self.reached = 0  # the first position that was never scored

    def put(self, first: int, columns: np.ndarray, scores: np.ndarray) -> None:
        """`scores`: `[positions, len(columns)]`, from position `first` on. What is computed again replaces what was there."""
        stop = first + len(scores)
        if stop > len(self.scores):
            grown = np.full((max(stop, 2 * len(self.scores)), self.scores.shape[1]), np.nan, dtype=np.float32)
            grown[: len(self.scores)] = self.scores
            self.scores = grown
        self.scores[first:stop, columns] = scores
        self.reached = max(self.reached, stop)

    def results(self, positions: int) -> tuple[list[ProbeScore], int]:
        """Of the first `positions` tokens: the results, and a CRC32 of all scores. Raises ProbeError."""
        scores = self.scores[:positions]
        if len(scores) < positions or not np.isfinite(scores).all():
            bad = np.flatnonzero(~np.isfinite(scores).all(axis=1))
            where = int(bad[0]) if len(bad) else len(scores)
            column = int(np.flatnonzero(~np.isfinite(scores[where]))[0]) if len(bad) else 0
            name = next(probe.name for probe, mine in zip(self.probes, self.columns, strict=True) if column in mine)
            seen = "its score is not finite" if where < self.reached else "it was not scored"
            raise ProbeError(f"probe {name!r}: {seen} at position {where}")
        results = [self._result(probe, scores[:, list(mine)]) for probe, mine in zip(self.probes, self.columns, strict=True)]
        return results, zlib.crc32(scores.tobytes())

    def _result(self, probe: StoredProbe, scores: np.ndarray) -> ProbeScore:
        content = probe.content
        aggregates = aggregate(content.aggregation, scores, content.decay)
        crossed: list[int | None] = []
        for column, threshold in enumerate(content.thresholds):
            above = aggregates[:, column] >= threshold if threshold is not None else np.zeros(1, dtype=bool)
            crossed.append(int(above.argmax()) if above.any() else None)
        return ProbeScore(
            name=probe.name,
            digest=probe.digest,
            labels=content.labels,
            score=aggregates[-1].tolist(),
            positions=len(scores),
            crossed=crossed,
            action=probe.action,
            tokens=np.ascontiguousarray(scores, dtype="<f4").tobytes() if probe.tokens else b"",
            watching=probe.watching,
        )
