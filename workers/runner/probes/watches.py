"""Watches: the probe scores of a request on a rank, what they decide, news and results. Those of
many requests are in one table, to which a step adds all its scores at once.

A probe is on at a token up to which an aggregate of its scores is at or above its threshold, or at
which its policy is on. What it does then (`StoredProbe.actions`) is read from these states alone.
"""

import sys
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ....schemas.artifacts.conditions import Decision
from ....schemas.artifacts.probes import ProbeScore, StoredProbe
from ..base.position_table import PositionTable
from .deciders import seen_by
from .kinds import ProbeGroup, thresholds_of
from .probe_news import News, Scored


class ProbeError(RuntimeError):
    """A token could not be scored."""


class ScoreTable(PositionTable):
    """Scores of the live watches of one kind."""

    def __init__(self, kind: ProbeGroup) -> None:
        self.kind = kind
        columns = (kind.width,)
        probes = (len(kind.columns),)
        # NaN: not computed. `on`: whether each probe is on at this position. `places`: of the n-th
        # row, the n-th position of the prompt that each policy reads.
        row = np.dtype(
            [
                *(("aggregates", np.float64, columns), ("scores", np.float32, columns)),
                *(("on", bool, probes), ("places", np.int32, probes)),
            ],
            align=True,
        )
        # Positions below `filled` have their aggregates and states; the tokens of the prompt. Of
        # each column: its threshold. Of each probe's policy: the exponential average, the first
        # position at which it may turn on, and how many positions of the prompt it reads.
        fields = [
            ("filled", np.int64),
            ("tokens", np.int64),
            ("thresholds", np.float64, columns),
            ("averages", np.float64, probes),
            ("ready", np.int64, probes),
            ("seen", np.int64, probes),
        ]
        super().__init__(row, (np.nan, np.nan, False, 0), fields)

    def look(self, slot: int, places: Sequence[np.ndarray]) -> None:
        """Set the positions of the prompt that each probe's policy reads."""
        with self.lock:
            self.reserve(slot, max(map(len, places)))
            rows = self.rows_of(slot)
            for number, of_policy in enumerate(places):
                rows["places"][: len(of_policy), number] = of_policy
                self.of["seen"][slot, number] = len(of_policy)

    def put(
        self,
        columns: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        scores: np.ndarray,
        *,
        now: bool = True,
    ) -> None:
        """Store `scores` `[rows, columns]` of the watches at `slots`, each at its position. `now`:
        decide the positions, which have no other columns to come, where it is quickly done.

        Scores that are computed again replace the earlier ones, unless `ProbeGroup.once`.
        """
        with self.lock:
            for row in np.flatnonzero(positions >= self.of["room"][slots]).tolist():
                self.reserve(int(slots[row]), int(positions[row]) + 1)
            rows = self.of["first"][slots] + positions
            of = self.of
            if self.kind.once:
                earlier = self.rows["scores"][rows[:, None], columns]
                scores = np.where(np.isnan(earlier), scores, earlier)
            else:
                np.minimum.at(of["filled"], slots, positions)
            self.rows["scores"][rows[:, None], columns] = scores
            np.maximum.at(of["reached"], slots, positions + 1)
            # those that follow decided positions, and are the only ones of their watches
            ahead = (of["filled"][slots] == positions) & (of["reached"][slots] == positions + 1)
            if now:
                ahead &= positions > 0
            if now and ahead.any():
                rows = rows[ahead]
                slots = slots[ahead]
                positions = positions[ahead]
                new = self.rows["scores"][rows][None]
                before = self.rows["aggregates"][rows - 1]
                thresholds = of["thresholds"][slots]
                (after,), (on,) = self.kind.aggregated(new, before, positions[:, None], thresholds)
                known = np.isfinite(after).all(axis=1)
                if (deciders := self.kind.deciders) is not None:
                    states = self.rows["on"][rows - 1]
                    quiet, averages = deciders.quiet(of[slots], self.rows, states, positions)
                    known &= quiet  # the others are decided one after the other
                    of["averages"][slots[known]] = averages[known]
                    on = np.where(deciders.policies, states, on)
                if not known.all():
                    rows = rows[known]
                    slots = slots[known]
                    after = after[known]
                    on = on[known]
                self.rows["aggregates"][rows] = after
                self.rows["on"][rows] = on
                of["filled"][slots] += 1

    def news(
        self,
        watches: Sequence["Watch"],
        slots: np.ndarray,
        positions: np.ndarray,
        streams_from: np.ndarray,
    ) -> list[News]:
        """Return the news from scores at these positions, which ascend for each watch; of each also
        its slot, and `Watch.streams_from`.
        """
        late = np.flatnonzero(self.of["filled"][slots] <= positions)
        changed = dict.fromkeys(map(watches.__getitem__, late.tolist()))
        for watch in changed:
            watch.decide()
        rows = self.of["first"][slots] + positions
        found = dict[str, News]()
        for item in np.flatnonzero((streams_from >= 0) & (streams_from <= positions)).tolist():
            request = watches[item].request_id
            scored = (self.rows[name][rows[item]].tolist() for name in ("scores", "aggregates"))
            news = found.setdefault(request, News(request, -1, "", []))
            news.scored.append(Scored(int(positions[item]), *scored))
        stopping = np.flatnonzero((self.rows["on"][rows] & self.kind.stops).any(axis=1))
        for watch in changed | dict.fromkeys(map(watches.__getitem__, stopping.tolist())):
            if (stop := watch.stop()) is not None:
                news = found.get(watch.request_id, News(watch.request_id, -1, "", []))
                found[watch.request_id] = News(watch.request_id, *stop, news.scored)
        return list(found.values())


