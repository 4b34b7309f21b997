"""Decisions of policies: a function of a request's scores in token order, in float64.

Each position is decided once, in order, when its first scores are there. So neither the steps in
which scores arrive, nor other requests, nor a preemption after which they are computed again can
change a decision.

At most tokens, no policy turns on or off. `Deciders.quiet` finds these for many requests together,
by aggregates that may be off by a rounding error, and whose distance from the thresholds is larger.
All others are decided one after the other, by the correctly rounded aggregates, which NumPy
computes for all new tokens of a policy together.
"""

import sys
from collections.abc import Sequence
from itertools import accumulate, chain, starmap
from math import frexp, fsum, inf, isnan, nan
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ....schemas.artifacts.conditions import Condition, Decision, Schedule, StoredPolicy
from ....schemas.artifacts.probes import StoredProbe
from ....schemas.base.limits import MAX_DECISIONS
from ....schemas.prompts.sight import reads_answer

#: Bound of the error of an aggregate of `quiet`, relative to the largest score: a sum of n numbers
#: in float64 is off by at most n² · 2⁻⁵³ times the largest, and n is at most 256.
_ERROR = 1e-10
#: Bits of a part of a score, so that sums of 256 are exact in float64.
_BITS = 44
#: So many tokens are faster decided without arrays.
_FEW = 8
#: Of a probe without a policy.
_NEVER = Condition(at_least=0.0, schedule=Schedule(stop=0))
#: Of a prompt of which nothing is read.
_NOTHING = np.zeros(0, np.int64)


