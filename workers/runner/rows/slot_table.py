"""Tables of the tracked requests, a slot for each, and what a step reads from them for all its
tokens at once.

A slot is written when its request begins, changes or ends. Steps that generate one token of each
request read the same from them again and again, and are then planned without a look at any request.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ....kernels import IDLE
from ....schemas.prompts.selectors import (
    PositionSelector,
    end_position,
    lowest_position,
    select,
)
from ..base.engine_step import StepView

#: Slots at first; the tables grow by doubling.
_SLOTS = 64
_NONE = np.zeros(0, dtype=bool)


class SlotValue(NamedTuple):
    """A value of a slot's tokens at some positions."""

    column: int
    value: int  # not 0
    first: int  # no position is outside of `[first, stop)`
    stop: int
    #: (first, stop) → the positions in this range, ascending; None: all between `first` and `stop`.
    chosen: Callable[[int, int], Sequence[int]] | None = None
    gate: int = 0  # column of `StepTokens.closed`, of its gate and its trigger


def entry_of(
    column: int,
    value: int,
    positions: PositionSelector,
    prompt_tokens: int,
    chosen: Callable[[int, int], Sequence[int]] | None = None,
    gate: int = 0,
) -> SlotValue:
    """Return the entry of a selector's positions, of which `chosen` may leave some out."""
    first = lowest_position(positions, prompt_tokens)
    stop = end_position(positions, prompt_tokens)
    if chosen is None and (isinstance(positions, list) or getattr(positions, "step", 1) > 1):
        chosen = partial(_selected, positions, prompt_tokens)
    return SlotValue(column, value, first, stop, chosen, gate)


def _selected(
    positions: PositionSelector, prompt_tokens: int, first: int, stop: int
) -> Sequence[int]:
    return select(positions, first, stop, prompt_tokens)


class SlotTable:
    """Values of one bank by slot and column: at most one of a column at a position."""

    def __init__(self) -> None:
        # first, stop, value and gate of each entry, `[4, slots, columns]`
        self._parts = np.zeros((4, _SLOTS, 1), dtype=np.int64)
        # slot → entries that choose their positions; [slots]: whether it has any
        self._chosen: dict[int, list[SlotValue]] = {}
        self._chooses = np.zeros(_SLOTS, dtype=bool)
        self._used: dict[int, int] = {}  # slot → the columns that its entries take

    def write(self, slot: int, entries: Iterable[SlotValue] = ()) -> None:
        """Replace the slot's entries."""
        entries = list(entries)
        self._used.pop(slot, None)
        if entries:
            self._used[slot] = 1 + max(entry.column for entry in entries)
        # no column that nobody needs: a step looks at all of them for all its tokens
        columns = max(self._used.values(), default=1)
        slots = self._parts.shape[1]
        if slot >= slots or columns != self._parts.shape[2]:
            kept = self._parts[:, :, :columns]
            more = slots if slot < slots else slot + 1 + slots
            self._parts = np.zeros((4, more, columns), dtype=np.int64)
            self._parts[:, :slots, : kept.shape[2]] = kept
            self._chooses = np.append(self._chooses, np.zeros(more - slots, dtype=bool))
        self._parts[:, slot] = 0
        for entry in entries:
            if entry.chosen is None:
                place = entry.first, entry.stop, entry.value, entry.gate
                self._parts[:, slot, entry.column] = place
        self._chosen.pop(slot, None)
        if listed := [entry for entry in entries if entry.chosen is not None]:
            self._chosen[slot] = listed
        self._chooses[slot] = bool(listed)

    def at(self, tokens: "StepTokens") -> np.ndarray:
        """Return the values at the tokens, int64 `[tokens, columns]`, 0 where there is none."""
        if not self._used:
            return np.zeros((len(tokens.slots), 1), dtype=np.int64)
        slots = tokens.slots
        positions = tokens.positions[:, None]
        firsts, stops, each, gates = self._parts
        inside = (positions >= firsts[slots]) & (positions < stops[slots])
        values: np.ndarray = np.where(inside, each[slots], 0)
        chosen = self._chooses[tokens.of_requests] if self._chosen else _NONE
        for number in np.flatnonzero(chosen).tolist():
            first, stop = tokens.window(number)
            row = int(tokens.first_rows[number]) - first
            for entry in self._chosen[int(tokens.of_requests[number])]:
                if entry.first < stop and first < entry.stop and entry.chosen is not None:
                    at = np.array(entry.chosen(first, stop), dtype=np.int64) + row
                    if tokens.closed is not None:  # lists share columns, not gates
                        at = at[~tokens.closed[at, entry.gate]]
                    values[at, entry.column] = entry.value
        if tokens.closed is not None:
            values[tokens.closed[np.arange(len(slots))[:, None], gates[slots]]] = 0
        return values


