"""Streams: rows of long captures are written to a file as they land, so that a request holds only a
window of its rows in memory.

The file has room for the longest header, then for each tensor of the blob, with every position that
the request may capture. When the request has ended, the tensors are moved together to close gaps,
and the header is written last. If the store can adopt the file, it becomes the capture's object.
Otherwise, and for other layouts, the rows are read from the file as if from memory.
"""

import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ....schemas.base.dtypes import ITEM_BYTES
from ....schemas.requests.specs import RankSpec
from ....storage.blobs import Blob
from ....storage.formats.capture_blobs import DTYPE_NAMES, encode_header
from ....storage.store import ArtifactStore, Draft, Drafts
from ..files.finished_rows import FinishedCapture
from ..files.layouts import file_name
from .capture import SPAN, Recording
from .extents import Block, Extent, as_array, bytes_of, contiguous
from .landings import LANDED, Landing

#: Parts of the window: rows are handed to the writers in parts of about this share of it.
_PARTS = 8
#: Bytes that are moved, or read for the file's CRC32, at a time.
_PIECE = 4 << 20
#: Largest token id and count of rows.
_LARGEST = (1 << 31) - 1


class Stream:
    """The file of one recording.

    `push` and `drop` are called by the model's thread, the rest by writers, one at a time.
    """

    def __init__(
        self,
        recording: Recording,
        order: np.ndarray,
        stored_as: torch.dtype,
        begin: Callable[[], tuple[Draft, int]],
        submit: Callable[[Callable[[], None], int], None],
        part: int,
    ) -> None:
        """`order`: every position that may be captured, int64, ascending. `begin()` creates the
        file, and returns it with the bytes reserved for its header. `submit`: `Writer.stream`.
        `part`: bytes of rows that leave the recording at a time, at least.
        """
        self._submit, self.part = submit, part
        self._ports = dict(recording.ports)
        self._numbers = np.fromiter(self._ports.values(), dtype=np.int64, count=len(self._ports))
        self._chosen = recording.chosen
        self._order, self._stored_as, self._begin = order, stored_as, begin
        self._draft: Draft | None = None
        self._header = self._row_bytes = 0
        self._written = np.zeros(len(order), dtype=bool)
        # dtype → position → indices of the ports whose rows are not finite in that dtype
        self._bad: dict[torch.dtype, dict[int, set[int]]] = {}
        self._queue: deque[tuple[list[Block], Landing]] = deque()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._dropped = False
        self.begun = False  # whether rows have left the recording

    def push(self, blocks: list[Block], landing: Landing) -> None:
        """Have a writer write these blocks, after those pushed before: if a position was recorded
        twice, the last row counts. `landing`: of their rows.
        """
        self.begun = True
        self._queue.append((blocks, landing))
        self._submit(self.flush, sum(block.nbytes for block in blocks))

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
                        landing.wait()
                        self._write([run for block in blocks for run in block.runs(0, sys.maxsize)])
                    except Exception as error:
                        # dropping the draft frees its disk space immediately
                        self._error, self._draft = error.with_traceback(None), None
            if self._dropped:
                self._draft = None

    def seal(
        self, recording: Recording, blocks: list[Block], expected: set[int], stop: int
    ) -> "tuple[list[int], int, SealedRows]":
        """Write the remaining blocks, and reduce the file to the positions below `stop`; return
        (these positions, how many of them were reused, their rows).

        Raises the first error of the stream: OSError and others.
        """
        self._queue.append((blocks, LANDED))
        self.flush()
        with self._lock:
            if self._error is not None:
                raise self._error
            # earlier rows of dropped positions do not count, see `Recording.dropped`
            self._written &= ~np.isin(self._order, sorted(recording.dropped))
            if recording.capture.window is not None:
                self._written &= np.isin(self._order, sorted(expected))
            if (
                extra := {
                    int(position) for position in self._order[self._written] if position < stop
                }
                - expected
            ):
                raise RuntimeError(f"positions {sorted(extra)[:8]} were recorded but not requested")
            lacking = expected - {int(position) for position in self._order[self._written]}
            more, reused = recording.fill(lacking)
            self._write(more)
            kept = np.flatnonzero(self._written & (self._order < stop))
            positions: list[int] = self._order[kept].tolist()
            if self._draft is None:  # only rows that do not count have left
                self._draft, self._header = self._begin()
            self._move_together(kept)
            rows = SealedRows(
                self._draft, self._ports, positions, self._row_bytes, self._header, self._bad
            )
            return positions, reused, rows

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
        position, like = runs[0].first_position, runs[0].block.rows
        at = int(np.searchsorted(self._order, position))
        if at == len(self._order) or int(self._order[at]) != position:
            raise RuntimeError(f"position {position} was recorded but not requested")
        if self._draft is None:
            self._draft, self._header = self._begin()
            self._row_bytes = (
                sum(len(range(like.shape[2])[columns]) for columns in self._chosen)
                * self._stored_as.itemsize
            )
        ports = [np.searchsorted(run.block.ports, self._numbers).tolist() for run in runs]
        stride = len(self._order) * self._row_bytes
        for place in range(len(self._ports)):
            rows = [
                bytes_of(
                    run.block.rows[of_run[place], run.at : run.at + run.count],
                    self._stored_as,
                    self._chosen,
                )
                for run, of_run in zip(runs, ports, strict=True)
            ]
            self._draft.write(self._header + place * stride + at * self._row_bytes, rows)
        self._written[at : at + sum(run.count for run in runs)] = True
        for dtype in {like.dtype, self._stored_as}:
            bad = self._bad.setdefault(dtype, {})
            for run, of_run in zip(runs, ports, strict=True):
                self._note(run.unsound(dtype), bad, run.positions, of_run)

    def _note(
        self,
        unsound: np.ndarray | None,
        bad: dict[int, set[int]],
        positions: range,
        ports: list[int],
    ) -> None:
        for position in positions if bad else ():  # earlier rows of these positions do not count
            bad.pop(position, None)
        if unsound is None:
            return
        for place, port in enumerate(ports):
            for offset in np.flatnonzero(unsound[port]).tolist():
                bad.setdefault(positions[offset], set()).add(place)

    def _move_together(self, kept: np.ndarray) -> None:
        """Close the gaps of positions that were not captured. Rows move towards the beginning in
        order, so none is overwritten before it has moved.
        """
        assert self._draft is not None
        stride, to = len(self._order) * self._row_bytes, self._header
        runs = contiguous(kept) if len(kept) else []
        for place in range(len(self._ports)):
            for first, count in runs:
                at, remaining = (
                    self._header + place * stride + int(kept[first]) * self._row_bytes,
                    count * self._row_bytes,
                )
                while remaining and at != to:
                    piece = self._draft.read(at, min(remaining, _PIECE))
                    self._draft.write(to, [piece])
                    at, to, remaining = at + len(piece), to + len(piece), remaining - len(piece)
                to += remaining
        self._draft.truncate(to)


