"""Planner of a step: writes the rows to edit and to record into the buffers before the forward, and
clears the plan after it.

A position's row is `first_row + position − first_position`, if the step computes the position.
Chunked prefill, preemption and resumption are therefore no special cases. A step that reads the
same from the slots' tables as the one before has its plan, at later positions.
"""

import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ....kernels import WHOLE, plan as columns
from ....kernels.plan import Buffers
from ....schemas.artifacts.probes import ProbeScore
from ....schemas.model.banks import RESIDUAL
from ....schemas.prompts.selectors import select
from ....schemas.requests.specs import RankSpec, SteeringRow, WriterWork
from ..base.engine_step import StepView
from ..edits.steering_tables import RowTable
from ..edits.triggers import Search, TriggeredGate
from ..hooks.sites import RankSite
from ..probes.gates import open_among
from ..probes.watches import Watch
from .arena import BankRows
from .buffers import Staging
from .capture import Recording, ScoredRows
from .edit_sizes import RequestSizes
from .finite_check import Due
from .lanes import FEW, Lanes, parts_of
from .overload import Overloads
from .slot_table import Slots, SlotTable, SlotValue, StepTokens, entry_of
from .step_places import Places, Runs, StepLayout, layout_of

_PORT_COLUMNS = [*columns.BEFORE, *columns.AFTER]
_COUNT_COLUMNS = [columns.BEFORE.COUNT, columns.AFTER.COUNT]
_EDIT_COLUMNS = [
    columns.EDITS,
    columns.DEPTH,
    columns.LIMITED,
    columns.ALIKE,
    columns.ALIKE_FROM,
]
_ROW_COLUMNS = [columns.BEFORE.ROW, columns.AFTER.ROW]


@dataclass
class Tracked:
    """A live request with a spec."""

    spec: RankSpec
    # table rows that it holds, which edit its tokens in this order
    rows: list[tuple[int, SteeringRow]] = field(default_factory=list)
    recordings: dict[int, Recording] = field(default_factory=dict)  # by index in the captures
    slot: int = 0  # its slot in the tables; 0: it has none
    applied: int = 0  # see `Slots`, as last counted
    reached: int = 0
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
    gates: list[str] = field(default_factory=list)  # the probes that gate its steering
    # of its rows with triggers: gate, and key of the trigger → search
    searches: dict[tuple[str, bytes], Search] = field(default_factory=dict)
    stopped_by: str = ""  # the probe that ended the request
    counted: int = sys.maxsize  # once the request is over: the tokens that count
    scores: list[ProbeScore] = field(default_factory=list)  # results, once the request is over
    results: int = 0  # CRC32 of its scores, of what they decide, and of the sizes of its edits
    # returns the values for `RankSpec.grade`, once they are computed
    graded: Callable[[], list[float]] | None = None

    @property
    def special(self) -> bool:
        """Return whether steps decide something of it: its gates, triggers, entry or grade."""
        spec = self.spec
        return bool(self.gates or self.searches or spec.entry is not None or spec.grade is not None)

    def count(self, slots: Slots) -> None:
        """Count what its rows edited so far."""
        if self.slot:
            self.applied = int(slots.applied[self.slot])
            self.reached = int(slots.reached[self.slot])

    def forget(self) -> None:
        """Drop what was recorded of it, because nobody will have it."""
        for recording in self.recordings.values():
            recording.forget()
        for sizes in self.sizes.values():
            sizes.close(0)

    def columns_of_gates(self) -> dict[tuple[str, bytes], int]:
        """Return the condition of rows → its column in `StepTokens.closed`. Others never open."""
        gates = [("", b""), *((gate, b"") for gate in self.gates), *self.searches]
        return {
            condition: column
            for column, condition in enumerate(gates)
            if condition[0] in ("", *self.gates)
        }

    def conditions_at(self, number: int) -> list[TriggeredGate]:
        """Return its conditions, as the request of this number in a step."""
        gates = ["", *self.gates]
        return [
            TriggeredGate(number, search, gates.index(gate), column)
            for column, ((gate, _), search) in enumerate(self.searches.items(), len(gates))
            if gate in gates
        ]

    def open_of(self, row: SteeringRow, positions: list[int] | range) -> list[int] | range:
        """Return the positions, out of those that a row names, at which its gate is open; all of
        them if it has no gate.
        """
        if not row.gate:
            return positions
        if self.watch is None or row.gate not in self.gates:
            return []
        return open_among(self.watch, row.gate, positions)

    def miscounted(self, row: SteeringRow, rows: int) -> int:
        """Return how many positions of a row `applied` counts too many: edits after the first
        `rows` tokens, and what rejected drafts changed.
        """
        search = self.searches.get(row.condition)
        prompt = self.spec.prompt_tokens
        first = rows if search is None else 0
        positions = self.open_of(row, select(row.positions, first, self.reached, prompt))
        return len(positions) if search is None else search.miscounted(positions, rows)


