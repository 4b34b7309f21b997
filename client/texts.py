"""Reads examples from files: CSV, JSON lines, JSON, Parquet, or a text per line.

A file's name may be followed by the columns to read: `poems.csv:verse`; where several are wanted,
in their order, `mood.csv:line,feeling`, or by name, `mood.csv:label=feeling,text=line`.
"""

import csv
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..schemas.base.errors import MidstreamError, Translated, invalid
from ..schemas.base.limits import MAX_DOCUMENT_BYTES
from ..schemas.base.records import json_or_text
from ..storage.formats.csv_rows import CsvRows
from .extras import need

#: Number of a line or row, and what it has.
Numbered = Iterator[tuple[int, Any]]

#: What is wanted → the column that is taken if none has that name.
_ALSO = {"text": "prompt"}
#: Rows of a Parquet file that are in memory together.
_BATCH = 256
_UNREADABLE = (ValueError, csv.Error, msgspec.DecodeError)
_FORM = "UTF-8; CSV files are named .csv, JSON lines .jsonl"
_NAMED = re.compile(r"(.+\.(?:csv|tsv|jsonl|ndjson|json|parquet|txt)):([^/]+)", re.IGNORECASE)


def split(source: str | Path) -> tuple[Path, str]:
    """Return the file and the columns that `FILE:COLUMNS` names."""
    match = _NAMED.fullmatch(str(source))
    return (Path(match[1]), match[2]) if match else (Path(source), "")


def read_texts(source: str | Path) -> Iterator[Any]:
    """Yield the texts of a file as they are asked for: its column `text`, else `prompt`, or that of
    `FILE:COLUMN`; the lines of a file that has no columns.

    Raises MidstreamError naming the line; OSError; MissingExtraError for Parquet without pyarrow.
    """
    return (row["text"] for row in read_rows(source, ["text"]))


def read_rows(
    source: str | Path, wanted: Sequence[str], required: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as they are asked for, with the columns of `FILE:COLUMNS` alone if
    there are such. `required`: each row has all that are wanted. Raises as `read_texts`.
    """
    path, columns = split(source)
    named = _named(columns, wanted)
    also = _ALSO if required else {}
    needed = wanted if required else [*named]
    reader = READERS.get(path.suffix.lower(), _lines)
    number = 0
    with Translated(
        _UNREADABLE,
        lambda error: invalid("FILE", f"{path} cannot be read after line {number}: {error}", _FORM),
    ):
        read = [*named.values()] if len(named) == len(wanted) else []
        for number, row in reader(path, read):
            if isinstance(row, str | list) and len(wanted) == 1:
                row = {wanted[0]: row}
            if not isinstance(row, dict):
                found = f"{path}, line {number} has no columns"
                raise invalid("FILE", found, f"rows with {', '.join(wanted)}")
            chosen = {name: name if name in row else also.get(name, name) for name in wanted}
            chosen |= named
            lacking = [name for name in needed if chosen[name] not in row]
            if lacking:
                absent = named.get(lacking[0], lacking[0])
                raise _lacks(path, number, absent, row, chosen)
            picked = {name: row[column] for name, column in chosen.items() if column in row}
            yield picked if named else row | picked


def _lacks(
    path: Path, number: int, absent: str, row: Mapping[str, Any], chosen: Mapping[str, str]
) -> MidstreamError:
    """Return the error of a row without a column. `chosen`: what is wanted → its column."""
    known = {name: column if column in row else "COLUMN" for name, column in chosen.items()}
    form = ",".join(f"{name}={column}" for name, column in known.items())
    return invalid(
        "FILE",
        f"{path}, line {number} has no {absent!r}: it has {', '.join(row)}",
        hint=f"name columns as in {path.name}:{form}",
    )


def _named(columns: str, wanted: Sequence[str]) -> dict[str, str]:
    """Return what is wanted → its column. Raises MidstreamError for what is not."""
    parts = [part for part in columns.split(",") if part]
    named = {}
    for in_order, part in zip(wanted, parts, strict=False):
        name, equals, column = part.partition("=")
        if equals:
            named[name] = column or name
        else:
            named[in_order] = part
    if not named.keys() <= {*wanted} or len(named) < len(parts):
        found = f"{columns!r} names other columns than are read"
        raise invalid("FILE", found, f"COLUMN or NAME=COLUMN of {', '.join(wanted)}")
    return named


# --- Formats


def decoded(text: str | bytes) -> Any:
    """Decode JSON. Raises ValueError with the line and column, which msgspec does not name."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        json.loads(text)
        raise


def _lines(path: Path, _: Sequence[str]) -> Numbered:
    """Yield the lines that are not blank; of JSON, the items of a list, or the object."""
    text = path.read_text(encoding="utf-8-sig")  # ends every line with a newline
    content = decoded(text) if path.suffix == ".json" else json_or_text(text)
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        content = filter(str.strip, text.split("\n"))
    return enumerate(content, 1)


def _csv(path: Path, _: Sequence[str]) -> Numbered:
    with path.open("rb") as file:
        yield from CsvRows(file)


def _json_lines(path: Path, _: Sequence[str]) -> Numbered:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_DOCUMENT_BYTES + 1), b""), 1):
            if len(line) > MAX_DOCUMENT_BYTES:
                raise ValueError(f"line {number} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
            if line.strip():
                yield number, msgspec.json.decode(line.removeprefix(BOM_UTF8))


def _parquet(path: Path, columns: Sequence[str]) -> Numbered:
    need("harvest", "reading Parquet")
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    names = [name for name in file.schema_arrow.names if name in columns]
    first = 1
    for batch in file.iter_batches(_BATCH, columns=names or None):
        yield from enumerate(batch.to_pylist(), first)
        first += len(batch)


#: File suffix → reader of the file's rows; of columns, only those given are needed.
READERS: dict[str, Callable[[Path, Sequence[str]], Numbered]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}