class SealedRows:
    """Rows of an ended request in its file: the finished capture's `rows`, and its blob if the
    store can adopt the file.
    """

    def __init__(
        self,
        draft: Draft,
        ports: dict[tuple[str, int], int],
        positions: list[int],
        row_bytes: int,
        header: int,
        bad: dict[torch.dtype, dict[int, set[int]]],
    ) -> None:
        self._draft, self._sites, self._positions = draft, list(ports), positions
        self._tensor, self._header, self._bad = len(positions) * row_bytes, header, bad
        self._view: memoryview | None = None

    def unsound(self, dtype: torch.dtype) -> Iterator[tuple[str, int, int]]:
        """Yield (hook, layer, position) of the rows that are not finite as `dtype`."""
        held = set(self._positions) if self._bad.get(dtype) else set()
        for position, places in self._bad.get(dtype, {}).items():
            for place in sorted(places) if position in held else ():
                yield *self._sites[place], position

    def __call__(self, hook: str, layer: int) -> list[memoryview]:
        if self._view is None:
            self._view = self._draft.view()
        first = self._header + self._sites.index((hook, layer)) * self._tensor
        return [self._view[first : first + self._tensor]]

    def blob(self, capture: FinishedCapture) -> Blob | None:
        """Complete the file, and return it as the capture's blob; None if the store cannot adopt
        it.
        """
        if not self._draft.adoptable:
            return None
        count = len(self._positions)
        tensors = [
            (
                f"{hook}.{layer}",
                DTYPE_NAMES[capture.dtype],
                [count, capture.hidden_size],
                self._tensor,
            )
            for hook, layer in self._sites
        ]
        ends = [
            np.array(values, dtype="<i8").tobytes()
            for values in (capture.positions, capture.token_ids)
        ]
        tensors += [
            (name, DTYPE_NAMES["int64"], [count], len(end))
            for name, end in zip(("positions", "token_ids"), ends, strict=True)
        ]
        manifest = capture.manifest(capture.sites)
        header, rows = (
            encode_header(tensors, manifest, self._header),
            self._header + self._tensor * len(self._sites),
        )
        if len(header) != self._header:
            raise RuntimeError(
                f"a header of {len(header)} bytes does not fit the {self._header} reserved for it"
            )
        self._draft.write(0, [header])
        self._draft.write(rows, ends)
        size, crc, at = rows + sum(map(len, ends)), 0, 0
        while at < size:
            piece = self._draft.read(at, min(_PIECE, size - at))
            crc = zlib.crc32(piece, crc)
            at += len(piece)
        return Blob(manifest, [], size, crc, self._draft)