class ScoreTables:
    """The tables of one rank: those of the kinds that have watches."""

    def __init__(self) -> None:
        self._tables = weakref.WeakValueDictionary[ProbeGroup, ScoreTable]()

    def of(self, kind: ProbeGroup) -> ScoreTable:
        """Return the table of a kind; it lasts as long as one of its watches."""
        table = self._tables.get(kind)
        if table is None:
            table = ScoreTable(kind)
            self._tables[kind] = table
        return table


class Watch:
    """The scores of one request on this rank, a column for each label of each probe."""

    def __init__(
        self,
        request_id: str,
        probes: Sequence[StoredProbe],
        table: ScoreTable,
        prompt_tokens: int = 0,
        streams_from: int = -1,
    ) -> None:
        """`request_id`: the engine's id. `table`: of the kind of these probes. `streams_from`: the
        first position whose scores are streamed; -1: none are.
        """
        self.request_id = request_id
        self.probes = list(probes)
        self.streams_from = streams_from
        self.prompt_tokens = prompt_tokens
        self.table = table
        self.kind = table.kind
        self.slot = table.take(0, prompt_tokens, thresholds_of(probes), np.nan, 0, 0)
        if self.kind.deciders is not None:
            table.look(self.slot, [seen_by(probe.policy, prompt_tokens) for probe in probes])
        weakref.finalize(self, table.returned.append, self.slot).atexit = False
        #: Whether each probe is on before the first token.
        self._begins = np.array([bool(item.policy and item.policy.inherited) for item in probes])
        self._decisions: list[list[Decision]] = [[] for _ in probes]  # the first `MAX_DECISIONS`
        #: Scores the rows of watches, up to a number of them, that wait for it.
        self.settle: Callable[[Mapping[Watch, int]], None] = lambda _: None

    @property
    def reached(self) -> int:
        """Return the first position that was never scored."""
        return int(self.table.of["reached"][self.slot])

    @property
    def decided(self) -> int:
        """Return the first position without aggregates and states."""
        return int(self.table.of["filled"][self.slot])

    @property
    def rows(self) -> np.ndarray:
        """Return the rows of its positions, see `ScoreTable`."""
        return self.table.rows_of(self.slot)

    def number(self, probe: str) -> int:
        """Return the number of a probe by its name."""
        return [other.name for other in self.probes].index(probe)

    def decide(self, stop: int = sys.maxsize) -> int:
        """Compute the missing aggregates and states of the positions below `stop`, up to one whose
        scores are not finite; return the first position without.
        """
        kind = self.kind
        with self.table.lock:
            of = self.table.of[self.slot]
            rows = self.rows
            first = int(of["filled"])
            new = rows[first : min(stop, int(of["reached"]))]
            finite = np.isfinite(new["scores"]).all(axis=1)
            new = new if finite.all() else new[: finite.argmin()]
            if len(new):
                before = rows[first - 1]["aggregates"] if first else None
                limits = of["thresholds"]
                new["aggregates"], new["on"] = kind.aggregated(new["scores"], before, first, limits)
                if kind.deciders is not None:
                    on = rows[first - 1]["on"] if first else self._begins
                    states = np.vstack([on, new["on"]])
                    kind.deciders.decide(of, rows, states, self._decisions)
                    new["on"] = states[1:]
                of["filled"] = first + len(new)
            return int(of["filled"])

    def stop(self) -> tuple[int, str] | None:
        """Return the first position at which a probe ends the request, and the probe."""
        stops = self.rows["on"][: self.decided] & self.kind.stops
        position = int(stops.any(axis=1).argmax()) if stops.any() else -1
        return None if position < 0 else (position, self.probes[int(stops[position].argmax())].name)

    def decide_all(self, most: int) -> int:
        """Return how many tokens the policies have decided about, up to the one at which a probe
        ends the request, and up to `most`.
        """
        if self.kind.deciders is None:
            return 0
        self.settle({self: sys.maxsize})
        return min(most, self.decide(), (self.stop() or (sys.maxsize, ""))[0] + 1)

    def high(self, probe: str, at_least: float) -> list[bool]:
        """Return, of each position that was scored, whether a score of the probe is at least that
        high, or whether it triggered the policy. False where it is not finite; `results` raises
        then.
        """
        number = self.number(probe)
        if self.probes[number].policy is not None:
            decided: list[bool] = self._triggers(self.decide())[:, number].tolist()
            return decided
        columns = self.kind.columns[number]
        scores = self.rows["scores"][: self.reached, columns.start : columns.stop]
        above: list[bool] = np.logical_or.reduce(scores >= at_least, axis=1).tolist()
        return above

    def _triggers(self, stop: int) -> np.ndarray:
        """Return whether each probe turns on at each position below `stop`."""
        on = self.rows["on"][:stop]
        triggers: np.ndarray = on & ~np.vstack([self._begins, on])[:-1]
        return triggers

    def check(self, positions: int) -> None:
        """Raise ProbeError if one of the first `positions` tokens has no score, or one that is not
        finite.
        """
        bad = np.argwhere(~np.isfinite(self.rows["scores"][:positions])).tolist()
        if bad or len(self.rows) < positions:
            where, column = bad[0] if bad else (len(self.rows), 0)
            why = "its score is not finite" if where < self.reached else "it was not scored"
            names = [probe.name for probe in self.probes for _ in probe.content.labels]
            raise ProbeError(f"probe {names[column]!r}: {why} at position {where}")

    def results(self, positions: int, stopped_by: str = "") -> tuple[list[ProbeScore], int]:
        """Return the results of the first `positions` tokens, and a CRC32 of their scores and of
        all decisions about them.

        `stopped_by`: the probe that ended the request. Raises ProbeError for a score that is
        missing or not finite.
        """
        self.check(positions)
        self.decide(positions)
        rows = self.rows[:positions]
        triggers = self._triggers(positions)
        scores = rows["scores"]
        crossing = rows["aggregates"] >= self.table.of["thresholds"][self.slot]
        # Each rank decides by itself. One that decided otherwise may have equal scores by the end.
        checksum = zlib.crc32(rows["on"].tobytes(), zlib.crc32(scores.tobytes()))
        decided: dict[int, dict[str, Any]] = {}
        for number, policy in enumerate(probe.policy for probe in self.probes):
            if policy is not None and self.kind.deciders is not None:
                crossing[:, self.kind.deciders.columns[number]] = triggers[:, number]
                made = [item for item in self._decisions[number] if item.position < positions]
                count = int(triggers[:, number].sum())
                decided[number] = {"policy": policy, "decisions": made, "triggers": count}
                checksum = zlib.crc32(msgspec.msgpack.encode(decided[number]), checksum)
        firsts = np.where(crossing.any(axis=0), crossing.argmax(axis=0), -1).tolist()
        crossed = [None if first < 0 else first for first in firsts]
        last: list[float] = rows["aggregates"][-1].tolist()
        results = [
            ProbeScore(
                name=probe.name,
                digest=probe.digest,
                labels=probe.content.labels,
                score=last[columns.start : columns.stop],
                positions=positions,
                crossed=crossed[columns.start : columns.stop],
                actions=probe.actions,
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