class Deciders:
    """The conditions of the policies among a request's probes, in arrays with an entry for each
    probe. Requests with the same probes and policies share them.
    """

    def __init__(self, probes: Sequence[StoredProbe], columns: Sequence[range]) -> None:
        self.conditions = [probe.policy.condition if probe.policy else _NEVER for probe in probes]
        self.policies = np.array([probe.policy is not None for probe in probes])
        self.columns = [
            each.start + (probe.policy.column if probe.policy else 0)
            for each, probe in zip(columns, probes, strict=True)
        ]
        table = np.array([_numbers(condition) for condition in self.conditions])
        self.start, self.stop, self.every, self.windows = table.T[:4]
        #: Whether each reads generated tokens.
        self.answers = np.array([reads_answer(each.schedule.tokens) for each in self.conditions])
        self.at_least, self.below, self.decay, self.largest = table.T[4:]
        # the scores of all windows, one after the other: of which probe, how old, in which column
        counts = self.windows.astype(int)
        self.begins = np.cumsum(counts) - counts
        self.owners = np.repeat(np.arange(len(counts)), counts)
        ages = np.arange(len(self.owners)) - self.begins[self.owners]
        self.ages = ages * self.every.astype(int)[self.owners]
        self.columns_read = np.array(self.columns)[self.owners]

    def decide(
        self,
        of: np.void,
        rows: np.ndarray,
        states: np.ndarray,
        decisions: Sequence[list[Decision]],
    ) -> None:
        """Decide positions of a request: set the states of the policies, and add to the first
        `MAX_DECISIONS` `decisions` of each.

        `of`: the request's entry in `ScoreTable.of`; `rows`: of its positions from 0 on, see
        `ScoreTable.rows`. `states`: `[1 + positions, probes]`, from the last one that is decided
        on.
        """
        first = int(of["filled"])
        turns = np.zeros(states.shape, bool)
        turns[0] = states[0]
        until = first + len(states) - 1
        for number in np.flatnonzero(self.policies).tolist():
            condition = self.conditions[number]
            places = rows["places"][: int(of["seen"][number]), number]
            tokens = int(of["tokens"])
            begin, end = (
                self._scheduled_before(position, number, places, tokens)
                for position in (first, until)
            )
            schedule = self._numbers_of(number)
            window = schedule[max(0, begin + 1 - (condition.window or 1)) : end]
            numbers = np.arange(window.start, window.stop, window.step)
            inside = places[numbers[numbers < len(places)]]
            read = np.append(inside, numbers[len(inside) :] - len(places) + tokens)
            new = read[len(read) - len(schedule[begin:end]) :].tolist()
            values = rows["scores"][read, self.columns[number]]
            on = bool(turns[0, number])
            ready = int(of["ready"][number])
            below = float(self.below[number])
            aggregates = self._aggregates(number, of, values.astype(np.float64), len(new))
            for position, aggregate in zip(new, aggregates, strict=True):
                if on and aggregate < below:
                    ready = position + 1 + condition.cool_down
                elif on or aggregate < condition.at_least or position < ready:
                    continue
                turns[position - first + 1, number] = True
                if len(decisions[number]) < MAX_DECISIONS:
                    event: Any = "release" if on else "trigger"
                    decisions[number].append(
                        Decision(position=position, event=event, score=aggregate)
                    )
                on = not on
            of["ready"][number] = ready
        states[:, self.policies] = np.logical_xor.accumulate(turns)[:, self.policies]

    def _numbers_of(self, number: int) -> range:
        """Return the numbers of the tokens on a policy's schedule, among those that it reads: those
        of the prompt, then the generated ones.
        """
        schedule = self.conditions[number].schedule
        stop = sys.maxsize if schedule.stop is None else schedule.stop
        return range(schedule.start, stop, schedule.every)

    def _scheduled_before(self, position: int, number: int, places: np.ndarray, tokens: int) -> int:
        """Return how many tokens on a policy's schedule are before a position. `places`: those of
        the prompt, of so many `tokens`, that it reads.
        """
        read = int(np.searchsorted(places, position))
        if self.answers[number]:
            read += max(0, position - tokens)
        schedule = self._numbers_of(number)
        return len(range(schedule.start, min(read, schedule.stop), schedule.step))

    def _aggregates(self, number: int, of: np.void, values: np.ndarray, count: int) -> list[float]:
        """Return the aggregates of the last `count` of these scores. The last score is the mean of
        a window of one.
        """
        condition = self.conditions[number]
        average = float(of["averages"][number])
        if (decay := condition.decay) is None:
            return _windowed(
                values, count, condition.window or 1, largest=condition.aggregation == "max"
            )
        before = [] if isnan(average) else [average]
        # e_0 = s_0, e_p = decay · e_(p−1) + (1 − decay) · s_p
        averages = list(
            accumulate(before + values.tolist(), lambda e, s: decay * e + (1.0 - decay) * s)
        )
        of["averages"][number] = averages[-1] if averages else nan
        return averages[len(before) :]

    def quiet(
        self, of: np.ndarray, rows: np.ndarray, on: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return at which tokens, each the only one of its request that is not decided yet, no
        policy turns, and the averages up to them. Tokens of prompts are not quiet, if a policy
        reads any.

        `of`: the requests' entries in `ScoreTable.of`; `rows`: of the table; `on`: the states
        before the tokens.
        """
        place = positions[:, None]
        first = of["first"][:, None]
        seen = of["seen"]
        generated = place >= of["tokens"][:, None]
        number = place - of["tokens"][:, None] + seen  # among the tokens that each reads
        since = number - self.start
        scheduled = (since >= 0) & (since < self.stop - self.start) & (since % self.every == 0)
        scheduled &= generated & self.answers
        read = place - self.ages
        numbers = number[:, self.owners] - self.ages
        in_prompt = (numbers >= 0) & (numbers < seen[:, self.owners])
        if in_prompt.any():  # windows that begin there
            among = rows["places"][first + np.maximum(numbers, 0), self.owners]
            read = np.where(in_prompt, among, read)
        values = rows["scores"][first + np.maximum(read, 0), self.columns_read].astype(np.float64)
        latest = values[:, self.begins]
        if (since < self.ages.max()).any():  # some windows are not full
            filling = np.where(self.largest, latest, 0.0)[:, self.owners]
            values = np.where(self.ages > since[:, self.owners], filling, values)
        aggregates = np.add.reduceat(values, self.begins, axis=1)
        aggregates /= np.clip(since // self.every + 1, 1, self.windows)
        if self.largest.any():
            largest = np.maximum.reduceat(values, self.begins, axis=1)
            aggregates = np.where(self.largest, largest, aggregates)
        averages = of["averages"]
        average = self.decay > 0
        if average.any():
            new = self.decay * averages + (1.0 - self.decay) * latest
            averages = np.where(scheduled & average, new, averages)
            aggregates = np.where(average, averages, aggregates)
        error = _ERROR * np.abs(values).max(axis=1, keepdims=True)
        above = aggregates > self.below + error
        below = aggregates < self.at_least - error
        known = (generated | (seen == 0)) & (~scheduled | np.where(on, above, below))
        return known.all(axis=1), averages


def seen_by(policy: StoredPolicy | None, prompt_tokens: int) -> np.ndarray:
    """Return the ascending positions of a prompt that a policy reads: all, if nothing tells which
    the sender wrote.
    """
    if policy is None or policy.condition.schedule.tokens == "generated":
        return _NOTHING
    if policy.sight is None or policy.sight.whole:
        return np.arange(prompt_tokens)
    runs = starmap(range, policy.sight.runs)
    return np.fromiter(chain.from_iterable(runs), np.int64)


def _numbers(condition: Condition) -> tuple[float, ...]:
    """Return what a condition is in `Rules`. Floats hold all these integers exactly."""
    schedule = condition.schedule
    below = condition.release_below
    if below is None:
        below = condition.at_least
    return (
        schedule.start,
        inf if schedule.stop is None else schedule.stop,
        schedule.every,
        condition.window or 1,
        condition.at_least,
        below if condition.latch == "none" else -inf,
        condition.decay or 0.0,
        condition.aggregation == "max",
    )


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
    # A running sum would be faster, but one large score would spoil it.
    sums = [np.zeros(count)]
    rest = np.pad(values, missing)
    while rest.any():
        unit = 2.0 ** (frexp(np.abs(rest).max())[1] - _BITS)
        part = np.rint(rest / unit) * unit
        sums.append(sliding_window_view(part, window).sum(axis=1))
        rest = rest - part
    exact = map(fsum, zip(*sums, strict=True))
    return [total / min(end, window) for total, end in zip(exact, ends, strict=True)]
