"""Aggregates of a probe's scores over the positions of a request, in float64."""

from collections.abc import Callable, Mapping

import numpy as np

#: Positions of an exponential average that are computed together.
_BLOCK = 64


def _max(
    scores: np.ndarray, decay: float, before: np.ndarray | None, first: int | np.ndarray
) -> np.ndarray:
    largest: np.ndarray = np.maximum.accumulate(scores, axis=0)
    return largest if before is None else np.maximum(largest, before)


def _mean(
    scores: np.ndarray, decay: float, before: np.ndarray | None, first: int | np.ndarray
) -> np.ndarray:
    total = np.cumsum(scores, axis=0) + (0.0 if before is None else before * first)
    places = np.arange(1, len(scores) + 1).reshape(-1, *[1] * (scores.ndim - 1))
    return total / (first + places)


def _exponential(
    scores: np.ndarray, decay: float, before: np.ndarray | None, first: int | np.ndarray
) -> np.ndarray:
    """e_0 = s_0, e_p = decay · e_(p−1) + (1 − decay) · s_p."""
    flat = scores.reshape(len(scores), -1)
    powers = decay ** np.arange(_BLOCK + 1)
    places = np.arange(min(_BLOCK, len(flat)))
    mixing = np.tril((1 - decay) * powers[np.abs(places[:, None] - places)])
    averages = np.empty_like(flat)
    last = flat[0] if before is None else before.reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK]
        averages[start : start + _BLOCK] = (
            mixing[: len(block), : len(block)] @ block + powers[1 : len(block) + 1, None] * last
        )
        last = averages[start + len(block) - 1]
    return averages.reshape(scores.shape)


#: Aggregation, if it is not the last score → function of scores `[positions, …]` of the positions
#: from `first` on, `decay`, the aggregates at position `first` − 1, and `first`: returns each
#: position's aggregate of the scores of all positions up to its own.
KINDS: Mapping[str, Callable[..., np.ndarray]] = {
    "max": _max,
    "mean": _mean,
    "exponential": _exponential,
}
