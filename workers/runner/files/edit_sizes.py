"""The sizes of an ended request's edits, for its receipt.

A bin is 1/24 of an octave wide, so its middle is within 1.5 % of each value.
"""

import zlib

import numpy as np

from ....schemas.base.edit_sizes import EditSizes
from ....schemas.base.records import Wire

#: Bins of an octave, and the octaves: from float32's rounding, below which an edit changes nothing
#: of a row, to 2²⁴. The first bin has smaller sizes, the last larger ones.
BINS, LOWEST, HIGHEST = 24, -24, 24
WIDTH = 2 + BINS * (HIGHEST - LOWEST)


class CountedSizes(Wire):
    """The sizes of one request in one bank, over all its edited rows."""

    sites: list[tuple[str, int]]  # (hook, layer) of each edited site
    places: bytes  # int64 `[sites]`: the site's number in the bank
    counts: bytes  # uint32 `[sites, WIDTH]`: rows in each bin
    largest: bytes  # float32 `[sites]`

    def report(self, request: int) -> list[EditSizes]:
        """Return the report of each edited site. `request`: see `EditSizes`."""
        counts = np.frombuffer(self.counts, dtype=np.uint32).reshape(-1, WIDTH)
        largest = np.frombuffer(self.largest, dtype=np.float32)
        totals = np.cumsum(counts, axis=1, dtype=np.int64)
        rows = totals[:, -1]
        halves = (rows + 1) // 2, rows // 2 + 1  # the ranks of the lower and of the upper median
        bins = np.stack([(totals >= rank[:, None]).argmax(axis=1) for rank in halves])
        middles = np.where(bins > 0, 2.0 ** (LOWEST + (bins - 0.5) / BINS), 0.0)
        medians = np.where(bins == WIDTH - 1, largest, np.minimum(middles, largest))
        return [
            EditSizes(
                request=request, hook=hook, layer=layer, rows=count, median=median, largest=most
            )
            for (hook, layer), count, median, most in zip(
                self.sites,
                rows.tolist(),
                medians.mean(axis=0).tolist(),
                largest.tolist(),
                strict=True,
            )
        ]

    def checksum(self, crc: int) -> int:
        """Continue a CRC32 with everything that was counted."""
        for part in (self.places, self.counts, self.largest):
            crc = zlib.crc32(part, crc)
        return crc
