"""Decisions of policies: a function of a request's scores in token order, in float64.

Each position is decided once, in order, when its first scores are there. So neither the steps in
which scores arrive, nor other requests, nor a preemption after which they are computed again can
change a decision.

At most tokens, no policy turns on or off. `keep_quiet` finds these for many requests together, by
aggregates that may be off by a rounding error, and whose distance from the thresholds is larger.
All others are decided one after the other, by the correctly rounded aggregates, which NumPy
computes for all new tokens of a policy together.
"""

import sys
import zlib
from collections.abc import Sequence
from itertools import accumulate
from math import frexp, fsum, inf, isnan, nan
from typing import Any

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ....schemas.artifacts.conditions import Condition, Decision, Schedule
from ....schemas.artifacts.probes import StoredProbe
from ....schemas.base.limits import MAX_DECISIONS

#: Bound of the error of an aggregate of `keep_quiet`, relative to the largest score: a sum of n
#: numbers in float64 is off by at most n² · 2⁻⁵³ times the largest, and n is at most 256.
_ERROR = 1e-10
#: Bits of a part of a score, so that sums of 256 are exact in float64; and how many tokens are
#: faster decided without arrays.
_BITS, _FEW = 44, 8
#: Of a probe without a policy.
_NEVER = Condition(at_least=0.0, schedule=Schedule(stop=0))


class Rules:
    """The conditions of the policies among a request's probes, in arrays with an entry for each
    probe. Requests with the same probes and policies share them.
    """

    def __init__(self, probes: Sequence[StoredProbe], columns: Sequence[range]) -> None:
        self.conditions = [probe.policy.condition if probe.policy else _NEVER for probe in probes]
        self.columns = [
            each.start + (probe.policy.column if probe.policy else 0)
            for each, probe in zip(columns, probes, strict=True)
        ]
        table = np.array([_numbers(condition) for condition in self.conditions])
        self.generated, self.start, self.stop, self.every, self.windows = table.T[:5]
        self.at_least, self.below, self.decay, self.largest = table.T[5:]
        # the scores of all windows, one after the other: of which probe, how old, in which column
        counts = self.windows.astype(int)
        self.begins = np.cumsum(counts) - counts
        self.owners = np.repeat(np.arange(len(counts)), counts)
        ages = np.arange(len(self.owners)) - self.begins[self.owners]
        self.ages = ages * self.every.astype(int)[self.owners]
        self.places = np.array(self.columns)[self.owners]


def _numbers(condition: Condition) -> tuple[float, ...]:
    """Return what a condition is in `Rules`. Floats hold all these integers exactly."""
    schedule, below = condition.schedule, condition.release_below
    return (
        schedule.tokens == "generated",
        schedule.start,
        inf if schedule.stop is None else schedule.stop,
        schedule.every,
        condition.window or 1,
        condition.at_least,
        -inf if condition.latch != "none" else condition.at_least if below is None else below,
        condition.decay or 0.0,
        condition.aggregation == "max",
    )


class Deciders:
    """The states of the policies of one request."""

    def __init__(self, rules: Rules, probes: Sequence[StoredProbe], prompt_tokens: int) -> None:
        self.rules, self.probes, self.prompt_tokens = rules, probes, prompt_tokens
        #: Whether each is on now: a byte for each.
        self.on = bytes([bool(probe.policy and probe.policy.inherited) for probe in probes])
        self.averages = np.full(len(probes), nan)  # the exponential ones
        self._ready = [0] * len(probes)  # the first position at which each may turn on
        self.read = 0  # positions that are decided
        self.rows = bytearray(self.on)  # whether each is on at first, and after each position
        self._decisions: list[list[Decision]] = [[] for _ in probes]  # the first `MAX_DECISIONS`

    def decide(self, scores: np.ndarray, stop: int) -> None:
        """Decide the positions below `stop`, up to one whose scores are not finite."""
        first, finite = self.read, np.isfinite(scores[self.read : stop]).all(axis=1)
        self.read += len(finite) if finite.all() else int(finite.argmin())
        turns = np.zeros((self.read - first + 1, len(self.probes)), bool)
        turns[0] = np.frombuffer(self.on, bool)
        for number, condition in enumerate(self.rules.conditions):
            shift = self.prompt_tokens * (condition.schedule.tokens == "generated")
            scheduled = range(
                condition.schedule.start + shift,
                sys.maxsize if condition.schedule.stop is None else condition.schedule.stop + shift,
                condition.schedule.every,
            )
            begin, until = (
                len(range(scheduled.start, position, scheduled.step))
                for position in (first, self.read)
            )
            read = scheduled[max(0, begin + 1 - (condition.window or 1)) : until]
            values = scores[read.start : read.stop : read.step, self.rules.columns[number]]
            new, on, below = (
                scheduled[begin:until],
                bool(turns[0, number]),
                float(self.rules.below[number]),
            )
            aggregates = self._aggregates(number, values.astype(np.float64), len(new))
            for position, aggregate in zip(new, aggregates, strict=True):
                if on and aggregate < below:
                    self._ready[number] = position + 1 + condition.cool_down
                elif on or aggregate < condition.at_least or position < self._ready[number]:
                    continue
                turns[position - first + 1, number] = True
                if len(self._decisions[number]) < MAX_DECISIONS:
                    event: Any = "release" if on else "trigger"
                    decision = Decision(position=position, event=event, score=aggregate)
                    self._decisions[number].append(decision)
                on = not on
        states = np.logical_xor.accumulate(turns)
        self.on = states[-1].tobytes()
        self.rows += states[1:].tobytes()

    def _aggregates(self, number: int, values: np.ndarray, count: int) -> list[float]:
        """Return the aggregates of the last `count` of these scores. The last score is the mean of
        a window of one.
        """
        condition, average = self.rules.conditions[number], float(self.averages[number])
        if (decay := condition.decay) is None:
            return _windowed(
                values, count, condition.window or 1, largest=condition.aggregation == "max"
            )
        before = [] if isnan(average) else [average]
        # e_0 = s_0, e_p = decay · e_(p−1) + (1 − decay) · s_p
        averages = list(
            accumulate(before + values.tolist(), lambda e, s: decay * e + (1.0 - decay) * s)
        )
        self.averages[number] = averages[-1] if averages else nan
        return averages[len(before) :]

    @property
    def states(self) -> np.ndarray:
        """`[1 + positions, probes]`: whether a policy is on at first, and after each position."""
        return np.frombuffer(bytes(self.rows), bool).reshape(-1, len(self.probes))

    def stop(self) -> tuple[int, str] | None:
        """Return the first position at which a policy ends the request, and the policy's probe."""
        stops = [
            (int(states.argmax()), probe.name)
            for probe, states in zip(self.probes, self.states[1:].T, strict=True)
            if probe.policy and probe.policy.takes("stop") and states.any()
        ]
        return min(stops, default=None)

    def report(self, positions: int, checksum: int) -> tuple[dict[int, dict[str, Any]], int]:
        """Return number → the fields of a `ProbeScore` about a policy and the request's first
        `positions` tokens (the others were dropped), and the CRC32 of all decisions about them,
        continuing `checksum`.
        """
        states, fields = self.states[: positions + 1], {}
        triggers = (states[1:] & ~states[:-1]).sum(axis=0).tolist()
        for number, policy in enumerate(probe.policy for probe in self.probes):
            if policy is not None:
                made = [item for item in self._decisions[number] if item.position < positions]
                found = {"policy": policy, "decisions": made, "triggers": triggers[number]}
                content = msgspec.msgpack.encode((found, states[1:, number].tobytes()))
                fields[number], checksum = found, zlib.crc32(content, checksum)
        return fields, checksum


