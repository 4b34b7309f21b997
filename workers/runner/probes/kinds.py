"""What the watches of the same probes share."""

from collections.abc import Sequence

import numpy as np

from ....schemas.artifacts.probes import StoredProbe
from .aggregates import KINDS
from .deciders import Rules


class Kind:
    """Facts that watches of the same probes share. A column is a label of a probe."""

    def __init__(self, probes: Sequence[StoredProbe]) -> None:
        contents = [probe.content for probe in probes]
        ends = np.cumsum([len(content.labels) for content in contents]).tolist()
        # the columns of each probe
        self.columns = [
            range(end - len(content.labels), end)
            for content, end in zip(contents, ends, strict=True)
        ]
        self.width: int = ends[-1]
        thresholds = [
            np.inf if threshold is None or probe.policy is not None else threshold
            for probe in probes
            for threshold in probe.content.thresholds
        ]
        # a policy has a threshold of its own
        stops = [
            probe.action == "stop" and probe.policy is None
            for probe in probes
            for _ in probe.content.labels
        ]
        self.thresholds = np.array(thresholds)
        # infinite for columns that do not end a request
        self.stop_thresholds = np.where(stops, self.thresholds, np.inf)
        self.begins = np.array([columns.start for columns in self.columns])
        # scores decide how the request continues: whether it ends, or which edits are applied
        self.decides = any(probe.action in ("stop", "steer") for probe in probes)
        self.names = [probe.name for probe in probes for _ in probe.content.labels]
        kinds = [
            (content.aggregation, content.decay if content.aggregation == "exponential" else 0.0)
            for content in contents
        ]
        of_column = [
            kind for kind, content in zip(kinds, contents, strict=True) for _ in content.labels
        ]
        #: Aggregation, if it is not the last score, and decay → columns.
        self.aggregations = {
            kind: np.array([number for number, item in enumerate(of_column) if item == kind])
            for kind in dict.fromkeys(kinds)
            if kind[0] != "last"
        }
        self.rules = Rules(probes, self.columns) if any(probe.policy for probe in probes) else None
        #: Whether scores may be news: they end requests, or policies decide.
        self.tells = any(stops) or self.rules is not None

    def aggregated(
        self, scores: np.ndarray, before: np.ndarray | None, first: int | np.ndarray
    ) -> np.ndarray:
        """Return the aggregates at positions from `first` on: `[positions, …, columns]`, like the
        scores. `before`: those at the previous position.
        """
        result = scores.astype(np.float64)
        for (kind, decay), columns in self.aggregations.items():
            earlier = None if before is None else before[..., columns]
            result[..., columns] = KINDS[kind](result[..., columns], decay, earlier, first)
        return result
