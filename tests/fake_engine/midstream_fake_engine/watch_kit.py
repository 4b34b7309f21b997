"""Watches of probes outside of a rank: alone in their table, with scores that a caller gives."""

from collections.abc import Sequence

import numpy as np

from midstream.schemas.artifacts.probes import StoredProbe
from midstream.workers.runner.probes.kinds import ProbeGroup
from midstream.workers.runner.probes.watches import ScoreTable, Watch


def lone_watch(request: str, probes: Sequence[StoredProbe], prompt_tokens: int = 0) -> Watch:
    """Return a watch with a table of its own."""
    return Watch(request, probes, ScoreTable(ProbeGroup(probes)), prompt_tokens)


def put_scores(watch: Watch, first: int, columns: np.ndarray | slice, scores: np.ndarray) -> None:
    """Store `scores` `[positions, columns]` of a watch, from position `first` on."""
    positions = first + np.arange(len(scores))
    columns = np.arange(watch.kind.width)[columns]
    watch.table.put(columns, np.full(len(scores), watch.slot), positions, scores)
