"""The last step of a bank, which steps of decoding repeat until a request comes or goes: the same
rows of the batch are edited and recorded, at later positions.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Protocol

from ....schemas.prompts.selectors import PositionSelector, end_position, lowest_position, select
from ....schemas.requests.specs import RankSpec, SteeringRow
from ..base.engine_step import RequestRows
from .capture import Recording


class Member(Protocol):
    """What a plan depends on of a `planner.Tracked`."""

    spec: RankSpec
    rows: list[tuple[int, SteeringRow]]
    recordings: dict[int, Recording]
    reported: bool
    gated: bool


class LastStep:
    """The requests of the last step whose plan may be used again."""

    def __init__(self, bank: str) -> None:
        self._bank = bank
        # each request, its rows of the step, and what its plan depended on
        self._members: list[tuple[Member, RequestRows, tuple[object, ...]]] = []
        self._ends: list[int] = []  # positions below which the plan is right; empty: not known yet

    def keep(self, request_rows: Sequence[tuple[Member, RequestRows]]) -> None:
        self._members = [
            (tracked, rows, (tracked.rows, tracked.recordings, tracked.reported))
            for tracked, rows in request_rows
        ]
        self._ends = []

    def forget(self) -> None:
        self._members = []

    def repeated_by(self, request_rows: Sequence[tuple[Member, RequestRows]]) -> bool:
        """Return whether the plan of the last step is right for these rows, except for their
        positions.
        """
        if not self._members or len(self._members) != len(request_rows):
            return False
        ends = self._ends or itertools.repeat(sys.maxsize)
        for (tracked, rows), (before, last, (held, recordings, reported)), end in zip(
            request_rows, self._members, ends, strict=False
        ):
            if (
                tracked is not before
                or tracked.rows is not held
                or tracked.recordings is not recordings
                or tracked.reported != reported
                or rows.first_row != last.first_row
                or rows.num_rows != last.num_rows
                or rows.first_position < last.first_position
                or rows.first_position + rows.num_rows > end
            ):
                return False
        if not self._ends:  # only now, since many steps are not repeated
            self._ends = [self._end(tracked, rows) for tracked, rows, _ in self._members]
            return self.repeated_by(request_rows)
        return True

    def _end(self, tracked: Member, rows: RequestRows) -> int:
        if tracked.gated:
            return 0
        first, stop = rows.first_position, rows.first_position + rows.num_rows
        edits = [row.positions for _, row in tracked.rows if row.bank == self._bank]
        captures = [
            item.capture
            for item in tracked.recordings.values()
            if item.bank == self._bank and not tracked.reported
        ]
        prompt = tracked.spec.prompt_tokens
        return min(
            [
                *(_end_of(item, select(item, first, stop, prompt), rows, prompt) for item in edits),
                *(
                    _end_of(item.positions, item.select(first, stop, prompt), rows, prompt)
                    for item in captures
                ),
            ],
            default=sys.maxsize,
        )


def _end_of(
    selector: PositionSelector, chosen: Sequence[int], rows: RequestRows, prompt_tokens: int
) -> int:
    """Return the position up to which the selector has all positions, if `chosen`, those of `rows`,
    are all, or none, if they are none; 0 if that is not known.
    """
    if not selector:
        return sys.maxsize
    if not chosen and rows.first_position >= end_position(selector, prompt_tokens):
        return sys.maxsize
    if not chosen:
        return lowest_position(selector, prompt_tokens)
    whole = isinstance(chosen, range) and len(chosen) == rows.num_rows
    return end_position(selector, prompt_tokens) if whole else 0
