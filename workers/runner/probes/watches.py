"""Watches: the probe scores of a request on a rank, their aggregates, news and results. Those of
many requests are in one table, to which a step adds all its scores at once.
"""

import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ....schemas.artifacts.probes import ProbeScore, StoredProbe
from .deciders import Deciders, keep_quiet
from .kinds import Kind
from .probe_news import News, Scored


class ProbeError(RuntimeError):
    """A token could not be scored."""


#: Positions for which a watch has room at first; it grows by doubling. Slots are added in such
#: numbers.
_ROOM, _SLOTS = 256, 64


class ScoreTable:
    """Scores of the live watches of one kind: a slot for each watch, and a range of rows, one for
    each position. Whoever writes to it holds the lock.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind, self.lock = kind, threading.RLock()
        _TABLES[kind] = self
        columns = (kind.width,)
        #: NaN: not computed. `open`: whether each probe opens its gate at this position.
        self.rows = np.zeros(
            0,
            np.dtype(
                [
                    *(("aggregates", np.float64, columns), ("scores", np.float32, columns)),
                    ("open", bool, (len(kind.columns),)),
                ],
                align=True,
            ),
        )
        #: By slot: its rows; the first position that was never scored; positions below have their
        #: aggregates; positions below have gates that are decided.
        self.of = np.zeros(
            0, [(name, np.int64) for name in ("first", "room", "reached", "filled", "decided")]
        )
        #: Slots of watches that are gone, in whichever thread.
        self.returned: deque[int] = deque()
        self._end = 0  # of all ranges
        self._nothing = np.array((np.nan, np.nan, False), self.rows.dtype)

    def take(self) -> int:
        """Return a slot for a watch. It has the range of the one before."""
        with self.lock:
            if not self.returned:
                self.returned.extend(range(len(self.of), len(self.of) + _SLOTS))
                self.of = np.append(self.of, np.zeros(_SLOTS, self.of.dtype))
            slot = self.returned.pop()
            first, room = self.of[slot].item()[:2]
            self.rows[first : first + room] = self._nothing
            self.of[slot] = first, room, 0, 0, 0
            self.reserve(slot, _ROOM)
            return slot

    def reserve(self, slot: int, rows: int) -> None:
        """Have room for this many rows of a watch. Its earlier range, at most half as long, is used
        no more.
        """
        with self.lock:
            first, had = self.of[slot].item()[:2]
            if rows > had:
                to, room = self._end, max(_ROOM, 1 << (rows - 1).bit_length())
                self._end += room
                if self._end > len(self.rows):
                    self.rows = np.append(self.rows, np.zeros(self._end, self.rows.dtype))
                self.rows[to : to + room] = self._nothing
                self.rows[to : to + had] = self.rows[first : first + had]
                self.of["first"][slot], self.of["room"][slot] = to, room

    def put(
        self,
        columns: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        scores: np.ndarray,
        *,
        last: bool = True,
    ) -> None:
        """Store `scores` `[rows, columns]` of the watches at `slots`, each at its position. `last`:
        these positions have no other columns to come.

        Scores that are computed again replace the earlier ones. With policies, which have decided
        from the earlier ones, those stay: no draft, which would be replaced, has policies.
        """
        with self.lock:
            for row in np.flatnonzero(positions + 2 >= self.of["room"][slots]).tolist():
                self.reserve(int(slots[row]), int(positions[row]) + 3)  # also for its gates
            rows, of = self.of["first"][slots] + positions, self.of
            if self.kind.rules is not None:
                earlier = self.rows["scores"][rows[:, None], columns]
                scores = np.where(np.isnan(earlier), scores, earlier)
            self.rows["scores"][rows[:, None], columns] = scores
            np.maximum.at(of["reached"], slots, positions + 1)
            np.minimum.at(of["filled"], slots, positions)
            # those that follow positions with aggregates, and are the only ones of their watches
            ahead = (of["filled"][slots] == positions) & (of["reached"][slots] == positions + 1)
            if last and self.kind.decides and (ahead := ahead & (positions > 0)).any():
                rows, slots, positions = rows[ahead], slots[ahead], positions[ahead]
                new, before = self.rows["scores"][rows][None], self.rows["aggregates"][rows - 1]
                (after,) = self.kind.aggregated(new, before, positions[:, None])
                self.rows["aggregates"][rows], of["filled"][slots] = after, positions + 1

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
        for item in np.flatnonzero(self.of["filled"][slots] <= positions).tolist():
            watches[item].aggregate(int(positions[item]) + 1)
        rows, found = self.rows[self.of["first"][slots] + positions], dict[str, News]()
        above = rows["aggregates"] >= self.kind.stop_thresholds
        streamed = (streams_from >= 0) & (streams_from <= positions)
        for item in np.flatnonzero(above.any(axis=1) | streamed).tolist():
            request, position = watches[item].request_id, int(positions[item])
            news = found.setdefault(request, News(request, -1, "", []))
            if streamed[item]:
                scored = (rows[name][item].tolist() for name in ("scores", "aggregates"))
                news.scored.append(Scored(position, *scored))
            if news.stop_at < 0 and above[item].any():
                name = self.kind.names[int(above[item].argmax())]
                found[request] = news._replace(stop_at=position, stopped_by=name)
        result = list(found.values())
        if self.kind.rules is not None:
            every = list(dict.fromkeys(watches))
            quiet = keep_quiet(
                [(one.deciders, one.scores, one.reached) for one in every if one.deciders]
            )
            for watch, is_quiet in zip(every, quiet, strict=True):
                result += watch.stopped() if not is_quiet else ()
        return result


#: Of the kinds that have watches.
_TABLES = weakref.WeakValueDictionary[Kind, ScoreTable]()


class Watch:
    """The scores of one request on this rank, a column for each label of each probe."""

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
        self.request_id, self.probes, self.streams_from = request_id, list(probes), streams_from
        self.kind = kind or Kind(probes)
        self.table = _TABLES.get(self.kind) or ScoreTable(self.kind)
        self.slot = self.table.take()
        weakref.finalize(self, self.table.returned.append, self.slot).atexit = False
        rules = self.kind.rules
        self.deciders = None if rules is None else Deciders(rules, self.probes, prompt_tokens)
        self._told = False  # the news has been sent that a policy ends the request
        #: Scores the rows of watches, up to a number of them, that wait for it.
        self.settle: Callable[[Mapping[Watch, int]], None] = lambda _: None

    @property
    def reached(self) -> int:
        """Return the first position that was never scored."""
        return int(self.table.of["reached"][self.slot])

    @property
    def _rows(self) -> slice:
        first, room = self.table.of[self.slot].item()[:2]
        return slice(first, first + room)

    @property
    def scores(self) -> np.ndarray:
        """Return `[positions, columns]`; NaN: not computed."""
        return self.table.rows["scores"][self._rows]

    @property
    def aggregates(self) -> np.ndarray:
        """Return `[positions, columns]`; computed on demand, see `aggregate`."""
        return self.table.rows["aggregates"][self._rows]

    def put(self, first: int, columns: np.ndarray | slice, scores: np.ndarray) -> None:
        """Store `scores` `[positions, columns]`, from position `first` on, see `ScoreTable.put`."""
        positions, columns = first + np.arange(len(scores)), np.arange(self.kind.width)[columns]
        self.table.put(columns, np.full(len(scores), self.slot), positions, scores)

    def aggregate(self, stop: int) -> None:
        """Compute the missing aggregates of the positions below `stop`."""
        with self.table.lock:
            first, aggregates = int(self.table.of["filled"][self.slot]), self.aggregates
            if first < stop:
                aggregates[first:stop] = self.kind.aggregated(
                    self.scores[first:stop], aggregates[first - 1] if first else None, first
                )
                self.table.of["filled"][self.slot] = stop

    def stopped(self) -> list[News]:
        """Return the news that a policy ends the request, once."""
        if self.deciders is None or self._told:
            return []
        self.deciders.decide(self.scores, self.reached)
        stop = self.deciders.stop()
        self._told = stop is not None
        return [] if stop is None else [News(self.request_id, *stop, [])]

    def decided(self, most: int) -> int:
        """Return how many tokens the policies have decided about, up to the one at which one ends
        the request, and up to `most`.
        """
        if (deciders := self.deciders) is None:
            return 0
        self.settle({self: sys.maxsize})
        deciders.decide(self.scores, self.reached)
        return min(most, (deciders.stop() or (deciders.read - 1, ""))[0] + 1)

    def above(self, probe: int, position: int) -> bool:
        """Return whether an aggregate of probe number `probe`, up to this position, is at or above
        its threshold. Raises ProbeError.
        """
        if self.deciders is not None and self.probes[probe].policy and position < self.reached:
            self.deciders.decide(self.scores, position + 1)
            if position < self.deciders.read:
                return bool(self.deciders.rows[(position + 1) * len(self.probes) + probe])
        column = self.kind.columns[probe]
        self.aggregate(min(position + 1, self.reached))
        aggregates = self.aggregates[position, column.start : column.stop]  # NaN: not computed
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
        self.aggregate(positions)
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
