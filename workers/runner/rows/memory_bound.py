"""Bounds the host memory of recorded rows: compacts rows that keep whole slabs alive, and hands
long captures' rows to the writers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from ..base.engine_step import StepView
from ..files.writer import Writer
from .capture import Recording
from .mover import Mover
from .overload import Overload
from .planner import Tracked
from .slabs import SlabPool
from .streams import Streams

#: `guard(requests, kind)`: an error in its block fails these requests and nothing else.
Guard = Callable[[Collection[Tracked], str], AbstractContextManager[None]]


class MemoryBound:
    """Memory bound of one rank."""

    def __init__(
        self,
        slabs: SlabPool,
        floor: int,
        overload: Overload,
        mover: Mover,
        writer: Writer,
        streams: Streams,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`floor`: bytes of slabs up to which nothing is compacted."""
        self._slabs, self.floor, self._overload, self._mover = slabs, floor, overload, mover
        self._writer, self._streams, self._hidden_size, self._dtype = (
            writer,
            streams,
            hidden_size,
            dtype,
        )

    def before_step(self, tracked: Sequence[Tracked], guard: Guard) -> None:
        """Free memory for a step: wait if the overload policy blocks, then compact.

        A recorded row keeps its whole slab alive, with all rows of that step. When slabs take more
        than twice the memory of the needed rows, the needed rows are copied out.
        """
        self._overload.wait()
        recordings = [
            (item, recording) for item in tracked for recording in item.recordings.values()
        ]
        for item, recording in recordings:
            if not recording.settles:
                continue
            with guard([item], "capture_failed"):
                recording.settle()
        self._slabs.collect()
        if self._slabs.alive <= self.floor:
            return
        rows = sum(
            recording.num_rows * recording.width(self._hidden_size) for _, recording in recordings
        )
        needed = rows * self._dtype.itemsize + self._writer.backlog
        if self._slabs.alive > 2 * needed:
            for _, recording in recordings:
                recording.compact(self._mover)

    def after_step(
        self, view: StepView | None, requests: Mapping[str, Tracked], block_size: int, guard: Guard
    ) -> None:
        """Hand over to the writers the rows of long captures that this rank no longer needs, and
        drop the rows that were recorded for probes and are scored.

        Rows of a prompt block stay until the block is full, since `row_store` may keep it.
        """
        for rows in view.requests if view is not None else ():
            tracked = requests.get(rows.id)
            if tracked is None or tracked.reported:
                continue
            leaving = [
                recording
                for recording in tracked.recordings.values()
                if recording.stream is not None
            ]
            if not leaving and tracked.watch is None:
                continue
            reached = rows.first_position + rows.num_rows
            if reached < tracked.spec.prompt_tokens:
                reached -= reached % block_size
            if tracked.watch is not None:
                for recording in tracked.recordings.values():
                    if recording.watch is not None:
                        recording.discard(reached)
            if leaving:
                with guard([tracked], "capture_failed"):
                    for recording in leaving:
                        self._hand_over(recording, reached)

    def close(self) -> None:
        """Finish pending writes and copies."""
        self._writer.close()
        self._mover.close()

    def _hand_over(self, recording: Recording, reached: int) -> None:
        row_bytes = recording.width(self._hidden_size) * self._dtype.itemsize
        num_rows = recording.leave(reached, self._streams.part // row_bytes)
        if num_rows and recording.stream is not None:
            self._writer.stream(recording.stream.flush, num_rows * row_bytes)
