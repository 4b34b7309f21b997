"""Planner of a step: writes the rows to edit and to record into the buffers before the forward, and
clears the plan after it.

A position's row is `first_row + position − first_position`, if the step computes the position.
Chunked prefill, preemption and resumption are therefore no special cases.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ....kernels import WHOLE, plan as columns
from ....schemas.artifacts.probes import ProbeScore
from ....schemas.model.banks import RESIDUAL
from ....schemas.prompts.selectors import select
from ....schemas.requests.specs import RankSpec, SteeringRow, columns_of
from ..base.engine_step import RequestRows
from ..edits.steering_tables import RowTable
from ..hooks.sites import Buffers, Site
from ..probes.gates import Gates
from ..probes.watches import ProbeError, Watch
from .buffers import Staging
from .capture import Recording
from .edit_sizes import RequestSizes
from .execution_check import Due
from .extents import Extent, StepRows, contiguous
from .mover import Mover
from .overload import Overload
from .pending_rows import LastLanding
from .slabs import SlabPool
from .step_runs import Layout, Stretch, layout_of, leave


@dataclass
class Tracked:
    """A live request with a spec."""

    spec: RankSpec
    rows: list[tuple[int, SteeringRow]] = field(default_factory=list)  # table rows that it holds
    columns: list[int] = field(default_factory=list)  # each row's column in `token_rows`
    recordings: dict[int, Recording] = field(default_factory=dict)  # by index in the captures
    # token rows edited so far, over all sites of this rank; recomputed positions count once
    applied: int = 0
    reached: int = 0  # the first position that was never computed
    # once the request is over: its rows, and how many sites each edits
    edited: list[tuple[SteeringRow, int]] = field(default_factory=list)
    failure: str = ""
    failure_kind: str = ""  # the problem's kind, see `Receipt.kind`
    reported: bool = False
    admitted: int = 0  # the step in which it began, or resumed after a preemption
    cached_tokens: int = 0  # tokens that the prefix cache served in that step
    touched: tuple[int, int] = (0, sys.maxsize)  # see `schemas.requests.specs.touched`
    family: int = WHOLE  # the last of `kernels.ops` that has the launches that it needs
    unsound: bool = False  # the model computed non-finite rows that no edit could have reached
    sizes: dict[str, RequestSizes] = field(default_factory=dict)  # of its edits, by bank
    accounted: bool = False  # the request's LoRA adapter is in the action ledger
    watch: Watch | None = None  # the scores of its probes
    gates: Gates | None = None  # the probes' decisions about its steering
    gated: bool = False  # a probe gates at least one of its rows
    stopped_by: str = ""  # the probe that ended the request
    counted: int = sys.maxsize  # once the request is over: the tokens that count
    scores: list[ProbeScore] = field(default_factory=list)  # results, once the request is over
    results: int = 0  # CRC32 of its scores, of its gates, and of the sizes of its edits
    # returns the values for `RankSpec.grade`, once they are computed
    graded: Callable[[], list[float]] | None = None

    def set_rows(self, rows: list[tuple[int, SteeringRow]]) -> None:
        """Set the rows that edit the request's tokens from now on, in this order."""
        self.rows, self.columns = rows, columns_of([spec for _, spec in rows])
        self.gated = any(spec.gate for _, spec in rows)

    def forget_sizes(self) -> None:
        for sizes in self.sizes.values():
            sizes.close(0)

    def decide(self, stop: int) -> str:
        """Decide the gates of positions below `stop`; return why that failed, or an empty text."""
        try:
            if self.gates is not None and not self.reported:
                self.gates.decide(stop)
        except ProbeError as error:
            return str(error)
        return ""

    def open_of(self, row: SteeringRow, positions: list[int] | range) -> list[int] | range:
        """Return the positions, out of those that a row names, at which its gate is open; all of
        them if it has no gate.
        """
        if not row.gate:
            return positions
        return self.gates.among(row.gate, positions) if self.gates is not None else []


