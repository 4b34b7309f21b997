"""Buffers of a step: puts the plan where the forward reads it, and takes captured rows out.

On the CPU the buffers are written in place; a forward that runs as Python captures directly into
the slab, and a compiled one into the ring, which is then copied. On an accelerator everything goes
through pinned memory without waiting: the ring has two halves, and a separate stream copies the
rows of one half while the next step fills the other.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..base.host_memory import locked_copy
from ..hooks.sites import Buffers
from .pending_rows import LANDED, Landing, OnStream


class Staging:
    """Stages the buffers of one bank."""

    def __init__(self, buffers: Buffers, *, traced: bool) -> None:
        """`traced`: the forward is compiled or graph-captured."""
        self._buffers = buffers
        self._device = buffers.ring.device
        self._on_cpu = self._device.type == "cpu"
        self._direct = self._on_cpu and not traced
        self._token_rows = np.zeros(tuple(buffers.token_rows.shape), dtype=np.int32)
        self._edited: list[np.ndarray] = []  # indices of rows in `_token_rows` that are not zero
        self._changed = False  # `_token_rows` is not what the last `commit` uploaded
        self._end = 0  # all nonzero rows of `_token_rows` are before this one
        self._end_on_device = 0  # the same for the device's copy
        self._slots: dict[int, np.ndarray] = {}  # pattern → tokens, until `commit` uploads them
        self._area = _Areas(buffers.ring) if not self._on_cpu else None
        self._rows = 0  # rows captured in this step
        self._empty = buffers.ring
        if self._on_cpu:
            self._token_rows = buffers.token_rows.numpy()

    @property
    def row(self) -> tuple[int, torch.dtype]:
        """Elements and dtype of a captured row."""
        return self._buffers.ring.shape[1], self._buffers.ring.dtype

    # --- Edits

    def clear_rows(self) -> None:
        for tokens in self._edited:
            self._token_rows[tokens] = 0
        self._edited, self._end, self._changed = [], 0, True

    def set_rows(self, tokens: np.ndarray, columns: np.ndarray, rows: np.ndarray) -> None:
        """Have configuration row `rows[i]` edit `tokens[i]`, in column `columns[i]`; not empty."""
        self._edited.append(tokens)
        self._changed = True
        self._end = max(self._end, int(tokens.max()) + 1)
        self._token_rows[tokens, columns] = rows

    # --- Captures

    def check_room(self, rows: int) -> None:
        """Raise RuntimeError if a step cannot record so many rows (requests are admitted so that it
        can).
        """
        room = len(self._buffers.ring) if self._area is None else self._area.rows
        if not self._direct and rows > room:
            raise RuntimeError(
                f"{rows} captured rows in one step, but the buffer has room for {room} (setting "
                "capture_buffer_mib)"
            )

    def next_area(self) -> tuple[int, Landing]:
        """Begin a step that records: return the first ring row of its rows, and the landing of the
        copy that `take` makes of them.
        """
        return self._area.next() if self._area is not None else (0, LANDED)

    def record_into(self, slab: torch.Tensor) -> None:
        """Have the next forward's rows arrive in `slab`, `[rows, hidden_size]`."""
        self._rows = len(slab)
        if self._direct:
            self._buffers.ring = slab

    def set_slots(self, pattern: int, tokens: np.ndarray) -> None:
        """Give captured token `tokens[i]` slot i at the ports of this pattern."""
        if not self._on_cpu:
            self._slots[pattern] = tokens

    def take(self, slab: torch.Tensor) -> None:
        """Copy this step's captured rows to `slab`; on an accelerator, only begin to."""
        if self._area is not None:
            self._area.take(slab, self._rows)
        elif self._direct:
            self._buffers.ring = self._empty  # later forwards must not write to the slab
        else:
            slab.copy_(self._buffers.ring[: self._rows])

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
        self._upload(buffers.plan, plan)
        rows = max(self._end, self._end_on_device)  # later rows are zero on both sides
        if rows and self._changed:
            self._upload(buffers.token_rows[:rows], self._token_rows[:rows])
        self._end_on_device, self._changed = self._end, False
        if self._slots:
            slots = np.full(
                (max(self._slots) + 1, buffers.capture_slots.shape[1]), -1, dtype=np.int32
            )
            for pattern, tokens in self._slots.items():
                slots[pattern, tokens] = np.arange(len(tokens), dtype=np.int32)
            self._upload(buffers.capture_slots[: len(slots)], slots)
            self._slots = {}

    def abandon(self) -> None:
        """Undo a failed `commit`, so that the next forward does nothing. Allocates no memory."""
        self._buffers.plan.zero_()
        # some token rows may have been uploaded, so the next commit overwrites all of them
        self._end_on_device, self._changed = len(self._token_rows), True
        self._rows, self._slots = 0, {}
        if self._direct:
            self._buffers.ring = self._empty

    def _upload(self, buffer: torch.Tensor, values: np.ndarray) -> None:
        # The caching allocator keeps pinned memory until the copy that was queued from it is over.
        buffer.copy_(locked_copy(torch.from_numpy(values)), non_blocking=True)


class _Areas:
    """The two halves of an accelerator's ring."""

    def __init__(self, ring: torch.Tensor) -> None:
        self.rows = len(ring) // 2
        self._ring = ring
        self._stream = torch.cuda.Stream(ring.device)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._current = 0

    def next(self) -> tuple[int, Landing]:
        """Switch to the other half; the forward that fills it waits on the device until its old
        rows are copied.

        Returns the half's first row, and the landing of the rows that `take` copies from it.
        """
        self._current = 1 - self._current
        copied = self._copied[self._current]
        if copied is not None:
            torch.cuda.current_stream(self._ring.device).wait_event(copied)
        event = self._copied[self._current] = torch.cuda.Event(blocking=True)
        return self._current * self.rows, OnStream(event)

    def take(self, slab: torch.Tensor, rows: int) -> None:
        """Queue on the copy stream: wait for the forward, copy the rows, record the event."""
        event = self._copied[self._current]
        assert event is not None, "next() comes before take()"
        first = self._current * self.rows
        self._stream.wait_stream(torch.cuda.current_stream(self._ring.device))
        with torch.cuda.stream(self._stream):
            slab.copy_(self._ring[first : first + rows], non_blocking=True)
            event.record(self._stream)
