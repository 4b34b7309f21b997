"""Watches: the probe scores of a request on a rank, their aggregates, news and results."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ....schemas.artifacts.probes import ProbeScore, StoredProbe
from .aggregates import aggregate
from .deciders import Decider
from .probe_news import News, Scored

#: Positions for which a watch has room at first; it grows by doubling.
_ROOM = 256


class ProbeError(RuntimeError):
    """A token could not be scored."""


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
        self.acts = any(stops)
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
        #: Aggregation and decay → columns.
        self.aggregations = {
            kind: np.array([number for number, item in enumerate(of_column) if item == kind])
            for kind in dict.fromkeys(kinds)
        }
        # weight of a new score in an exponential average; `advanced` overwrites the other columns
        self._steps = np.array([1.0 - decay for _, decay in of_column])

    def advanced(self, before: np.ndarray, scores: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return aggregates `[watches, columns]` at each watch's position, from the aggregates
        `before` at the previous position and the scores at this one.
        """
        after: np.ndarray = before + self._steps * (scores - before)
        if (last := self.aggregations.get(("last", 0.0))) is not None:
            after[:, last] = scores[:, last]
        if (means := self.aggregations.get(("mean", 0.0))) is not None:
            after[:, means] = before[:, means] + (scores[:, means] - before[:, means]) / (
                positions[:, None] + 1
            )
        if (largest := self.aggregations.get(("max", 0.0))) is not None:
            after[:, largest] = np.maximum(before[:, largest], scores[:, largest])
        return after


