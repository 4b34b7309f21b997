"""Reads a harvest's source: plans units with checksums of their documents, and reads one unit at a
time, which fails if its file was changed since.
"""

from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from zlib_ng import zlib_ng

from midstream.schemas.base.errors import MidstreamError, Translated, invalid
from midstream.schemas.base.limits import MAX_DOCUMENT_BYTES
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.settings.roots import allowed_roots
from midstream.schemas.settings.settings import Settings
from midstream.storage.store import ArtifactStore, Distant, Handle, open_store

from ..files.corpora import find, missing
from ..records.harvests import HarvestPlan, PlannedUnit, SourceFile, StoredHarvest
from .cut import CutDocument, fed
from .tables import READERS
from .tokens import HarvestTokenizer, SourceValue

#: Approximate bytes of text per token.
TOKEN_BYTES = 4
#: Least and most bytes that a unit's documents should have.
LEAST_WEIGHT = 4 << 10
MOST_WEIGHT = 16 << 20
#: A JSONL file is planned in pieces of this many bytes.
PIECE = 8 << 20
#: Units of a part; parts get more where there would be more than `MOST_PARTS` of them.
PART_UNITS = 8
MOST_PARTS = 1000


@dataclass
class TableCursor:
    """Position in a table: the next row."""

    file: int
    row: int
    values: Iterator[Any]


