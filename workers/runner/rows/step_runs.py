"""Runs of a step: the consecutive positions that each recording captures in it, their places in the
step's slab, and the copy of their rows to the recordings. Steps that repeat one another share a
slab, and their rows are copied together.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from .capture import NewMemory, Recording
from .extents import Extent, Spaced, StepRows, rows_of, spaced
from .pending_rows import LANDED, Landing, LastLanding

logger = logging.getLogger(__name__)

#: Tokens of a run at most whose rows are gathered with others': of decoding, also with drafts.
_SHORT = 16


@dataclass(frozen=True)
class Layout:
    """Places of a step's rows in its slab; read-only.

    Successive steps that generate one token of each request share a layout.
    """

    runs: Sequence[tuple[bytes, int, int]]  # each one's ports, as `Recording.wants`, token, count
    pattern: np.ndarray  # [ports]: pattern of the port
    tokens: list[np.ndarray]  # for each pattern: tokens, sorted and distinct
    base: np.ndarray  # [ports]: first row of the port
    slots: np.ndarray  # [runs, patterns]: slot of the run's first token

    @property
    def rows(self) -> int:
        """Return the number of rows over all ports."""
        return int(self.base[-1]) + len(self.tokens[self.pattern[-1]]) if self.tokens else 0

    @cached_property
    def alike(self) -> list[tuple[list[int], list[int], np.ndarray | Spaced]]:
        """The runs by their ports: runs, their counts, and the numbers of their rows, `[ports,
        rows]`.

        A long run whose rows are not equally spaced is alone: not many are gathered at a time.
        """
        groups: dict[bytes, list[int]] = {}
        for run, (wants, _, _) in enumerate(self.runs):
            groups.setdefault(wants, []).append(run)
        alike = []
        for group in groups.values():
            long = [run for run in group if self.runs[run][2] > _SHORT]
            alike.append(self._together(group))
            if long and not isinstance(alike[-1][2], Spaced):
                short = [run for run in group if self.runs[run][2] <= _SHORT]
                alike[-1:] = [
                    self._together(runs) for runs in [short, *([n] for n in long)] if runs
                ]
        return alike

    def _together(self, runs: list[int]) -> tuple[list[int], list[int], np.ndarray | Spaced]:
        ports = np.flatnonzero(np.frombuffer(self.runs[runs[0]][0], dtype=bool))
        counts = [self.runs[run][2] for run in runs]
        first = self.base[ports] + self.slots[runs][:, self.pattern[ports]]  # [runs, ports]
        within = np.concatenate([np.arange(count) for count in counts])
        return runs, counts, spaced(np.repeat(first, counts, axis=0).T + within)


def layout_of(runs: Sequence[tuple[bytes, int, int]]) -> Layout:
    """Return the layout of runs, each: ports as `Recording.wants`, first token, count."""
    groups: dict[bytes, list[tuple[int, int]]] = {}  # runs of recordings with the same ports
    for wants, token, count in runs:
        groups.setdefault(wants, []).append((token, count))
    members, pattern = _patterns_of(tuple(groups))
    tokens = []
    for of_pattern in members.T.tolist():  # two captures of one request may name the same row
        items = [
            item
            for member, of_group in zip(of_pattern, groups.values(), strict=True)
            if member
            for item in of_group
        ]
        tokens.append(_numbers([token for token, _ in items], [count for _, count in items]))
    per_port = np.array([len(token) for token in tokens])[pattern]
    first_tokens = np.array([token for _, token, _ in runs])
    slots = np.stack([np.searchsorted(token, first_tokens) for token in tokens], axis=1)
    return Layout(runs, pattern, tokens, np.cumsum(per_port) - per_port, slots)


@lru_cache(maxsize=64)
def _patterns_of(masks: tuple[bytes, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Group ports by the recordings that capture them: return which masks are in each pattern, bool
    `[masks, patterns]`, and the pattern of each port.

    Cached, because the steps of a request need the same ports again and again.
    """
    members, pattern = np.unique(
        np.stack([np.frombuffer(mask, dtype=bool) for mask in masks]), axis=1, return_inverse=True
    )
    return members, pattern.reshape(-1)


