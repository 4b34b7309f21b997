"""What the watches of the same probes share."""

from collections.abc import Sequence

import numpy as np

from ....schemas.artifacts.probes import StoredProbe
from .aggregates import KINDS
from .deciders import Deciders


class ProbeGroup:
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
        # infinite for columns that decide nothing: a policy has a threshold of its own
        self.thresholds = np.array(
            [
                np.inf if threshold is None or probe.policy is not None else threshold
                for probe in probes
                for threshold in probe.content.thresholds
            ]
        )
        self.begins = np.array([columns.start for columns in self.columns])
        self.names = [probe.name for probe in probes for _ in probe.content.labels]
        #: Whether each probe ends the request while it is on.
        self.stops = np.array(["stop" in probe.actions for probe in probes])
        #: Whether any does, and whether scores decide how the request continues: also which edits
        #: are applied.
        self.ends = bool(self.stops.any())
        steers = any("steer" in probe.actions for probe in probes)
        self.decides = steers or self.ends
        policies = any(probe.policy is not None for probe in probes)
        self.deciders = Deciders(probes, self.columns) if policies else None
        #: What was decided from a score stays when it is computed again. Drafts, whose scores are
        #: replaced, are refused for such probes.
        self.once = steers or policies
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

    def aggregated(
        self, scores: np.ndarray, before: np.ndarray | None, first: int | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the aggregates at positions from `first` on, `[positions, …, columns]` like the
        scores, and whether each probe has one at or above its threshold, `[positions, …, probes]`.

        `before`: the aggregates at the previous position.
        """
        result = scores.astype(np.float64)
        for (kind, decay), columns in self.aggregations.items():
            earlier = None if before is None else before[..., columns]
            result[..., columns] = KINDS[kind](result[..., columns], decay, earlier, first)
        above = result >= self.thresholds
        if self.width > len(self.columns):  # some probes have several labels
            above = np.logical_or.reduceat(above, self.begins, axis=-1)
        return result, above
