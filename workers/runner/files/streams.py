"""Streams: rows of long captures are written to a file as they land, so that a request holds only a
window of its rows in memory.

The file has room for the longest header, then for each tensor of the blob, with every position that
the request may capture. A row's place follows from its site and position: so rows come in any
order, and one that is computed again (after a preemption, or a rejected draft) replaces the first.
When the request has ended, the tensors are moved together to close gaps, and the header is written
last. If the store can adopt the file, it becomes the capture's object. Otherwise, and for other
layouts, the rows are read from the file as if from memory.
"""

import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....schemas.base.dtypes import ITEM_BYTES
from ....schemas.base.records import Wire
from ....schemas.requests.specs import RankSpec
from ....storage.blobs import FileBytes
from ....storage.formats.capture_blobs import DTYPE_NAMES, encode_header
from ....storage.store import ArtifactStore, Draft, Drafts
from .finished_rows import FinishedCapture, Origin
from .layouts import file_name
from .recorded import (
    CaptureShape,
    Extent,
    Recorded,
    RowBlock,
    as_array,
    bytes_of,
    contiguous,
    ports_in,
)

#: Bytes that are moved, or read for the file's CRC32, at a time.
_PIECE = 4 << 20
#: Largest token id and count of rows.
_LARGEST = (1 << 31) - 1


class StreamOpened(Wire):
    """Rows of a capture will leave before its request ends."""

    stream: int  # number of the stream on its rank
    spec: RankSpec
    shape: CaptureShape
    end: int  # rows of this position and of later ones are not needed


