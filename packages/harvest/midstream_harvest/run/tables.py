"""Reads a column of Parquet, Arrow and CSV files row by row; one page or batch and one value are in
memory at a time.
"""

import io
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from midstream.schemas.base.limits import MAX_DOCUMENT_BYTES
from midstream.storage.formats.csv_rows import CsvRows
from midstream.storage.store import Handle

#: Rows of a Parquet file that are decoded together at most.
BATCH_ROWS = 1024
#: About how many bytes these have at most.
BATCH_BYTES = 4 << 20
#: Bytes of a CSV file that are read together.
PIECE = 1 << 20
#: First bytes of an Arrow file in the file format; the stream format has none.
MAGIC = b"ARROW1"


def parquet_values(handle: Handle, mapped: bool, field: str, start: int) -> Iterator[Any]:
    """Yields the column's values from row `start` on. Raises ValueError and pyarrow's errors."""
    import pyarrow.parquet as parquet

    meta = parquet.read_metadata(HandleFile(handle))
    columns = [meta.schema.column(at) for at in range(meta.num_columns)]
    # Read texts as dictionary arrays, so that repeated values are in memory once.
    texts = (
        [field]
        if any(column.path == field and column.physical_type == "BYTE_ARRAY" for column in columns)
        else []
    )
    file = parquet.ParquetFile(HandleFile(handle), metadata=meta, read_dictionary=texts)
    # a list's path continues below its column: "text.list.element"
    names = [str(column.path).split(".")[0] for column in columns]
    _check_field(field, sorted(set(names)))
    first = 0
    for number in range(meta.num_row_groups):
        group = meta.row_group(number)
        if first + group.num_rows > start:
            item = sum(
                group.column(at).total_uncompressed_size
                for at, name in enumerate(names)
                if name == field
            ) // max(1, group.num_rows)
            if item > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"the values of row group {number} (from row {first} on) have {item:,} bytes "
                    f"each{TOO_LARGE}"
                )
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, item)))
            at = first
            for batch in file.iter_batches(batch_size=rows, row_groups=[number], columns=[field]):
                yield from _values(batch.column(0), at, max(0, start - at))
                at += batch.num_rows
        first += group.num_rows


def arrow_values(handle: Handle, mapped: bool, field: str, start: int) -> Iterator[Any]:
    """Yields the column's values from row `start` on. Raises ValueError and pyarrow's errors.

    `mapped`: `handle.view` maps the file instead of reading all of it into memory.
    """
    import pyarrow as pa

    source: Any = (
        pa.BufferReader(pa.py_buffer(handle.view()))
        if mapped
        else pa.PythonFile(HandleFile(handle), "r")
    )
    if handle.read(0, len(MAGIC)) == MAGIC:
        file = pa.ipc.open_file(source)
        schema = file.schema
        batches = (file.get_batch(number) for number in range(file.num_record_batches))
    else:  # files of Hugging Face's `datasets` have the stream format
        stream = pa.ipc.open_stream(source)
        schema = stream.schema
        batches = iter(stream)
    _check_field(field, schema.names)
    at = 0
    for batch in batches:
        if at + batch.num_rows > start:
            yield from _values(batch.column(field), at, max(0, start - at))
        at += batch.num_rows


def csv_values(handle: Handle, mapped: bool, field: str, start: int) -> Iterator[Any]:
    """Yields the column's values from row `start` on; None for an empty cell. Reads the rows before
    it too: their places are not known. Raises ValueError and csv.Error.
    """
    rows = CsvRows(io.BufferedReader(HandleFile(handle), PIECE))
    _check_field(field, rows.names)
    return (row.get(field) for _, row in islice(rows, start, None))


READERS: dict[str, Callable[[Handle, bool, str, int], Iterator[Any]]] = {
    "parquet": parquet_values,
    "arrow": arrow_values,
    "csv": csv_values,
}
TOO_LARGE = f": a document may have at most {MAX_DOCUMENT_BYTES:,}"


def _check_field(field: str, names: list[str]) -> None:
    if field not in names:
        raise ValueError(f"it has no column {field!r}: it has {', '.join(names)}")


def _values(array: Any, first: int, start: int) -> Iterator[Any]:
    """Yields the array's values from its row `start` on; `first`: number of its first row."""
    import pyarrow as pa

    for row in range(start, len(array)):
        scalar = array[row]
        if isinstance(scalar, pa.DictionaryScalar):
            scalar = scalar.value
        if not scalar.is_valid:
            yield None
            continue
        text = hasattr(scalar, "as_buffer")
        size = scalar.as_buffer().size if text else array.slice(row, 1).nbytes
        if size > MAX_DOCUMENT_BYTES:
            raise ValueError(f"row {first + row} has {size:,} bytes{TOO_LARGE}")
        items = scalar.values if isinstance(scalar, pa.ListScalar) else None
        if items is not None and pa.types.is_integer(items.type) and not items.null_count:
            # ten times as fast as `as_py`
            yield items.to_numpy(zero_copy_only=False).tolist()
        else:
            yield scalar.as_py()


class HandleFile(io.RawIOBase):
    """A store's object as a readable, seekable file."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._handle.size}[whence]
        )
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._handle.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
