"""Aggregates of a probe's scores over the positions of a request, in float64."""

from collections.abc import Callable, Mapping

import numpy as np

#: Positions of an exponential average that are computed together.
_BLOCK = 64


def aggregate(
    kind: str,
    scores: np.ndarray,
    decay: float = 0.0,
    before: np.ndarray | None = None,
    first: int = 0,
) -> np.ndarray:
    """Return `[positions, labels]`: each row aggregates the scores of all positions up to its own.

    `kind`: see `schemas.artifacts.probes.Aggregation`; `scores`: `[positions, labels]` of the
    positions from `first` on; `before`: `[labels]`, the aggregates at position `first` − 1.
    """
    return KINDS[kind](scores.astype(np.float64), decay, before, first)


def _last(scores: np.ndarray, decay: float, before: np.ndarray | None, first: int) -> np.ndarray:
    return scores


def _max(scores: np.ndarray, decay: float, before: np.ndarray | None, first: int) -> np.ndarray:
    largest: np.ndarray = np.maximum.accumulate(scores, axis=0)
    return largest if before is None else np.maximum(largest, before)


def _mean(scores: np.ndarray, decay: float, before: np.ndarray | None, first: int) -> np.ndarray:
    total = np.cumsum(scores, axis=0) + (0.0 if before is None else before * first)
    means: np.ndarray = total / np.arange(first + 1, first + len(scores) + 1)[:, None]
    return means


def _exponential(
    scores: np.ndarray, decay: float, before: np.ndarray | None, first: int
) -> np.ndarray:
    """e_0 = s_0, e_p = decay · e_(p−1) + (1 − decay) · s_p."""
    powers = decay ** np.arange(_BLOCK + 1)
    places = np.arange(min(_BLOCK, len(scores)))
    mixing = np.tril((1 - decay) * powers[np.abs(places[:, None] - places)])
    averages, last = np.empty_like(scores), scores[0] if before is None else before
    for start in range(0, len(scores), _BLOCK):
        block = scores[start : start + _BLOCK]
        averages[start : start + _BLOCK] = (
            mixing[: len(block), : len(block)] @ block + powers[1 : len(block) + 1, None] * last
        )
        last = averages[start + len(block) - 1]
    return averages


KINDS: Mapping[str, Callable[[np.ndarray, float, np.ndarray | None, int], np.ndarray]] = {
    "last": _last,
    "max": _max,
    "mean": _mean,
    "exponential": _exponential,
}