def _numbers(firsts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """Return the numbers of the ranges that begin at `firsts`: sorted and distinct."""
    if len(firsts) == 1:
        return np.arange(firsts[0], firsts[0] + counts[0], dtype=np.int64)
    begins, lengths = np.array(firsts, dtype=np.int64), np.array(counts, dtype=np.int64)
    ends = np.cumsum(lengths)
    numbers: np.ndarray = np.repeat(begins - ends + lengths, lengths) + np.arange(
        ends[-1] if len(ends) else 0
    )
    return numbers if bool((numbers[1:] > numbers[:-1]).all()) else np.unique(numbers)


class Stretch:
    """The recorded rows of steps with one layout, each of which continues the one before: run i has
    rows of `recordings[i]` from `firsts[i]` on.
    """

    def __init__(
        self,
        layout: Layout,
        recordings: Sequence[Recording],
        firsts: np.ndarray,
        slab: torch.Tensor,
        landing: LastLanding,
    ) -> None:
        """`firsts`: int64 [runs]. `slab`: has room for the rows of one step or more; of more only
        if each run has one position in a step. `landing`: of the slab.
        """
        self.layout, self.recordings, self.slab = layout, recordings, slab
        self._firsts, self._landing = firsts, landing
        self.steps = 0  # taken so far
        self._watched = any(recording.watch is not None for recording in recordings)

    @property
    def full(self) -> bool:
        return len(self.slab) < (self.steps + 1) * self.layout.rows

    def is_continued_by(self, layout: Layout, firsts: np.ndarray) -> bool:
        """Return whether the next step may have these runs."""
        continues = layout is self.layout and np.array_equal(firsts, self._firsts + self.steps)
        return continues and not self.full

    def next(self, landing: Landing) -> StepRows:
        """Return the memory of the next step's rows, see `take`."""
        size, layout = self.layout.rows, self.layout
        slab = self.slab[self.steps * size : (self.steps + 1) * size]
        return StepRows(slab, layout.base, layout.pattern, landing)

    def take(self, step: StepRows) -> list[tuple[Recording, Extent]]:
        """Add the next step, whose rows are on their way; return those that probes read."""
        self.steps, self._landing.last = self.steps + 1, step.landing
        if not self._watched:
            return []
        firsts, runs = (self._firsts + self.steps - 1).tolist(), self.layout.runs
        return [
            (recording, Extent(step, slots, first, count))
            for recording, slots, first, (_, _, count) in zip(
                self.recordings, self.layout.slots, firsts, runs, strict=True
            )
            if recording.watch is not None
        ]

    def count(self) -> None:
        """Count the rows as recorded."""
        for recording, first, (_, _, count) in zip(
            self.recordings, self._firsts.tolist(), self.layout.runs, strict=True
        ):
            recording.recorded += count * self.steps
            if recording.dropped:
                recording.dropped.difference_update(range(first, first + count * self.steps))

    def copy(self, new: NewMemory) -> None:
        """Copy the rows to their recordings, once they have landed.

        One call copies all: calls for each recording, of which a step often has one position, would
        take longer than the rows, and would hold up the model's thread.
        """
        try:
            self._landing.wait()
            used = self.slab[: self.steps * self.layout.rows]
            like = StepRows(used, self.layout.base, self.layout.pattern, LANDED)
            rows, places = list[torch.Tensor](), list[torch.Tensor]()
            for runs, counts, numbers in self.layout.alike:
                found = rows_of(used, numbers, self.steps)
                parts = found.split(counts, dim=1) if self.steps == 1 else found.unbind(1)
                for run, count, part in zip(runs, counts, parts, strict=True):
                    first, many = int(self._firsts[run]), count * self.steps
                    spans = self.recordings[run].places(first, many, like, new)
                    places += spans
                    rows += [part] if len(spans) == 1 == many else _cut(part, spans)
            if places:
                torch._foreach_copy_(places, rows)
        except Exception as error:
            logger.exception("captured rows could not be copied")
            for recording in self.recordings:
                recording.fail(error)


def leave(recordings: Sequence[Recording]) -> None:
    """Have rows leave those in which pieces were begun."""
    for recording in recordings:
        if recording.opened:
            recording.leave()


def _cut(rows: torch.Tensor, places: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the parts of rows `[ports, positions, width]` that belong in `places`, in order."""
    at = 0
    for place in places:
        yield rows.narrow(1, at, place.shape[1])
        at += place.shape[1]
