"""Values of a column of Parquet and Arrow files, row by row: what is in memory is a page or a
batch, and one value.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

from ...schemas.base.limits import MAX_DOCUMENT_BYTES
from ...storage.store import Handle

#: Rows of a Parquet file that are decoded together, and about how many bytes of them.
BATCH_ROWS, BATCH_BYTES = 1024, 4 << 20
#: The beginning of an Arrow file that is no stream.
MAGIC = b"ARROW1"


def parquet_values(handle: Handle, mapped: bool, field: str, start: int) -> Iterator[Any]:
    """From row `start` on. Raises ValueError and pyarrow's errors."""
    import pyarrow.parquet as parquet

    meta = parquet.read_metadata(HandleFile(handle))
    columns = [meta.schema.column(at) for at in range(meta.num_columns)]
    # Values of a dictionary are not repeated in memory.
    texts = (
        [field]
        if any(column.path == field and column.physical_type == "BYTE_ARRAY" for column in columns)
        else []
    )
    file = parquet.ParquetFile(HandleFile(handle), metadata=meta, read_dictionary=texts)
    # of a list, without what follows
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
    """Likewise. `mapped`: the file is not read into memory as a whole."""
    import pyarrow as pa

    source: Any = (
        pa.BufferReader(pa.py_buffer(handle.view()))
        if mapped
        else pa.PythonFile(HandleFile(handle), "r")
    )
    if handle.read(0, len(MAGIC)) == MAGIC:
        file = pa.ipc.open_file(source)
        schema, batches = (
            file.schema,
            (file.get_batch(number) for number in range(file.num_record_batches)),
        )
    else:  # datasets' files are streams
        stream = pa.ipc.open_stream(source)
        schema, batches = stream.schema, iter(stream)
    _check_field(field, schema.names)
    at = 0
    for batch in batches:
        if at + batch.num_rows > start:
            yield from _values(batch.column(field), at, max(0, start - at))
        at += batch.num_rows


READERS: dict[str, Callable[[Handle, bool, str, int], Iterator[Any]]] = {
    "parquet": parquet_values,
    "arrow": arrow_values,
}
TOO_LARGE = f": a document may have {MAX_DOCUMENT_BYTES:,}"


def _check_field(field: str, names: list[str]) -> None:
    if field not in names:
        raise ValueError(f"it has no column {field!r}: it has {', '.join(names)}")


def _values(array: Any, first: int, start: int) -> Iterator[Any]:
    """From row `start` of the array on; `first`: its first row's number."""
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
            yield items.to_numpy(zero_copy_only=False).tolist()  # ten times as fast
        else:
            yield scalar.as_py()


class HandleFile(io.RawIOBase):
    """An object of a store as a file that can be read and sought."""

    def __init__(self, handle: Handle) -> None:
        self._handle, self._at = handle, 0

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
