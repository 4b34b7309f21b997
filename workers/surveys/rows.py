"""A harvest's rows in the order of their keys, and the strongest examples among them, in one pass
with bounded memory.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from ...schemas.base.errors import MidstreamError
from ...storage.harvests import Harvest


class Block(NamedTuple):
    """Consecutive rows, ordered by document and position."""

    documents: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]
    token_ids: np.ndarray  # int64 [rows]
    values: np.ndarray  # float32 [rows, width]

    def part(self, start: int, stop: int | None = None) -> "Block":
        return Block(*[column[start:stop] for column in self])


def joined(blocks: Iterable[Block]) -> Block:
    return Block(*map(np.concatenate, zip(*blocks, strict=True)))


def ordered_rows(harvest: Harvest, hook: str, layer: int) -> Iterator[Block]:
    """Yield the rows of a site, shard by shard.

    Documents are in the shards in their order, and a long one goes on in the next shard. Raises
    MidstreamError if they are not.
    """
    last = (-1, -1)
    for shard in harvest.shards:
        keys = shard.keys()
        order = np.lexsort((keys.positions, keys.documents))
        documents, positions, token_ids = (column[order] for column in keys)
        rows = shard.rows(hook, layer).astype(np.float32, copy=False)[order]
        shard.close()
        for first in zip(documents[:1].tolist(), positions[:1].tolist(), strict=True):
            if first <= last:
                raise MidstreamError("capture_damaged", f"row {first} comes after row {last}")
            last = int(documents[-1]), int(positions[-1])
        yield Block(documents, positions, token_ids, rows)


def blocks_of(parts: Iterable[Block], rows: int) -> Iterator[Block]:
    """Yield the same rows in blocks of `rows`; only the last may have fewer."""
    held: list[Block] = []
    for part in parts:
        whole = joined([*held, part])
        full = len(whole.documents) // rows * rows
        yield from (whole.part(start, start + rows) for start in range(0, full, rows))
        held = [whole.part(full)]
    yield from (block for block in held if len(block.documents))


def neighbourhoods(blocks: Iterable[Block], context: int) -> Iterator[tuple[Block, int, int]]:
    """Yield each block with up to `context` rows before and after it, and where it starts and stops
    in them. All blocks but the last have `context` rows or more.
    """
    held: list[Block] = []  # up to `context` rows, and the block after them
    for block in chain(blocks, [None]):
        if held:
            start = sum(len(before.documents) for before in held[:-1])
            stop = start + len(held[-1].documents)
            around = joined(held if block is None else [*held, block.part(0, context)])
            yield around, start, stop
            held = [around.part(max(0, stop - context), stop)]
        held += [] if block is None else [block]


class Examples:
    """Counts of each feature's activations, and the `top` largest, at most one of a document, with
    their contexts.

    Of equal activations the one of the earlier document, and in it of the earlier position, counts
    more. Inactive features have no examples.
    """

    def __init__(self, features: int, top: int, context: int) -> None:
        self._context, width = context, 2 * context + 1
        self.active, self.total = np.zeros((2, features))
        self.arrays = {
            "values": np.zeros((features, top), np.float32),
            "documents": np.full((features, top), -1),
            "positions": np.full((features, top), -1),
            "tokens": np.full((features, top, width), -1),
            "around": np.zeros((features, top, width), np.float32),
        }

    def add(self, rows: Block, start: int, stop: int) -> None:
        """Take rows `[start, stop)`; the others are context. Call it in the order of the rows."""
        body = rows.values[start:stop]
        self.active += np.count_nonzero(body, axis=0)
        self.total += body.sum(axis=0, dtype=np.float64)
        edges = start + np.flatnonzero(np.diff(rows.documents[start:stop], prepend=-1))
        for first, after in zip(edges, [*edges[1:], stop], strict=True):
            self._add_document(rows, first, after)

    def _add_document(self, rows: Block, first: int, after: int) -> None:
        values, documents = self.arrays["values"], self.arrays["documents"]
        found = first + rows.values[first:after].argmax(axis=0)  # the first of equal ones
        best = rows.values[found, np.arange(len(found))]
        # it replaces an example of the same document, in an earlier block, or else the weakest
        own = documents == rows.documents[first]
        slots = np.where(own.any(axis=1), own.argmax(axis=1), values.shape[1] - 1)
        hit = np.flatnonzero(best > values[np.arange(len(slots)), slots])
        slot, row = slots[hit], found[hit]
        near = row[:, None] + np.arange(-self._context, self._context + 1)
        inside = np.clip(near, 0, len(rows.documents) - 1)
        offset = rows.positions[inside] - rows.positions[row][:, None] + self._context
        here = (near == inside) & (rows.documents[inside] == rows.documents[first])
        which, at = np.nonzero(here & (offset >= 0) & (offset <= 2 * self._context))
        place, other = (hit[which], slot[which], offset[which, at]), inside[which, at]
        self.arrays["tokens"][hit, slot], self.arrays["around"][hit, slot] = -1, 0
        self.arrays["tokens"][place] = rows.token_ids[other]
        self.arrays["around"][place] = rows.values[other, hit[which]]
        values[hit, slot], documents[hit, slot] = best[hit], rows.documents[first]
        self.arrays["positions"][hit, slot] = rows.positions[row]
        # stable: an earlier document stays before this one if the values are equal
        order = np.argsort(-values[hit], axis=1, kind="stable")
        for array in self.arrays.values():
            array[hit] = array[hit[:, None], order]
