"""Triggers of edits: the positions at which the tokens of a request let an edit be applied.

Whether a position is one of them depends on the tokens up to its own alone, which a step knows once
its inputs are prepared: chunks, preemption, rejected drafts and cached tokens give the same edits.

Where occurrences end in the prompt comes with the request: the process that sends it has searched
the prompt. A step looks only at generated tokens that it computes for the first time, of all
requests at once.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ....schemas.base.limits import MAX_AROUND, MAX_SEQUENCES
from ....schemas.prompts.windows import Trigger
from ..base.engine_step import StepView
from ..base.position_table import PositionTable
from ..base.ranges import numbers_of

#: Where no occurrence has ended yet.
_NEVER = -1
#: Of a position: no step computed it.
_CACHED = 2
#: No token.
_NONE = -2
#: More than any position.
_FAR = 1 << 32


class SearchTable(PositionTable):
    """The tokens of requests with triggers, as the searches of these know them."""

    def __init__(self) -> None:
        # of each position: its token, where the last occurrence up to it ended, and whether it was
        # open when it was first computed
        row = [("token", np.int32), ("end", np.int32), ("opened", np.int8)]
        # positions below `settled` have their final tokens; of the trigger, `after` and `skip`
        fields = [("settled", np.int64), ("after", np.int64), ("skip", bool)]
        super().__init__(np.dtype(row, align=True), (_NONE, _NEVER, _CACHED), fields)

    def is_open(
        self, slots: np.ndarray | int, positions: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Return whether positions are open, up to which the last occurrences ended at `ends`."""
        of = self.of[slots]
        near = (ends != _NEVER) & (positions - ends <= of["after"])
        return np.asarray(near != of["skip"])


class Search:
    """Search for the occurrences of a trigger in the tokens of one request."""

    def __init__(
        self, table: SearchTable, trigger: Trigger, prompt: Sequence[int], occurrences: bytes
    ) -> None:
        """`prompt`: its tokens. `occurrences`: see `RankSpec`."""
        tokens = len(prompt)
        sequences = trigger.token_ids or []
        after = sys.maxsize if trigger.after == "end" else trigger.after
        self.table = table
        self.slot = table.take(tokens, after, trigger.skip)
        weakref.finalize(self, table.returned.append, self.slot).atexit = False
        table.reserve(self.slot, tokens)
        rows = table.rows_of(self.slot)
        ends = np.frombuffer(occurrences, dtype=np.int32)
        lengths = np.diff(ends, prepend=0, append=tokens)
        rows["end"][:tokens] = np.repeat(np.append(_NEVER, ends), lengths)
        # an occurrence may begin there
        rows["token"][max(tokens - MAX_AROUND, 0) : tokens] = prompt[-MAX_AROUND:]
        #: The tokens of each sequence, the last one first, `[MAX_SEQUENCES, MAX_AROUND]`; and the
        #: most of one.
        self.sequences = np.full((MAX_SEQUENCES, MAX_AROUND), _NONE, dtype=np.int32)
        self.longest = max(map(len, sequences))
        for number, sequence in enumerate(sequences):
            self.sequences[number, : len(sequence)] = sequence[::-1]

    def miscounted(self, positions: Sequence[int], rows: int) -> int:
        """Return how many more of the positions, if a step computed them, were open then than are
        among the first `rows` now.
        """
        places = np.array(positions, dtype=np.int64)
        found = self.table.rows_of(self.slot)
        places = places[found["opened"][places] != _CACHED]
        counted = self.table.is_open(self.slot, places, found["end"][places]) & (places < rows)
        return int(found["opened"][places].sum()) - int(counted.sum())


class TriggeredGate(NamedTuple):
    """A gate and a trigger of some rows of a request."""

    request: int  # its number in the step
    search: Search
    gate: int  # columns of whether they are closed: of the gate, and of both
    column: int


class SharedSearches:
    """The searches of a step's requests."""

    def __init__(self, conditions: Sequence[TriggeredGate], first_rows: np.ndarray, view: StepView):
        """`first_rows`: of each request in the step."""
        requests, searches, gates, columns = zip(*conditions, strict=True)
        self._table = searches[0].table
        self._requests = np.array(requests)
        self._slots = np.array([search.slot for search in searches])
        self._counts = counts = view.counts[self._requests]
        self._member = np.repeat(np.arange(len(counts)), counts)  # the condition of each row
        self._begins = np.cumsum(counts) - counts
        self._rows = numbers_of(first_rows[self._requests], counts)
        self._gates = np.repeat(gates, counts)
        self._columns = np.repeat(columns, counts)
        longest = max(search.longest for search in searches)
        self._sequences = np.stack([search.sequences[:, :longest] for search in searches])

    def decide(self, view: StepView, closed: np.ndarray, fail: Callable[[str, str], None]) -> None:
        """Decide the conditions of the step's tokens, whose gates are decided; on an error they are
        closed. `closed`: `[tokens, columns]`; `fail` takes a request that cannot be decided, and
        why.
        """
        of_gates = closed[self._rows, self._gates]
        closed[self._rows, self._columns] = True
        table = self._table
        slots = self._slots
        member = self._member
        firsts = view.positions[self._requests]
        stops = firsts + self._counts
        for number in np.flatnonzero(stops > table.of["room"][slots]).tolist():
            table.reserve(int(slots[number]), int(stops[number]))
        of = table.of[slots]
        rows = table.rows
        unknown = firsts > np.maximum(of["reached"], of["settled"])
        for number in np.flatnonzero(unknown).tolist():
            why = f"the tokens before position {firsts[number]} are unknown to its trigger"
            fail(view.ids[self._requests[number]], why)
        positions = numbers_of(firsts, self._counts)
        at = of["first"][member] + positions
        rows["token"][at] = view.token_ids()[self._rows]
        # a request goes on after the last token that was no rejected draft
        settled = np.maximum(of["settled"], firsts)
        new = positions >= settled[member]
        ends = np.where(new, _NEVER, rows["end"][at])
        found = self._found(np.flatnonzero(new), positions, at)
        ends[found] = positions[found]
        before = np.where(firsts > 0, rows["end"][at[self._begins] - 1], _NEVER)
        ends[self._begins] = np.maximum(ends[self._begins], before)
        ends = np.maximum.accumulate(ends + member * _FAR) - member * _FAR
        rows["end"][at] = ends
        opened = table.is_open(slots[member], positions, ends)
        first = positions >= of["reached"][member]
        rows["opened"][at[first]] = opened[first]
        table.of["reached"][slots] = np.maximum(of["reached"], stops)
        table.of["settled"][slots] = settled
        closed[self._rows, self._columns] = of_gates | ~opened | unknown[member]

    def _found(self, items: np.ndarray, positions: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return at which of the rows `items` an occurrence ends. `at`: where they are."""
        tokens = self._table.rows["token"]
        back = np.arange(self._sequences.shape[2])
        last = self._sequences[self._member[items], :, 0] == tokens[at[items], None]
        place, number = np.nonzero(last)
        items = items[place]
        wanted = self._sequences[self._member[items], number]
        same = (tokens[at[items, None] - back] == wanted) & (back <= positions[items, None])
        found: np.ndarray = items[(same | (wanted == _NONE)).all(axis=1)]
        return found
