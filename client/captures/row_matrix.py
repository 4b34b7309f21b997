"""Joins captured rows of many requests into one matrix: for probes, differences of means, or an
SAE's training batch.
"""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ...schemas.base.errors import MidstreamError, invalid
from ...schemas.prompts.selectors import as_ranges
from .reader import CaptureReader

#: The rows to take from a request: its last or first captured row, the mean of its rows, all rows,
#: or the row at a token position.
RowName = Literal["last", "first", "mean", "all"]
RowChoice = RowName | int
#: The most ranges of positions that an error message lists.
SHOWN_RANGES = 16


class Sample(NamedTuple):
    """The origin of a row of a matrix."""

    job: str
    request: int
    position: int | None  # absolute token position; None: a mean over positions


class SiteRows(np.ndarray):
    """Rows `[samples, hidden]` that know their site; so do their slices."""

    layer: int | None = None
    hook: str | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.layer = getattr(source, "layer", None)
        self.hook = getattr(source, "hook", None)


def matrix(
    readers: "CaptureReader | Iterable[CaptureReader]",
    layer: int,
    hook: str | None = None,
    rows: RowChoice = "last",
) -> SiteRows:
    """Return float32 `[samples, hidden]` over all requests of the readers, in the order of
    `samples`. The array has the rows' `layer` and `hook`.

    `layer`, `hook`: as for `CaptureReader.array`. `rows`: "last" (one row per request: its last
    captured position), "first", "mean" (over its captured positions), "all" (every captured
    position), or a token position. A negative position counts from the prompt's end, as in a
    request's `positions`: -1 is the last token of the prompt.

    Warns if "first" is not the prompt's first token, or "last" lies before the prompt's last.

    Raises MidstreamError: `invalid_request` for invalid `rows` or for rows of different width,
    `not_found` if a request lacks the layer or the position, and what `CaptureReader.requests`
    raises if requests are missing.
    """
    parts = []
    for reader, request in _each(readers):
        parts.append(_chosen(reader.array(layer, hook, request), reader, request, rows))
        site = reader.site(layer, hook, request)
    if not parts:
        raise MidstreamError("not_found", "there are no captured rows")
    widths = sorted({part.shape[1] for part in parts})
    if len(widths) > 1:
        raise invalid(
            "readers",
            f"rows of different width cannot form one matrix: {widths}",
            allowed="captures of a single model",
        )
    result: SiteRows = np.concatenate(parts).view(SiteRows)
    result.hook, result.layer = site
    return result


def samples(
    readers: "CaptureReader | Iterable[CaptureReader]", rows: RowChoice = "last"
) -> list[Sample]:
    """Return the job, request and token position of each row of `matrix(readers, …, rows=rows)`."""
    result = []
    for reader, request in _each(readers):
        positions = reader.positions(request)
        if rows == "mean":
            result.append(Sample(reader.job, request, None))
        else:
            result += [
                Sample(reader.job, request, positions[index])
                for index in _indices(reader, request, rows)
            ]
    return result


def _each(
    readers: "CaptureReader | Iterable[CaptureReader]",
) -> Iterator[tuple[CaptureReader, int]]:
    every = [readers] if isinstance(readers, CaptureReader) else readers
    return ((reader, request) for reader in every for request in reader.requests())


def _chosen(array: np.ndarray, reader: CaptureReader, request: int, rows: RowChoice) -> np.ndarray:
    """Select from one request's `[positions, hidden]`; return `[samples, hidden]`."""
    if rows == "mean":
        if not len(array):
            raise _no_rows(request)
        mean: np.ndarray = array.mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
        return mean
    return array[_indices(reader, request, rows)]


def _indices(reader: CaptureReader, request: int, rows: RowChoice) -> list[int]:
    """Return the indices of the requested rows among the request's captured rows. Warns if the
    first or last of them is not the prompt's.
    """
    positions = reader.positions(request)
    if isinstance(rows, str):
        if rows not in get_args(RowName):
            raise invalid(
                "rows",
                f"{rows!r} is not a selection of rows",
                allowed=f"{', '.join(get_args(RowName))}, or a token position",
            )
        if rows == "all":
            return list(range(len(positions)))
        if not positions:
            raise _no_rows(request)
        if rows == "first":
            index = 0
            inside = positions[0] > 0
        else:
            index = len(positions) - 1
            inside = positions[index] < reader.manifest(request).prompt_tokens - 1
        if inside:
            warnings.warn(
                f'rows="{rows}" takes the {rows} captured row, which is not the prompt\'s '
                f"{rows} token",
                stacklevel=4,
            )
        return [index]
    position = rows if rows >= 0 else reader.manifest(request).prompt_tokens + rows
    if position not in positions:
        detail = f"position {rows} of request {request} was not captured"
        raise MidstreamError(
            "not_found", detail, field="rows", allowed=as_ranges(positions, SHOWN_RANGES)
        )
    return [positions.index(position)]


def _no_rows(request: int) -> MidstreamError:
    return MidstreamError(
        "not_found", f"request {request} has no captured rows", field="rows", allowed='rows="all"'
    )