class RecordingFile:
    """The file of one recording.

    `push` and `drop` are called by one thread, the rest by writers, one at a time.
    """

    def __init__(
        self,
        opened: StreamOpened,
        begin: Callable[["RecordingFile"], tuple[Draft, int]],
        wait: Callable[[int], None],
    ) -> None:
        """`begin(stream)` creates the file, and returns it with the bytes reserved for its header.
        `wait`: that of `SharedMemory`.
        """
        self.opened = opened
        self._begin = begin
        self._wait = wait
        shape = opened.shape
        self.capture = capture = opened.spec.captures[shape.number]
        self._ports = shape.ports
        self._dtype = shape.dtype
        self._chosen = shape.chosen(capture)
        #: Every position that may be captured, int64, ascending.
        self.order = as_array(capture.select(0, opened.end, opened.spec.prompt_tokens))
        self._stored_as = shape.stored_as(capture)
        self._row_bytes = shape.stored_width(capture) * ITEM_BYTES[self._stored_as]
        self._draft: Draft | None = None
        self._header = 0
        self._written = np.zeros(len(self.order), dtype=bool)
        # dtype → which rows are not finite in that dtype, `[positions, ports]`: by position, so
        # that only the last computation of a row counts; where all are finite, it takes no memory
        self._bad = {
            dtype: np.zeros((len(self.order), len(shape.ports)), dtype=bool)
            for dtype in (shape.dtype, self._stored_as)
        }
        self._queue: deque[tuple[list[RowBlock], int]] = deque()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._dropped = False

    def push(self, blocks: list[RowBlock], landing: int) -> None:
        """Have `flush` write these blocks, after those pushed before: if a position was recorded
        twice, the last row counts. `landing`: of their rows.
        """
        self._queue.append((blocks, landing))

    def drop(self) -> None:
        """Write nothing more, because the capture has failed. Does not wait."""
        self._dropped = True
        self._queue.clear()

    def flush(self) -> None:
        """Write the queued blocks and release them. `seal` raises the first error."""
        with self._lock:
            while self._queue:
                blocks, landing = self._queue.popleft()
                if self._error is None and not self._dropped:
                    try:
                        self._wait(landing)
                        self._write([run for block in blocks for run in block.runs(0, sys.maxsize)])
                    except Exception as error:
                        # dropping the draft frees its disk space immediately
                        self._error = error.with_traceback(None)
                        self._draft = None
            if self._dropped:
                self._draft = None

    def seal(self, rows: Recorded, stop: int) -> "tuple[list[int], int, SealedRows]":
        """Write the remaining blocks, and reduce the file to the positions below `stop`; return
        (these positions, how many of them were reused, their rows).

        Raises the first error of the stream: OSError and others.
        """
        self.push(rows.blocks, 0)
        self.flush()
        with self._lock:
            if self._error is not None:
                raise self._error
            # earlier rows of dropped positions do not count, see `EndedCapture.dropped`
            self._written &= ~np.isin(self.order, sorted(rows.dropped))
            if rows.windowed:
                self._written &= np.isin(self.order, sorted(rows.expected))
            held = {int(position) for position in self.order[self._written]}
            rows.check({position for position in held if position < stop})
            more, reused = rows.fill(rows.expected - held)
            self._write(more)
            kept = np.flatnonzero(self._written & (self.order < stop))
            positions: list[int] = self.order[kept].tolist()
            draft = self._begun()  # even if only rows that do not count have left
            self._move_together(draft, kept)
            bad = {
                dtype: [(int(self.order[at]), place) for at, place in np.argwhere(found).tolist()]
                for dtype, found in self._bad.items()
            }
            sites = [(hook, layer) for hook, layer, _ in self._ports]
            tensor = len(positions) * self._row_bytes
            sealed = SealedRows(draft, sites, positions, tensor, self._header, bad)
            return positions, reused, sealed

    def _begun(self) -> Draft:
        """Return the file, which the first rows create."""
        if self._draft is None:
            self._draft, self._header = self._begin(self)
        return self._draft

    def _write(self, runs: Iterable[Extent]) -> None:
        """Write runs, those that follow one another together."""
        together: list[Extent] = []
        for run in runs:
            if together and together[-1].positions.stop != run.first_position:
                self._put(together)
                together = []
            together.append(run)
        if together:
            self._put(together)

    def _put(self, runs: Sequence[Extent]) -> None:
        """Write the rows of runs that follow one another."""
        position = runs[0].first_position
        at = int(np.searchsorted(self.order, position))
        if at == len(self.order) or int(self.order[at]) != position:
            raise RuntimeError(f"position {position} was recorded but not requested")
        draft = self._begun()
        ports = [ports_in(run.block, self._ports) for run in runs]
        stride = len(self.order) * self._row_bytes
        for place in range(len(self._ports)):
            rows = [
                bytes_of(run.rows(of_run[place]), self._dtype, self._stored_as, self._chosen)
                for run, of_run in zip(runs, ports, strict=True)
            ]
            draft.write(self._header + place * stride + at * self._row_bytes, rows)
        self._written[at : at + sum(run.count for run in runs)] = True
        for run, of_run in zip(runs, ports, strict=True):
            for dtype, bad in self._bad.items():
                unsound = run.unsound(dtype)
                part = bad[at : at + run.count]
                if unsound is not None or part.any():
                    part[:] = False if unsound is None else unsound[of_run].T
            at += run.count

    def _move_together(self, draft: Draft, kept: np.ndarray) -> None:
        """Close the gaps of positions that were not captured: safetensors allows no holes. Rows
        move towards the beginning in order, so none is overwritten before it has moved.
        """
        stride = len(self.order) * self._row_bytes
        to = self._header
        runs = contiguous(kept) if len(kept) else []
        for place in range(len(self._ports)):
            for first, count in runs:
                at = self._header + place * stride + int(kept[first]) * self._row_bytes
                remaining = count * self._row_bytes
                while remaining and at != to:
                    piece = draft.read(at, min(remaining, _PIECE))
                    draft.write(to, [piece])
                    at = at + len(piece)
                    to = to + len(piece)
                    remaining = remaining - len(piece)
                to += remaining
        draft.truncate(to)


