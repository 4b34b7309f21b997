"""Buffers of a step: puts the plan where the forward reads it, and takes captured rows out.

On the CPU the buffers are written in place, and the forward records each row where it stays. On an
accelerator everything goes through pinned memory without waiting: the ring has two halves, and a
separate stream copies the rows of one half to their places while the next step fills the other.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from ....kernels.plan import Buffers
from ..base.host_memory import locked_copy, locked_like, on_device
from ..base.landings import FINISHING, LANDED, Landing, LateLanding
from ..base.ranges import numbers_of
from ..base.shared_memory import HostMemoryError
from .arena import BankRows
from .step_places import Places

#: Bytes of page-locked memory that rows for other memory are copied to at a time.
_PART_BYTES = 64 << 20


class Staging:
    """Stages the buffers of one bank."""

    def __init__(
        self, buffers: Buffers, memory: BankRows, copies: "torch.cuda.Stream | None" = None
    ) -> None:
        """`copies`: an accelerator's stream for captured rows, which all banks share."""
        self._buffers = buffers
        self._memory = memory
        self._on_cpu = copies is None
        self._token_rows = np.zeros(tuple(buffers.token_rows.shape), dtype=np.int32)
        self._changed = False  # `_token_rows` is not what the last `commit` uploaded
        self._end = 0  # all nonzero rows of `_token_rows` are before this one
        self._end_on_device = 0  # the same for the device's copy
        # the captured tokens of each pattern, until `commit` uploads their slots
        self._slots: Sequence[np.ndarray] = ()
        # patterns and tokens behind which the device's copy has no slots
        self._slots_end = np.zeros(2, dtype=np.int64)
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
        self._end = tokens
        self._changed = True

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
            first = places.of_rows()[row]
            rows = self._memory.all
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
            counts = np.array([len(tokens) for tokens in self._slots])
            tokens = np.concatenate(self._slots)
            end = np.array([len(counts), tokens.max(initial=-1) + 1])
            patterns, width = np.maximum(end, self._slots_end)
            slots = np.full((patterns, width), -1, dtype=np.int32)
            places = np.repeat(np.arange(len(counts)), counts), tokens
            slots[places] = numbers_of(np.zeros_like(counts), counts)
            uploads.append((buffers.capture_slots[:patterns, :width], slots))
            self._slots_end = end
        for buffer, values in uploads:
            # The caching allocator keeps pinned memory until the copies queued from it are over.
            buffer.copy_(locked_copy(torch.from_numpy(values)), non_blocking=True)
        self._end_on_device = self._end
        self._changed = False
        self._slots = ()

    def abandon(self) -> None:
        """Undo a failed `commit`, so that the next forward does nothing. Allocates no memory."""
        self._buffers.plan.zero_()
        # some token rows and slots may have been uploaded, so the next commit overwrites all
        self._end_on_device = len(self._token_rows)
        self._changed = True
        self._slots = ()
        self._slots_end = np.array(self._buffers.capture_slots.shape)


class _Halves:
    """The two halves of an accelerator's ring, from which a stream copies rows to the arena."""

    def __init__(self, ring: torch.Tensor, memory: BankRows, stream: torch.cuda.Stream) -> None:
        self._ring = ring
        self._memory = memory
        self._stream = stream
        self._rows = len(ring) // 2
        locked = memory.arena.locked // memory.row_bytes
        self._locked = memory.all[:locked]
        self._on_device = on_device(self._locked)
        self._landed = torch.from_numpy(memory.arena.memory.landed)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._current = 0
        self._last = LANDED
        self._part = max(1, _PART_BYTES // memory.row_bytes)
        self._check()

    def _check(self) -> None:
        """Copy a number of each half to the row that nobody needs, so that the kernel is compiled;
        raise HostMemoryError if it does not arrive. Of memory that torch does not know as
        page-locked, vLLM may return a view of a copy.
        """
        for half in self._ring[: self._rows], self._ring[self._rows :]:
            self._locked[0] = 0
            half.fill_(1)
            self._scatter(self._on_device, half, *np.zeros((2, 1), dtype=np.int64))
            torch.cuda.current_stream(self._ring.device).synchronize()
            if not bool((self._locked[0] == 1).all()):
                raise HostMemoryError(
                    "vLLM's view of page-locked memory for captured rows is a copy of it: rows "
                    "would not arrive"
                )

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

        The device cannot write outside of page-locked memory: such rows take a way around, and the
        host copies them when their forward is over, after the next one has been launched.
        """
        arena = self._memory.arena
        around = list[tuple[torch.Tensor, torch.Tensor]]()
        if arena.late:
            self._last.wait()
        ring = self._ring[self._current * self._rows :]
        event = self._copied[self._current] = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._ring.device))
        number = next(arena.landings)
        landing = Landing(event, number)
        try:
            with torch.cuda.stream(self._stream):
                locked = places < len(self._locked)
                if not locked.all():
                    others = np.flatnonzero(~locked)
                    for part in np.split(others, range(self._part, len(others), self._part)):
                        found = locked_like(self._memory.all[: len(part)])
                        self._scatter(on_device(found), ring, rows[part], np.arange(len(part)))
                        around.append((found, torch.from_numpy(places[part])))
                    rows = rows[locked]
                    places = places[locked]
                if len(rows):
                    self._scatter(self._on_device, ring, rows, places)
        finally:
            with torch.cuda.stream(self._stream), FINISHING:
                if around or arena.late:
                    arrive = partial(self._arrive, around)
                    landing = LateLanding(event, number, arrive, arena.late, arena.memory.landed)
                else:
                    arrived = torch.full((1,), number, device=self._ring.device)
                    self._landed.copy_(arrived, non_blocking=True)
                event.record(self._stream)
            self._last = arena.landing = landing
        return landing

    def _scatter(
        self, memory: torch.Tensor, ring: torch.Tensor, rows: np.ndarray, places: np.ndarray
    ) -> None:
        """Queue copies of rows of `ring` to page-locked memory, as the device has it."""
        both = locked_copy(torch.from_numpy(np.stack([rows, places])))
        at, to = both.to(self._ring.device, non_blocking=True)
        if self._ring.is_cuda:  # Triton is imported where it is needed
            from ....kernels.triton_rows import scatter

            scatter(memory, ring, at, to)
        else:
            memory.index_copy_(0, to, ring.index_select(0, at))

    def _arrive(self, around: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for found, places in around:
            self._memory.all.index_copy_(0, places, found)
