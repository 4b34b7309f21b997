"""Kinds of attention: how layers of the loaded model turn queries and keys into patterns, and the
arithmetic.
"""

import numpy as np

from .layer_kinds import LayerKind

#: Version of the arithmetic that a kind describes; readers reject kinds of a later version.
#: A capture can be read years later, without the service, by a reader that ignores unknown fields.
VERSION = 1
#: Hook points whose rows determine a pattern: queries and keys, as attention uses them.
ATTENDING = frozenset({"q", "k"})


class AttentionKind(LayerKind):
    """The kind of attention of some layers, which is the same in all of them.

    It describes all heads of the model, over all ranks, in the model's order.

    Query `i` sees key `j ≤ i` if `i - j < window` (unless `window` is 0) and `i // chunk == j //
    chunk` (unless `chunk` is 0). The score is `scale · q·k`; with a softcap, it becomes `softcap ·
    tanh(score / softcap)`; with slopes, `slope · (j - i)` is added. The pattern is the softmax of
    the scores, with the head's sink as one more score that belongs to no key.
    """

    # number of query heads; consecutive query heads share a key head
    heads: int = 0
    head_dim: int = 0
    scale: float = 0.0
    window: int = 0  # number of keys that a query sees, including its own; 0: all earlier keys
    chunk: int = 0  # length of the chunks within which tokens see each other; 0: no chunks
    softcap: float = 0.0  # 0: none
    sinks: list[float] = []  # [heads]; empty: none
    slopes: list[float] = []  # [heads], ALiBi; empty: none
    # tokens of an image see each other in both directions, so patterns of prompts with images are
    # rejected
    text_only: bool = False
    refused: str = ""  # why patterns of these layers cannot be computed; empty: they can
    version: int = VERSION


def weights(
    queries: np.ndarray,
    keys: np.ndarray,
    kind: AttentionKind,
    head: int,
    places: np.ndarray,
    query_places: np.ndarray,
) -> np.ndarray:
    """Return the pattern of one head, float64 `[queries, keys]`; its sink has no column.

    `queries`, `keys`: float64 rows of the head and of its key head; `query_places`, `places`: their
    positions. At least one key that a query sees is needed.
    """
    # float64, because it is closer to the model's arithmetic than either order of float32 sums. It
    # takes twice the time of a float32 softmax.
    scores: np.ndarray = queries @ keys.T
    scores *= kind.scale
    if kind.softcap:
        scores = kind.softcap * np.tanh(scores / kind.softcap)
    if kind.slopes:
        scores += kind.slopes[head] * (places[None, :] - query_places[:, None])
    lows = lowest(query_places, kind)
    scores[(places[None, :] > query_places[:, None]) | (places[None, :] < lows[:, None])] = -np.inf
    sink = kind.sinks[head] if kind.sinks else -np.inf
    most = np.maximum(scores.max(axis=1, keepdims=True), sink)
    scores -= most
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True) + np.exp(sink - most)
    return scores


def lowest(places: np.ndarray, kind: AttentionKind) -> np.ndarray:
    """Return the first position that a query at each of `places` sees, int64 `[queries]`."""
    lows = np.zeros_like(places)
    if kind.window:
        lows = np.maximum(lows, places - kind.window + 1)
    if kind.chunk:
        lows = np.maximum(lows, places // kind.chunk * kind.chunk)
    return lows
