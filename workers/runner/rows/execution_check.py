"""Compares the work of a step's sites with their plan.

The sites count on the device each row that they edit or capture (`kernels.plan.Planned.counts`),
and `finite_check` copies the counts, which are never set back. The comparison finds a site that
did not run, ran twice, or ran with another plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....kernels.plan import CAPTURED_AFTER, CAPTURED_BEFORE, EDITED
from ..hooks.sites import RankSite

#: Column of `counts` → description of what is counted.
_WHAT = {
    EDITED: "edits",
    CAPTURED_BEFORE: "rows captured before edits",
    CAPTURED_AFTER: "rows captured after edits",
}


@dataclass(frozen=True, slots=True)
class Miscount:
    """A site whose work in a step differs from its plan, and one request that is affected."""

    id: str  # of the request in the engine
    step: int
    site: RankSite
    column: int  # of `counts`
    expected: int  # over all requests of the step
    counted: int

    @property
    def kind(self) -> str:
        """The problem's kind, see `Receipt.kind`."""
        return "intervention_failed" if self.column == EDITED else "capture_failed"

    def __str__(self) -> str:
        what = f"{_WHAT[self.column]} at {self.site.hook} of layer {self.site.layer}"
        return f"step {self.step}, {what}: {self.expected} planned, {self.counted} counted"


@dataclass(frozen=True, eq=False)
class Due:
    """Counts that the sites of one step must reach, and for which requests."""

    counts: np.ndarray  # int32 [sites, COUNTS]
    edits: Sequence[tuple[str, np.ndarray]]  # request → sites that edit its rows, bool [sites]
    # request → ports that capture its rows, bool [2 · sites]
    captures: Sequence[tuple[str, np.ndarray]]
    masks: np.ndarray  # bool [n, sites]: sites that each configuration of the step edits
    masked: np.ndarray  # [tokens, columns]: the numbers of those that edit each token

    @cached_property
    def edited(self) -> frozenset[str]:
        """The requests whose rows are edited."""
        return frozenset(request for request, _ in self.edits)

    @cached_property
    def sites(self) -> np.ndarray:
        """The numbers of the sites that edit rows, int64."""
        return np.flatnonzero(self.counts[:, EDITED])

    @cached_property
    def span(self) -> tuple[int, int]:
        """The number of the first site that edits rows, and of the last one plus 1."""
        return (int(self.sites[0]), int(self.sites[-1]) + 1) if len(self.sites) else (0, 0)

    @cached_property
    def edited_rows(self) -> np.ndarray:
        """Which rows each of `sites` edits: bool `[sites, tokens]`."""
        return np.ascontiguousarray(self.masks[:, self.sites][self.masked].any(axis=1).T)

    def miscounts(
        self, step: int, counts: np.ndarray, sites: Sequence[RankSite]
    ) -> Iterator[Miscount]:
        """Yield each request's first site whose actual `counts` differ, for each `kind`."""
        failed: set[tuple[str, str]] = set()
        for number, column in np.argwhere(counts != self.counts).tolist():
            for request in self._planned_at(number, column):
                miscount = Miscount(
                    request,
                    step,
                    sites[number],
                    column,
                    int(self.counts[number, column]),
                    int(counts[number, column]),
                )
                if (request, miscount.kind) not in failed:
                    failed.add((request, miscount.kind))
                    yield miscount

    def _planned_at(self, site: int, column: int) -> list[str]:
        """Return the requests whose rows the site was to edit or capture; if it was planned for
        none, all requests of the step with edits or captures.
        """
        if column == EDITED:
            members, place = self.edits, site
        else:
            members, place = self.captures, 2 * site + (column == CAPTURED_AFTER)
        return [request for request, mask in members if mask[place]] or [
            request for request, _ in (*self.edits, *self.captures)
        ]
