"""Probes for tests of the engine, and what numpy makes of captured rows."""

from typing import Any

import numpy as np
from host import Host

from midstream.schemas.jobs import Job
from midstream.schemas.probes import Action, ProbeContent, ProbeScore, StoredProbe
from midstream.workers.runner.aggregates import aggregate

HIDDEN = 64
#: Scores against numpy's on the same rows, float32: sums of 64 products.
SCORES = 1e-5


class Weights:
    """`k` random directions, as a probe on a host."""

    def __init__(self, seed: int, k: int = 2):
        rng = np.random.default_rng(seed)
        self.weight = (rng.normal(size=(k, HIDDEN)) / 8).astype(np.float32)
        self.bias = rng.normal(size=k).astype(np.float32)

    def probe(
        self, host: Host, layer: int, action: Action = "none", *, name: str = "p", tokens: bool = True, **content: Any
    ) -> StoredProbe:
        labels = [f"label{number}" for number in range(len(self.bias))]
        fields = {"hook": "post_block", "thresholds": [None] * len(labels), "labels": labels, **content}
        tensors = [host.vector(self.weight), host.vector(self.bias)]
        made = ProbeContent(layer=layer, tensors=tensors, **fields)
        return StoredProbe(name=name, digest=made.digest, content=made, action=action, tokens=tokens)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """`[positions, k]`."""
        return np.asarray(rows @ self.weight.T + self.bias)


def scores_of(host: Host, job: Job, request: int = 0) -> dict[str, ProbeScore]:
    """Probe → what the ranks report, which all of them must have done well."""
    receipts = [receipt for receipt in host.receipts(job) if receipt.request == request]
    assert [receipt.status for receipt in receipts] == ["ok"] * len(receipts), receipts
    return {score.name: score for receipt in receipts for score in receipt.scores}


def tokens_of(score: ProbeScore) -> np.ndarray:
    """`[positions, labels]`."""
    return np.frombuffer(score.tokens, dtype="<f4").reshape(score.positions, len(score.labels))


def check(score: ProbeScore, wanted: np.ndarray, kind: str = "last", decay: float = 0.0) -> None:
    """`wanted`: `[positions, labels]`."""
    np.testing.assert_allclose(tokens_of(score), wanted, atol=SCORES, rtol=SCORES)
    np.testing.assert_allclose(score.score, aggregate(kind, wanted, decay)[-1], atol=SCORES, rtol=SCORES)


def new_maximum(scores: np.ndarray, first: int, stop: int) -> tuple[int, int, float]:
    """(label, position, threshold): below the threshold before that position, which is in `[first, stop)`, and above it there."""
    for label in range(scores.shape[1]):
        before = np.maximum.accumulate(scores[:, label])
        for position in range(first, stop):
            if scores[position, label] > before[position - 1] + 1e-3:
                return label, position, float(scores[position, label] + before[position - 1]) / 2
    raise AssertionError("no generated token has a score above all earlier ones: take other weights")