class SourceFiles:
    """The documents of one harvest. Blocking; use it from one thread at a time."""

    def __init__(
        self, harvest: StoredHarvest, bundle: TokenizerBundle, settings: Settings, vocabulary: int,
        show: Callable[[str], None] = lambda place: None,
    ) -> None:  # fmt: skip
        """`vocabulary`: the size of the model's vocabulary. `show` is called with each place that
        is about to be read.
        """
        self._show = show
        self._harvest = harvest
        self._source = harvest.source
        self.tokens = HarvestTokenizer(harvest, bundle, vocabulary)
        self._roots = allowed_roots(settings.harvest_sources, [harvest.root])
        self._store: ArtifactStore | None = open_store(harvest.root) if harvest.root else None
        tokens = harvest.shard_rows * harvest.positions.every
        self._target = min(MOST_WEIGHT, max(LEAST_WEIGHT, tokens * TOKEN_BYTES))
        self._cursor: TableCursor | None = None

    # Planning

    def plan(self) -> HarvestPlan:
        """Plan the whole source. Raises MidstreamError naming file and place."""
        files: list[SourceFile] = []
        result = (
            self._units(files) if self._source.lines is None else self._grouped(self._source.lines)
        )
        units = list(
            result
            if self._harvest.max_tokens is None
            else self._limited(files, result, self._harvest.max_tokens)
        )
        size = max(min(PART_UNITS, -(-len(units) // 4)), -(-len(units) // MOST_PARTS), 1)
        return HarvestPlan(files=files, units=units, parts=-(-len(units) // size))

    def _units(self, files: list[SourceFile]) -> Iterator[PlannedUnit]:
        """Yield the units of all files; each file is added to `files` before its units."""
        _, keys, kind = find(self._roots, self._source)
        first = 0
        for number, key in enumerate(keys):
            self._show(repr(key))
            with self._guarded(key), self._open(key) as handle:
                files.append(SourceFile(key=key, size=handle.size, stamp=handle.stamp))
                if kind == "jsonl":
                    units = self._plan_lines(handle)
                else:
                    units = self._grouped(self._table(kind, handle))
                for unit in units:
                    yield msgspec.structs.replace(unit, file=number, document=first)
                    self._show(f"{key!r} from document {first} on")
                    first += unit.documents

    # Planned in input order and only as far as the limit, which is then exact, regardless of the
    # number of workers.
    def _limited(
        self, files: list[SourceFile], units: Iterable[PlannedUnit], tokens: int
    ) -> Iterator[PlannedUnit]:
        """Yield the units that hold the first `tokens` tokens; the last has the tokens that remain
        as its limit.
        """
        for unit in units:
            within = msgspec.structs.replace(unit, tokens=tokens)
            documents = self._documents(files[unit.file] if files else None, within)
            local = sum(fed(document, self._harvest) for document in documents)
            yield unit if local < tokens else within
            tokens -= local
            if tokens <= 0:
                return

    def _plan_lines(self, handle: Handle) -> Iterator[PlannedUnit]:
        """Yield the units of a JSONL file; the caller sets their file and document numbers."""
        begun = planned = lines = at = crc32 = 0
        line_start = 0  # of the line that continues
        while piece := memoryview(handle.read(at, PIECE)):
            ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == 0x0A) + at + 1
            lengths = np.diff(np.concatenate([[line_start], ends, [at + len(piece)]]))
            long = lengths > MAX_DOCUMENT_BYTES
            if long.any():
                raise ValueError(
                    f"line {lines + int(np.argmax(long)) + 1} is longer than "
                    f"{MAX_DOCUMENT_BYTES >> 20} MiB"
                )
            summed = at
            for end in ends.tolist():
                lines += 1
                if end - begun >= self._target:
                    yield _unit(
                        begun,
                        end,
                        lines - planned,
                        end - begun,
                        zlib_ng.crc32(piece[summed - at : end - at], crc32),
                    )
                    begun = end
                    planned = lines
                    summed = end
                    crc32 = 0
            crc32 = zlib_ng.crc32(piece[summed - at :], crc32)
            line_start = int(ends[-1]) if len(ends) else line_start
            at += len(piece)
        if begun < at:
            if line_start < at:  # the last line has no newline
                lines += 1
            yield _unit(begun, at, lines - planned, at - begun, crc32)

    # A table's checksum is of its values as MessagePack: its bytes depend on how pyarrow batches
    # them. So planning reads a table once, and cuts by what its values really hold.
    def _grouped(self, values: Iterable[Any]) -> Iterator[PlannedUnit]:
        """Yield units of consecutive values, such as the request's lines."""
        start = row = weight = crc32 = 0
        for row, value in enumerate(values, 1):
            data = to_msgpack(value)
            weight = weight + len(data)
            crc32 = zlib_ng.crc32(data, crc32)
            if weight >= self._target:
                yield _unit(start, row, row - start, weight, crc32)
                start = row
                weight = 0
                crc32 = 0
        if start < row:
            yield _unit(start, row, row - start, weight, crc32)

    # Reading

    def read(self, file: SourceFile | None, unit: PlannedUnit) -> list[CutDocument]:
        """Return a unit's documents as token ids. `file`: None for lines of the request.

        Raises MidstreamError naming file and place, also if the file was changed since it was
        planned.
        """
        return list(self._documents(file, unit))

    def _documents(self, file: SourceFile | None, unit: PlannedUnit) -> Iterator[CutDocument]:
        if file is None:
            lines = self._source.lines or []
            values: Iterator[SourceValue] = (
                (row, lines[row], f"source.lines[{row}]") for row in range(unit.start, unit.stop)
            )
        else:
            read = self._lines if self._source.format == "jsonl" else self._rows
            values = self._named(unit, file, read(file, unit))
        yield from self.tokens.documents(values, unit.tokens)
        for _ in values:  # the checksum also covers documents beyond the limit of tokens
            pass

    def _named(
        self, unit: PlannedUnit, file: SourceFile, values: Iterator[Any]
    ) -> Iterator[SourceValue]:
        """Yield the values with their numbers, as many as were planned.

        Raises MidstreamError if there are fewer.
        """
        for row in range(unit.documents):
            with self._guarded(file.key):
                value = next(values, Ellipsis)
            if value is Ellipsis:
                raise _changed(
                    file,
                    f"it has {row} of {unit.documents} documents from document {unit.document} on",
                )
            yield unit.document + row, value, f"document {unit.document + row} (in {file.key})"
        with self._guarded(file.key):
            next(values, Ellipsis)  # compares the checksum

    def _lines(self, file: SourceFile, unit: PlannedUnit) -> Iterator[Any]:
        with self._open(file.key, file) as handle:
            data = handle.read(unit.start, unit.stop - unit.start)
        if len(data) != unit.stop - unit.start or zlib_ng.crc32(data) != unit.crc32:
            raise _changed(file, f"documents from {unit.document} on differ")
        at = 0
        for row in range(unit.documents):
            end = data.find(b"\n", at)
            yield self._line(data[at : end if end >= 0 else len(data)], row + unit.document)
            at = end + 1

    def _line(self, line: bytes, document: int) -> Any:
        line = line.removeprefix(BOM_UTF8)
        if not line.strip():
            return None
        with Translated(
            (msgspec.DecodeError, UnicodeDecodeError, RecursionError),
            lambda error: ValueError(f"document {document} is not JSON: {error}"),
        ):
            if not line.lstrip().startswith(b"{"):
                return msgspec.json.decode(line)
            value = self._member.decode(line).value
        if value is msgspec.UNSET:
            raise ValueError(f"document {document} has no member {self._source.field!r}")
        return value

    @cached_property
    def _member(self) -> msgspec.json.Decoder[Any]:
        """Return a decoder of one member of a line's object, which does not build the others."""
        line = msgspec.defstruct(
            "Line", [("value", Any, msgspec.UNSET)], rename={"value": self._source.field}
        )
        return msgspec.json.Decoder(line)

    def _rows(self, file: SourceFile, unit: PlannedUnit) -> Iterator[Any]:
        """Yield a unit's values from a table, which is read on from the end of the previous unit
        if this unit follows it.
        """
        cursor = self._cursor
        self._cursor = None  # after an error, the table is opened again
        if cursor is None or (cursor.file, cursor.row) != (unit.file, unit.start):
            cursor = TableCursor(
                unit.file,
                unit.start,
                self._table(self._source.format, self._open(file.key, file), unit.start),
            )
        crc32 = 0
        for value in cursor.values:
            crc32 = zlib_ng.crc32(to_msgpack(value), crc32)
            cursor.row += 1
            yield value
            if cursor.row == unit.stop:
                break
        if cursor.row < unit.stop:
            return
        if crc32 != unit.crc32:
            raise _changed(file, f"documents from {unit.document} on differ")
        self._cursor = cursor

    def _table(self, kind: str, handle: Handle, start: int = 0) -> Iterator[Any]:
        return READERS[kind](
            handle, not isinstance(self._store, Distant), self._source.field, start
        )

    def _open(self, key: str, planned: SourceFile | None = None) -> Handle:
        """Open a file. Raises MidstreamError if its size or stamp differs from `planned`."""
        assert self._store is not None, "lines have no files"
        handle = self._store.open(key, hold=False)
        if planned is not None and (handle.size, handle.stamp) != (planned.size, planned.stamp):
            handle.close()
            raise _changed(
                planned,
                (
                    f"it has {handle.size:,} bytes (stamp {handle.stamp}), and had "
                    f"{planned.size:,} (stamp {planned.stamp})"
                ),
            )
        return handle

    @contextmanager
    def _guarded(self, key: str) -> Iterator[None]:
        """Turn errors in the block into MidstreamError that names the file `key`."""
        try:
            yield
        except OSError as error:
            raise missing(error, key) from error
        except MidstreamError:
            raise
        except MemoryError as error:
            raise invalid(
                "source", f"{key!r}: reading it takes too much memory: {error}"
            ) from error
        except Exception as error:  # pyarrow raises its own, ValueErrors and KeyErrors
            raise invalid("source", f"{key!r}: {error}") from error


def _unit(start: int, stop: int, documents: int, weight: int, crc32: int) -> PlannedUnit:
    return PlannedUnit(
        file=0,
        start=start,
        stop=stop,
        document=start,
        documents=documents,
        weight=weight,
        crc32=crc32,
    )


def _changed(file: SourceFile, how: str) -> MidstreamError:
    return MidstreamError(
        "conflict",
        f"{file.key!r} was changed since the harvest was planned: {how}",
        field="source.path",
    )
