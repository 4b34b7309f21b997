"""Relative sizes of the edits of live requests at the sites of one bank: the largest, and a
histogram for the median, in memory that does not grow with a request.

A bin is 1/24 of an octave wide, so its middle is within 1.5 % of each value. Rows of rejected
drafts do not count, and a row that is computed again counts once: what a step computed is kept
until the next step shows how much of it was accepted.

A step is counted as a whole, for all requests at once: the model's thread does this between two
steps, so its cost must not grow with the number of requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..base.engine_step import StepView
from ..files.edit_sizes import BINS, LOWEST, WIDTH, CountedSizes
from ..hooks.sites import Site
from .execution_check import Due


class StepSizes(NamedTuple):
    """The relative sizes of one step's edits in one bank."""

    step: int
    view: StepView
    due: Due  # the plan
    sites: np.ndarray  # int64 [sites], their numbers
    # float32 [sites, rows of the step], as `kernels.plan.Planned.sizes`; NaN: not edited
    values: np.ndarray


class RequestSizes:
    """The sizes of one request in one bank."""

    def __init__(self, table: "SizeTable", slot: int) -> None:
        """`slot`: of the request in the table."""
        self._table, self.slot = table, slot
        self.too_large = ""  # the first edit that exceeded its limit, by position and site
        self.counted: CountedSizes | None = None  # once the request is over

    def close(self, stop: int) -> None:
        """Count what is left of the positions below `stop`, and leave the table."""
        if self.slot >= 0:
            self.counted = self._table.close(self, stop)
            self.slot = -1


@dataclass(slots=True)
class _Step:
    """A step's sizes that wait for the next step of their requests. Arrays by request."""

    sites: np.ndarray
    values: np.ndarray
    slots: np.ndarray
    first_rows: np.ndarray
    rows: np.ndarray  # how many
    positions: np.ndarray  # of the first rows

    def only(self, chosen: np.ndarray) -> "_Step":
        return _Step(
            self.sites,
            self.values,
            *(part[chosen] for part in (self.slots, self.first_rows, self.rows, self.positions)),
        )


