"""Budget of the ring: how many tokens each capturing request may have in a step, so that the step's
captured rows fit.

Lives in the scheduler. A request's prefill is split into as many steps as its rows need; requests
without captures are not limited. What cannot be split, the next token of each request with its
drafts, is reserved first: the worker admits requests so that these fit together, so every request
proceeds in every step in which vLLM lets it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice

from ....schemas.requests.specs import StoredCapture

#: Rows in each pipeline stage, whose ring holds the rows of that stage's layers.
StageRows = list[int]


def stage_sites(capture: StoredCapture, stages: Sequence[range]) -> StageRows:
    """Rows per captured position. `stages`: the layers that each holds."""
    if len(stages) == 1:
        return [capture.num_sites]
    return [
        sum(layer in held for layers in capture.sites.values() for layer in layers)
        for held in stages
    ]


class CapturedRows:
    """Number of rows that a request's captures give."""

    def __init__(
        self, captures: Sequence[StoredCapture], prompt_tokens: int, stages: Sequence[range]
    ) -> None:
        self._captures = [(capture, stage_sites(capture, stages)) for capture in captures]
        self._prompt_tokens, self._stages = prompt_tokens, len(stages)

    def of(self, start: int, stop: int) -> StageRows:
        """Return the number of rows of the positions `[start, stop)`."""
        rows = [0] * self._stages
        for capture, sites in self._captures:
            positions = len(capture.select(start, stop, self._prompt_tokens))
            if positions:
                for stage, per_position in enumerate(sites):
                    rows[stage] += positions * per_position
        return rows

    def most(self, tokens: int, max_tokens: int) -> StageRows:
        """Return the most rows of any `tokens` consecutive positions, when up to `max_tokens`
        are generated.
        """
        rows = [0] * self._stages
        for capture, sites in self._captures:
            positions = min(tokens, capture.count_positions(self._prompt_tokens, max_tokens))
            for stage, per_position in enumerate(sites):
                rows[stage] += positions * per_position
        return rows


class RingBudget:
    """One per scheduler.

    `room`: rows that one step may capture on each rank, 0: no limit; `drafts`: of one request in a
    step, at most.
    """

    def __init__(self, room: int, stages: Sequence[range], drafts: int) -> None:
        self._room, self._stages, self._tokens = room, stages, 1 + drafts
        # and what it may need at least
        self._captured: dict[str, tuple[CapturedRows, StageRows]] = {}
        # requests of this step that capture → tokens computed; -1: it waits
        self._due: dict[str, int] = {}
        self._reserved: dict[str, StageRows] = {}  # for the next tokens of those
        # of this step, neither given nor reserved; None: not asked for yet
        self._left: StageRows | None = None

    def join(
        self,
        request_id: str,
        captures: Sequence[StoredCapture],
        prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        """A request that captures; until `leave`."""
        if self._room:
            rows = CapturedRows(captures, prompt_tokens, self._stages)
            self._captured[request_id] = rows, rows.most(self._tokens, max_tokens + self._tokens)

    def leave(self, request_id: str) -> None:
        self._captured.pop(request_id, None)

    def begin(self, running: Iterable[tuple[str, int]], waiting: Iterable[str], slots: int) -> None:
        """Begin a step.

        `running`: requests → tokens computed. `waiting`: in the order in which up to `slots` of
        them may join.
        """
        if self._captured:
            self._due = {
                request_id: computed
                for request_id, computed in running
                if request_id in self._captured
            }
            self._due |= {
                request_id: -1
                for request_id in islice(waiting, max(slots, 0))
                if request_id in self._captured
            }
            self._left = None

    def take(self, request_id: str, computed: int, tokens: int) -> int:
        """Return how many of the `tokens` that follow `computed` ones may be in this step; their
        rows are taken from the budget.
        """
        if request_id not in self._captured or (tokens <= self._tokens and request_id in self._due):
            return tokens  # it needs no room, or has it: a step in which all generate costs nothing
        if self._left is None:
            self._left = self._reserve()
        captured, _ = self._captured[request_id]
        share = self._reserved.pop(request_id, [0] * len(self._stages))
        remaining = [remaining + rows for remaining, rows in zip(self._left, share, strict=True)]

        def exceeds(count: int) -> bool:
            return any(
                rows > present
                for rows, present in zip(
                    captured.of(computed, computed + count), remaining, strict=True
                )
            )

        if exceeds(tokens):
            tokens = bisect_left(range(1, tokens), True, key=exceeds)
        self._left = [
            present - rows
            for present, rows in zip(
                remaining, captured.of(computed, computed + tokens), strict=True
            )
        ]
        return tokens

    def _reserve(self) -> StageRows:
        """Reserve the rows of all next tokens; returns what is left."""
        remaining, self._reserved = [self._room] * len(self._stages), {}
        for request_id, computed in self._due.items():
            rows, most = self._captured[request_id]
            share = (
                most
                if computed < 0
                else list(map(min, rows.of(computed, computed + self._tokens), most))
            )
            self._reserved[request_id] = share
            remaining = [present - rows for present, rows in zip(remaining, share, strict=True)]
        return remaining
