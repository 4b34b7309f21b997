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
    return Block(*[np.concatenate(columns) for columns in zip(*blocks, strict=True)])


def ordered_rows(harvest: Harvest, hook: str, layer: int) -> Iterator[Block]:
    """Yield the rows of a site, shard by shard.

    Documents are in the shards in their order, and a long one goes on in the next shard. Raises
    MidstreamError if they are not.
    """
    last = (-1, -1)
    for shard in harvest.shards:
        keys = shard.keys()
        order = np.lexsort((keys.positions, keys.documents))
        rows = shard.rows(hook, layer).astype(np.float32, copy=False)[order]
        shard.close()
        documents, positions, tokens = (column[order] for column in keys)
        block = Block(documents, positions, tokens, rows)
        if not len(order):
            continue
        first = int(block.documents[0]), int(block.positions[0])
        if first <= last:
            raise MidstreamError(
                "capture_damaged",
                f"row {first} follows row {last} in harvest {harvest.manifest.id}",
            )
        last = int(block.documents[-1]), int(block.positions[-1])
        yield block


def blocks_of(parts: Iterable[Block], rows: int) -> Iterator[Block]:
    """Yield the same rows in blocks of `rows`; only the last may have fewer."""
    held: list[Block] = []
    for part in parts:
        held.append(part)
        if sum(len(block.documents) for block in held) >= rows:
            whole = joined(held)
            full = len(whole.documents) // rows * rows
            for start in range(0, full, rows):
                yield whole.part(start, start + rows)
            held = [whole.part(full)]
    if held and len((rest := joined(held)).documents):
        yield rest


def neighbourhoods(blocks: Iterable[Block], context: int) -> Iterator[tuple[Block, int, int]]:
    """Yield each block with up to `context` rows before and after it, and where it starts and stops
    in them. Blocks have `context` rows or more.
    """
    before: Block | None = None
    pending: Block | None = None
    for block in chain(blocks, [None]):
        if pending is not None:
            parts = [pending] if before is None else [before, pending]
            start = sum(map(len, (part.documents for part in parts[:-1])))
            stop = start + len(pending.documents)
            around = joined(parts if block is None else [*parts, block.part(0, context)])
            yield around, start, stop
            before = around.part(max(0, stop - context), stop)
        pending = block


class Figures:
    """Counts, largest and mean of every feature's activations."""

    def __init__(self, features: int) -> None:
        self.rows = 0
        self.active = np.zeros(features, np.int64)
        self.largest = np.zeros(features, np.float32)
        self._total = np.zeros(features, np.float64)

    def add(self, values: np.ndarray) -> None:
        self.rows += len(values)
        self.active += np.count_nonzero(values > 0, axis=0)
        self._total += values.sum(axis=0, dtype=np.float64)
        np.maximum(self.largest, values.max(axis=0, initial=0.0), out=self.largest)

    def arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        mean = (self._total / np.maximum(1, self.active)).astype(np.float32)
        named = {"active": self.active, "largest": self.largest, "mean": mean}
        return {prefix + name: array for name, array in named.items()}


class Examples:
    """The `top` largest values of each feature, at most one of a document, with their contexts.

    Of equal values the one of the earlier document, and in it of the earlier position, counts more.
    Values of 0 are no examples.
    """

    def __init__(self, features: int, top: int, context: int) -> None:
        self._context, width = context, 2 * context + 1
        self.values = np.zeros((features, top), np.float32)
        self.documents = np.full((features, top), -1, np.int64)
        self.positions = np.full((features, top), -1, np.int64)
        self.tokens = np.full((features, top, width), -1, np.int64)
        self.around = np.zeros((features, top, width), np.float32)

    def add(self, rows: Block, start: int, stop: int) -> None:
        """Take rows `[start, stop)`; the others are context. Call it in the order of the rows."""
        documents, body = rows.documents[start:stop], rows.values[start:stop]
        starts = np.flatnonzero(np.diff(documents, prepend=-1))
        best = np.maximum.reduceat(body, starts, axis=0)  # [documents, features]
        # the first document may have rows in the block before
        earlier = self.documents == documents[0]
        known = np.where(earlier, self.values, 0).max(axis=1)
        replaced = earlier & (best[0] > known)[:, None]
        self.values[replaced], self.documents[replaced] = 0, -1
        best[0][best[0] <= known] = 0
        hit = np.flatnonzero((best > self.values.min(axis=1)).any(axis=0))
        if len(hit):
            self._merge(hit, best[:, hit].T, rows, start + starts, stop)

    def _merge(
        self, hit: np.ndarray, best: np.ndarray, rows: Block, starts: np.ndarray, stop: int
    ) -> None:
        top = self.values.shape[1]
        merged = np.concatenate([self.values[hit], best], axis=1)
        # stable: earlier documents come before later ones of the same value
        order = np.argsort(-merged, axis=1, kind="stable")[:, :top]
        self.values[hit] = np.take_along_axis(merged, order, axis=1)
        kept = np.where(order < top, order, 0)
        for array in (self.documents, self.positions, self.tokens, self.around):
            array[hit] = array[hit[:, None], kept]
        feature, slot = np.nonzero(order >= top)
        document = order[feature, slot] - top
        feature = hit[feature]
        found = np.zeros(len(feature), np.int64)
        ends = np.append(starts[1:], stop)
        for number in np.unique(document).tolist():
            mine = document == number
            values = rows.values[starts[number] : ends[number]][:, feature[mine]]
            found[mine] = starts[number] + values.argmax(axis=0)  # the first of equal ones
        active = self.values[feature, slot] > 0
        self.documents[feature, slot] = np.where(active, rows.documents[found], -1)
        self.positions[feature, slot] = rows.positions[found]
        near = found[:, None] + np.arange(-self._context, self._context + 1)
        inside = np.clip(near, 0, len(rows.documents) - 1)
        offset = rows.positions[inside] - rows.positions[found][:, None] + self._context
        here = (
            (near == inside)
            & (rows.documents[inside] == rows.documents[found][:, None])
            & (offset >= 0)
            & (offset <= 2 * self._context)
        )
        self.tokens[feature, slot], self.around[feature, slot] = -1, 0
        which, at = np.nonzero(here)
        place = feature[which], slot[which], offset[which, at]
        self.tokens[place] = rows.token_ids[inside[which, at]]
        self.around[place] = rows.values[inside[which, at], feature[which]]

    def arrays(self) -> dict[str, np.ndarray]:
        absent = self.documents < 0
        self.positions[absent], self.tokens[absent], self.around[absent] = -1, -1, 0
        return {
            "values": self.values,
            "documents": self.documents,
            "positions": self.positions,
            "tokens": self.tokens,
            "around": self.around,
        }
