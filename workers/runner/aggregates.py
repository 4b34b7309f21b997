"""Aggregates of a probe's scores over the positions of a request, in float64."""

from collections.abc import Callable, Mapping

import numpy as np

#: Positions of an exponential average that are computed together.
_BLOCK = 64


def aggregate(kind: str, scores: np.ndarray, decay: float = 0.0) -> np.ndarray:
    """`scores`: `[positions, labels]`; the result's row p aggregates positions 0 to p. Kinds: see `schemas.probes.Aggregation`."""
    return KINDS[kind](scores.astype(np.float64), decay)


def _mean(scores: np.ndarray, _: float) -> np.ndarray:
    means: np.ndarray = np.cumsum(scores, axis=0) / np.arange(1, len(scores) + 1)[:, None]
    return means


def _exponential(scores: np.ndarray, decay: float) -> np.ndarray:
    """e_0 = s_0, e_p = decay · e_(p−1) + (1 − decay) · s_p."""
    powers = decay ** np.arange(_BLOCK + 1)
    places = np.arange(_BLOCK)
    mixing = np.tril((1 - decay) * powers[np.abs(places[:, None] - places)])
    averages, before = np.empty_like(scores), scores[:1]
    for first in range(0, len(scores), _BLOCK):
        block = scores[first : first + _BLOCK]
        averages[first : first + _BLOCK] = mixing[: len(block), : len(block)] @ block + powers[1 : len(block) + 1, None] * before
        before = averages[first + len(block) - 1][None]
    return averages


KINDS: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "last": lambda scores, _: scores,
    "max": lambda scores, _: np.maximum.accumulate(scores, axis=0),
    "mean": _mean,
    "exponential": _exponential,
}
