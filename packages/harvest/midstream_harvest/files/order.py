"""Order and sampling of rows in harvests: functions of only seed and keys, with the same results in
every version of numpy.
"""

from collections.abc import Sequence

import numpy as np

#: (document, position in it, first token in the sequence, tokens)
CutSpan = tuple[int, int, int, int]
#: SplitMix64 (Steele, Lea and Flood 2014): its increment and multipliers.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mixed(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's output function to uint64 values of any shape."""
    with np.errstate(over="ignore"):
        values = values + _STEP
        values = (values ^ (values >> np.uint64(30))) * _FIRST
        values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed_values: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed_values


def key_hash(seed: int, documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a hash of each row's key, uint64 `[rows]`. `documents`, `positions`: int64
    `[rows]`.
    """
    start = mixed(np.full(1, seed, np.uint64))
    return mixed(mixed(start ^ documents.astype(np.uint64)) ^ positions.astype(np.uint64))


def keys_of(places: np.ndarray, spans: Sequence[CutSpan]) -> tuple[np.ndarray, np.ndarray]:
    """Return the document of each of `places`, and the position in that document, both int64.

    `places`: positions in a sequence, each of which lies in a span or was generated after the last.
    """
    columns = np.array(spans, dtype=np.int64).reshape(-1, 4)
    span = np.searchsorted(columns[:, 2], places, side="right") - 1
    return columns[span, 0], columns[span, 1] + places - columns[span, 2]


# By keys alone: the order depends neither on completion nor on numpy's generators, and a reader can
# check it. A shuffle over shards would take a second copy of all rows.
def row_order(seed: int | None, documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the order of the rows as indices, int64 `[rows]`.

    Rows are ordered by the hash of their keys; without a seed, or for equal hashes, by document and
    position.
    """
    by = (
        (positions, documents)
        if seed is None
        else (positions, documents, key_hash(seed, documents, positions))
    )
    order: np.ndarray = np.lexsort(by)
    return order


def sampled(seed: int, documents: np.ndarray, positions: np.ndarray, count: int) -> np.ndarray:
    """Return which rows to keep, bool `[rows]`: in each document, the `count` rows with the
    smallest hashes, or all if it has fewer.

    The seed is changed before hashing. With the seed of the shuffle, both would use the same
    hashes, and shards would begin with the rows that sampling prefers.
    """
    order = np.lexsort((positions, key_hash(seed ^ (1 << 62), documents, positions), documents))
    sorted_documents = documents[order]
    starts = (
        np.flatnonzero(np.r_[True, sorted_documents[1:] != sorted_documents[:-1]])
        if len(order)
        else np.zeros(0, np.int64)
    )
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    chosen = np.zeros(len(order), bool)
    chosen[order[place < count]] = True
    return chosen
