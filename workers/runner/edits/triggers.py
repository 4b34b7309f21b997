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
#: More than any position.
_FAR = 1 << 32


class SearchTable(PositionTable):
    """The tokens of requests with triggers, as the searches of these know them."""

    def __init__(self) -> None:
        # of each position: its token, where the last occurrence up to it ended, and whether it was
        # open when it was first computed
        row = [("token", np.int32), ("end", np.int32), ("opened", np.int8)]
        # positions below `known` have their tokens; of the trigger, `after` and `skip`
        fields = [*((name, np.int64) for name in ("known", "prompt", "after")), ("skip", bool)]
        super().__init__(np.dtype(row), (-1, _NEVER, _CACHED), fields)

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
        tokens, sequences = len(prompt), trigger.token_ids or []
        after = sys.maxsize if trigger.after == "end" else trigger.after
        self.table, self.slot = table, table.take(tokens, tokens, after, trigger.skip)
        weakref.finalize(self, table.returned.append, self.slot).atexit = False
        table.reserve(self.slot, tokens)
        rows, ends = table.rows_of(self.slot), np.frombuffer(occurrences, dtype=np.int32)
        lengths = np.diff(ends, prepend=0, append=tokens)
        rows["end"][:tokens] = np.repeat(np.append(_NEVER, ends), lengths)
        last = prompt[-MAX_AROUND:]  # an occurrence may begin there
        rows["token"][tokens - len(last) : tokens] = last
        #: The tokens of all sequences; of each its length, where it stops in these, and its last
        #: token, `[3, MAX_SEQUENCES]`; the length is 0 and the token −1 where there is none.
        self.text = np.array([token for each in sequences for token in each], dtype=np.int32)
        self.sequences = np.zeros((3, MAX_SEQUENCES), dtype=np.int64)
        self.sequences[2] = -1
        lengths = np.array([len(each) for each in sequences])
        stops = np.cumsum(lengths)
        self.sequences[:, : len(sequences)] = lengths, stops, self.text[stops - 1]

    def miscounted(self, positions: Sequence[int], rows: int) -> int:
        """Return how many more of the positions, if a step computed them, were open then than are
        among the first `rows` now.
        """
        places, found = np.array(positions, dtype=np.int64), self.table.rows_of(self.slot)
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
        self._table, self._requests = searches[0].table, np.array(requests)
        self._slots = np.array([search.slot for search in searches])
        counts = view.counts[self._requests]
        self._member = np.repeat(np.arange(len(counts)), counts)  # the condition of each row
        self._begins = np.cumsum(counts) - counts
        self._lasts = np.cumsum(counts) - 1
        self._rows = numbers_of(first_rows[self._requests], counts)
        self._gates, self._columns = np.repeat(gates, counts), np.repeat(columns, counts)
        self._text = np.concatenate([search.text for search in searches])
        texts = np.array([len(search.text) for search in searches])
        self._lengths, self._stops, self._ends = np.stack(
            [search.sequences for search in searches], axis=1
        )
        self._stops += (np.cumsum(texts) - texts)[:, None]

    def decide(self, view: StepView, closed: np.ndarray, fail: Callable[[str, str], None]) -> None:
        """Decide the conditions of the step's tokens, whose gates are decided; on an error they are
        closed. `closed`: `[tokens, columns]`; `fail` takes a request that cannot be decided, and
        why.
        """
        of_gates = closed[self._rows, self._gates]
        closed[self._rows, self._columns] = True
        table, slots, member = self._table, self._slots, self._member
        firsts = view.positions[self._requests]
        stops = firsts + view.counts[self._requests]
        for number in np.flatnonzero(stops > table.of["room"][slots]).tolist():
            table.reserve(int(slots[number]), int(stops[number]))
        of, rows = table.of[slots], table.rows
        unknown = firsts > of["known"]
        for number in np.flatnonzero(unknown).tolist():
            why = f"the tokens before position {firsts[number]} are unknown to its trigger"
            fail(view.ids[self._requests[number]], why)
        positions = firsts[member] + np.arange(len(member)) - self._begins[member]
        at, tokens = of["first"][member] + positions, view.token_ids()[self._rows]
        # drafts are tokens that may be others the next time; all that follow one are looked at
        other = (positions >= of["known"][member]) | (rows["token"][at] != tokens)
        other &= positions >= of["prompt"][member]
        new = np.maximum.accumulate(np.where(other, member, -1)) == member
        rows["token"][at] = tokens
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
        table.of["known"][slots] = np.where(new[self._lasts], stops, np.maximum(of["known"], stops))
        closed[self._rows, self._columns] = of_gates | ~opened | unknown[member]

    def _found(self, items: np.ndarray, positions: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return at which of the rows `items` an occurrence ends. `at`: where they are."""
        tokens, of_items = self._table.rows["token"], self._member[items]
        place, number = np.nonzero(self._ends[of_items] == tokens[at[items], None])
        items, member = items[place], of_items[place]
        lengths, stops = self._lengths[member, number], self._stops[member, number]
        fits = (lengths > 0) & (lengths <= positions[items] + 1)
        items, lengths, stops = items[fits], lengths[fits], stops[fits]
        read = tokens[numbers_of(at[items] + 1 - lengths, lengths)]
        same = read == self._text[numbers_of(stops - lengths, lengths)]
        return items[np.logical_and.reduceat(same, np.cumsum(lengths) - lengths)]
