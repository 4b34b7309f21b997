"""Relative sizes of a request's edits at the sites of one bank: the largest, and a histogram for
the median, in memory that does not grow with the request.

A bin is 1/24 of an octave wide, so its middle is within 1.5 % of each value. Rows of rejected
drafts do not count, and a row that is computed again counts once: what a step computed is kept
until the next step shows how much of it was accepted.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....schemas.requests.edit_sizes import SiteSizes
from ..base.engine_step import StepView
from ..hooks.sites import Site

#: Bins of an octave, and the octaves: from 2⁻¹² to 2⁸. The first bin has smaller sizes, the last
#: larger ones.
BINS, LOWEST, HIGHEST = 24, -12, 8
WIDTH = 2 + BINS * (HIGHEST - LOWEST)
#: A request's sizes are sorted into bins once it holds those of this many steps, or this many
#: values.
STEPS, VALUES = 16, 1 << 16


class StepSizes(NamedTuple):
    """The relative sizes of one step's edits in one bank."""

    step: int
    view: StepView
    edited: frozenset[str]  # the requests whose rows were edited
    first: int  # number of the first site
    values: np.ndarray  # float32 [sites, rows of the step], as `kernels.plan.Planned.sizes`


class TooLarge(NamedTuple):
    """The first edit that exceeded its limit, by position and site."""

    position: int
    site: int
    size: float


class EditSizes:
    """The sizes of one request in one bank."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, np.ndarray]] = []  # first position, first site, values
        self._held = 0  # values in `_steps`
        self._stop = 0  # positions below are counted
        self._numbers = np.zeros(0, dtype=np.int64)  # the sites, ascending
        self._bins = np.zeros((0, WIDTH), dtype=np.int32)
        self._largest = np.zeros(0, dtype=np.float32)
        self.too_large: TooLarge | None = None

    def add(self, position: int, site: int, values: np.ndarray) -> None:
        """Take the sizes of a step: `[sites, rows]` from these on."""
        self._steps.append((position, site, values.copy()))
        self._held += values.size
        exceeded = any(bool((last < 0).any()) for _, _, last in self._steps[-2:])
        if len(self._steps) > STEPS or self._held > VALUES or exceeded:
            self._count(self._steps[:-1], position)
            self._steps, self._held = self._steps[-1:], values.size

    def close(self, stop: int) -> TooLarge | None:
        """Count what is left of the positions below `stop`; return the first edit that was too
        large.
        """
        self._count(self._steps, stop)
        self._steps = []
        return self.too_large

    def _count(self, steps: Sequence[tuple[int, int, np.ndarray]], stop: int) -> None:
        stops = [position for position, _, _ in steps[1:]] + [stop]
        for (position, site, values), end in zip(steps, stops, strict=False):
            # the next step begins at the first position that was not accepted
            chosen = values[:, max(self._stop - position, 0) : max(end - position, 0)]
            if chosen.size:
                self._sort(max(self._stop, position), site, chosen)
            self._stop = max(self._stop, min(end, position + values.shape[1]))

    def _sort(self, position: int, site: int, values: np.ndarray) -> None:
        places, columns = np.nonzero(~np.isnan(values))
        if not len(places):
            return
        sizes, sites = values[places, columns], places + site
        if (bad := np.flatnonzero(sizes < 0)).size and self.too_large is None:
            at = bad[np.lexsort((sites[bad], columns[bad]))[0]]
            size = float(-sizes[at])
            self.too_large = TooLarge(position + int(columns[at]), int(sites[at]), size)
        self._grow(np.unique(sites))
        index, sizes = np.searchsorted(self._numbers, sites), np.abs(sizes)
        with np.errstate(divide="ignore"):
            bins = np.floor((np.log2(sizes) - LOWEST) * BINS)
        np.add.at(self._bins, (index, np.clip(bins + 1, 0, WIDTH - 1).astype(np.int64)), 1)
        np.maximum.at(self._largest, index, sizes)

    def _grow(self, sites: np.ndarray) -> None:
        """Make room for more sites."""
        new = np.setdiff1d(sites, self._numbers)
        if len(new):
            numbers = np.union1d(self._numbers, new)
            kept = np.searchsorted(numbers, self._numbers)
            bins = np.zeros((len(numbers), WIDTH), dtype=np.int32)
            largest = np.zeros(len(numbers), dtype=np.float32)
            bins[kept], largest[kept] = self._bins, self._largest
            self._numbers, self._bins, self._largest = numbers, bins, largest

    def report(self, sites: Sequence[Site]) -> list[SiteSizes]:
        """Return the report of each site. `sites`: of the bank."""
        return [
            SiteSizes(
                sites[number].hook,
                sites[number].layer,
                int(bins.sum()),
                min(_median(bins), largest),
                largest,
            )
            for number, bins, largest in zip(
                self._numbers.tolist(), self._bins, self._largest.tolist(), strict=True
            )
        ]

    @property
    def checksum(self) -> int:
        """CRC32 of everything that is counted."""
        parts = (self._numbers, self._bins, self._largest)
        return zlib.crc32(b"".join(part.tobytes() for part in parts))


def _median(bins: np.ndarray) -> float:
    """Return the (lower) median: the middle of its bin; infinite in the last bin."""
    place = int(np.searchsorted(np.cumsum(bins), (int(bins.sum()) + 1) // 2))
    if place == WIDTH - 1:
        return float("inf")
    return 0.0 if place == 0 else float(2.0 ** (LOWEST + (place - 0.5) / BINS))
