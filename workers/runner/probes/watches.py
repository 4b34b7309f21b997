"""Watches: the probe scores of a request on a rank, their aggregates, news and results."""

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ....schemas.artifacts.probes import ProbeScore, StoredProbe
from .aggregates import aggregate
from .deciders import Deciders, Rules, keep_quiet
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
        self.rules = Rules(probes, self.columns) if any(probe.policy for probe in probes) else None

    def aggregated(
        self, scores: np.ndarray, before: np.ndarray | None, first: int | np.ndarray
    ) -> np.ndarray:
        """Return the aggregates at positions from `first` on: `[positions, …, columns]`, like the
        scores. `before`: those at the previous position.
        """
        result = np.empty(scores.shape)
        for (kind, decay), columns in self.aggregations.items():
            earlier = None if before is None else before[..., columns]
            result[..., columns] = aggregate(kind, scores[..., columns], decay, earlier, first)
        return result


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
        rules = self.kind.rules
        self.deciders = None if rules is None else Deciders(rules, self.probes, prompt_tokens)
        self._told = False  # the news has been sent that a policy ends the request
        #: Scores the rows of watches, up to a number of them, that wait for it.
        self.settle: Callable[[Mapping[Watch, int]], None] = lambda _: None

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
        if self.deciders is not None and first < self.reached:
            earlier = self.scores[first:stop, columns]
            scores = np.where(np.isnan(earlier), scores, earlier)
        self.scores[first:stop, columns] = scores
        self.reached = max(self.reached, stop)
        self._aggregated, self._lowest = min(self._aggregated, first), min(self._lowest, first)

    def _aggregate(self, stop: int) -> None:
        """Compute the missing aggregates of the positions below `stop`."""
        first = self._aggregated
        if first < stop:
            self.aggregates[first:stop] = self.kind.aggregated(
                self.scores[first:stop], self.aggregates[first - 1] if first else None, first
            )
            self._aggregated = stop

    def stopped(self) -> News | None:
        """Return the news that a policy ends the request, once."""
        if self.deciders is None or self._told:
            return None
        self.deciders.decide(self.scores, self.reached)
        stop = self.deciders.stop()
        self._told = stop is not None
        return None if stop is None else News(self.request_id, *stop, [])

    def decided(self, most: int) -> int:
        """Return how many tokens the policies have decided about, up to the one at which one ends
        the request, and up to `most`.
        """
        if (deciders := self.deciders) is None:
            return 0
        self.settle({self: sys.maxsize})
        deciders.decide(self.scores, self.reached)
        return min(most, (deciders.stop() or (deciders.read - 1, ""))[0] + 1)

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
        (after,) = self.kind.aggregated(scores[None], before, np.array(positions)[:, None])
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
        if self.deciders is not None and self.probes[probe].policy and position < self.reached:
            self.deciders.decide(self.scores, position + 1)
            if position < self.deciders.read:
                return bool(self.deciders.rows[(position + 1) * len(self.probes) + probe])
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
        if self.deciders is not None and self.probes[number].policy:
            self.deciders.decide(self.scores, self.reached)
            states = self.deciders.states[:, number]
            return [*(states[1:] & ~states[:-1]).tolist()]
        columns = self.kind.columns[number]
        scores = self.scores[: self.reached, columns.start : columns.stop]
        return [bool((row >= at_least).any()) for row in scores]

    def results(self, positions: int, stopped_by: str = "") -> tuple[list[ProbeScore], int]:
        """Return the results of the first `positions` tokens, and a CRC32 of their scores.

        `stopped_by`: the probe that ended the request. Raises ProbeError for a score that is
        missing or not finite.
        """
        scores = self.scores[:positions]
        bad = np.argwhere(~np.isfinite(scores)).tolist()
        if bad or len(scores) < positions:
            where, column = bad[0] if bad else (len(scores), 0)
            why = "its score is not finite" if where < self.reached else "it was not scored"
            raise ProbeError(f"probe {self.kind.names[column]!r}: {why} at position {where}")
        self._aggregate(positions)
        aggregates = self.aggregates[:positions]
        above = np.asarray(aggregates >= self.kind.thresholds)
        firsts = np.where(above.any(axis=0), above.argmax(axis=0), -1).tolist()
        crossed = [None if first < 0 else first for first in firsts]
        last: list[float] = aggregates[-1].tolist()
        checksum = zlib.crc32(scores.tobytes())
        decided: dict[int, dict[str, Any]] = {}
        if (deciders := self.deciders) is not None:
            deciders.decide(self.scores, positions)
            decided, checksum = deciders.report(positions, checksum)
            for number, fields in decided.items():
                on = (item.position for item in fields["decisions"] if item.event == "trigger")
                crossed[deciders.rules.columns[number]] = next(on, None)
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
        kinds.setdefault(id(watch.kind), []).append(watch)
    for kind in kinds.values():
        follow = [watch for watch in kind if watch.follows]
        found = [watch.news(watch.reached) for watch in kind if not watch.follows]
        deciding = [(each.deciders, each.scores, each.reached) for each in kind if each.deciders]
        quiet = keep_quiet(deciding) if deciding else [True] * len(kind)
        found += [watch.stopped() for watch, kept in zip(kind, quiet, strict=True) if not kept]
        result += [news for news in found if news is not None]
        result += follow[0].follow(follow) if follow else []
    return result
