"""Attention patterns from captured queries and keys: numpy, a block of queries at a time."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...schemas.base.errors import MidstreamError, invalid
from ...schemas.model.attention import AttentionKind
from ...schemas.prompts.selectors import LayerSelector, SelectorError, as_ranges, resolve_layers

#: Bytes of one answer, at most.
MAX_BYTES = 2 << 30
#: Bytes of the scores, in float64, that are worked on at a time.
_BLOCK_BYTES = 32 << 20
#: Longer lists of positions are cut in errors.
_SHOWN_RANGES = 8


def heads_of(kind: AttentionKind, heads: LayerSelector | None) -> list[int]:
    """The heads that a selector names: a number, a list, `"0-3"`; None: all.

    Raises MidstreamError naming those that there are.
    """
    try:
        return resolve_layers("all" if heads is None else heads, kind.heads, "head")
    except SelectorError as error:
        raise invalid("head", str(error), allowed=f"0 to {kind.heads - 1}") from error


def pattern(
    queries: np.ndarray,
    keys: np.ndarray,
    kind: AttentionKind,
    positions: Sequence[int],
    *,
    heads: LayerSelector | None = None,
    rows: Sequence[int] | None = None,
) -> np.ndarray:
    """float32 `[heads, queries, keys]`: how much each query attends to the key of each of
    `positions`.

    `queries` `[positions, heads * head_dim]` and `keys` `[positions, key heads * head_dim]`, as
    attention uses them (after norms and rotary); `positions`: absolute, ascending. `rows`:
    positions whose queries are wanted; None: all. A row sums to 1, less what the head's sink takes;
    keys that a query does not see are 0. Computed in float64 from what was captured.

    Raises MidstreamError: `invalid_request` for heads that there are not or rows of another width,
    or where the answer would exceed MAX_BYTES; `not_found` where a key that a query sees was not
    captured.
    """
    chosen, places = heads_of(kind, heads), np.asarray(positions, dtype=np.int64)
    key_heads = _key_heads(queries, keys, kind)
    needed = np.arange(len(places)) if rows is None else _rows_at(places, rows)
    lows = _lowest(places[needed], kind)
    _complete(places, places[needed], lows)
    shape = len(chosen), len(needed), len(places)
    if (size := 4 * math.prod(shape)) > MAX_BYTES:
        detail = (
            f"{shape[0]} heads × {shape[1]} queries × {shape[2]} keys are {size >> 20} MiB; "
            f"the limit is {MAX_BYTES >> 20} MiB"
        )
        raise invalid("head", detail, allowed="fewer heads, or the queries of fewer positions")
    result = np.zeros(shape, dtype=np.float32)
    step = max(1, _BLOCK_BYTES // (8 * max(len(places), 1)))
    for at, head in enumerate(chosen):
        columns = slice(head * kind.head_dim, (head + 1) * kind.head_dim)
        shared = head * key_heads // kind.heads
        of_keys = keys[:, shared * kind.head_dim : (shared + 1) * kind.head_dim].astype(np.float64)
        for start in range(0, len(needed), step):
            block = slice(start, start + step)
            of_queries = queries[needed[block], columns].astype(np.float64)
            result[at, block] = _softmax(
                _scores(
                    of_queries, of_keys, kind, head, places, places[needed[block]], lows[block]
                ),
                kind,
                head,
            )
    return result


def _scores(
    queries: np.ndarray,
    keys: np.ndarray,
    kind: AttentionKind,
    head: int,
    places: np.ndarray,
    of: np.ndarray,
    lows: np.ndarray,
) -> np.ndarray:
    """float64 `[queries, keys]` of one head, -inf where a query does not see a key.

    `of`, `lows`: each query's place and lowest key.
    """
    scores: np.ndarray = queries @ keys.T
    scores *= kind.scale
    if kind.softcap:
        scores = kind.softcap * np.tanh(scores / kind.softcap)
    if kind.slopes:
        scores += kind.slopes[head] * (places[None, :] - of[:, None])
    scores[(places[None, :] > of[:, None]) | (places[None, :] < lows[:, None])] = -np.inf
    return scores


def _softmax(scores: np.ndarray, kind: AttentionKind, head: int) -> np.ndarray:
    """Over keys, in place; the head's sink takes its share and has no column."""
    most = scores.max(axis=1, keepdims=True)
    sink = kind.sinks[head] if kind.sinks else -np.inf
    most = np.maximum(most, sink)
    scores -= most
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True) + np.exp(sink - most)
    return scores