# On one GPU, vLLM's scheduler, its model runner and our threads share one interpreter lock: the
# model waits for what a step does in Python. So a step reads arrays, not requests.
class Slots:
    """Holds what a rank knows of each slot's request in all banks; slot 0: requests without one."""

    def __init__(self) -> None:
        self._free: list[int] = []
        # [slot]: the first position that was never computed; token rows edited so far, over all
        # sites of this rank, of which recomputed positions count once
        self.reached, self.applied = np.zeros((2, 1), dtype=np.int64)
        # positions that the request's steering and captures may touch, and the family of graphs
        # that has the launches that these need, see `kernels.ops`
        self.touched = np.zeros((1, 2), dtype=np.int64)
        self.family = np.full(1, IDLE, dtype=np.int64)
        self.special = np.zeros(1, dtype=bool)  # see `Tracked.special`

    def take(self, touched: tuple[int, int], family: int) -> int:
        """Return a slot for a request."""
        if not self._free:
            have = len(self.reached)
            self._free = list(range(have + _SLOTS - 1, have - 1, -1))
            self.reached, self.applied, self.family, self.special = (
                np.pad(part, (0, _SLOTS))
                for part in (self.reached, self.applied, self.family, self.special)
            )
            self.touched = np.pad(self.touched, ((0, _SLOTS), (0, 0)))
        slot = self._free.pop()
        self.reached[slot] = self.applied[slot] = 0
        self.touched[slot] = touched
        self.family[slot] = family
        self.special[slot] = False
        return slot

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def lost(self, tokens: "StepTokens", family: int) -> list[str]:
        """Return the requests whose tokens need launches that a forward of this family lacks."""
        first, stop = self.touched[tokens.of_requests].T
        lacks = self.family[tokens.of_requests] < family
        numbers = np.flatnonzero(lacks & (tokens.firsts < stop) & (first < tokens.stops)).tolist()
        return [tokens.ids[number] for number in numbers]


class StepTokens:
    """The tokens of a step: of the same requests as in the step before, until one comes or goes."""

    def __init__(self, view: StepView, of_requests: np.ndarray) -> None:
        """`of_requests`: the slot of each request."""
        self.ids = view.ids
        self.of_requests = of_requests
        self._counts = view.counts
        self.first_rows = np.cumsum(view.counts) - view.counts
        self.members = np.repeat(np.arange(len(view.ids)), view.counts)  # [tokens]
        self.slots = of_requests[self.members]
        self._within = np.arange(view.num_rows) - self.first_rows[self.members]
        # [requests]: the first position, and the one after the last
        self.firsts = view.positions
        self.stops = view.positions + view.counts
        self.positions = self.firsts[self.members] + self._within
        self.again = False  # the last step had the same requests and counts
        #: Whether each gate of the token's request is closed, then each gate with a trigger:
        #: `[tokens, 1 + gates + conditions]`, of which the first is none; None: no request has any.
        self.closed: np.ndarray | None = None

    def move_to(self, view: StepView) -> bool:
        """Have the tokens of another step; return False if that has other requests or counts."""
        if view.ids != self.ids or not np.array_equal(view.counts, self._counts):
            return False
        self.firsts = view.positions
        self.stops = view.positions + view.counts
        self.again = True
        self.positions = self.firsts[self.members] + self._within
        return True

    def window(self, number: int) -> tuple[int, int]:
        """Return the positions `[first, stop)` of a request."""
        first = int(self.firsts[number])
        return first, first + int(self._counts[number])
