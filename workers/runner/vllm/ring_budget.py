"""Budget of the ring and of the writers' queue: limits the tokens of each capturing request in a
step, so that the step's captured rows fit into both.

Runs in the scheduler. A request's prefill is split into as many steps as its rows need; requests
without captures are not limited. The next token of each request, with its drafts, cannot be split,
so its rows are reserved first. The worker admits only requests whose reserved rows fit together, so
every request proceeds in every step in which vLLM schedules it. If the queue has less room than is
reserved, requests still get their next token, since rows that are not recorded yet are not in it;
while it is overfull, requests whose rows writers take get none.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import islice, repeat

import numpy as np

from ....schemas.prompts.selectors import end_position, lowest_position
from ....schemas.requests.specs import StoredCapture, WriterWork
from ..base.backlog import WORKS
from ..rows.overload import Overloads

#: Rows in each pipeline stage, whose ring holds the rows of its layers; in a budget, then the bytes
#: in each stage that its writers take, for each kind of work.
StageRows = list[int]


def stage_sites(capture: StoredCapture, stages: Sequence[range]) -> StageRows:
    """Return the rows per captured position. `stages`: the layers of each stage."""
    if len(stages) == 1:
        return [capture.num_sites]
    return [
        sum(layer in held for layers in capture.sites.values() for layer in layers)
        for held in stages
    ]


class CapturedRows:
    """Counts the rows of a request's captures."""

    def __init__(
        self,
        captures: Sequence[StoredCapture],
        prompt_tokens: int,
        stages: Sequence[range],
        sizes: Callable[[StoredCapture], Sequence[int]] = lambda capture: [0] * len(WORKS),
    ) -> None:
        """`sizes(capture)`: bytes of a row that the writers of each kind of work take."""
        self._captures = list[tuple[StoredCapture, list[int]]]()
        for capture in captures:
            sites = stage_sites(capture, stages)
            nbytes = [count * size for size in sizes(capture) for count in sites]
            self._captures.append((capture, [*sites, *nbytes]))
        self._prompt_tokens = prompt_tokens
        self._columns = (1 + len(WORKS)) * len(stages)

    def spans(self) -> list[tuple[int, int, StageRows]]:
        """Return of each capture its first position, the one after its last, and the rows and bytes
        of a position.
        """
        prompt = self._prompt_tokens
        return [
            (
                lowest_position(capture.positions, prompt),
                end_position(capture.positions, prompt),
                rows,
            )
            for capture, rows in self._captures
        ]

    def of(self, start: int, stop: int) -> StageRows:
        """Return the number of rows of the positions `[start, stop)`, and their bytes.

        Counts follow positions, so chunks, preemption and cache hits need no case of their own. Two
        captures of a site count twice, although they share its rows.
        """
        return self._rows(
            len(capture.select(start, stop, self._prompt_tokens)) for capture, _ in self._captures
        )

    def most(self, tokens: int, max_tokens: int) -> StageRows:
        """Return the most rows of any `tokens` consecutive positions, and their bytes, if up to
        `max_tokens` tokens are generated.
        """
        return self._rows(
            min(tokens, capture.count_positions(self._prompt_tokens, max_tokens))
            for capture, _ in self._captures
        )

    def _rows(self, positions: Iterable[int]) -> StageRows:
        """Return the rows of so many positions of each capture."""
        rows = [0] * self._columns
        for number, (_, sites) in zip(positions, self._captures, strict=True):
            for column, per_position in enumerate(sites):
                rows[column] += number * per_position
        return rows


class NextRows:
    """Counts the rows of the next tokens of all requests together, from arrays: a step in which one
    computes its prompt looks at no other.
    """

    def __init__(self, columns: int) -> None:
        self._owners = dict[str, int]()  # request → its number, from 1 on
        self._entries = dict[str, list[int]]()  # request → those of its captures
        self._unowned = list[int]()
        self._free = list[int]()
        # [entries]: the number of the request, the first position, and the one after the last
        self._owner, self._first, self._stop = np.zeros((3, 0), dtype=np.int64)
        self._rows = np.zeros((0, columns), dtype=np.int64)  # [entries, columns]: of a position
        # [numbers]: computed tokens of the request; -1: it is not asked for
        self._begins = np.zeros(1, dtype=np.int64)

    def join(self, request_id: str, captured: "CapturedRows") -> None:
        if not self._unowned:
            self._unowned.append(len(self._begins))
            self._begins = np.append(self._begins, 0)
        owner = self._owners[request_id] = self._unowned.pop()
        entries = self._entries[request_id] = []
        for first, stop, rows in captured.spans():
            if not self._free:
                have = len(self._owner)
                more = max(have, 64)
                self._free = list(range(have + more - 1, have - 1, -1))
                self._owner, self._first, self._stop = (
                    np.pad(part, (0, more)) for part in (self._owner, self._first, self._stop)
                )
                self._rows = np.pad(self._rows, ((0, more), (0, 0)))
            entry = self._free.pop()
            entries.append(entry)
            self._owner[entry] = owner
            self._first[entry] = first
            self._stop[entry] = stop
            self._rows[entry] = rows

    def leave(self, request_id: str) -> None:
        if request_id in self._owners:
            self._unowned.append(self._owners.pop(request_id))
            entries = self._entries.pop(request_id)
            self._stop[entries] = 0
            self._free += entries

    def of(self, ids: Sequence[str], computed: Sequence[int], tokens: int) -> np.ndarray:
        """Return the rows of the next `tokens` positions of these requests, int64 `[columns]`, at
        most. `computed`: tokens of each before these.
        """
        owners = np.fromiter(map(self._owners.get, ids, repeat(0)), np.int64, len(ids))
        self._begins[:] = -1
        self._begins[owners] = computed
        self._begins[0] = -1
        begins = self._begins[self._owner]
        counts = np.minimum(self._stop, begins + tokens) - np.maximum(self._first, begins)
        total: np.ndarray = np.where(begins < 0, 0, np.maximum(counts, 0)) @ self._rows
        return total


