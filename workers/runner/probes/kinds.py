"""What the watches of alike probes share: all that does not depend on weights and thresholds, so
that a step decides those of many requests at once, whichever probes each has.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from ....schemas.artifacts.probes import StoredProbe
from ....schemas.base.records import to_msgpack
from .aggregates import KINDS
from .deciders import Deciders


def shape_of(probes: Sequence[StoredProbe]) -> Hashable:
    """Return what probes of one `ProbeGroup` have in common."""
    return tuple(
        [
            (
                len(probe.content.labels),
                _aggregation_of(probe),
                *("stop" in probe.actions, "steer" in probe.actions),
                probe.policy and (to_msgpack(probe.policy.condition), probe.policy.column),
            )
            for probe in probes
        ]
    )


def thresholds_of(probes: Sequence[StoredProbe]) -> np.ndarray:
    """Return the threshold of each column, float64: infinite for columns that decide nothing. A
    policy has a threshold of its own.
    """
    return np.array(
        [
            np.inf if threshold is None or probe.policy is not None else threshold
            for probe in probes
            for threshold in probe.content.thresholds
        ]
    )


def _aggregation_of(probe: StoredProbe) -> tuple[str, float]:
    kind = probe.content.aggregation
    return kind, probe.content.decay if kind == "exponential" else 0.0


class ProbeGroup:
    """Facts that watches of alike probes share, see `shape_of`. A column is a label of a probe."""

    def __init__(self, probes: Sequence[StoredProbe]) -> None:
        contents = [probe.content for probe in probes]
        ends = np.cumsum([len(content.labels) for content in contents]).tolist()
        # the columns of each probe
        self.columns = [
            range(end - len(content.labels), end)
            for content, end in zip(contents, ends, strict=True)
        ]
        self.width: int = ends[-1]
        self.begins = np.array([columns.start for columns in self.columns])
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
        kinds = list(map(_aggregation_of, probes))
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
        self,
        scores: np.ndarray,
        before: np.ndarray | None,
        first: int | np.ndarray,
        thresholds: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the aggregates at positions from `first` on, `[positions, …, columns]` like the
        scores, and whether each probe has one at or above its threshold, `[positions, …, probes]`.

        `before`: the aggregates at the previous position. `thresholds`: `[…, columns]`, see
        `thresholds_of`.
        """
        result = scores.astype(np.float64)
        for (kind, decay), columns in self.aggregations.items():
            earlier = None if before is None else before[..., columns]
            result[..., columns] = KINDS[kind](result[..., columns], decay, earlier, first)
        above = result >= thresholds
        if self.width > len(self.columns):  # some probes have several labels
            above = np.logical_or.reduceat(above, self.begins, axis=-1)
        return result, above
