"""Triggers of edits: the positions at which the tokens of a request let an edit be applied.

Whether a position is one of them depends on the tokens up to its own alone, which a step knows once
its inputs are prepared: chunks, preemption, rejected drafts and cached tokens give the same edits.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ....schemas.prompts.windows import Trigger
from ..base.engine_step import StepView

#: Where no occurrence has ended yet.
_NEVER = -1
#: Of a position in `Search._first`: no step computed it.
_CACHED = 2


class Search:
    """Search for the occurrences of a trigger in the tokens of one request."""

    def __init__(self, trigger: Trigger, prompt: Sequence[int]) -> None:
        self._steps, lengths = trigger.automaton
        self._ending = np.array([lengths[node] > 0 for node in range(len(self._steps))])
        self._after = sys.maxsize if trigger.after == "end" else trigger.after
        self._skip, self._prompt = trigger.skip, prompt
        # of each position: the node after its token, and where the last occurrence up to it ended
        self._nodes, self._ends = array("i"), array("i")
        self._first = bytearray()  # whether it was open when it was first computed

    def read(self, first: int, token_ids: Sequence[int]) -> Sequence[bool]:
        """Read the tokens that a step computes, from position `first` on; return at which of them
        the edit is applied. Tokens in place of rejected drafts are read again.

        Raises LookupError if tokens before `first` are unknown.
        """
        ends, known = self._ends, len(self._ends)
        if len(token_ids) == 1 and first == known > 0:  # as in most steps: without arrays
            node = self._steps[self._nodes[-1]].get(token_ids[0], 0)
            self._nodes.append(node)
            ends.append(first if self._ending[node] else ends[-1])
            opened = (ends[-1] != _NEVER and first - ends[-1] <= self._after) != self._skip
            self._first.append(opened)
            return (opened,)
        self._advance(known, self._prompt[known:first])
        if len(ends) < first:
            raise LookupError(f"the tokens before position {first} are unknown to its trigger")
        self._advance(first, token_ids)
        part = self._open(first, first + len(token_ids))
        self._first += bytes([_CACHED]) * (first - len(self._first))
        self._first += part[len(self._first) - first :].tobytes()
        return list[bool](part.tolist())

    def miscounted(self, positions: Sequence[int], rows: int) -> int:
        """Return how many more of the positions, if a step computed them, were open then than are
        among the first `rows` now.
        """
        places, first = np.array(positions, dtype=np.int64), np.array(self._first)
        counted = self._open(0, len(first)) & (np.arange(len(first)) < rows)
        places = places[first[places] != _CACHED]
        return int(first[places].sum()) - int(counted[places].sum())

    def _advance(self, start: int, token_ids: Sequence[int]) -> None:
        node, end = (self._nodes[start - 1], self._ends[start - 1]) if start else (0, _NEVER)
        steps, stop = self._steps, start + len(token_ids)
        read = accumulate(token_ids, lambda at, token: steps[at].get(token, 0), initial=node)
        nodes = np.fromiter(read, np.int32, 1 + len(token_ids))[1:]
        ends = np.where(self._ending[nodes], np.arange(start, stop, dtype=np.int32), end)
        # what follows stays: cached tokens of a preempted request may reach beyond this step
        self._nodes[start:stop] = array("i", nodes.tobytes())
        self._ends[start:stop] = array("i", np.maximum.accumulate(ends).tobytes())

    def _open(self, first: int, stop: int) -> np.ndarray:
        ends = np.array(self._ends[first:stop])
        near = (ends != _NEVER) & (np.arange(first, stop) - ends <= self._after)
        return np.asarray(near != self._skip)


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
        self._conditions, self._starts = conditions, first_rows.tolist()
        requests, _, gates, columns = map(np.array, zip(*conditions, strict=True))
        counts = view.counts[requests]
        parts = map(np.arange, first_rows[requests], first_rows[requests] + counts)
        self._rows = np.concatenate(list(parts))
        self._gates, self._columns = np.repeat(gates, counts), np.repeat(columns, counts)

    def decide(self, view: StepView, closed: np.ndarray, fail: Callable[[str, str], None]) -> None:
        """Decide the conditions of the step's tokens, whose gates are decided; on an error they are
        closed. `closed`: `[tokens, columns]`; `fail` takes a request that cannot be decided, and
        why.
        """
        of_gates = closed[self._rows, self._gates]
        closed[self._rows, self._columns] = True
        token_ids, firsts, counts = (
            each.tolist() for each in (view.token_ids(), view.positions, view.counts)
        )
        opened = list[bool]()
        for number, search, _, _ in self._conditions:
            start = self._starts[number]
            try:
                opened += search.read(firsts[number], token_ids[start : start + counts[number]])
            except LookupError as error:
                fail(view.ids[number], str(error))
                opened += [False] * counts[number]
        closed[self._rows, self._columns] = of_gates | ~np.array(opened)
