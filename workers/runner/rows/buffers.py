"""Buffers of a step: puts the plan where the forward reads it, and takes captured rows out.

On the CPU the buffers are written in place, and the forward records each row where it stays. On an
accelerator everything goes through pinned memory without waiting: the ring has two halves, and a
separate stream copies the rows of one half to their places while the next step fills the other.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..base.host_memory import locked_copy, on_device
from ..base.landings import LANDED, Landing
from ..base.ranges import numbers_of
from ..hooks.sites import Buffers
from .arena import BankRows
from .step_places import Places

#: Rows of a port that follow one another, from which on they are copied by themselves.
_LONG = 16


class Staging:
    """Stages the buffers of one bank."""

    def __init__(
        self, buffers: Buffers, memory: BankRows, copies: "torch.cuda.Stream | None" = None
    ) -> None:
        """`copies`: an accelerator's stream for captured rows, which all banks share."""
        self._buffers, self._memory = buffers, memory
        self._on_cpu = copies is None
        self._token_rows = np.zeros(tuple(buffers.token_rows.shape), dtype=np.int32)
        self._changed = False  # `_token_rows` is not what the last `commit` uploaded
        self._end = 0  # all nonzero rows of `_token_rows` are before this one
        self._end_on_device = 0  # the same for the device's copy
        # the captured tokens of each pattern, until `commit` uploads their slots
        self._slots: Sequence[np.ndarray] = ()
        #: Whether a step's rows have other places in the ring than the last step's.
        self.moves = copies is not None
        self._halves = None if copies is None else _Halves(buffers.ring, memory, copies)
        if self._on_cpu:
            self._token_rows = buffers.token_rows.numpy()
            buffers.ring.set_(memory.all)  # in place: compiled forwards have this tensor

    # --- Edits

    def set_rows(self, rows: np.ndarray) -> None:
        """Have configuration rows `[tokens, columns]` edit the step's tokens, others none."""
        tokens, depth = rows.shape
        self._token_rows[: max(tokens, self._end)] = 0
        self._token_rows[:tokens, :depth] = rows
        self._end, self._changed = tokens, True

    # --- Captures

    def set_slots(self, tokens: Sequence[np.ndarray]) -> None:
        """Give captured token `tokens[p][i]` slot i at the ports of pattern p."""
        if not self._on_cpu:
            self._slots = tokens

    def place(self, places: Places, at: int) -> np.ndarray:
        """Have the next forward record rows; return the ring row of each port's first one. `at`:
        index in `lists` at which the rows' places begin.

        Raises RuntimeError if a step cannot record so many rows (requests are admitted so that it
        can).
        """
        layout = places.layout
        if self._halves is not None:
            return layout.base + self._halves.next(layout.rows)
        self._buffers.lists.numpy()[at : at + layout.rows] = places.of_rows()
        return layout.base

    def take(self, places: Places) -> Landing:
        """Have this step's captured rows where they stay; on an accelerator, only begin to."""
        row = places.layout.entries.row
        if self._halves is not None:
            return self._halves.take(row, places.rows)
        if len(row) > places.layout.rows:
            first, rows = places.of_rows()[row], self._memory.all
            again = (places.rows != first) & (places.rows > 0)
            found = rows.index_select(0, torch.from_numpy(first[again]))
            rows.index_copy_(0, torch.from_numpy(places.rows[again]), found)
        return LANDED

    # --- Both

    def commit(self, plan: np.ndarray, lists: Sequence[np.ndarray]) -> None:
        """Put the plan where the next forward reads it. Rows of edits, slots and `lists` that were
        not set since the last commit remain.
        """
        buffers = self._buffers
        if self._on_cpu:
            buffers.plan.numpy()[:] = plan
            if lists:
                flat = np.concatenate(lists)
                buffers.lists.numpy()[: len(flat)] = flat
            return
        uploads = [(buffers.plan, plan)]
        rows = max(self._end, self._end_on_device)  # later rows are zero on both sides
        if rows and self._changed:
            uploads.append((buffers.token_rows[:rows], self._token_rows[:rows]))
        if self._slots:
            slots = np.full((len(self._slots), buffers.capture_slots.shape[1]), -1, dtype=np.int32)
            counts = np.array([len(tokens) for tokens in self._slots])
            patterns = np.repeat(np.arange(len(counts)), counts)
            slots[patterns, np.concatenate(self._slots)] = numbers_of(np.zeros_like(counts), counts)
            uploads.append((buffers.capture_slots[: len(slots)], slots))
        for buffer, values in uploads:
            # The caching allocator keeps pinned memory until the copies queued from it are over.
            buffer.copy_(locked_copy(torch.from_numpy(values)), non_blocking=True)
        self._end_on_device, self._changed, self._slots = self._end, False, ()

    def abandon(self) -> None:
        """Undo a failed `commit`, so that the next forward does nothing. Allocates no memory."""
        self._buffers.plan.zero_()
        # some token rows may have been uploaded, so the next commit overwrites all of them
        self._end_on_device, self._changed = len(self._token_rows), True
        self._slots = ()


