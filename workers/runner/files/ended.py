"""Ended requests, as a rank hands them over: what the forward recorded, and the receipt that waits
for it.

Messages only: a process that writes may be another one than the rank, whose memory of rows it
shares.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ....schemas.base.records import Wire
from ....schemas.jobs.receipts import Receipt
from ....schemas.requests.specs import RankSpec
from ..base.actions import sealed
from ..base.attribution import precedes_edits
from .edit_sizes import RecordedSizes
from .extents import BlockPlace, ExtentPlace
from .finished_rows import FinishedCapture, Origin
from .recorded import CaptureShape, MemoryRows, Recorded
from .streams import RecordingFile
from .writer import InterventionError, WriteJob


class EndedCapture(Wire):
    """One capture of an ended request, as this rank recorded it."""

    shape: CaptureShape
    landing: int  # of all its rows, see `SharedMemory.wait`
    blocks: list[BlockPlace] = []
    # its own rows that are kept for others, and may have been recorded again
    earlier: list[ExtentPlace] = []
    reused: list[ExtentPlace] = []  # rows that an earlier request recorded
    # positions that were not recorded when they were last computed, under overload
    dropped: list[int] = []
    high: list[bool] = []  # of each token, whether the window's probe is high
    stream: int = 0  # number of the stream with rows that have left; 0: none
    error: str = ""  # why rows could not be recorded


class EndedRequest(Wire, tag="ended"):
    """A request that is over on its rank."""

    receipt: Receipt  # complete except for the captures and the sizes
    spec: RankSpec
    captures: list[EndedCapture] = []
    token_ids: list[int] = []  # all its tokens
    rows: int = 0  # how many of them, from the first on, have rows
    unsound: bool = False  # the model computed non-finite rows that no edit could have reached
    sizes: list[RecordedSizes] = []  # of its edits
    shown: bool = False  # the receipt has the sizes; else its checksum alone
    # the CRC32 of its scores and decisions, and the ledger's state: of both the checksum is made
    results: int = 0
    state: int = 0
    nbytes: int = 0  # of the rows

    def job(
        self,
        memory: np.ndarray,
        wait: Callable[[int], None],
        origin: Origin,
        streams: Mapping[int, RecordingFile | None],
        prepared: Mapping[int, Any],
    ) -> WriteJob:
        """Return what a writer does for the request. `memory`: the shared memory, uint8. `wait`:
        that of `SharedMemory`. `streams`: by number; None for one that was dropped. `prepared`:
        what readers prepared, by the capture's number.
        """
        builds = [
            partial(
                self._built,
                capture,
                memory,
                wait,
                origin,
                streams.get(capture.stream),
                prepared.get(capture.shape.number),
            )
            for capture in self.captures
        ]
        return WriteJob(
            self.receipt,
            builds,
            self.nbytes,
            partial(self._with_sizes, memory) if self.sizes else None,
            self.spec.work,
            self.spec.tenant,
        )

    def _with_sizes(self, memory: np.ndarray, receipt: Receipt) -> Receipt:
        """Add the sizes of the edits to the receipt, and to the checksum of the results."""
        counted = [sizes.counted(memory, self.rows) for sizes in self.sizes]
        results = self.results
        for sizes in counted:
            results = sizes.checksum(results)
        shown = counted if self.shown else []
        return msgspec.structs.replace(
            receipt,
            checksum=sealed(self.state, results),
            sizes=[size for sizes in shown for size in sizes.report(receipt.request)],
        )

    def _built(
        self,
        ended: EndedCapture,
        memory: np.ndarray,
        wait: Callable[[int], None],
        origin: Origin,
        stream: RecordingFile | None,
        prepared: Any,
    ) -> FinishedCapture:
        """Build a capture, in a writer thread.

        Raises InterventionError for a row that is not finite, unless the unedited model made it so.
        """
        wait(ended.landing)
        capture = self.finish(ended, memory, origin, stream, prepared)
        if capture.unsound is not None and not self.unsound:
            hook, layer, position = capture.unsound
            after = capture.capture.at == "after"
            if not precedes_edits(self.spec, position, (hook, layer), after=after):
                where = f"{hook} of layer {layer}, position {position}"
                raise InterventionError(
                    f"the captured row at {where} is not finite, after edits of this request (rank "
                    f"{origin.rank})"
                )
        return capture

    def finish(
        self,
        ended: EndedCapture,
        memory: np.ndarray,
        origin: Origin,
        stream: RecordingFile | None = None,
        prepared: Any = None,
    ) -> FinishedCapture:
        """Return a capture of the request, whose rows have landed, as it is to be stored.

        Raises RuntimeError when an expected row is missing, or could not be recorded.
        """
        if ended.error:
            raise RuntimeError(ended.error)
        if ended.stream and stream is None:
            raise RuntimeError("rows that left before the request ended could not be written")
        spec, token_ids, stop, shape = self.spec, self.token_ids, self.rows, ended.shape
        capture = spec.captures[shape.number]
        expected = set[int]()
        if stop >= spec.prompt_tokens:
            chosen, window = capture.select(0, stop, spec.prompt_tokens), capture.window
            expected = set(chosen)
            if window is not None:
                expected = window.keep(chosen, token_ids, ended.high)
        stored_as = shape.stored_as(capture)
        windowed = capture.window is not None  # more positions than the expected ones are recorded
        rows = Recorded(
            memory, ended.blocks, ended.earlier, ended.reused, set(ended.dropped), expected
        )
        result: Any  # `MemoryRows`, or those of the stream
        if stream is not None:
            positions, reused, result = stream.seal(rows, stop, windowed=windowed)
        else:
            positions, reused, runs = rows.below(stop, windowed=windowed)
            result = MemoryRows(shape.ports, runs, stored_as, shape.chosen(capture))
        if missing := expected.difference(positions) - rows.dropped:
            raise RuntimeError(
                f"positions {sorted(missing)[:8]} were not recorded ({len(missing)} of "
                f"{len(expected)})"
            )
        return shape.finished(
            spec,
            origin,
            positions=positions,
            token_ids=[token_ids[position] for position in positions],
            rows=result,
            non_finite=dict(Counter(place[:2] for place in result.unsound(stored_as))),
            unsound=min(result.unsound(shape.dtype), key=lambda place: place[2], default=None),
            reused=len(shape.ports) * reused,
            dropped=tuple(sorted((rows.dropped & expected).difference(positions))),
            whole=result.blob,
            prepared=prepared,
        )
