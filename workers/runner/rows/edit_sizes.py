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

from ....schemas.base.edit_sizes import EditSizes
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


class SizeCount:
    """The sizes of one request in one bank."""

    def __init__(self, sites: Sequence[Site]) -> None:
        """`sites`: of the bank."""
        self._sites = sites
        self._steps: list[tuple[int, int, np.ndarray]] = []  # first position, first site, values
        self._stop = 0  # positions below are counted
        # site · WIDTH + bin of each bin that is not empty, ascending, and how many sizes it has
        self._bins, self._counts = np.zeros((2, 0), dtype=np.int64)
        self._largest = np.zeros(len(sites), dtype=np.float32)
        self.too_large = ""  # the first edit that exceeded its limit, by position and site

    def add(self, position: int, site: int, values: np.ndarray) -> None:
        """Take the sizes of a step: `[sites, rows]` from these on."""
        self._steps.append((position, site, values.copy()))
        held = sum(values.size for _, _, values in self._steps)
        exceeded = any(bool((last < 0).any()) for _, _, last in self._steps[-2:])
        if len(self._steps) > STEPS or held > VALUES or exceeded:
            self._count(self._steps[:-1], position)
            self._steps = self._steps[-1:]

    def close(self, stop: int) -> None:
        """Count what is left of the positions below `stop`."""
        self._count(self._steps, stop)
        self._steps = []

    def _count(self, steps: Sequence[tuple[int, int, np.ndarray]], stop: int) -> None:
        stops = [position for position, _, _ in steps[1:]] + [stop]
        for (position, site, values), end in zip(steps, stops, strict=False):
            # the next step begins at the first position that was not accepted
            chosen = values[:, max(self._stop - position, 0) : max(end - position, 0)]
            self._sort(max(self._stop, position), site, chosen)
            self._stop = max(self._stop, min(end, position + values.shape[1]))

    def _sort(self, position: int, site: int, values: np.ndarray) -> None:
        columns, places = np.nonzero(~np.isnan(values.T))  # by position, then by site
        sizes, sites = values[places, columns], places + site
        if not self.too_large and (bad := np.flatnonzero(sizes < 0)).size:
            first, at = self._sites[sites[bad[0]]], position + columns[bad[0]]
            self.too_large = (
                f"the edit at {first.hook} of layer {first.layer}, position {at} is "
                f"{-sizes[bad[0]]:.4g} times as long as its row: more than its limit"
            )
        sizes = np.abs(sizes)
        with np.errstate(divide="ignore"):
            bins = np.clip(np.floor((np.log2(sizes) - LOWEST) * BINS) + 1, 0, WIDTH - 1)
        every = np.concatenate([self._bins, sites * WIDTH + bins.astype(np.int64)])
        counts = np.concatenate([self._counts, np.ones_like(sites)])
        self._bins, index = np.unique(every, return_inverse=True)
        self._counts = np.bincount(index, counts).astype(np.int64)
        np.maximum.at(self._largest, sites, sizes)

    def report(self, request: int) -> list[EditSizes]:
        """Return the report of each edited site. `request`: see `EditSizes`."""
        reports = []
        for number in np.unique(self._bins // WIDTH).tolist():
            chosen, largest = self._bins // WIDTH == number, float(self._largest[number])
            total = np.cumsum(self._counts[chosen])
            at = int(np.searchsorted(total, (total[-1] + 1) // 2))  # of the lower median
            bin_ = int(self._bins[chosen][at]) % WIDTH
            middle = 2.0 ** (LOWEST + (bin_ - 0.5) / BINS) if bin_ else 0.0
            median = largest if bin_ == WIDTH - 1 else min(middle, largest)
            site = self._sites[number]
            reports.append(
                EditSizes(
                    request=request,
                    hook=site.hook,
                    layer=site.layer,
                    rows=int(total[-1]),
                    median=median,
                    largest=largest,
                )
            )
        return reports

    def checksum(self, crc: int) -> int:
        """Continue a CRC32 with everything that is counted."""
        parts = (self._bins, self._counts, self._largest)
        return zlib.crc32(b"".join(part.tobytes() for part in parts), crc)