class Watch:
    """The scores of one request on this rank: `scores[position, column]`, a column for each label
    of each probe. NaN: not computed.
    """

    def __init__(
        self,
        request_id: str,
        probes: Sequence[StoredProbe],
        streams_from: int = -1,
        kind: Kind | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        """`request_id`: the engine's id. `streams_from`: the first position whose scores are
        streamed; -1: none are. `kind`: the kind of these probes, if it exists already.
        """
        self.request_id, self.probes, self._streams_from = request_id, list(probes), streams_from
        self.kind = kind or Kind(probes)
        self.scores = np.full((_ROOM, self.kind.width), np.nan, dtype=np.float32)
        self.aggregates = np.full((_ROOM, self.kind.width), np.nan)  # filled up to `_aggregated`
        self._aggregated = 0
        self.reached = 0  # the first position that was never scored
        self._lowest = 0  # lowest position scored since the last news
        #: The policies among the probes, by their number.
        self.deciders = {
            number: Decider(probe.policy, prompt_tokens)
            for number, probe in enumerate(self.probes)
            if probe.policy is not None
        }
        self._told = False  # the news has been sent that a policy ends the request

    @property
    def urgent(self) -> bool:
        """Return whether the scores are needed as soon as a step is over."""
        return self.kind.decides or self._streams_from >= 0

    def put(self, first: int, columns: np.ndarray | slice, scores: np.ndarray) -> None:
        """Store `scores` `[positions, len(columns)]`, from position `first` on.

        Scores that are computed again replace the earlier ones. With policies, which have decided
        from the earlier ones, those stay: no draft, which would be replaced, has policies.
        """
        stop = first + len(scores)
        if stop > len(self.scores):
            more = max(stop, 2 * len(self.scores)) - len(self.scores)
            self.scores = np.pad(self.scores, ((0, more), (0, 0)), constant_values=np.nan)
            self.aggregates = np.pad(self.aggregates, ((0, more), (0, 0)), constant_values=np.nan)
        if self.deciders:
            earlier = self.scores[first:stop, columns]
            scores = np.where(np.isnan(earlier), scores, earlier)
        self.scores[first:stop, columns] = scores
        self.reached = max(self.reached, stop)
        self._aggregated, self._lowest = min(self._aggregated, first), min(self._lowest, first)

    def _aggregate(self, stop: int) -> None:
        """Compute the missing aggregates of the positions below `stop`."""
        first = self._aggregated
        if first >= stop:
            return
        if first and stop == first + 1:
            self._advance(first)
            return
        for (kind, decay), columns in self.kind.aggregations.items():
            before = self.aggregates[first - 1, columns] if first else None
            self.aggregates[first:stop, columns] = aggregate(
                kind, self.scores[first:stop, columns], decay, before, first
            )
        self._aggregated = stop

    def _advance(self, position: int) -> None:
        """Aggregate like `_aggregate`, by one position: the usual case."""
        after = self.kind.advanced(
            self.aggregates[[position - 1]], self.scores[[position]], np.array([position])
        )
        self.aggregates[position] = after[0]
        self._aggregated = position + 1

    def decide(self, stop: int) -> None:
        """Let policies read the scores of positions below `stop`, up to one that is not finite."""
        for number, decider in self.deciders.items():
            column = self.kind.columns[number].start + decider.policy.column
            decider.read(self.scores[len(decider.states) : stop, column].tolist())

    def stopped(self) -> News | None:
        """Return the news that a policy ends the request, once."""
        self.decide(self.reached)
        stops = [
            (decider.stop_at, self.probes[number].name)
            for number, decider in self.deciders.items()
            if decider.stop_at >= 0
        ]
        if not stops or self._told:
            return None
        self._told = True
        return News(self.request_id, *min(stops), [])

    @property
    def follows(self) -> bool:
        """Return whether `follow` can process this watch in a batch: it only has to
        compute the aggregates of one new position, and compare them with thresholds.
        """
        return (
            self.kind.acts
            and self._streams_from < 0
            and 0 < self._aggregated == self._lowest == self.reached - 1
        )

    def follow(self, watches: Sequence["Watch"]) -> list[News]:
        """Return the news of `watches`, which have this watch's kind and all satisfy `follows`."""
        positions = [watch.reached - 1 for watch in watches]
        before = np.array(
            [
                watch.aggregates[position - 1]
                for watch, position in zip(watches, positions, strict=True)
            ]
        )
        scores = np.array(
            [watch.scores[position] for watch, position in zip(watches, positions, strict=True)]
        )
        after = self.kind.advanced(before, scores, np.array(positions))
        for watch, position, aggregates in zip(watches, positions, after, strict=True):
            watch.aggregates[position] = aggregates
            watch._aggregated = watch._lowest = position + 1
        above = after >= self.kind.stop_thresholds
        crossed = np.flatnonzero(above.any(axis=1)).tolist() if above.any() else []
        return [
            News(
                watches[item].request_id,
                positions[item],
                self.kind.names[int(above[item].argmax())],
                [],
            )
            for item in crossed
        ]

    def news(self, stop: int) -> News | None:
        """Return the news from scores of positions below `stop` since the last news; None if the
        request neither stops nor streams scores.
        """
        first, self._lowest = self._lowest, stop
        if not self.kind.acts and self._streams_from < 0:
            return None
        self._aggregate(stop)
        stop_at, name = -1, ""
        if (
            self.kind.acts
            and (above := self.aggregates[first:stop] >= self.kind.stop_thresholds).any()
        ):
            row = int(above.any(axis=1).argmax())
            stop_at, name = first + row, self.kind.names[int(above[row].argmax())]
        streamed = (
            range(max(first, self._streams_from), stop) if self._streams_from >= 0 else range(0)
        )
        scored = [
            Scored(position, self.scores[position].tolist(), self.aggregates[position].tolist())
            for position in streamed
        ]
        return News(self.request_id, stop_at, name, scored) if scored or stop_at >= 0 else None

    def above(self, probe: int, position: int) -> bool:
        """Return whether an aggregate of probe number `probe`, up to this position, is at or above
        its threshold. Raises ProbeError.
        """
        if (decider := self.deciders.get(probe)) is not None and position < self.reached:
            self.decide(position + 1)
            if position < len(decider.states):
                return bool(decider.states[position])
        column = self.kind.columns[probe]
        if position < self.reached:
            self._aggregate(position + 1)
        aggregates = (
            self.aggregates[position, column.start : column.stop]
            if position < self.reached
            else np.full(1, np.nan)
        )
        if not np.isfinite(aggregates).all():
            why = "its score is not finite" if position < self.reached else "it was not scored"
            raise ProbeError(
                f"probe {self.probes[probe].name!r}: {why} at position {position}, which "
                "decides the edits of the next position"
            )
        return bool((aggregates >= self.kind.thresholds[column.start : column.stop]).any())

    def high(self, probe: str, at_least: float) -> list[bool]:
        """Return, of each position that was scored, whether a score of the probe is at least that
        high, or whether it triggered the policy. False where it is not finite; `results` raises
        then.
        """
        number = [other.name for other in self.probes].index(probe)
        if (decider := self.deciders.get(number)) is not None:
            self.decide(self.reached)
            triggers = set(decider.triggers)
            return [position in triggers for position in range(self.reached)]
        columns = self.kind.columns[number]
        scores = self.scores[: self.reached, columns.start : columns.stop]
        return [bool((row >= at_least).any()) for row in scores]

    def results(self, positions: int, stopped_by: str = "") -> tuple[list[ProbeScore], int]:
        """Return the results of the first `positions` tokens, and a CRC32 of their scores.

        `stopped_by`: the probe that ended the request. Raises ProbeError for a score that is
        missing or not finite.
        """
        scores = self.scores[:positions]
        if len(scores) < positions or not np.isfinite(scores).all():
            bad = np.flatnonzero(~np.isfinite(scores).all(axis=1))
            where = int(bad[0]) if len(bad) else len(scores)
            column = int(np.flatnonzero(~np.isfinite(scores[where]))[0]) if len(bad) else 0
            name = next(
                probe.name
                for probe, columns in zip(self.probes, self.kind.columns, strict=True)
                if column in columns
            )
            why = "its score is not finite" if where < self.reached else "it was not scored"
            raise ProbeError(f"probe {name!r}: {why} at position {where}")
        self.decide(positions)
        self._aggregate(positions)
        aggregates = self.aggregates[:positions]
        above = np.asarray(aggregates >= self.kind.thresholds)
        firsts = np.where(above.any(axis=0), above.argmax(axis=0), -1).tolist()
        crossed = [None if first < 0 else first for first in firsts]
        last: list[float] = aggregates[-1].tolist()
        checksum = zlib.crc32(scores.tobytes())
        decided: dict[int, dict[str, Any]] = {}
        for number, decider in self.deciders.items():
            decided[number], checksum = decider.report(positions, checksum)
            if decided[number]["triggers"]:
                column = self.kind.columns[number].start + decider.policy.column
                crossed[column] = decider.triggers[0]
        results = [
            ProbeScore(
                name=probe.name,
                digest=probe.digest,
                labels=probe.content.labels,
                score=last[columns.start : columns.stop],
                positions=positions,
                crossed=crossed[columns.start : columns.stop],
                action=probe.action,
                tokens=np.ascontiguousarray(
                    scores[:, columns.start : columns.stop], dtype="<f4"
                ).tobytes()
                if probe.tokens
                else b"",
                model=probe.model,
                stopped=probe.name == stopped_by,
                **decided.get(number, {}),
            )
            for number, (probe, columns) in enumerate(
                zip(self.probes, self.kind.columns, strict=True)
            )
        ]
        return results, checksum


def news_of_all(watches: Iterable[Watch]) -> list[News]:
    """Return the news of these watches; those that scored one more token, as most do in most steps,
    are processed in batches.
    """
    result: list[News] = []
    kinds: dict[int, list[Watch]] = {}
    for watch in watches:
        if watch.deciders and (news := watch.stopped()) is not None:
            result.append(news)
        if watch.follows:
            kinds.setdefault(id(watch.kind), []).append(watch)
        elif (news := watch.news(watch.reached)) is not None:
            result.append(news)
    for kind in kinds.values():
        result += kind[0].follow(kind)
    return result