def _windowed(values: np.ndarray, count: int, window: int, *, largest: bool) -> list[float]:
    """Return, for each of the last `count` values, the largest of the `window` values up to it, or
    their mean, which is correctly rounded whatever their order: as `fsum` does.
    """
    ends = range(len(values) - count + 1, len(values) + 1)
    if count < _FEW:
        windows = [values[max(0, end - window) : end].tolist() for end in ends]
        return [max(each) if largest else fsum(each) / len(each) for each in windows]
    missing = (window - 1 + count - len(values), 0)  # in the first windows
    if largest:
        rest = np.pad(values, missing, constant_values=-inf)
        return [*sliding_window_view(rest, window).max(axis=1).tolist()]
    # Parts of few bits, whose sums are exact in any order; one part, but for extreme values.
    sums, rest = [np.zeros(count)], np.pad(values, missing)
    while rest.any():
        unit = 2.0 ** (frexp(np.abs(rest).max())[1] - _BITS)
        part = np.rint(rest / unit) * unit
        sums.append(sliding_window_view(part, window).sum(axis=1))
        rest = rest - part
    exact = map(fsum, zip(*sums, strict=True))
    return [total / min(end, window) for total, end in zip(exact, ends, strict=True)]


def keep_quiet(many: Sequence[tuple[Deciders, np.ndarray, int]]) -> list[bool]:
    """Decide the next position of each of these, if it is the only one and changes no state; return
    whether it is such a one.

    `many`: with the same rules; the scores, and the number of positions that have some.
    """
    rules = many[0][0].rules
    read, tokens, reached = np.array(
        [(each.read, each.prompt_tokens, reached) for each, _, reached in many]
    ).T[:, :, None]
    since = read - tokens * rules.generated - rules.start
    scheduled = (since >= 0) & (since < rules.stop - rules.start) & (since % rules.every == 0)
    places = np.maximum(read - rules.ages, 0)
    values = np.array(
        [scores[row, rules.places] for (_, scores, _), row in zip(many, places, strict=True)],
        dtype=np.float64,
    )
    latest = values[:, rules.begins]
    if (since < rules.ages.max()).any():  # some windows are not full
        filling = np.where(rules.largest, latest, 0.0)[:, rules.owners]
        values = np.where(rules.ages > since[:, rules.owners], filling, values)
    aggregates = np.add.reduceat(values, rules.begins, axis=1)
    aggregates /= np.clip(since // rules.every + 1, 1, rules.windows)
    if rules.largest.any():
        largest = np.maximum.reduceat(values, rules.begins, axis=1)
        aggregates = np.where(rules.largest, largest, aggregates)
    averages = [each.averages for each, *_ in many]
    if (average := rules.decay > 0).any():
        before = np.array(averages)
        new = rules.decay * before + (1.0 - rules.decay) * latest
        averages = [*np.where(scheduled & average, new, before)]
        aggregates = np.where(average, averages, aggregates)
    on = np.frombuffer(b"".join([each.on for each, *_ in many]), bool).reshape(len(many), -1)
    error = _ERROR * np.abs(values).max(axis=1, keepdims=True)
    above, below = aggregates > rules.below + error, aggregates < rules.at_least - error
    alone = (read > 0) & (read == reached - 1)
    quiet: list[bool] = (alone & (~scheduled | np.where(on, above, below))).all(axis=1).tolist()
    for (each, *_), is_quiet, row in zip(many, quiet, averages, strict=True):
        if is_quiet:
            each.read, each.averages = each.read + 1, row
            each.rows += each.on
    return quiet