class SizeTable:
    """The sizes of all live requests in one bank."""

    def __init__(self, sites: Sequence[Site]) -> None:
        """`sites`: of the bank."""
        self.sites = sites
        self._requests: list[RequestSizes | None] = []  # by slot
        self._stops = np.zeros(0, dtype=np.int64)  # [slot]: positions below are counted
        # [slot, site]: row of `_counts` and `_largest`; -1: no edit there
        self._rows = np.full((0, len(sites)), -1, dtype=np.int64)
        self._counts = np.zeros((0, WIDTH), dtype=np.uint32)
        self._largest = np.zeros(0, dtype=np.float32)
        self._free: list[int] = []  # rows
        self._steps: list[_Step] = []

    def begin(self) -> RequestSizes:
        """Return the sizes of another request."""
        if None not in self._requests:
            more = max(16, len(self._requests))
            self._requests += [None] * more
            self._stops = _longer(self._stops, more, 0)
            self._rows = _longer(self._rows, more, -1)
        slot = self._requests.index(None)
        made = self._requests[slot] = RequestSizes(self, slot)
        return made

    def add(self, step: StepSizes, slots: np.ndarray, places: np.ndarray) -> bool:
        """Take the sizes of a step. `slots`: of its edited requests; `places`: their numbers in the
        step.

        Returns whether edits of earlier steps exceeded their limits.
        """
        view = step.view
        rows, positions = view.counts[places], view.positions[places]
        first_rows = (np.cumsum(view.counts) - view.counts)[places]
        stops = np.full(len(self._requests), -1, dtype=np.int64)
        stops[slots] = positions  # the next step begins at the first that was not accepted
        exceeded = self._count(stops)
        self._steps.append(_Step(step.sites, step.values, slots, first_rows, rows, positions))
        return exceeded

    def close(self, sizes: RequestSizes, stop: int) -> CountedSizes:
        """Count a request's positions below `stop` and forget it; return what was counted."""
        slot = sizes.slot
        stops = np.full(len(self._requests), -1, dtype=np.int64)
        stops[slot] = stop
        self._count(stops)
        places = np.flatnonzero(self._rows[slot] >= 0)
        rows = self._rows[slot, places]
        found = CountedSizes(
            [(self.sites[place].hook, self.sites[place].layer) for place in places.tolist()],
            places.tobytes(),
            self._counts[rows].tobytes(),
            self._largest[rows].tobytes(),
        )
        self._counts[rows], self._largest[rows] = 0, 0
        self._free += rows.tolist()
        self._rows[slot], self._stops[slot], self._requests[slot] = -1, 0, None
        return found

    def _count(self, stops: np.ndarray) -> bool:
        """Count what waits of requests whose slot has a stop, `[slot]` or -1, below it; return
        whether edits exceeded their limits.
        """
        waiting, exceeded = [], False
        for step in self._steps:
            ready = stops[step.slots] >= 0
            if ready.all():
                exceeded |= self._sort(step, stops)
                continue
            if ready.any():
                exceeded |= self._sort(step.only(ready), stops)
            waiting.append(step.only(~ready))
        self._steps = waiting
        return exceeded

    def _sort(self, step: _Step, stops: np.ndarray) -> bool:
        below = np.minimum(stops[step.slots], step.positions + step.rows)
        begin = np.maximum(self._stops[step.slots], step.positions)
        self._stops[step.slots] = np.maximum(self._stops[step.slots], below)
        counts = np.maximum(below - begin, 0)
        member = np.repeat(np.arange(len(counts)), counts)  # of each column
        positions = np.arange(len(member)) + np.repeat(begin - np.cumsum(counts) + counts, counts)
        values = step.values[:, positions - step.positions[member] + step.first_rows[member]]
        edited = ~np.isnan(values)
        sizes = values[edited]
        # the edits' places in `_rows`
        keys = (step.slots[member] * len(self.sites) + step.sites[:, None])[edited]
        if exceeded := bool((sizes < 0).any()):
            slots, places = np.divmod(keys, len(self.sites))
            self._limit(slots, np.broadcast_to(positions, edited.shape)[edited], places, sizes)
            sizes = np.abs(sizes)
        rows = self._rows.reshape(-1)[keys]
        if (new := rows < 0).any():
            self._make_rows(np.unique(keys[new]))
            rows = self._rows.reshape(-1)[keys]
        with np.errstate(divide="ignore"):
            bins = np.clip(np.floor((np.log2(sizes) - LOWEST) * BINS) + 1, 0, WIDTH - 1)
        # a 1 of another dtype takes ten times as long
        np.add.at(self._counts.reshape(-1), rows * WIDTH + bins.astype(np.int64), np.uint32(1))
        np.maximum.at(self._largest, rows, sizes)
        return exceeded

    def _make_rows(self, keys: np.ndarray) -> None:
        """Make rows for edits at these places of `_rows`, which have none."""
        if (lack := len(keys) - len(self._free)) > 0:
            more = max(lack, len(self._largest))
            self._free += range(len(self._largest), len(self._largest) + more)
            self._counts = _longer(self._counts, more, 0)
            self._largest = _longer(self._largest, more, 0)
        taken, self._free = self._free[: len(keys)], self._free[len(keys) :]
        self._rows.reshape(-1)[keys] = taken

    def _limit(
        self, slots: np.ndarray, positions: np.ndarray, places: np.ndarray, sizes: np.ndarray
    ) -> None:
        """Note the first edit of each request that exceeded its limit: its size is negative."""
        bad = np.flatnonzero(sizes < 0)
        for at in bad[np.lexsort((places[bad], positions[bad]))].tolist():
            request, site = self._requests[slots[at]], self.sites[places[at]]
            if request is not None and not request.too_large:
                request.too_large = (
                    f"the edit at {site.hook} of layer {site.layer}, position {positions[at]} is "
                    f"{-sizes[at]:.4g} times as long as its row: more than its limit"
                )


def _longer(values: np.ndarray, more: int, filled: int) -> np.ndarray:
    return np.concatenate([values, np.full((more, *values.shape[1:]), filled, values.dtype)])
