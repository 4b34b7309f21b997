"""Runs of a step: the consecutive positions that each recording captures in it, their places in the
step's slab, and the copy of their rows to the recordings.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from .capture import NewMemory, Recording
from .extents import Extent, Spaced, StepRows, spaced

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


@dataclass(frozen=True, slots=True)
class StepRuns:
    """The recorded rows of a step: run i has rows of `recordings[i]` from `firsts[i]` on."""

    step: StepRows
    layout: Layout
    recordings: Sequence[Recording]
    firsts: Sequence[int]

    def extent(self, run: int) -> Extent:
        """Return a run of these."""
        _, _, count = self.layout.runs[run]
        return Extent(self.step, self.layout.slots[run], self.firsts[run], count)

    def copy(self, new: NewMemory) -> None:
        """Copy the rows to their recordings, once they have landed.

        One call copies all: calls for each recording, of which a step often has one position, would
        take longer than the rows, and would hold up the model's thread.
        """
        try:
            self.step.landing.wait()
            rows, places = list[torch.Tensor](), list[torch.Tensor]()
            for recording in self.recordings:
                if recording.opened:
                    recording.leave()
            for runs, counts, numbers in self.layout.alike:
                parts = self.step.rows(numbers).split(counts, dim=1)
                for run, count, part in zip(runs, counts, parts, strict=True):
                    spans = self.recordings[run].places(self.firsts[run], count, self.step, new)
                    places += spans
                    rows += [part] if len(spans) == count == 1 else _cut(part, spans)
            if places:
                torch._foreach_copy_(places, rows)
        except Exception as error:
            logger.exception("captured rows could not be copied")
            for recording in self.recordings:
                recording.fail(error)


def _cut(rows: torch.Tensor, places: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the parts of rows `[ports, positions, width]` that belong in `places`, in order."""
    at = 0
    for place in places:
        yield rows.narrow(1, at, place.shape[1])
        at += place.shape[1]
