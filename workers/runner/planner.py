"""Which rows of this step's batch are steered and which recorded? Fills the buffers before the forward, empties them after.

`row = first_row + position − first_position`, and only inside the step's window: so chunked prefill, preemption and
resume need no case of their own.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...kernels.pair_site import CAPTURE, CAPTURE_START, SCATTERED, STEER
from ...schemas.selectors import PositionSelector, select
from ...schemas.specs import RankSpec, SteeringRow
from .capture import Recording, Run, SlabPool
from .sites import SharedBuffers, Site, Switch
from .steering import RowTable
from .step import RequestRows


@dataclass
class Tracked:
    """A live request that asked for something."""

    spec: RankSpec
    rows: list[tuple[int, SteeringRow]] = field(default_factory=list)
    recording: Recording | None = None
    applied: int = 0  # token rows changed so far, over all layers of this rank
    failure: str = ""
    failure_kind: str = ""  # the problem's kind, see `Receipt.kind`
    reported: bool = False
    admitted: int = 0  # the step in which it came
    cached_tokens: int = 0  # served by the prefix cache when it came


class Planner:
    """One per rank. `plan_steering` and `plan_capture`, then `commit`, before the forward; `drain` after it."""

    def __init__(
        self, sites: Sequence[Site], shared: SharedBuffers, switch: Switch, table: RowTable, slabs: SlabPool, *, traced: bool
    ) -> None:
        """`traced`: the forward is compiled or graph-captured, so the sites' buffers may not be replaced."""
        self._sites, self._shared, self._switch, self._table, self._slabs = list(sites), shared, switch, table, slabs
        reference = self._sites[0].captured
        self._device, self._hidden_size, self._dtype = reference.device, reference.shape[1], reference.dtype
        # The CPU op writes just the rows that are asked for, so it may write into the slab itself.
        self._direct = self._device.type == "cpu" and not traced
        self._counts = np.zeros((len(self._sites), 4), dtype=np.int32)
        self._runs: list[tuple[Recording, int, int, int]] = []  # (recording, slab row, first position, rows)
        self._slab: torch.Tensor | None = None
        self._slab_layers: dict[int, int] = {}
        self._filled: set[int] = set()  # buffers (by id) that hold more than zeros; on accelerators ops read all of them

    @property
    def busy(self) -> bool:
        """Does the forward that runs now do anything?"""
        return self._switch.active

    def plan_steering(self, mine: Sequence[tuple[Tracked, RequestRows]]) -> None:
        """Fill the steering buffers for these requests' rows; on an error nothing is steered."""
        self._counts[:, STEER] = 0
        tokens: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        touched: set[int] = set()
        for tracked, place in mine:
            for row, spec in tracked.rows:
                positions = _window(spec.positions, place, tracked.spec.prompt_tokens)
                if len(positions):
                    tokens.append(positions - place.first_position + place.first_row)
                    rows.append(np.full(len(positions), row, dtype=np.int64))
                    tracked.applied += len(positions) * len(self._table.layers(row))
                    touched |= self._table.layers(row)
        count = sum(map(len, tokens))
        if count > len(self._shared.steer_tokens):
            raise RuntimeError(f"{count} (token, row) pairs in one step, the buffers hold {len(self._shared.steer_tokens)}")
        nothing = np.zeros(0, dtype=np.int64)
        self._stage(self._shared.steer_tokens, np.concatenate(tokens) if tokens else nothing)
        self._stage(self._shared.steer_rows, np.concatenate(rows) if rows else nothing)
        for number, site in enumerate(self._sites):
            if site.layer in touched:
                self._counts[number, STEER] = count

    def plan_capture(self, mine: Sequence[tuple[Tracked, RequestRows]]) -> None:
        """Fill the capture buffers for these requests' rows; on an error nothing is recorded."""
        self._counts[:, CAPTURE] = 0
        self._runs, self._slab = [], None
        wanted = [
            (tracked.recording, place, chosen)
            for tracked, place in mine
            if tracked.recording is not None and tracked.recording.layers and not tracked.reported
            if len(chosen := _window(tracked.recording.spec.positions, place, tracked.spec.prompt_tokens))
        ]
        if not wanted:
            self._stage(self._shared.capture_tokens, np.zeros(0, dtype=np.int64))
            return
        # Those with the most layers first: then a layer gathers a prefix of the slots and few that it does not need.
        wanted.sort(key=lambda item: -len(item[0].layers))
        index = np.concatenate([chosen - place.first_position + place.first_row for _, place, chosen in wanted])
        start = int(index[0]) if bool((np.diff(index) == 1).all()) else SCATTERED
        slot, last_slot = 0, dict[int, int]()
        runs = []
        for recording, _, chosen in wanted:
            for first, count in _contiguous(chosen):
                runs.append((recording, slot + first, int(chosen[first]), count))
            slot += len(chosen)
            last_slot.update(dict.fromkeys(recording.layers, slot))
        slab = self._slabs.new_slab(len(last_slot), slot, self._hidden_size, self._dtype)
        self._stage(self._shared.capture_tokens, index)
        self._slab_layers = {layer: place for place, layer in enumerate(sorted(last_slot))}
        self._runs, self._slab = runs, slab
        for number, site in enumerate(self._sites):
            if site.layer in last_slot:
                self._counts[number, CAPTURE] = last_slot[site.layer]
                self._counts[number, CAPTURE_START] = start
                if self._direct:
                    site.captured = slab[self._slab_layers[site.layer]]

    def commit(self) -> None:
        """The next forward does what was planned."""
        busy = bool(self._counts[:, (STEER, CAPTURE)].any())
        if busy or self._switch.active:
            self._stage_counts()
        self._switch.active = busy

    def drain(self) -> None:
        """Hand the captured rows of the forward that ran to their recordings; the next one does nothing until planned."""
        try:
            if self._slab is not None:
                self._hand_over(self._slab)
        finally:  # what was planned must not reach a forward that nobody planned
            self.plan_steering([])
            self.plan_capture([])
            self.commit()

    def _hand_over(self, slab: torch.Tensor) -> None:
        if not self._direct:
            for number, site in enumerate(self._sites):
                count = int(self._counts[number, CAPTURE])
                if count:
                    slab[self._slab_layers[site.layer], :count] = site.captured[:count]
        for recording, row, position, count in self._runs:
            recording.runs.append(Run(slab, self._slab_layers, row, position, count))

    def _stage(self, buffer: torch.Tensor, values: np.ndarray) -> None:
        """Copy to a persistent int64 buffer. On accelerators, where ops read all of it, what lies behind is zeroed."""
        if self._device.type == "cpu":
            buffer.numpy()[: len(values)] = values
            return
        if not len(values) and id(buffer) not in self._filled:
            return
        staged = torch.zeros(len(buffer), dtype=torch.int64, pin_memory=True)
        staged[: len(values)] = torch.from_numpy(values)
        buffer.copy_(staged, non_blocking=True)
        self._filled = self._filled | {id(buffer)} if len(values) else self._filled - {id(buffer)}

    def _stage_counts(self) -> None:
        for index, site in enumerate(self._sites):
            if self._device.type == "cpu":
                site.counts.numpy()[:] = self._counts[index]
            else:
                site.counts.copy_(torch.from_numpy(self._counts[index].copy()), non_blocking=True)


def _window(selector: PositionSelector, place: RequestRows, prompt_tokens: int) -> np.ndarray:
    """Positions of this step's rows that `selector` names, int64 ascending."""
    chosen = select(selector, place.first_position, place.first_position + place.num_rows, prompt_tokens)
    return np.arange(chosen.start, chosen.stop, dtype=np.int64) if isinstance(chosen, range) else np.array(chosen, dtype=np.int64)


def _contiguous(values: np.ndarray) -> list[tuple[int, int]]:
    """(first index, length) of each run of consecutive values."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    return [(a, b - a) for a, b in itertools.pairwise([0, *breaks.tolist(), len(values)])]
