"""A harvest's rows, document by document, and the strongest examples among them, in one pass with
bounded memory.
"""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from midstream.schemas.base.errors import MidstreamError

from ..files.shards import Harvest


class DocumentRows(NamedTuple):
    """Rows of a document, or of several, ordered by document and position."""

    documents: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]
    token_ids: np.ndarray  # int64 [rows]
    values: np.ndarray  # float32 [rows, width]

    def part(self, start: int, stop: int) -> "DocumentRows":
        return DocumentRows(*[column[start:stop] for column in self])


def by_document(
    harvest: Harvest, hook: str, layer: int, context: int = 0
) -> Iterator[tuple[DocumentRows, int, int]]:
    """Yield the rows of each document at a site, with one shard in memory: blocks of one document,
    and the part `[start, stop)` of each that no other block has; up to `context` rows around it are
    in others too.

    Documents are in the shards in their order, and a long one goes on in the next shard. Raises
    MidstreamError if they are not, and `not_found` if the harvest lacks the site.
    """
    last = (-1, -1)
    pieces = _pieces(harvest, hook, layer)
    for document, parts in groupby(pieces, lambda piece: int(piece[0].documents[0])):
        rows = None
        start = 0
        for piece, is_whole in parts:
            if (document, piece.positions[0]) <= last or (np.diff(piece.positions) <= 0).any():
                raise MidstreamError("capture_damaged", f"document {document} is not in its place")
            last = (document, piece.positions[-1])
            rows = (
                DocumentRows(*map(np.concatenate, zip(rows, piece, strict=True))) if rows else piece
            )
            stop = len(rows.positions) - (0 if is_whole else context)
            if stop > start:
                yield rows, start, stop
                first = max(0, stop - context)
                rows = rows.part(first, len(rows.positions))
                start = stop - first
        if rows and start < len(rows.positions):
            yield rows, start, len(rows.positions)


def _pieces(harvest: Harvest, hook: str, layer: int) -> Iterator[tuple[DocumentRows, bool]]:
    """Yield the rows that a document has in a shard, and whether it has none in later shards for
    certain; only inside a shard are rows mixed.
    """
    for shard in harvest.shards:
        keys = shard.keys()
        order = np.lexsort((keys.positions, keys.documents))
        values = shard.rows(hook, layer).astype(np.float32, copy=False)
        rows = DocumentRows(*[column[order] for column in (*keys, values)])
        shard.close()
        starts = np.flatnonzero(np.diff(rows.documents, prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(order)]):
            yield rows.part(start, stop), stop < len(order)


# At most one of a document, so that one repetitive text does not fill the list. The tie rule makes
# results repeatable.
class Examples:
    """Counts of each feature's activations, and the `top` largest, at most one of a document, with
    their contexts.

    Of equal activations the one of the earlier document, and in it of the earlier position, counts
    more. Inactive features have no examples.
    """

    def __init__(self, features: int, top: int, context: int) -> None:
        self._context = context
        width = 2 * context + 1
        self.figures = np.zeros((2, features))  # how often each was active, and the sum
        self.arrays = {
            "values": np.zeros((features, top), np.float32),
            "documents": np.full((features, top), -1),
            "positions": np.full((features, top), -1),
            "tokens": np.full((features, top, width), -1),
            "around": np.zeros((features, top, width), np.float32),
        }

    def add(self, rows: DocumentRows, start: int = 0, stop: int | None = None) -> None:
        """Take rows `[start, stop)` of one document; the others are context. Call it in the order
        of the rows.
        """
        values = self.arrays["values"]
        body = rows.values[start:stop]
        every = self.figures.shape[1]
        self.figures += [np.count_nonzero(body, axis=0), body.sum(axis=0, dtype=np.float64)]
        found = start + body.argmax(axis=0)  # the first of equal ones
        best = rows.values[found, np.arange(every)]
        # it replaces an example of the same document, from earlier rows, or else the weakest
        own = self.arrays["documents"] == rows.documents[0]
        slots = np.where(own.any(axis=1), own.argmax(axis=1), -1)
        hit = np.flatnonzero(best > values[np.arange(every), slots])
        # position after the first, plus `context` → row; −1: that position has none
        after = rows.positions - rows.positions[0]
        row_at = np.full(after[-1] + 2 * self._context + 1, -1)
        row_at[after + self._context] = np.arange(len(after))
        near = row_at[after[found[hit], None] + np.arange(2 * self._context + 1)]
        example = {
            "values": best[hit],
            "documents": rows.documents[0],
            "positions": rows.positions[found[hit]],
            "tokens": np.where(near < 0, -1, rows.token_ids[near]),
            "around": np.where(near < 0, 0, rows.values[near, hit[:, None]]),
        }
        for name, array in self.arrays.items():
            array[hit, slots[hit]] = example[name]
        # stable: an earlier document stays before this one if the values are equal
        order = np.argsort(-values[hit], axis=1, kind="stable")
        for array in self.arrays.values():
            array[hit] = array[hit[:, None], order]