#: Steps whose rows are moved together at most, and the share of the unused memory that is kept for
#: slabs which their slab may take at most: one over this.
_TOGETHER, _SHARE = 32, 8
_NONE = np.zeros(0, dtype=np.int64)
_PORT_COLUMNS = [*columns.BEFORE, *columns.AFTER]
_COUNT_COLUMNS = [columns.BEFORE.COUNT, columns.AFTER.COUNT]
_ROW_COLUMNS = [columns.BEFORE.ROW, columns.AFTER.ROW]


@dataclass(frozen=True, slots=True)
class _RowRun:
    """Consecutive positions of a request that one of its recordings captures in this step."""

    request: str
    member: int  # index of the request among those of the step
    recording: Recording
    skip: int  # rows of the request before it in this step
    first_token: int  # its first row in the batch
    count: int


class Planner:
    """Planner of one bank: call `plan_steering`, `plan_capture` and `commit` before the forward,
    and `drain` after it.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        buffers: Buffers,
        table: RowTable,
        slabs: SlabPool,
        overload: Overload,
        mover: Mover,
        *,
        traced: bool,
        bank: str = RESIDUAL,
        last: bool = True,
    ) -> None:
        """`traced`: the forward is compiled or graph-captured, so the ring may not be replaced.
        `bank`: the bank whose steering and captures are planned. `last`: it is the last bank to
        plan a step.
        """
        self._bank, self._last = bank, last
        self._overload, self._mover = overload, mover
        self._sites, self._table, self._slabs = list(sites), table, slabs
        self._staging = Staging(buffers, traced=traced)
        self._plan = np.zeros((len(self._sites), columns.COLUMNS), dtype=np.int32)
        self._nothing = np.zeros_like(self._plan)
        self._repeats = False  # this step has the last step's plan, at later positions
        self.whole = False  # the plan has everything that requests ask for
        self._firsts = np.flatnonzero([site.leads for site in self._sites])  # of each launch
        self._launch_sizes = np.diff(self._firsts, append=len(self._sites))
        self._edits = False
        self._edit_counts = np.zeros(len(self._sites), dtype=np.int32)  # planned edits of each site
        self._edited: list[tuple[str, np.ndarray]] = []  # (request, sites that edit its rows)
        self._steered: list[tuple[int, int]] = []  # (index of the request, edits of each row)
        self._captured: list[tuple[str, np.ndarray]] = []  # (request, ports that capture its rows)
        self.due: Due | None = None  # work planned for the current forward's sites; None: nothing
        self._planned: Due | None = None  # the work in `_plan`
        self._launched: list[Site] = []  # sites whose launches have work in `_plan`
        # the plan's entries of `buffers.lists`, in order: of edits, then of captures
        self._lists: list[np.ndarray] = []
        self._lists_end = 0
        self._edit_lists = (0, 0)  # entries of edits in `_lists`, and their tokens
        self._layout = Layout([], _NONE, [], _NONE, _NONE)
        self._window: list[_RowRun] = []  # what the plan captures
        self._window_members = self._window_skips = _NONE  # of each of these
        self._stretch: Stretch | None = None  # steps whose rows are not moved yet
        self._copied: Sequence[Recording] = ()  # whose rows may leave
        self._step: StepRows | None = None  # the rows that this step's forward records
        self._loaded = False  # the forward reads a plan that is not empty
        self._busy = False

    @property
    def busy(self) -> bool:
        """Return whether the current forward edits or records anything."""
        return self._busy

    @property
    def edits(self) -> bool:
        """Return whether the current forward edits a row."""
        return self._busy and self._edits

    @property
    def loaded(self) -> bool:
        """Return whether the next forward would find a plan that is not empty."""
        return self._loaded

    @property
    def steered(self) -> Sequence[tuple[int, int]]:
        """The index of each request that the plan edits, and the edits of each of its rows."""
        return self._steered

    def forget_step(self) -> None:
        """Keep nothing alive of requests that end."""
        self.move()
        self._window = []

    def plan_steering(self, request_rows: Sequence[tuple[Tracked, RequestRows]]) -> None:
        """Begin a step's plan, with the edits of these requests' rows; on an error nothing is
        edited. Precedes `plan_capture`.
        """
        self.clear_plan()
        # runs of tokens that one row edits: (first token, count, column, row)
        runs: list[tuple[int, int, int, int]] = []
        used: dict[int, np.ndarray] = {}  # row → its sites
        for member, (tracked, place) in enumerate(request_rows):
            if not tracked.rows:
                continue
            first, stop = place.first_position, place.first_position + place.num_rows
            shift, edits = place.first_row - first, 0
            for column, (row, spec) in zip(tracked.columns, tracked.rows, strict=True):
                if spec.bank != self._bank:
                    continue
                chosen = select(spec.positions, first, stop, tracked.spec.prompt_tokens)
                if tracked.gated:
                    chosen = tracked.open_of(spec, chosen)
                if not chosen:
                    continue
                if row not in used:
                    used[row] = self._table.sites(row)
                self._edited.append((place.id, used[row]))
                again = 0 if first >= tracked.reached else bisect_left(chosen, tracked.reached)
                tracked.applied += (len(chosen) - again) * self._table.num_sites(row)
                edits += self._table.num_sites(row)
                if isinstance(chosen, range):
                    runs.append((chosen.start + shift, len(chosen), column, row))
                else:
                    runs += [(position + shift, 1, column, row) for position in chosen]
            if edits:
                self._steered.append((member, edits))
            if self._last:
                tracked.reached = max(tracked.reached, stop)
        if runs:
            self._edits = True
            # All requests in one call: a call for each would dominate the cost.
            begins, counts, column_of, row_of = np.array(runs, dtype=np.int64).T
            run = np.repeat(np.arange(len(runs)), counts)
            tokens = (begins - np.cumsum(counts) + counts)[run] + np.arange(len(run))
            self._staging.set_rows(tokens, column_of[run], row_of[run])
            tokens = np.unique(tokens)
            count, start = self._list([tokens])
            of_sites = np.stack(list(used.values()))  # [rows, sites]
            touched = of_sites.any(axis=0)
            self._edit_counts[:] = np.bincount(row_of, weights=counts)[list(used)] @ of_sites
            self._plan[touched, columns.EDITS] = count
            self._plan[touched, columns.EDITS_AT] = start
            self._plan[touched, columns.DEPTH] = depth = int(column_of.max()) + 1
            if len(used) == depth == 1 and int(tokens[-1] - tokens[0]) == count - 1:
                self._plan[touched, columns.ALIKE] = row_of[0]
                self._plan[touched, columns.ALIKE_FROM] = tokens[0]
        self._edit_lists = len(self._lists), self._lists_end

    def clear_plan(self) -> None:
        """Plan nothing: neither the last step again nor what was planned of this step so far."""
        self._repeats = self.whole = False
        self._plan[:] = 0
        self._lists, self._lists_end, self._edit_lists = [], 0, (0, 0)
        self._steered = []
        if self._edited:
            self._edits, self._edited = False, []
            self._edit_counts[:] = 0
            self._staging.clear_rows()

    def clear_captures(self) -> None:
        """Plan no captures, neither the last step's again nor those planned so far."""
        self._repeats = self.whole = False
        self._forget_captures()

    def plan_capture(self, request_rows: Sequence[tuple[Tracked, RequestRows]]) -> None:
        """Plan the captures of these requests' rows; on an error nothing is captured."""
        self._repeats = False
        drops = self._overload.drops()
        self.whole = not drops
        try:
            self._forget_captures()
            self._plan_capture(request_rows, drops=drops)
            self._record([rows.first_position for _, rows in request_rows])
        except Exception:
            self.clear_captures()
            raise

    def plan_again(self, positions: np.ndarray) -> None:
        """Plan the last step again, whose requests' rows now begin at these positions."""
        self._repeats, self._step = True, None
        try:
            self._record(positions)
        except Exception:
            self.clear_captures()
            raise

    def _plan_capture(
        self, request_rows: Sequence[tuple[Tracked, RequestRows]], *, drops: bool
    ) -> None:
        window = self._runs_of(request_rows)
        if drops:  # but not scored rows, which do not wait for the writers
            for item in window:
                if not item.recording.capture.scored:
                    first = request_rows[item.member][1].first_position + item.skip
                    item.recording.dropped.update(range(first, first + item.count))
            window = [item for item in window if item.recording.capture.scored]
        if not window:
            return
        runs = [(item.recording.wants, item.first_token, item.count) for item in window]
        if runs != self._layout.runs:
            self._layout = layout_of(runs)
        self._plan_ports(self._layout.pattern, self._layout.tokens)
        self._captured = [(item.request, item.recording.mask) for item in window]
        self._window = window
        self._window_members = np.array([item.member for item in window])
        self._window_skips = np.array([item.skip for item in window])

    def _record(self, positions: Sequence[int] | np.ndarray) -> None:
        """Give the captured rows of this step their memory."""
        if not self._window:
            return
        layout = self._layout
        firsts = np.asarray(positions)[self._window_members] + self._window_skips
        if self._stretch is None or not self._stretch.is_continued_by(layout, firsts):
            self.move()
            self._staging.check_room(layout.rows)
            width, dtype = self._staging.row
            many = 1
            if self._repeats and all(count == 1 for _, _, count in layout.runs):
                size = layout.rows * width * dtype.itemsize
                spans = [item.recording.span for item in self._window]
                many = max(1, min(_TOGETHER, self._slabs.keep_bytes // (_SHARE * size), *spans))
            landing = LastLanding()
            slab = self._slabs.new_slab(many * layout.rows, width, dtype, landing)
            recordings = [item.recording for item in self._window]
            self._stretch = Stretch(layout, recordings, firsts, slab, landing)
        first, landed = self._staging.next_area()
        self._step = self._stretch.next(landed)
        self._staging.record_into(self._step.slab)
        self._plan[:, _ROW_COLUMNS] = (layout.base + first).reshape(-1, 2)

    def move(self, keep: Callable[[], None] = lambda: None) -> None:
        """Have the rows moved that were recorded so far. `keep` gives the mover orders to keep
        some of them, before others may leave.
        """
        self._copy()
        keep()
        if self._copied:
            self._mover.submit(partial(leave, self._copied))
            self._copied = ()

    def _copy(self) -> None:
        stretch, self._stretch = self._stretch, None
        if stretch is not None and stretch.steps:
            stretch.count()
            self._mover.take(stretch, spill=self._overload.spills())
            self._copied = stretch.recordings

    def _forget_captures(self) -> None:
        """Take the captures out of the plan."""
        self.move()
        self._step = None
        self._window, self._captured = [], []
        entries, self._lists_end = self._edit_lists
        del self._lists[entries:]
        self._plan[:, _PORT_COLUMNS] = 0

    def _runs_of(self, request_rows: Sequence[tuple[Tracked, RequestRows]]) -> list[_RowRun]:
        """Return the runs of rows that this step's recordings capture."""
        window = []
        for member, (tracked, place) in enumerate(request_rows):
            if tracked.reported:
                continue
            first, stop = place.first_position, place.first_position + place.num_rows
            shift = place.first_row - first
            for recording in tracked.recordings.values():
                if recording.bank != self._bank:
                    continue
                chosen = recording.capture.select(first, stop, tracked.spec.prompt_tokens)
                if isinstance(chosen, range):  # of consecutive positions
                    runs = [(chosen.start, len(chosen))] if chosen else []
                else:
                    runs = (
                        [(chosen[at], count) for at, count in contiguous(np.array(chosen))]
                        if chosen
                        else []
                    )
                window += [
                    _RowRun(place.id, member, recording, at - first, at + shift, count)
                    for at, count in runs
                ]
        return window

    def _plan_ports(self, pattern: np.ndarray, tokens: list[np.ndarray]) -> None:
        """Fill the plan's columns of all ports but for their ring rows; all ports of a pattern
        share one token list.
        """
        # for each pattern: count, at, start, pattern
        places = np.zeros((len(tokens), 4), dtype=np.int64)
        for number, token in enumerate(tokens):
            if len(token):
                count, at = self._list([token])
                self._staging.set_slots(number, token)
                places[number] = (
                    count,
                    at,
                    int(token[0]) if token[-1] - token[0] == count - 1 else columns.SCATTERED,
                    number,
                )
        of_port = places[pattern]
        for after, port_columns in enumerate((columns.BEFORE, columns.AFTER)):
            token = of_port[after::2]
            self._plan[:, port_columns.COUNT] = token[:, 0]
            self._plan[:, port_columns.AT] = token[:, 1]
            self._plan[:, port_columns.START] = token[:, 2]
            self._plan[:, port_columns.PATTERN] = token[:, 3]

    def _list(self, parts: Sequence[np.ndarray]) -> tuple[int, int]:
        """Append token numbers to this step's lists; return their count and first index."""
        at = self._lists_end
        self._lists += parts
        self._lists_end += sum(map(len, parts))
        return self._lists_end - at, at

    def commit(self) -> None:
        """Put the plan into effect for the next forward, which does nothing if this raises."""
        if not self._repeats:
            self._complete()
        if self._planned is None:
            self.clear()
            return
        self._busy, self.due = True, self._planned
        if self._loaded and self._repeats and self._step is None:
            return  # the forward finds the plan where the last one found it
        try:
            self._staging.commit(self._plan, [] if self._repeats else self._lists)
        except Exception:
            self.abandon()
            raise
        if not (self._loaded and self._repeats):
            for site in self._launched:
                site.busy = True
        self._loaded = True

    def _complete(self) -> None:
        """Complete the plan of this step, which the next one may repeat."""
        for site in self._launched:
            site.busy = False
        self._planned, self._launched = None, []
        self._plan[:, columns.SITE] = 0
        captured = self._plan[:, _COUNT_COLUMNS]
        active = captured.any(axis=1)
        if self._edits:
            active |= self._plan[:, columns.EDITS] > 0
        if not active.any():
            return
        launched = np.repeat(np.logical_or.reduceat(active, self._firsts), self._launch_sizes)
        self._plan[launched, columns.SITE] = np.flatnonzero(launched) + 1
        self._planned = Due(
            np.column_stack([self._edit_counts, captured]), self._edited, self._captured
        )
        self._launched = [self._sites[number] for number in np.flatnonzero(launched).tolist()]

    def clear(self) -> None:
        """Have the next forward do nothing."""
        self._busy, self.due = False, None
        if self._loaded:
            self._loaded = False
            try:
                self._staging.commit(self._nothing, [])
            except Exception:
                self.abandon()
                raise
            for site in self._launched:
                site.busy = False

    def abandon(self) -> None:
        """Have the next forward do nothing, whatever of a plan was uploaded."""
        self._plan[:] = 0
        self._edits, self.due, self._planned = False, None, None
        self._forget_captures()
        self._staging.abandon()
        for site in self._sites:
            site.busy = False
        self._busy = self._loaded = False

    def drain(self) -> list[tuple[Recording, Extent]]:
        """Take the captured rows of the last forward, and return those that probes read."""
        step, self._step = self._step, None
        self._busy, self.due = False, None
        if step is None:
            return []
        assert self._stretch is not None
        try:
            self._staging.take(step.slab)
            found = self._stretch.take(step)
            if self._stretch.full:
                self._copy()
        except Exception:
            self._stretch = None
            self.plan_steering([])
            self.clear()
            raise
        return found
