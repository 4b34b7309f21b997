"""Reads the rows of CSV files: text in UTF-8 whose first line has the columns' names."""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from ...schemas.base.limits import MAX_DOCUMENT_BYTES


class CsvRows:
    """The rows of a file, one of which is in memory at a time. Cells are separated by what the
    first line has most of: tabs, semicolons or commas. Raises ValueError and csv.Error.
    """

    def __init__(self, file: BinaryIO) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_DOCUMENT_BYTES))
        # spreadsheets begin their files with a byte order mark
        self._file = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        self._length = 0  # of the row that is being read
        first = self._file.readline(MAX_DOCUMENT_BYTES + 1)
        if first.lstrip().startswith("{"):
            raise ValueError("line 1 is JSON: files of JSON lines are named .jsonl")
        unquoted = "".join(first.split('"')[::2])
        delimiter = max("\t;,", key=unquoted.count)
        self._table = csv.reader(self._lines(first), delimiter=delimiter, strict=True)
        self.names = [name.strip() for name in next(self._table, [])]
        repeated = [name for name, count in Counter(self.names).items() if name and count > 1]
        if repeated:
            raise ValueError(f"line 1 names {repeated[0]!r} twice: a column has a name of its own")

    def _lines(self, line: str) -> Iterator[str]:
        while line:
            self._length += len(line)
            if self._length > MAX_DOCUMENT_BYTES:
                row = f"the row after line {self._table.line_num}"
                raise ValueError(f"{row} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
            yield line
            line = self._file.readline(MAX_DOCUMENT_BYTES + 1)

    def __iter__(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield the number of each row's last line, and its cells that are not empty."""
        for cells in self._table:
            self._length = 0
            if len(cells) > len(self.names):
                raise ValueError(
                    f"line {self._table.line_num} has {len(cells)} cells, the first line "
                    f"{len(self.names)}: texts with separators are written in quotes"
                )
            row = {name: cell for name, cell in zip(self.names, cells, strict=False) if cell}
            if row:
                yield self._table.line_num, row
