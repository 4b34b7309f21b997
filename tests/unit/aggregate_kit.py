"""Aggregates of scores, as a rank computes them."""

import numpy as np

from midstream.schemas.artifacts.probes import ProbeContent, StoredProbe
from midstream.workers.runner.probes.kinds import ProbeGroup, thresholds_of


def aggregate(
    kind: str,
    scores: np.ndarray,
    decay: float = 0.5,
    before: np.ndarray | None = None,
    first: int = 0,
) -> np.ndarray:
    """Of scores `[positions, labels]`, see `ProbeGroup.aggregated`."""
    content = ProbeContent(
        hook="post_block",
        layer=0,
        tensors=["w", "b"],
        labels=[str(label) for label in range(scores.shape[1])],
        thresholds=[None] * scores.shape[1],
        aggregation=kind,
        decay=decay,
    )
    probe = StoredProbe(name="p", digest=content.digest, content=content)
    return ProbeGroup([probe]).aggregated(scores, before, first, thresholds_of([probe]))[0]