def _lowest(places: np.ndarray, kind: AttentionKind) -> np.ndarray:
    """int64 `[queries]`: the first position that each query sees."""
    lows = np.zeros_like(places)
    if kind.window:
        lows = np.maximum(lows, places - kind.window + 1)
    if kind.chunk:
        lows = np.maximum(lows, places // kind.chunk * kind.chunk)
    return lows


def _complete(places: np.ndarray, queries: np.ndarray, lows: np.ndarray) -> None:
    """Raises MidstreamError unless every key that a query sees is among `places`."""
    present = np.searchsorted(places, queries, side="right") - np.searchsorted(places, lows)
    lacking = np.flatnonzero(present < queries - lows + 1)
    if not len(lacking):
        return
    query, low = int(queries[lacking[0]]), int(lows[lacking[0]])
    missing = sorted({*range(low, query + 1)}.difference(places.tolist()))
    detail = (
        f"the query of position {query} sees keys {low}-{query}, of which "
        f"{as_ranges(missing, _SHOWN_RANGES)} were not captured "
        f"({len(lacking)} of {len(queries)} queries lack some)"
    )
    raise MidstreamError(
        "not_found",
        detail,
        field="positions",
        allowed='capture q and k at positions "all", or choose other queries',
    )


def _rows_at(places: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """int64 `[rows]`: where each position is among `places`."""
    present = {place: row for row, place in enumerate(places.tolist())}
    missing = [row for row in rows if row not in present]
    if missing or not len(rows):
        detail = (
            f"positions {as_ranges(missing, _SHOWN_RANGES)} were not captured"
            if missing
            else "no query given: give at least one"
        )
        raise MidstreamError(
            "not_found", detail, field="queries", allowed=as_ranges(places.tolist(), _SHOWN_RANGES)
        )
    return np.array([present[row] for row in rows])


def _key_heads(queries: np.ndarray, keys: np.ndarray, kind: AttentionKind) -> int:
    """Return how many key heads there are.

    Raises MidstreamError for rows of other widths than the kind's.
    """
    count, rest = divmod(int(keys.shape[1]), kind.head_dim)
    if queries.shape[1] != kind.heads * kind.head_dim or rest or not count or kind.heads % count:
        detail = (
            f"rows of width {queries.shape[1]} and {keys.shape[1]} are not queries and keys "
            f"of {kind.heads} heads of width {kind.head_dim}"
        )
        raise invalid(
            "q",
            detail,
            allowed=(
                f"q of width {kind.heads * kind.head_dim}, k of a divisor of {kind.heads} heads"
            ),
        )
    return count


def mixed(
    values: np.ndarray, patterns: Mapping[int, np.ndarray], kind: AttentionKind
) -> np.ndarray:
    """float32 `[positions, heads * head_dim]`: what heads give to the output projection if they
    attend as `patterns` say; other heads 0.

    `values` `[positions, key heads * head_dim]`: of all positions from 0 on. `patterns`: head →
    `[query, key]`, of all of them. Raises MidstreamError for a head that there is not, a pattern of
    another shape, one that is not finite, or one in which a query attends to a key behind it.
    """
    heads_of(kind, sorted(patterns))
    count, width = len(values), kind.head_dim
    key_heads, rest = divmod(int(values.shape[1]), width)
    if rest or not key_heads or kind.heads % key_heads:
        raise invalid(
            "v",
            (
                f"rows of width {values.shape[1]} are not values of {kind.heads} heads of width "
                f"{width}"
            ),
        )
    result = np.zeros((count, kind.heads * width), dtype=np.float32)
    for head, given in patterns.items():
        pattern = np.asarray(given, dtype=np.float64)
        if pattern.shape != (count, count):
            raise invalid(
                "patterns",
                f"of head {head} has shape {list(pattern.shape)}",
                allowed=f"[{count}, {count}], tokens of the prompt",
            )
        if not np.isfinite(pattern).all():
            raise invalid("patterns", f"of head {head} has numbers that are not finite")
        if np.triu(pattern, 1).any():
            query, key = (int(place[0]) for place in np.nonzero(np.triu(pattern, 1)))
            raise invalid(
                "patterns",
                (
                    f"of head {head}: the query at {query} attends to the key at {key}, which is "
                    "behind it"
                ),
            )
        shared = head * key_heads // kind.heads
        result[:, head * width : (head + 1) * width] = pattern @ values[
            :, shared * width : (shared + 1) * width
        ].astype(np.float64)
    return result