@dataclass(eq=False)
class SealedRows:
    """Rows of an ended request in its file: the finished capture's `rows`, and its blob if the
    store can adopt the file.
    """

    _draft: Draft
    _sites: list[tuple[str, int]]  # (hook, layer), in the order of the file
    _positions: list[int]
    _tensor: int  # bytes of a site's rows
    _header: int
    # dtype → position and index of the site of rows that are not finite in that dtype, among others
    _bad: dict[str, list[tuple[int, int]]]
    _view: memoryview | None = None

    def unsound(self, dtype: str) -> Iterator[tuple[str, int, int]]:
        """Yield (hook, layer, position) of the rows that are not finite as `dtype`."""
        held = set(self._positions) if self._bad[dtype] else set()
        for position, place in self._bad[dtype]:
            if position in held:
                yield *self._sites[place], position

    def __call__(self, hook: str, layer: int) -> list[memoryview]:
        if self._view is None:
            self._view = self._draft.view()
        first = self._header + self._sites.index((hook, layer)) * self._tensor
        return [self._view[first : first + self._tensor]]

    def blob(self, capture: FinishedCapture) -> FileBytes | None:
        """Complete the file, and return it as the capture's blob; None if the store cannot adopt
        it.
        """
        if not self._draft.adoptable:
            return None
        manifest = capture.manifest(capture.sites)
        header = encode_header(_tensors_of(capture), manifest, self._header)
        rows = self._header + self._tensor * len(self._sites)
        if len(header) != self._header:
            raise RuntimeError(
                f"a header of {len(header)} bytes does not fit the {self._header} reserved for it"
            )
        self._draft.write(0, [header])
        ends = [
            np.array(values, dtype="<i8").tobytes()
            for values in (capture.positions, capture.token_ids)
        ]
        self._draft.write(rows, ends)
        size = rows + sum(map(len, ends))
        crc = 0
        at = 0
        while at < size:
            piece = self._draft.read(at, min(_PIECE, size - at))
            crc = zlib.crc32(piece, crc)
            at += len(piece)
        return FileBytes(manifest, [], size, crc, self._draft)


def begin_file(
    store: ArtifactStore,
    scratch: Callable[[], Draft],
    origin: Callable[[], Origin],
    stream: RecordingFile,
) -> tuple[Draft, int]:
    """Create the file of a stream; return it with the bytes reserved for its header. `scratch()`
    creates a temporary file, for captures that the store cannot adopt. `origin()`: that of the
    rows.
    """
    opened = stream.opened
    capture = stream.capture
    most = stream.order.tolist()
    largest = opened.shape.finished(  # with the longest manifest that is possible
        opened.spec,
        origin(),
        positions=most,
        token_ids=[_LARGEST] * len(most),
        rows=lambda hook, layer: [],
        reused=_LARGEST,
        non_finite={(hook, layer): _LARGEST for hook, layer, _ in opened.shape.ports},
    )
    header = encode_header(_tensors_of(largest), largest.manifest(largest.sites))
    streamable = "filesystem" in capture.consumers and capture.layout in ("auto", "packed")
    draft = store.draft(file_name(largest)) if streamable and isinstance(store, Drafts) else None
    return draft if draft is not None else scratch(), len(header)


def _tensors_of(capture: FinishedCapture) -> list[tuple[str, str, list[int], int]]:
    """Return the tensors of a capture's blob: name, dtype, shape and bytes."""
    count = len(capture.positions)
    width = capture.hidden_size
    size = count * width * ITEM_BYTES[capture.dtype]
    return [
        *(
            (f"{hook}.{layer}", DTYPE_NAMES[capture.dtype], [count, width], size)
            for hook, layers in capture.sites.items()
            for layer in layers
        ),
        *((name, DTYPE_NAMES["int64"], [count], 8 * count) for name in ("positions", "token_ids")),
    ]
