"""Kinds of routing: how layers of the loaded model choose experts from the router's logits, and the
arithmetic.
"""

from typing import Literal

import numpy as np

from .layer_kinds import LayerKind

#: Version of the arithmetic that a kind describes; readers reject kinds of a later version.
VERSION = 1


Scoring = Literal["softmax", "sigmoid"]


class RoutingKind(LayerKind):
    """The choice of experts in some layers.

    An expert's score is the softmax over all logits, or the sigmoid of its own logit. The `top`
    experts with the largest score plus bias are chosen. If there are groups of experts, only `kept`
    groups take part: those with the largest sum of their two best experts, or without a bias, with
    the best single expert. The weights are the scores of the chosen experts, divided by their sum
    if `normalised`, times `scale`.
    """

    experts: int = 0
    top: int = 0
    scoring: Scoring = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1  # number of groups of neighbouring experts, of equal size
    kept: int = 1
    bias: list[float] = []  # [experts]; empty: none
    refused: str = ""  # why the choice of these layers cannot be computed; empty: it can
    version: int = VERSION


def routed(logits: np.ndarray, kind: RoutingKind) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen experts, largest weight first, and their weights: int64 and float32
    `[tokens, kind.top]`.

    `logits`: `[tokens, kind.experts]`. Computed in float64.
    """
    logits = logits.astype(np.float64)
    if kind.scoring == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    rank = scores + np.array(kind.bias) if kind.bias else scores
    if kind.groups > 1:
        by_group = np.sort(rank.reshape(len(rank), kind.groups, -1), axis=2)
        group_rank = by_group[:, :, -2:].sum(axis=2) if kind.bias else by_group[:, :, -1]
        excluded = np.argsort(-group_rank, axis=1, kind="stable")[:, kind.kept :]
        rank = rank.reshape(by_group.shape).copy()
        np.put_along_axis(rank, excluded[:, :, None], -np.inf, axis=1)
        rank = rank.reshape(scores.shape)
    chosen = np.argsort(-rank, axis=1, kind="stable")[:, : kind.top]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if kind.normalised:
        weights = weights / weights.sum(axis=1, keepdims=True)
    order = np.argsort(-weights, axis=1, kind="stable")
    return np.take_along_axis(chosen, order, axis=1), (
        kind.scale * np.take_along_axis(weights, order, axis=1)
    ).astype(np.float32)