class RingBudget:
    """The budget in one scheduler."""

    def __init__(
        self,
        room: int,
        stages: Sequence[range],
        drafts: int,
        row_bytes: Callable[[StoredCapture], int] = lambda capture: 0,
        queues: Sequence[Overloads] = (),
    ) -> None:
        """`room`: rows that one step may capture on each rank, 0: no limit; `drafts`: draft tokens
        of one request in a step, at most. `row_bytes(capture)`: bytes of a row on a rank, at most.
        `queues`: of each rank, the rows that wait for its writers.
        """
        self._room = room or sys.maxsize
        self._stages = stages
        self._tokens = 1 + drafts
        self._row_bytes = row_bytes
        self._queues = queues
        # of each kind of work the bytes of rows that this step may capture; negative: none
        self._queued = dict.fromkeys(WORKS, sys.maxsize)
        # requests whose rows writers take
        self._stored: dict[WriterWork, set[str]] = {work: set() for work in WORKS}
        self._waits: Set[str] = frozenset()  # those of them that get no tokens in this step
        # request that captures → its rows, and the most rows of its next tokens
        self._captured: dict[str, tuple[CapturedRows, StageRows]] = {}
        self._next = NextRows((1 + len(WORKS)) * len(stages))
        # running requests, and tokens computed of each; capturing requests that may join the step
        self._running: tuple[Sequence[str], Sequence[int]] = ((), ())
        self._joining = set[str]()
        # requests whose next tokens have reserved rows that are not taken
        self._reserved = set[str]()
        # the step's rows that are neither taken nor reserved; None: nothing is reserved yet
        self._free: StageRows | None = None

    def join(
        self,
        request_id: str,
        captures: Sequence[StoredCapture],
        prompt_tokens: int,
        max_tokens: int,
        work: WriterWork = "writer",
    ) -> None:
        """Add a request that captures; `leave` removes it."""
        rows = CapturedRows(
            captures,
            prompt_tokens,
            self._stages,
            lambda capture: [
                self._row_bytes(capture) if each == work and not capture.scored else 0
                for each in WORKS
            ],
        )
        self._captured[request_id] = rows, rows.most(self._tokens, max_tokens + self._tokens)
        self._next.join(request_id, rows)
        if not all(capture.scored for capture in captures):
            self._stored[work].add(request_id)

    def leave(self, request_id: str) -> None:
        self._captured.pop(request_id, None)
        self._next.leave(request_id)
        for stored in self._stored.values():
            stored.discard(request_id)

    def look(self) -> Set[str]:
        """See how much room the queues have for the step that begins; return the requests that wait
        because one is overfull.
        """
        self._waits = frozenset()
        for work, stored in self._stored.items():
            if stored:
                rooms = [of_rank[work].room for of_rank in self._queues]
                self._queued[work] = min(rooms, default=sys.maxsize)
            if self._queued[work] < 0:
                self._waits |= stored
        return self._waits

    def begin(
        self,
        running: Sequence[str],
        computed: Sequence[int],
        waiting: Iterable[str],
        slots: int,
    ) -> None:
        """Begin a step. `computed`: tokens of each running request. `waiting`: requests in the
        order in which up to `slots` of them may join.
        """
        if self._captured:
            self._running = running, computed
            self._joining = {
                request_id
                for request_id in islice(waiting, max(slots, 0))
                if request_id in self._captured
            }
            self._reserved = self._joining.union(running)
            self._free = None

    def take(self, request_id: str, computed: int, tokens: int) -> int:
        """Return how many of the `tokens` after `computed` ones may be in this step, and take their
        rows from the budget.
        """
        if request_id in self._waits:
            return 0
        if request_id not in self._captured or (
            tokens <= self._tokens and request_id in self._reserved
        ):
            return tokens  # no rows, or reserved ones: steps that only generate need no computation
        if self._free is None:
            self._free = self._reserve()
        captured, _ = self._captured[request_id]
        share = [0] * len(self._free)
        if request_id in self._reserved:
            self._reserved.remove(request_id)
            share = self._share(request_id, computed)
        room = [free + rows for free, rows in zip(self._free, share, strict=True)]

        def exceeds(count: int) -> bool:
            needed = captured.of(computed, computed + count)
            return any(rows > free for rows, free in zip(needed, room, strict=True))

        if exceeds(tokens):
            tokens = bisect_left(range(1, tokens), True, key=exceeds)
        taken = captured.of(computed, computed + tokens)
        self._free = [free - rows for free, rows in zip(room, taken, strict=True)]
        return tokens

    def _reserve(self) -> StageRows:
        """Reserve the rows of all next tokens; return the rows that remain free."""
        stages = len(self._stages)
        free = [self._room] * stages
        for queued in self._queued.values():
            free += [max(0, queued)] * stages
        reserved = [self._next.of(*self._running, self._tokens).tolist()]
        reserved += [self._captured[request_id][1] for request_id in self._joining]
        return [max(0, rows - sum(taken)) for rows, *taken in zip(free, *reserved, strict=True)]

    def _share(self, request_id: str, computed: int) -> StageRows:
        """Return the rows that are reserved for a request."""
        if request_id in self._joining:
            return self._captured[request_id][1]
        own: StageRows = self._next.of([request_id], [computed], self._tokens).tolist()
        return own