class Streams:
    """Decides which captures of this rank stream, and opens their files. One per rank."""

    def __init__(
        self,
        store: ArtifactStore,
        scratch: Callable[[], Draft],
        window: int,
        origin: Mapping[str, Any],
        submit: Callable[[Callable[[], None], int], None],
        *,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`scratch()` creates a temporary file, for captures that the store cannot adopt.
        `window`: bytes of a capture's rows that may stay in memory. `submit`: `Writer.stream`.
        """
        self._store, self._scratch, self._window, self._origin = store, scratch, window, origin
        self._submit, self._hidden_size, self._dtype = submit, hidden_size, dtype

    def prepare(self, spec: RankSpec, recording: Recording, max_tokens: int, block: int) -> None:
        """Set in blocks of which size a recording records, and its stream.

        `max_tokens`: tokens generated at most; 0: unknown. `block`: tokens of a KV block, if rows
        of prompts are kept; else 1.
        """
        part = max(1, self._window // _PARTS)
        row = len(recording.ports) * recording.width(self._hidden_size) * self._dtype.itemsize
        recording.span = max(1, min(SPAN, part // row))
        recording.block = block if block > 1 else recording.span
        if max_tokens:
            recording.end = spec.prompt_tokens + max_tokens - 1
        if max_tokens and not recording.capture.scored:
            recording.stream = self._of(spec, recording, row, part)

    def _of(self, spec: RankSpec, recording: Recording, row: int, part: int) -> Stream | None:
        """Return the stream of a recording with `row` bytes at a position; None if it fits the
        window.
        """
        chosen = recording.capture.select(0, recording.end, spec.prompt_tokens)
        window = recording.capture.window
        if min(len(chosen), (window and window.held) or len(chosen)) * row <= self._window:
            return None
        order = as_array(chosen)
        stored_as = (
            self._dtype
            if recording.capture.dtype == "model"
            else getattr(torch, recording.capture.dtype)
        )
        streamable = "filesystem" in recording.capture.consumers and recording.capture.layout in (
            "auto",
            "packed",
        )

        def begin() -> tuple[Draft, int]:
            largest = self._largest(spec, recording, order, stored_as)
            draft = (
                self._store.draft(file_name(largest))
                if streamable and isinstance(self._store, Drafts)
                else None
            )
            return draft if draft is not None else self._scratch(), _header_bytes(largest)

        return Stream(recording, order, stored_as, begin, self._submit, part)

    def _largest(
        self, spec: RankSpec, recording: Recording, order: np.ndarray, stored_as: torch.dtype
    ) -> FinishedCapture:
        """Return a finished capture without rows, with the longest manifest that is possible."""
        sites = {hook: list(layers) for hook, layers in recording.sites.items()}
        return FinishedCapture(
            spec=spec,
            capture=recording.capture,
            sites=sites,
            hidden_size=recording.stored_width(self._hidden_size),
            columns=recording.columns,
            dtype=str(stored_as).removeprefix("torch."),
            positions=order.tolist(),
            token_ids=[_LARGEST] * len(order),
            rows=lambda hook, layer: [],
            reused=_LARGEST,
            non_finite={
                (hook, layer): _LARGEST for hook, layers in sites.items() for layer in layers
            },
            **self._origin,
        )


def _header_bytes(largest: FinishedCapture) -> int:
    count = len(largest.positions)
    size = count * largest.hidden_size * ITEM_BYTES[largest.dtype]
    tensors = [
        (f"{hook}.{layer}", DTYPE_NAMES[largest.dtype], [count, largest.hidden_size], size)
        for hook, layers in largest.sites.items()
        for layer in layers
    ]
    tensors += [
        (name, DTYPE_NAMES["int64"], [count], 8 * count) for name in ("positions", "token_ids")
    ]
    return len(encode_header(tensors, largest.manifest(largest.sites)))
