"""Streams: rows of long captures, written to a file as they land, so that a request holds a window
of them in memory, not its length.

The file has the tensors of the blob one behind the other, each with room for every position that
the request may capture, behind room for the longest header. When the request has ended, the tensors
are moved together, and the header is written last. Where the store can take the file as the
capture's object, it does; elsewhere, and for other layouts, the rows are read from it as from
memory.
"""

import itertools
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from .capture import Extent, Recording, Selection, Stretch, bytes_of, contiguous, stretches

#: Rows are handed to the writers in parts of about this share of the window.
_PARTS = 8
#: Tensors are moved together in pieces of this many bytes, and the file's CRC32 is taken of such
#: pieces.
_PIECE = 4 << 20
#: A run of fewer positions is gathered with its neighbours: a write for each of its rows would cost
#: more than copying them.
_SHORT = 16
#: The most that a token id, or a count of rows, can be.
_LARGEST = (1 << 31) - 1


class Stream:
    """The file of one recording.

    `push` is called by the model's thread, the rest by writers, one at a time.
    """

    def __init__(
        self,
        recording: Recording,
        order: np.ndarray,
        stored_as: torch.dtype,
        begin: Callable[[], tuple[Draft, int]],
    ) -> None:
        """`order`: int64, ascending: every position that may be captured.

        `begin()`: the file, and the bytes reserved for its header.
        """
        self._ports = dict(recording.ports)
        self._numbers = np.fromiter(self._ports.values(), dtype=np.int64, count=len(self._ports))
        self._num_ports = len(recording.mask)
        self._chosen = recording.chosen
        self._order, self._stored_as, self._begin = order, stored_as, begin
        self._draft: Draft | None = None
        self._header = self._row_bytes = 0
        self._written = np.zeros(len(order), dtype=bool)
        # dtype → position → places of rows that are not finite in it
        self._bad: dict[torch.dtype, dict[int, set[int]]] = {}
        self._queue: deque[list[Extent]] = deque()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._dropped = False
        self.begun = False  # whether rows have left the recording

    def push(self, runs: list[Extent]) -> None:
        """Take over these runs, in the order in which they were recorded: of a position recorded
        twice, the last row counts.
        """
        self.begun = True
        self._queue.append(runs)

    def drop(self) -> None:
        """The capture has failed: nothing more is written. Does not wait."""
        self._dropped = True
        self._queue.clear()

    def flush(self) -> None:
        """Write what was pushed, and let go of it. What goes wrong is raised by `seal`."""
        with self._lock:
            while self._queue:
                runs = self._queue.popleft()
                if self._error is None and not self._dropped:
                    try:
                        self._write(runs)
                    except Exception as error:
                        # its place on the disk is free immediately
                        self._error, self._draft = error.with_traceback(None), None
            if self._dropped:
                self._draft = None

    def seal(
        self, recording: Recording, expected: set[int], stop: int
    ) -> "tuple[list[int], int, SealedRows]":
        """Write what is left, and close the file to the positions below `stop`: (those, how many
        were reused, their rows).

        Raises what went wrong, OSError and others.
        """
        self.push(recording.runs)
        self.flush()
        with self._lock:
            if self._error is not None:
                raise self._error
            if (
                extra := {
                    int(position) for position in self._order[self._written] if position < stop
                }
                - expected
            ):
                raise RuntimeError(f"positions {sorted(extra)[:8]} were recorded but not requested")
            lacking = expected - {int(position) for position in self._order[self._written]}
            reused = {
                position: run
                for run in recording.reused
                for position in run.positions
                if position in lacking
            }
            for stretch in stretches(reused, sorted(reused)):
                self._put(stretch.run, stretch.offset, stretch.count)
            kept = np.flatnonzero(self._written & (self._order < stop))
            positions: list[int] = self._order[kept].tolist()
            assert self._draft is not None, "an empty stream was sealed"
            self._move_together(kept)
            rows = SealedRows(
                self._draft, self._ports, positions, self._row_bytes, self._header, self._bad
            )
            return positions, len(reused), rows

    def _write(self, runs: Sequence[Extent]) -> None:
        """Neighbours in one piece."""
        for _, group in itertools.groupby(_numbered(runs), key=lambda item: item[0]):
            of_group = [run for _, run in group]
            if len(of_group) == 1:
                self._put(of_group[0], 0, of_group[0].count)
                continue
            positions = [position for run in of_group for position in run.positions]
            stretches = [Stretch(run, 0, run.count) for run in of_group]
            for run in Selection(self._numbers, self._num_ports, positions, stretches).copy():
                self._put(run, 0, run.count)

    def _put(self, run: Extent, offset: int, count: int) -> None:
        """Rows of `count` positions from the run's `offset` on.

        Those that no capture of the request can have are left out.
        """
        run.step.landing.wait()
        position = run.first_position + offset
        at = int(np.searchsorted(self._order, position))
        count = min(count, len(self._order) - at)
        if count <= 0:
            return
        if int(self._order[at]) != position:
            raise RuntimeError(f"position {position} was recorded but not requested")
        slab = run.step.slab
        if self._draft is None:
            self._draft, self._header = self._begin()
            self._row_bytes = (
                sum(len(range(slab.shape[1])[columns]) for columns in self._chosen)
                * self._stored_as.itemsize
            )
        first_rows = (run.first_rows(self._numbers) + offset).tolist()
        stride = len(self._order) * self._row_bytes
        for place, first in enumerate(first_rows):
            rows = bytes_of(slab[first : first + count], self._stored_as, self._chosen)
            self._draft.write(self._header + place * stride + at * self._row_bytes, [rows])
        self._written[at : at + count] = True
        for dtype in {slab.dtype, self._stored_as}:
            self._note(
                run.step.unsound(dtype),
                self._bad.setdefault(dtype, {}),
                range(position, position + count),
                first_rows,
            )

    def _note(
        self,
        unsound: np.ndarray | None,
        bad: dict[int, set[int]],
        positions: range,
        first_rows: list[int],
    ) -> None:
        for position in positions if bad else ():  # computed again
            bad.pop(position, None)
        if unsound is None:
            return
        for place, first in enumerate(first_rows):
            for offset in np.flatnonzero(unsound[first : first + len(positions)]).tolist():
                bad.setdefault(positions[offset], set()).add(place)

    def _move_together(self, kept: np.ndarray) -> None:
        """Close the holes that positions left which were not captured: towards the beginning, so
        nothing is written over too early.
        """
        assert self._draft is not None
        stride, to = len(self._order) * self._row_bytes, self._header
        runs = contiguous(kept)
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


