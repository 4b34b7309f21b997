"""Planner of a step: writes the rows to edit and to record into the buffers before the forward, and
clears the plan after it.

A position's row is `first_row + position − first_position`, if the step computes the position.
Chunked prefill, preemption and resumption are therefore no special cases.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ....kernels import plan as columns
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
from .edit_sizes import SizeCount
from .execution_check import Due
from .extents import Extent, StepRows, contiguous
from .last_step import LastStep
from .mover import Mover
from .overload import Overload
from .slabs import SlabPool
from .step_runs import Layout, StepRuns, layout_of


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
    unsound: bool = False  # the model computed non-finite rows that no edit could have reached
    sizes: dict[str, SizeCount] = field(default_factory=dict)  # of its edits, by bank
    accounted: bool = False  # the request's LoRA adapter is in the action ledger
    watch: Watch | None = None  # the scores of its probes
    gates: Gates | None = None  # the probes' decisions about its steering
    gated: bool = False  # a probe gates at least one of its rows
    stopped_by: str = ""  # the probe that ended the request
    scores: list[ProbeScore] = field(default_factory=list)  # results, once the request is over
    results: int = 0  # CRC32 of its scores, of its gates, and of the sizes of its edits
    # returns the values for `RankSpec.grade`, once they are computed
    graded: Callable[[], list[float]] | None = None

    def set_rows(self, rows: list[tuple[int, SteeringRow]]) -> None:
        """Set the rows that edit the request's tokens from now on, in this order."""
        self.rows, self.columns = rows, columns_of([spec for _, spec in rows])
        self.gated = any(spec.gate for _, spec in rows)

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
        self._last_step = LastStep(bank)
        self._repeats = False  # this step has the last step's plan, at later positions
        self._members: Sequence[tuple[Tracked, RequestRows]] = ()  # whose plan may be repeated
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
        self._runs: StepRuns | None = None  # what this step's forward records
        self._busy = False

    @property
    def busy(self) -> bool:
        """Return whether the current forward edits or records anything."""
        return self._busy

    @property
    def edits(self) -> bool:
        """Return whether the current forward edits a row."""
        return self._busy and self._edits

    def forget_step(self) -> None:
        """Repeat no plan of requests that end, and keep nothing of them alive."""
        self._last_step.forget()
        self._members, self._window = (), []

    def plan_steering(self, request_rows: Sequence[tuple[Tracked, RequestRows]]) -> None:
        """Begin a step's plan, with the edits of these requests' rows; on an error nothing is
        edited. Precedes `plan_capture`.
        """
        self._repeats = self._last_step.repeated_by(request_rows)
        if self._repeats:
            self._steer_again(request_rows)
            return
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
        self._members = request_rows

    def clear_plan(self) -> None:
        """Plan nothing: neither the last step again nor what was planned of this step so far."""
        self._last_step.forget()
        self._repeats, self._members = False, ()
        self._plan[:] = 0
        self._lists, self._lists_end, self._edit_lists = [], 0, (0, 0)
        self._steered = []
        if self._edited:
            self._edits, self._edited = False, []
            self._edit_counts[:] = 0
            self._staging.clear_rows()

    def clear_captures(self) -> None:
        """Plan no captures, neither the last step's again nor those planned so far."""
        self._repeats, self._members = False, ()
        self._forget_captures()

    def _steer_again(self, request_rows: Sequence[tuple[Tracked, RequestRows]]) -> None:
        """Count the edits of a repeated plan, which names all rows of a request or none."""
        for member, edits in self._steered:
            tracked, place = request_rows[member]
            stop = place.first_position + place.num_rows
            tracked.applied += edits * max(stop - max(place.first_position, tracked.reached), 0)
        if self._last:
            for tracked, place in request_rows:
                if tracked.rows:
                    tracked.reached = max(tracked.reached, place.first_position + place.num_rows)

    def plan_capture(self, request_rows: Sequence[tuple[Tracked, RequestRows]]) -> None:
        """Plan the captures of these requests' rows; on an error nothing is captured."""
        self._runs = None
        drops = self._overload.drops()
        self._repeats = self._repeats and not drops
        try:
            if not self._repeats:
                self._forget_captures()
                self._plan_capture(request_rows, drops=drops)
            if self._window:
                self._record(request_rows)
        except Exception:
            self.clear_captures()
            raise

    def _plan_capture(
        self, request_rows: Sequence[tuple[Tracked, RequestRows]], *, drops: bool
    ) -> None:
        window = self._runs_of(request_rows)
        if drops:  # but not scored rows, which do not wait for the writers
            self._members = ()
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

    def _record(self, request_rows: Sequence[tuple[Tracked, RequestRows]]) -> None:
        """Give the captured rows of this step their memory."""
        layout = self._layout
        new = self._staging.new_rows(self._slabs, layout.rows)
        self._plan[:, _ROW_COLUMNS] = (layout.base + new.first).reshape(-1, 2)
        self._runs = StepRuns(
            StepRows(new.slab, layout.base, layout.pattern, new.landing),
            layout,
            [item.recording for item in self._window],
            [request_rows[item.member][1].first_position + item.skip for item in self._window],
        )

    def _forget_captures(self) -> None:
        """Take the captures out of the plan."""
        self._runs = None
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
            self._clear()
            return
        self._busy, self.due = True, self._planned
        try:
            self._staging.commit(self._plan, [] if self._repeats else self._lists)
        except Exception:
            self._abandon()
            raise
        for site in self._launched:
            site.busy = True

    def _complete(self) -> None:
        """Complete the plan of this step, which the next one may repeat."""
        for site in self._launched:
            site.busy = False
        self._planned, self._launched = None, []
        self._last_step.keep(self._members)
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

    def _clear(self) -> None:
        """Commit an empty plan for the next forward, unless the last one was empty too."""
        self.due = None
        if self._busy:
            self._busy = False
            try:
                self._staging.commit(self._nothing, [])
            except Exception:
                self._abandon()
                raise
            for site in self._launched:
                site.busy = False

    def _abandon(self) -> None:
        self._last_step.forget()
        self._plan[:] = 0
        self._edits, self.due, self._planned = False, None, None
        self._forget_captures()
        self._staging.abandon()
        for site in self._sites:
            site.busy = False
        self._busy = False

    def drain(self) -> list[tuple[Recording, Extent]]:
        """Hand the captured rows of the last forward to their recordings, and return those that
        probes read; commit an empty plan, so that the next forward does nothing unless it is
        planned.
        """
        runs = self._runs
        try:
            if runs is not None:
                self._staging.take(runs.step.slab)
                for recording, first, (_, _, count) in zip(
                    runs.recordings, runs.firsts, runs.layout.runs, strict=True
                ):
                    recording.recorded += count
                    if recording.dropped:
                        recording.dropped.difference_update(range(first, first + count))
                self._mover.take(runs, spill=self._overload.spills())
        except Exception:
            self._last_step.forget()
            self.plan_steering([])
            raise
        finally:  # a forward that was not planned must not use this plan
            self._runs = None
            self._clear()
        return [
            (recording, runs.extent(run))
            for run, recording in enumerate(runs.recordings if runs is not None else ())
            if runs is not None and recording.watch is not None
        ]
