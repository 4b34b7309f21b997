"""Computes attention patterns from captured queries and keys in numpy, in blocks of queries."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.model import attention, routing
from ...schemas.model.attention import AttentionKind
from ...schemas.model.layer_kinds import LayerKindT
from ...schemas.model.routing import RoutingKind
from ...schemas.prompts.selectors import LayerSelector, SelectorError, as_ranges, resolve_layers

#: The most bytes of one returned pattern array.
MAX_BYTES = 2 << 30
#: Bytes of float64 scores in one block of queries.
_BLOCK_BYTES = 32 << 20
#: The most ranges of positions in an error message.
_SHOWN_RANGES = 8


def attention_at(kinds: Sequence[AttentionKind], layer: int) -> AttentionKind:
    """Return how `layer` attends. Raises MidstreamError if that is unknown."""
    return _at(kinds, layer, "attends")


def usable(kind: AttentionKind, layer: int) -> AttentionKind:
    """Return `kind` if its patterns can be computed; otherwise raise MidstreamError with the
    reason.
    """
    if kind.refused:
        raise MidstreamError(
            "not_found", f"layer {layer} has no attention pattern: {kind.refused}", field="layer"
        )
    _readable(kind.version, attention.VERSION, f"layer {layer} attends")
    return kind


def routing_at(kinds: Sequence[RoutingKind], layer: int) -> RoutingKind:
    """Return how `layer` chooses experts. Raises MidstreamError if that is unknown."""
    kind = _at(kinds, layer, "chooses experts")
    if kind.refused:
        raise MidstreamError(
            "not_found",
            f"the experts that layer {layer} chooses cannot be computed: {kind.refused}",
            field="layer",
        )
    _readable(kind.version, routing.VERSION, f"layer {layer} chooses experts")
    return kind


def _at(kinds: Sequence[LayerKindT], layer: int, verb: str) -> LayerKindT:
    result = [kind for kind in kinds if layer in kind.layers]
    if not result:
        known = as_ranges(number for kind in kinds for number in kind.layers)
        detail = (
            f"the capture does not record how layer {layer} {verb}: either the layer never does, "
            "or an older version of Midstream wrote this capture"
        )
        raise MidstreamError(
            "not_found",
            detail,
            field="layer",
            allowed=f"layers {known}" if known else "no layers of this capture",
        )
    if len(result) > 1:
        raise MidstreamError("ranks_disagree", f"ranks disagree on how layer {layer} {verb}")
    return result[0]


def _readable(version: int, newest: int, what: str) -> None:
    if version > newest:
        raise MidstreamError(
            "version_mismatch",
            f"a newer version of Midstream recorded how {what}",
            hint="read it with that version",
        )


def heads_of(kind: AttentionKind, heads: LayerSelector | None) -> list[int]:
    """Resolve a selector of heads: a number, a list, `"0-3"`; None: all.

    Raises MidstreamError with the valid heads.
    """
    with Translated(
        SelectorError, lambda error: invalid("head", str(error), allowed=f"0 to {kind.heads - 1}")
    ):
        return resolve_layers("all" if heads is None else heads, kind.heads, "head")


# The reader computes patterns because vLLM's kernels never hold one: a forward pass that did would
# be another computation than the served one.
def pattern(
    queries: np.ndarray,
    keys: np.ndarray,
    kind: AttentionKind,
    positions: Sequence[int],
    *,
    heads: LayerSelector | None = None,
    rows: Sequence[int] | None = None,
) -> np.ndarray:
    """Return how much each query attends to the key at each of `positions`: float32 `[heads,
    queries, keys]`.

    `queries` `[positions, heads * head_dim]` and `keys` `[positions, key heads * head_dim]`, as
    attention uses them (after norms and rotary); `positions`: absolute, ascending. `rows`: the
    positions of the queries to compute; None: all. A row sums to 1 minus the share of the head's
    sink; keys that a query does not see are 0. Computed in float64 from the captured rows.

    Raises MidstreamError: `invalid_request` for heads that do not exist, rows of another width, or
    a result over MAX_BYTES; `not_found` if a key that a query sees was not captured.
    """
    chosen = heads_of(kind, heads)
    places = np.asarray(positions, dtype=np.int64)
    key_heads = _key_heads(keys.shape[1], kind)
    if queries.shape[1] != kind.heads * kind.head_dim or not key_heads:
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
    needed = np.arange(len(places)) if rows is None else _rows_at(places, rows)
    lows = attention.lowest(places[needed], kind)
    _complete(places, places[needed], lows)
    shape = len(chosen), len(needed), len(places)
    if (size := 4 * math.prod(shape)) > MAX_BYTES:
        detail = (
            f"{shape[0]} heads × {shape[1]} queries × {shape[2]} keys are {size >> 20} MiB; "
            f"the limit is {MAX_BYTES >> 20} MiB"
        )
        raise invalid("head", detail, hint="ask for fewer heads, or the queries of fewer positions")
    result = np.zeros(shape, dtype=np.float32)
    step = max(1, _BLOCK_BYTES // (8 * max(len(places), 1)))
    queries = queries.reshape(len(queries), kind.heads, kind.head_dim)
    keys = keys.reshape(len(keys), key_heads, kind.head_dim)
    for at, head in enumerate(chosen):
        of_keys = keys[:, head * key_heads // kind.heads].astype(np.float64)
        for start in range(0, len(needed), step):
            block = slice(start, start + step)
            of_queries = queries[needed[block], head].astype(np.float64)
            result[at, block] = attention.weights(
                of_queries, of_keys, kind, head, places, places[needed[block]]
            )
    return result


def _complete(places: np.ndarray, queries: np.ndarray, lows: np.ndarray) -> None:
    """Raise MidstreamError unless every key that a query sees is among `places`."""
    # A softmax over the keys that happen to be captured would be another pattern.
    present = np.searchsorted(places, queries, side="right") - np.searchsorted(places, lows)
    lacking = np.flatnonzero(present < queries - lows + 1)
    if not len(lacking):
        return
    query = int(queries[lacking[0]])
    low = int(lows[lacking[0]])
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
        hint='capture q and k at positions "all", or choose other queries',
    )


def _rows_at(places: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Return the index of each position among `places`, int64 `[rows]`."""
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