def _numbered(runs: Sequence[Extent]) -> Iterator[tuple[int, Extent]]:
    """Each run with the number of its group: short runs whose positions follow one another belong
    together.
    """
    number, before = 0, None
    for run in runs:
        if before is None or before.positions.stop != run.first_position or run.count >= _SHORT:
            number += 1
        yield number, run
        before = run if run.count < _SHORT else None


class SealedRows:
    """The rows of an ended request in its file: a finished capture's `rows`, and its blob where the
    store takes the file.
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
        """(hook, layer, position) of the rows that are not finite as `dtype`."""
        held = set(self._positions) if self._bad.get(dtype) else set()
        for position, places in self._bad.get(dtype, {}).items():
            for place in sorted(places) if position in held else ():
                yield *self._sites[place], position

    def non_finite(self, dtype: torch.dtype) -> dict[tuple[str, int], int]:
        """(hook, layer) → how many of its rows are not finite as `dtype`, where some are."""
        return dict(Counter((hook, layer) for hook, layer, _ in self.unsound(dtype)))

    def __call__(self, hook: str, layer: int) -> list[memoryview]:
        if self._view is None:
            self._view = self._draft.view()
        first = self._header + self._sites.index((hook, layer)) * self._tensor
        return [self._view[first : first + self._tensor]]

    def blob(self, capture: FinishedCapture) -> Blob | None:
        """The whole file as the capture's blob; None where the store cannot take it."""
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
        *,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`scratch`: its own file, for what the store does not take.

        `window`: bytes of a capture's rows that stay in memory.
        """
        self._store, self._scratch, self._window, self._origin = store, scratch, window, origin
        self._hidden_size, self._dtype = hidden_size, dtype

    @property
    def part(self) -> int:
        """Bytes of rows that leave a recording together."""
        return max(1, self._window // _PARTS)

    def of(self, spec: RankSpec, recording: Recording, max_tokens: int) -> Stream | None:
        """None for a capture that fits the window, or may have no end.

        `max_tokens`: generated at most; 0: unknown.
        """
        if not max_tokens or recording.capture.scored:
            return None
        chosen = recording.capture.select(
            0, spec.prompt_tokens + max_tokens - 1, spec.prompt_tokens
        )
        row = len(recording.ports) * recording.width(self._hidden_size) * self._dtype.itemsize
        if len(chosen) * row <= self._window:
            return None
        order = (
            np.arange(chosen.start, chosen.stop, chosen.step)
            if isinstance(chosen, range)
            else np.array(chosen, dtype=np.int64)
        )
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

        return Stream(recording, order, stored_as, begin)

    def _largest(
        self, spec: RankSpec, recording: Recording, order: np.ndarray, stored_as: torch.dtype
    ) -> FinishedCapture:
        """Return a file of no rows with the longest manifest that the capture may have."""
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