def _captured(recording: Recording, prompt_tokens: int, first: int, stop: int) -> Sequence[int]:
    return recording.capture.select(first, stop, prompt_tokens)


class Planner:
    """Planner of one bank: call `plan_capture`, `plan_steering` and `commit` before the forward,
    and `drain` after it. Edits come last, because gates and triggers wait for the last step.
    """

    def __init__(
        self,
        sites: Sequence[RankSite],
        buffers: Buffers,
        table: RowTable,
        memory: BankRows,
        overloads: Overloads,
        copies: "torch.cuda.Stream | None" = None,
        *,
        bank: str = RESIDUAL,
    ) -> None:
        """`memory`: of captured rows. `copies`: an accelerator's stream that copies them there.
        `bank`: the bank whose steering and captures are planned.
        """
        self._bank = bank
        self._dropping = {work: each for work, each in overloads.items() if each.dropping}
        self._sites = list(sites)
        self._table = table
        self._staging = Staging(buffers, memory, copies)
        self._steering = SlotTable()
        self._captures = SlotTable()
        self._lanes = Lanes(memory, 2 * len(sites))
        self._lanes_of: dict[int, list[int]] = {}  # slot → of its recordings
        self._parts: list[int] = []  # lanes of parts of runs, for one step
        # what the tables had for the last step's tokens, and the edits of each of these
        self._named = np.zeros((0, 1), dtype=np.int64)
        self._chosen = np.zeros((0, 1), dtype=np.int64)
        self._edits_of = np.zeros(0, dtype=np.int64)
        self._plan = np.zeros((len(self._sites), columns.COLUMNS), dtype=np.int32)
        self._tokens = StepTokens(StepView([], [], [], []), np.zeros(0, dtype=np.int64))
        # this step has the last step's captures; all of its plan, at later positions
        self._same = self.repeats = False
        self._whole = True  # the next step may have this one's captures
        self._firsts = np.flatnonzero([site.leads for site in self._sites])  # of each launch
        self._launch_sizes = np.diff(self._firsts, append=len(self._sites))
        self._edit_counts = np.zeros(len(self._sites), dtype=np.int32)  # planned edits of each site
        # sites that each configuration of the step edits, `[n, sites]`, of which 0 is none; which
        # of these edit each token, `[tokens, columns]`
        self._masks = np.zeros((1, len(self._sites)), dtype=bool)
        self._masked = self._named
        self.due: Due | None = None  # work planned for the current forward's sites; None: nothing
        self._planned: Due | None = None  # the work in `_plan`
        self._launched: list[RankSite] = []  # sites whose launches have work in `_plan`
        # the edited tokens, with which `buffers.lists` begins; those of the layout follow behind as
        # many places as the step has tokens
        self._edited_tokens = np.zeros(0, dtype=np.int64)
        self._layout: StepLayout | None = None  # of the last captures
        self._places: Places | None = None  # of the captured rows; None: the plan captures none
        self._places_at = 0  # index in `buffers.lists` at which the rows' places begin
        self.loaded = False  # the next forward would find a plan that is not empty

    def write(self, tracked: Tracked) -> None:
        """Write the request's slot in the tables."""
        slot = tracked.slot
        prompt = tracked.spec.prompt_tokens
        gates = tracked.columns_of_gates()
        self._steering.write(
            slot,
            [
                entry_of(spec.column, row, spec.positions, prompt, gate=gate)
                for row, spec in tracked.rows
                if spec.bank == self._bank and (gate := gates.get(spec.condition)) is not None
            ],
        )
        self._leave_lanes(slot)
        captures = list(tracked.recordings.values()) if not tracked.reported else []
        entries = list[SlotValue]()
        for item in captures:
            if item.capture.bank != self._bank:
                continue
            chosen = partial(_captured, item, prompt) if item.capture.every_n > 1 else None
            entry = entry_of(len(entries), 0, item.capture.positions, prompt, chosen)
            lane = self._lanes.add(item, scattered=entry.chosen is not None)
            entries.append(entry._replace(value=lane))
        self._lanes_of[slot] = [entry.value for entry in entries]
        self._captures.write(slot, entries)

    def _leave_lanes(self, slot: int) -> None:
        """Give back the lanes of a slot, and what is planned with them."""
        self._layout = self._places = None
        self._lanes.remove([*self._lanes_of.pop(slot, []), *self._parts])
        self._parts = []

    def erase(self, slot: int) -> None:
        """Have the slot do nothing, because its request is over, and keep nothing of it alive."""
        self._leave_lanes(slot)
        self._steering.write(slot)
        self._captures.write(slot)

    def plan_steering(self, tokens: StepTokens, slots: Slots) -> None:
        """Complete a step's plan with the edits of its tokens; on an error nothing is edited."""
        named = self._steering.at(tokens)
        same = tokens.again and np.array_equal(named, self._named)
        self.repeats = same and self._same
        if not same:
            self.clear_edits()
            self._named = named
            self._edits_of = self._table.num_sites[named].sum(axis=1)
            if named.any():
                self._plan_edits(named)
        if len(self._edited_tokens):
            new = np.where(tokens.positions >= slots.reached[tokens.slots], self._edits_of, 0)
            slots.applied[tokens.of_requests] += np.add.reduceat(new, tokens.first_rows)

    def _plan_edits(self, named: np.ndarray) -> None:
        self._edited_tokens = edited = np.flatnonzero(named.any(axis=1))
        depth = int(np.flatnonzero(named.any(axis=0))[-1])
        self._staging.set_rows(named)
        counts = np.bincount(named.reshape(-1))
        counts[0] = 1  # it is used by no token, and yet the first
        used = np.flatnonzero(counts)
        self._masks = self._table.sites[used]  # a copy
        self._masked = (np.cumsum(counts > 0) - 1)[named]
        touched = self._masks.any(axis=0)
        self._edit_counts[:] = counts[used] @ self._masks
        self._plan[touched, columns.EDITS] = len(edited)
        self._plan[touched, columns.DEPTH] = depth + 1
        self._plan[touched, columns.LIMITED] = self._table.limited[used].any()
        if len(used) == 2 and not depth and int(edited[-1] - edited[0]) == len(edited) - 1:
            self._plan[touched, columns.ALIKE] = used[1]
            self._plan[touched, columns.ALIKE_FROM] = edited[0]

    def clear_edits(self) -> None:
        """Plan no edits, neither the last step's again nor those planned so far."""
        self.repeats = False
        self._plan[:, _EDIT_COLUMNS] = 0
        self._edited_tokens = self._edited_tokens[:0]
        self._named = np.zeros((0, 1), dtype=np.int64)
        self._masked = self._named
        self._edit_counts[:] = 0
        self._staging.set_rows(self._named)

    def clear_captures(self) -> None:
        """Plan no captures, neither the last step's again nor those planned so far."""
        self._same = self.repeats = self._whole = False
        self._forget_captures()

    def plan_capture(self, tokens: StepTokens) -> None:
        """Begin a step's plan with the captures of its tokens; on an error nothing is captured.
        Precedes `plan_steering`.
        """
        self._tokens = tokens
        drops = set[WriterWork]()
        for work, each in self._dropping.items():
            if each.drops():
                drops.add(work)
        try:
            chosen = self._captures.at(tokens)
            self._same = (
                tokens.again and self._whole and not drops and np.array_equal(chosen, self._chosen)
            )
            if not self._same:
                self._forget_captures()
                self._chosen = chosen
                self._plan_capture(tokens, drops)
            if self._places is not None:
                self._places.move_to(tokens.firsts)
                base = self._staging.place(self._places, self._places_at)
                self._plan[:, _ROW_COLUMNS] = base.reshape(-1, 2)
        except Exception:
            self.clear_captures()
            raise

    def _plan_capture(self, tokens: StepTokens, drops: Set[WriterWork]) -> None:
        """`drops`: kinds of work whose rows are not recorded."""
        runs = self._runs_of(tokens)
        self._whole = not drops
        if drops:
            runs = self._without(runs, tokens, drops)
        if not len(runs.lanes):
            return
        several = (runs.counts > FEW) | self._lanes.scattered[runs.lanes]
        if several.any():
            self._whole = False
            runs = self._cut(runs, several, tokens)
        numbers = self._lanes.mask[runs.lanes]
        placed = np.stack([numbers, runs.tokens, runs.counts])
        if self._layout is None or not np.array_equal(self._layout.runs, placed):
            self._layout = layout_of(placed, self._lanes.masks.rows)
        self._places = Places(self._layout, runs, tokens.ids, self._lanes)
        self._plan_ports(self._layout)

    def leave(self) -> None:
        """Have rows leave the recordings with a new block. Called once it is known which of the
        last step's rows are kept for other requests.
        """
        begun = self._lanes.begun
        self._lanes.begun = {}
        for recording, reached in begun.values():
            recording.leave(reached, self._lanes.memory.arena.landing)

    @property
    def begun(self) -> bool:
        """Whether a recording has a new block."""
        return bool(self._lanes.begun)

    def _forget_captures(self) -> None:
        """Take the captures out of the plan."""
        self._places = None
        self._lanes.remove(self._parts)
        self._parts = []
        self._plan[:, _PORT_COLUMNS] = 0

    def _runs_of(self, tokens: StepTokens) -> Runs:
        """Return the runs of consecutive tokens that this step's recordings capture."""
        chosen = self._chosen > 0
        joins = (np.diff(tokens.members) == 0)[:, None] & chosen[1:] & chosen[:-1]
        edge = np.zeros((1, chosen.shape[1]), dtype=bool)
        column, first = np.nonzero((chosen & ~np.concatenate([edge, joins])).T)
        _, last = np.nonzero((chosen & ~np.concatenate([joins, edge])).T)
        members = tokens.members[first]
        skips = first - tokens.first_rows[members]
        return Runs(self._chosen[first, column], members, skips, first, last - first + 1)

    def _without(self, runs: Runs, tokens: StepTokens, drops: Set[WriterWork]) -> Runs:
        """Drop runs of these kinds of work; probes' rows wait for no writer."""
        kept = np.ones(len(runs.lanes), dtype=bool)
        firsts = tokens.firsts[runs.members] + runs.skips
        for number, lane in enumerate(runs.lanes.tolist()):
            recording = self._lanes.recordings[lane]
            if recording.work in drops and not recording.capture.scored:
                first = int(firsts[number])
                recording.dropped.update(range(first, first + int(runs.counts[number])))
                self._lanes.dropped.add(lane)
                kept[number] = False
        return Runs(*(part[kept] for part in runs))

    def _cut(self, runs: Runs, several: np.ndarray, tokens: StepTokens) -> Runs:
        """Cut runs where their blocks end, if they are long; give each part of `several`, of which
        a recording may have more than one, a lane of its own for this step.
        """
        parts = list[list[int]]()
        for run in np.flatnonzero(several).tolist():
            lane, member, skip, token, count = (int(part[run]) for part in runs)
            recording = self._lanes.recordings[lane]
            first = int(tokens.firsts[member]) + skip
            for at, size in parts_of(recording, first, count, self._lanes.memory):
                self._parts.append(self._lanes.add(recording))
                parts.append([self._parts[-1], member, skip + at, token + at, size])
        cut = np.array(parts, dtype=np.int64).T
        return Runs(
            *(np.append(whole[~several], part) for whole, part in zip(runs, cut, strict=True))
        )

    def _plan_ports(self, layout: StepLayout) -> None:
        """Fill the plan's columns of all ports but for their ring rows; all ports of a pattern
        share one token list.
        """
        counts = np.array([len(tokens) for tokens in layout.tokens])
        # after the edited tokens, which may be all
        starts = len(self._tokens.slots) + np.cumsum(counts) - counts
        self._places_at = int(starts[-1] + counts[-1])
        self._staging.set_slots(layout.tokens)
        # for each pattern: count, at, pattern
        places = np.stack([counts, starts, np.arange(len(counts))], axis=1)
        of_port = places[layout.pattern]
        for after, port_columns in enumerate((columns.BEFORE, columns.AFTER)):
            token = of_port[after::2]
            self._plan[:, port_columns.COUNT] = token[:, 0]
            self._plan[:, port_columns.AT] = token[:, 1]
            self._plan[:, port_columns.PLACES] = self._places_at + layout.base[after::2]
            self._plan[:, port_columns.PATTERN] = token[:, 2]

    def commit(self) -> None:
        """Put the plan into effect for the next forward, which does nothing if this raises."""
        if not self.repeats:
            self._complete()
        self.due = self._planned
        if self.due is None:
            self.clear()
            return
        if self.loaded and self.repeats and (self._places is None or not self._staging.moves):
            return  # the forward finds the plan where the last one found it
        lists = list[np.ndarray]()
        if not self.repeats:
            lists += self._lists()
        try:
            self._staging.commit(self._plan, lists)
        except Exception:
            self.abandon()
            raise
        if not (self.loaded and self.repeats):
            for site in self._launched:
                site.busy = True
        self.loaded = True

    def _lists(self) -> list[np.ndarray]:
        """Return what `buffers.lists` has, but for the rows' places."""
        if self._places is None:
            return [self._edited_tokens]
        rest = len(self._tokens.slots) - len(self._edited_tokens)
        none = np.zeros(rest, dtype=np.int64)
        return [self._edited_tokens, none, *self._places.layout.tokens]

    def _complete(self) -> None:
        """Complete the plan of this step, which the next one may repeat."""
        for site in self._launched:
            site.busy = False
        self._planned = None
        self._launched = []
        self._plan[:, columns.SITE] = 0
        captured = self._plan[:, _COUNT_COLUMNS]
        active = captured.any(axis=1)
        active |= self._plan[:, columns.EDITS] > 0
        if not active.any():
            return
        launched = np.repeat(np.logical_or.reduceat(active, self._firsts), self._launch_sizes)
        self._plan[launched, columns.SITE] = np.flatnonzero(launched) + 1
        self._planned = Due(
            np.column_stack([self._edit_counts, captured]),
            self._tokens,
            self._places,
            self._masks,
            self._masked,
        )
        self._launched = [self._sites[number] for number in np.flatnonzero(launched).tolist()]

    def clear(self) -> None:
        """Have the next forward do nothing."""
        self.due = None
        if self.loaded:
            self.loaded = False
            try:
                self._staging.commit(np.zeros_like(self._plan), [])
            except Exception:
                self.abandon()
                raise
            for site in self._launched:
                site.busy = False

    def abandon(self) -> None:
        """Have the next forward do nothing, whatever of a plan was uploaded."""
        self.clear_edits()
        self.clear_captures()
        self.due = self._planned = None
        self._staging.abandon()
        for site in self._sites:
            site.busy = False
        self.loaded = False

    def drain(self) -> list[ScoredRows]:
        """Take the captured rows of the last forward, and return those that probes read."""
        due = self.due
        places = self._places
        self.due = None
        if due is None or places is None:
            return []
        try:
            return places.drain(self._staging.take(places))
        except Exception:
            self.abandon()
            raise
