"""Reading a harvest's source: units are planned from sizes alone, and read one at a time."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from ...broker.artifacts.chat_templates import in_parts, template_environment
from ...broker.artifacts.corpora import find, missing, roots_of
from ...schemas.errors import MidstreamError
from ...schemas.harvests import Plan, PlannedUnit, StoredHarvest
from ...schemas.limits import MAX_DOCUMENT_BYTES
from ...schemas.models import TokenizerBundle
from ...schemas.settings import Settings
from ...storage.store import ArtifactStore, Handle, open_store
from .harvest_cut import Document, fed, within

#: Bytes of a text, about, that make a token.
TOKEN_BYTES = 4
#: Bytes of a unit's documents: so many at least and at most.
LEAST_WEIGHT, MOST_WEIGHT = 4 << 10, 16 << 20
#: A JSONL file is looked through in pieces of this many bytes.
PIECE = 8 << 20
#: Units of a part, while there are few; beyond `MOST_PARTS` parts they are larger.
PART_UNITS, MOST_PARTS = 8, 1000
#: Files and row groups that are kept open.
OPEN = 2


class HarvestSource:
    """The documents of one harvest. Blocking; one thread at a time."""

    def __init__(self, harvest: StoredHarvest, bundle: TokenizerBundle, settings: Settings) -> None:
        self._harvest, self._bundle, self._source = harvest, bundle, harvest.source
        self._roots = roots_of(settings, [harvest.root])
        self._store: ArtifactStore | None = open_store(harvest.root) if harvest.root else None
        tokens = max(1, (harvest.shards.mib << 20) // harvest.row_bytes) * harvest.positions.every
        self._target = min(MOST_WEIGHT, max(LEAST_WEIGHT, tokens * TOKEN_BYTES))
        self._table = lru_cache(maxsize=OPEN)(self._read_table)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._bundle.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def special(self, name: str) -> int | None:
        """The id of the model's token of this name (`bos_token`, `eos_token`); None where it has none."""
        text = self._bundle.special_tokens.get(name)
        found: int | None = None if text is None else self.tokenizer.token_to_id(text)
        return found

    # Planning

    def plan(self) -> Plan:
        """The units of the whole source. Raises MidstreamError naming file and place."""
        files: list[str] = []
        if self._source.lines is not None:
            units = list(self._grouped([_weight(line) for line in self._source.lines]))
        else:
            _, files, kind = find(self._roots, self._source)
            units, first = [], 0
            for number, key in enumerate(files):
                of_file, documents = self._guarded(key, partial(PLANS[kind], self, number, key, first))
                units += of_file
                first += documents
        plan = Plan(files=files, units=units, parts=0)
        if self._harvest.max_tokens is not None:
            units = list(self._limited(plan, self._harvest.max_tokens))
        size = max(min(PART_UNITS, -(-len(units) // 4)), -(-len(units) // MOST_PARTS), 1)
        return Plan(files=files, units=units, parts=-(-len(units) // size))

    def _limited(self, plan: Plan, tokens: int) -> Iterator[PlannedUnit]:
        """The units that the first `tokens` tokens are in."""
        for unit in plan.units:
            here = sum(fed(document, self._harvest) for document in self.read(plan, unit))
            yield unit if here <= tokens else msgspec.structs.replace(unit, tokens=tokens)
            tokens -= here
            if tokens <= 0:
                return

    def _grouped(self, weights: Sequence[int]) -> Iterator[PlannedUnit]:
        """Units of consecutive lines of the request."""
        start = total = 0
        for stop, weight in enumerate(weights, 1):
            total += weight
            if total >= self._target or stop == len(weights):
                yield PlannedUnit(file=0, start=start, stop=stop, document=start, weight=total)
                start, total = stop, 0

    def _even(self, file: int, first: int, rows: int, size: int) -> Iterator[PlannedUnit]:
        """Units of the rows of a file, which take `size` bytes together."""
        each = max(1, size // max(1, rows))
        step = max(1, self._target // each)
        for at in range(0, rows, step):
            count = min(step, rows - at)
            yield PlannedUnit(file=file, start=at, stop=at + count, document=first + at, weight=count * each)

    def _plan_lines(self, file: int, key: str, first: int) -> tuple[list[PlannedUnit], int]:
        units: list[PlannedUnit] = []
        begun, document, lines = 0, first, 0
        last = b"\n"
        line_start = 0  # of the line that goes on
        with self._open(key) as handle:
            at = 0
            while piece := handle.read(at, PIECE):
                ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == 0x0A) + at + 1
                for end, number in zip(ends.tolist(), range(lines + 1, lines + 1 + len(ends)), strict=True):
                    line_start = end
                    if end - begun >= self._target:
                        units.append(PlannedUnit(file=file, start=begun, stop=end, document=document, weight=end - begun))
                        begun, document = end, first + number
                lines += len(ends)
                at += len(piece)
                last = piece[-1:]
                if at - line_start > MAX_DOCUMENT_BYTES:
                    raise ValueError(f"line {lines + 1} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
        lines += last != b"\n"
        if begun < at:
            units.append(PlannedUnit(file=file, start=begun, stop=at, document=document, weight=at - begun))
        return units, lines

    def _plan_parquet(self, file: int, key: str, first: int) -> tuple[list[PlannedUnit], int]:
        meta = self._parquet(key).metadata
        names = sorted({_column(meta, at) for at in range(meta.num_columns)})
        if self._source.field not in names:
            raise ValueError(f"it has no column {self._source.field!r}: it has {', '.join(names)}")
        groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
        columns = [at for at in range(meta.num_columns) if _column(meta, at) == self._source.field]
        size = sum(group.column(at).total_uncompressed_size for group in groups for at in columns)
        return list(self._even(file, first, meta.num_rows, size)), meta.num_rows

    def _plan_arrow(self, file: int, key: str, first: int) -> tuple[list[PlannedUnit], int]:
        table = self._table(key, -1)
        return list(self._even(file, first, table.num_rows, table.nbytes)), table.num_rows

    # Reading

    def read(self, plan: Plan, unit: PlannedUnit) -> list[Document]:
        """The documents of a unit as token ids. Raises MidstreamError naming file and place."""
        if self._source.lines is not None:
            raw: list[Any] = list(self._source.lines[unit.start : unit.stop])
            where: Callable[[int], str] = lambda row: f"source.lines[{unit.start + row}]"  # noqa: E731
        else:
            key = plan.files[unit.file]
            raw = self._guarded(key, lambda: self._rows(key, unit))
            where = lambda row: f"document {unit.document + row} (in {key})"  # noqa: E731
        ids = self._token_ids(raw, where)
        return within([Document(unit.document + row, of_row) for row, of_row in enumerate(ids)], self._harvest, unit.tokens)

    def _rows(self, key: str, unit: PlannedUnit) -> list[Any]:
        if self._source.format == "jsonl":
            with self._open(key) as handle:
                data = handle.read(unit.start, unit.stop - unit.start)
            if len(data) != unit.stop - unit.start:
                raise ValueError("it has become shorter since the harvest was planned")
            lines = data.split(b"\n")
            if data.endswith(b"\n"):
                lines.pop()
            return [self._line(line, row + unit.document) for row, line in enumerate(lines)]
        if self._source.format == "parquet":
            return self._parquet_rows(key, unit.start, unit.stop)
        column = self._table(key, -1).column(self._source.field)
        return list(column.slice(unit.start, unit.stop - unit.start).to_pylist())

    def _line(self, line: bytes, document: int) -> Any:
        if not line.strip():
            return None
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"document {document} is not JSON: {error}") from error
        if isinstance(value, dict):
            if self._source.field not in value:
                raise ValueError(f"document {document} has no member {self._source.field!r}")
            return value[self._source.field]
        return value

    def _parquet_rows(self, key: str, start: int, stop: int) -> list[Any]:
        meta, found, first = self._parquet(key).metadata, [], 0
        for number in range(meta.num_row_groups):
            rows = meta.row_group(number).num_rows
            if first < stop and first + rows > start:
                low, high = max(start, first), min(stop, first + rows)
                found += self._table(key, number).column(0).slice(low - first, high - low).to_pylist()
            first += rows
        return found

    def _read_table(self, key: str, group: int) -> Any:
        """A row group's column of a Parquet file; -1: the whole of an Arrow file, mapped where the store can."""
        import pyarrow as pa

        if group >= 0:
            return self._parquet(key).read_row_group(group, columns=[self._source.field])
        view = pa.py_buffer(self._open(key).view())
        try:
            return pa.ipc.open_file(view).read_all()
        except pa.ArrowInvalid:  # datasets' files are streams
            return pa.ipc.open_stream(view).read_all()

    def _parquet(self, key: str) -> Any:
        import pyarrow.parquet as parquet

        return parquet.ParquetFile(_HandleFile(self._open(key)))

    def _open(self, key: str) -> Handle:
        assert self._store is not None, "lines have no files"
        return self._store.open(key, hold=False)

    def _guarded(self, key: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except OSError as error:
            raise missing(error, key) from error
        except MidstreamError:
            raise
        except Exception as error:  # pyarrow raises its own, ValueErrors and KeyErrors
            raise MidstreamError("invalid_request", f"{key!r}: {error}", field="source") from error

    # Tokens

    def _token_ids(self, raw: Sequence[Any], where: Callable[[int], str]) -> list[np.ndarray]:
        if self._source.kind == "tokens" or (any(isinstance(value, list) for value in raw) and self._source.kind == "text"):
            return [self._as_ids(value, where(row)) for row, value in enumerate(raw)]
        chat = self._source.kind == "chat"
        texts = [self._rendered(value, where(row)) if chat else _text(value, where(row)) for row, value in enumerate(raw)]
        special = self._harvest.cut.special_tokens and not chat  # a template writes them itself
        return [np.array(made.ids, np.int64) for made in self.tokenizer.encode_batch_fast(texts, add_special_tokens=special)]

    def _as_ids(self, value: Any, where: str) -> np.ndarray:
        if isinstance(value, str):
            return np.array(self.tokenizer.encode(value, add_special_tokens=self._harvest.cut.special_tokens).ids, np.int64)
        try:
            ids = np.array(value or [], dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            ids = np.full(1, -1)
        if ids.ndim != 1 or (ids < 0).any() or (ids >= self.tokenizer.get_vocab_size()).any():
            raise MidstreamError("invalid_request", f"{where} is not a list of the model's token ids", field="source.kind")
        return ids

    @cached_property
    def _template(self) -> Any:
        if self._bundle.chat_template is None:
            raise MidstreamError("invalid_request", "the model has no chat template", field="source.kind", allowed="text, tokens")
        return template_environment().from_string(self._bundle.chat_template)

    def _rendered(self, messages: Any, where: str) -> str:
        try:
            if self._bundle.parts:
                messages = [{**message, "content": in_parts(message["content"])} for message in messages]
            text = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=self._harvest.generate is not None,
                **self._bundle.special_tokens,
            )
            return str(text)
        except MidstreamError:
            raise
        except Exception as error:  # whatever a template may raise, it is this conversation that it refuses
            raise MidstreamError(
                "invalid_request", f"{where}: the model's chat template rejects it: {error}", field="source.kind"
            ) from error


PLANS: dict[str, Callable[[HarvestSource, int, str, int], tuple[list[PlannedUnit], int]]] = {
    "jsonl": HarvestSource._plan_lines,
    "parquet": HarvestSource._plan_parquet,
    "arrow": HarvestSource._plan_arrow,
}


class _HandleFile(io.RawIOBase):
    """An object of a store as a file that can be read and sought."""

    def __init__(self, handle: Handle) -> None:
        self._handle, self._at = handle, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._handle.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._handle.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._handle.close()
        super().close()


def _column(meta: Any, index: int) -> str:
    """The name of a column; of a list, without what Parquet puts behind it."""
    return str(meta.schema.column(index).path).split(".")[0]


def _weight(line: str | Iterable[int]) -> int:
    return max(1, len(line.encode()) if isinstance(line, str) else TOKEN_BYTES * sum(1 for _ in line))


def _text(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MidstreamError("invalid_request", f"{where} is not a text", field="source.kind", allowed="text, chat, tokens")
    return value
