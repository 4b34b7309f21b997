"""Probes for tests of the engine, and what numpy makes of captured rows."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from aggregate_kit import aggregate
from host import Host, steer
from reference import Edit, Reference

from midstream.schemas.artifacts.probes import ProbeAction, ProbeContent, ProbeScore, StoredProbe
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.requests.specs import StoredSteering

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
        self,
        host: Host,
        layer: int,
        action: ProbeAction = "none",
        *,
        name: str = "p",
        tokens: bool = True,
        **content: Any,
    ) -> StoredProbe:
        labels = [f"label{number}" for number in range(len(self.bias))]
        fields = {
            "hook": "post_block",
            "thresholds": [None] * len(labels),
            "labels": labels,
            **content,
        }
        tensors = [host.vector(self.weight), host.vector(self.bias)]
        made = ProbeContent(layer=layer, tensors=tensors, **fields)
        return StoredProbe(
            name=name,
            digest=made.digest,
            content=made,
            actions=[] if action == "none" else [action],
            tokens=tokens,
        )

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
    np.testing.assert_allclose(
        score.score, aggregate(kind, wanted, decay)[-1], atol=SCORES, rtol=SCORES
    )


def new_maximum(scores: np.ndarray, first: int, stop: int) -> tuple[int, int, float]:
    """(label, position, threshold): below the threshold before that position, which is in `[first,
    stop)`, and above it there.
    """
    for label in range(scores.shape[1]):
        before = np.maximum.accumulate(scores[:, label])
        for position in range(first, stop):
            if scores[position, label] > before[position - 1] + 1e-3:
                return label, position, float(scores[position, label] + before[position - 1]) / 2
    raise AssertionError(
        "no generated token has a score above all earlier ones: take other weights"
    )


# --- Gated steering
# --------------------------------------------------------------------------------------------------

#: Aggregates nearer to a threshold than this may fall on its other side by rounding.
EDGE = 1e-3


@dataclass
class Gate:
    """A module that adds `vector` at `layer` while one label of a probe of `site` is at or above
    its threshold.
    """

    weights: Weights
    site: int
    label: int
    threshold: float
    vector: np.ndarray
    layer: int = 0
    aggregation: str = "last"
    decay: float = 0.0

    def probe(self, host: Host, action: ProbeAction = "steer") -> StoredProbe:
        thresholds = [
            self.threshold if number == self.label else None
            for number in range(len(self.weights.bias))
        ]
        return self.weights.probe(
            host,
            self.site,
            action,
            thresholds=thresholds,
            aggregation=self.aggregation,
            decay=self.decay,
        )

    def steering(self, host: Host) -> list[StoredSteering]:
        entry = steer(host.vector(self.vector), [self.layer], positions="all_generated")
        return [msgspec.structs.replace(entry, gate=self.probe(host).name)]

    def edits(self, positions: list[int]) -> list[Edit]:
        return [Edit(self.layer, self.vector, positions)] if positions else []

    def aggregates(self, rows: np.ndarray) -> np.ndarray:
        """`[positions]`, of its label, from the rows of its site."""
        return aggregate(self.aggregation, self.weights.of(rows), self.decay)[:, self.label]

    def generate(
        self, reference: Reference, prompt: list[int], number: int
    ) -> tuple[list[int], list[int], dict[tuple[str, int], np.ndarray]]:
        """Greedy tokens, the positions with an open gate, and the rows of all tokens but the last:
        a forward for each token.

        Raises ValueError where an aggregate is within `EDGE` of the threshold.
        """
        tokens: list[int] = []
        is_open: list[int] = []
        while True:
            rows = reference.rows([*prompt, *tokens], self.edits(is_open))
            tokens.append(int(reference.logits[-1].argmax()))
            if len(tokens) == number:
                return tokens, is_open, rows
            at_last = self.aggregates(rows["post_block", self.site])[-1]
            if abs(at_last - self.threshold) < EDGE:
                raise ValueError("too near")
            if at_last >= self.threshold:
                is_open.append(len(prompt) + len(tokens) - 1)


def flapping(
    reference: Reference, prompt: list[int], number: int, site: int, seed: int, **content: Any
) -> tuple[Gate, Any]:
    """A gate that is open at some generated tokens and closed at others, between open ones too; and
    what `generate` gives.
    """
    weights = Weights(seed, k=8)
    vector = np.random.default_rng(seed).normal(size=HIDDEN)
    free, _, rows = Gate(weights, site, 0, np.inf, vector, **content).generate(
        reference, prompt, number
    )
    for label in range(8):
        at_generated = Gate(weights, site, label, 0.0, vector, **content).aggregates(
            rows["post_block", site]
        )[len(prompt) - 1 :]
        gate = Gate(weights, site, label, float(np.median(at_generated)) + 0.01, vector, **content)
        try:
            tokens, is_open, made = gate.generate(reference, prompt, number)
        except ValueError:
            continue
        if sum(position - 1 not in is_open for position in is_open) > 1 and tokens != free:
            return gate, (tokens, is_open, made)
    raise AssertionError("no label opens and closes the gate: take another seed")


def positions_of(score: ProbeScore) -> list[int]:
    """Where its gate was open."""
    found = [position for first, last in score.gate or [] for position in range(first, last + 1)]
    assert len(found) == score.gated
    return found