def _key_heads(width: int, kind: AttentionKind) -> int:
    """Return the number of key heads of rows of keys or values; 0 if their width does not fit
    `kind`.
    """
    count, rest = divmod(width, kind.head_dim)
    return 0 if rest or not count or kind.heads % count else count


def mixed(
    values: np.ndarray, patterns: Mapping[int, np.ndarray], kind: AttentionKind
) -> np.ndarray:
    """Return the heads' inputs to the output projection, float32 `[positions, heads * head_dim]`,
    if their attention is `patterns`; 0 for other heads.

    `values` `[positions, key heads * head_dim]`: of all positions from 0. `patterns`: head →
    `[query, key]`, over the same positions. Raises MidstreamError for a head that does not exist,
    and for a pattern of another shape, with non-finite values, or in which a query attends to a
    later key.
    """
    heads_of(kind, sorted(patterns))
    count = len(values)
    width = kind.head_dim
    key_heads = _key_heads(values.shape[1], kind)
    if not key_heads:
        raise invalid(
            "v",
            (
                f"rows of width {values.shape[1]} are not values of {kind.heads} heads of width "
                f"{width}"
            ),
        )
    values = values.reshape(count, key_heads, width)
    result = np.zeros((count, kind.heads, width), dtype=np.float32)
    for head, weights in patterns.items():
        pattern = np.asarray(weights, dtype=np.float64)
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
                (f"of head {head}: the query at {query} attends to the later key at {key}"),
            )
        result[:, head] = pattern @ values[:, head * key_heads // kind.heads].astype(np.float64)
    return result.reshape(count, kind.heads * width)