class _Halves:
    """The two halves of an accelerator's ring, from which a stream copies rows to the arena."""

    def __init__(self, ring: torch.Tensor, memory: BankRows, stream: torch.cuda.Stream) -> None:
        self._ring, self._memory, self._stream = ring, memory, stream
        self._rows = len(ring) // 2
        locked = memory.arena.locked // memory.row_bytes
        self._locked = memory.all[:locked]
        self._on_device = on_device(self._locked) if locked else self._locked
        self._landed = torch.from_numpy(memory.arena.memory.landed)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._current = 0

    def next(self, rows: int) -> int:
        """Switch to the other half, and return its first row; the forward that fills it waits on
        the device until its old rows are copied.
        """
        if rows > self._rows:
            raise RuntimeError(
                f"{rows} captured rows in one step, but the buffer has room for {self._rows} "
                "(setting tuning.capture_buffer_mib)"
            )
        self._current = 1 - self._current
        if (copied := self._copied[self._current]) is not None:
            torch.cuda.current_stream(self._ring.device).wait_event(copied)
        return self._current * self._rows

    def take(self, rows: np.ndarray, places: np.ndarray) -> Landing:
        """Have rows of the half, once the forward has filled it, copied to their places.

        Rows outside of page-locked memory are waited for: the device cannot write there.
        """
        ring = self._ring[self._current * self._rows :]
        event = self._copied[self._current] = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._ring.device))
        number = next(self._memory.arena.landings)
        try:
            with torch.cuda.stream(self._stream):
                self._copy(ring, rows, places)
        finally:
            with torch.cuda.stream(self._stream):
                arrived = torch.full((1,), number, device=self._ring.device)
                self._landed.copy_(arrived, non_blocking=True)
            event.record(self._stream)
            landing = self._memory.arena.landing = Landing(event, number)
        return landing

    def _copy(self, ring: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> None:
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(places) != 1)) + 1
        starts, stops = np.append(0, breaks), np.append(breaks, len(rows))
        locked = places[stops - 1] < len(self._locked)
        alone = (stops - starts >= _LONG) & locked
        for start, stop in zip(starts[alone].tolist(), stops[alone].tolist(), strict=True):
            row, place, count = int(rows[start]), int(places[start]), stop - start
            self._locked[place : place + count].copy_(ring[row : row + count], non_blocking=True)
        both = np.stack([rows, places])
        rest = np.repeat(~alone, stops - starts)
        whole = np.repeat(locked, stops - starts)
        for chosen, waits in ((rest & whole, False), (rest & ~whole, True)):
            if chosen.any():
                of_rows = locked_copy(torch.from_numpy(both[:, chosen]))
                at, to = of_rows.to(self._ring.device, non_blocking=True)
                found = ring.index_select(0, at)
                if waits:
                    self._memory.all.index_copy_(0, of_rows[1], found.cpu())
                else:
                    self._on_device.index_copy_(0, to, found)
