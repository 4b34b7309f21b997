"""Decisions of policies: a function of a request's scores in token order, in float64.

Each position is read once, in order, when its first score is there. So neither the steps in which
scores arrive, nor other requests, nor a preemption after which they are computed again can change a
decision.
"""

import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from math import fsum, isfinite
from typing import Any

import msgspec

from ....schemas.artifacts.conditions import Condition, Decision, StoredPolicy
from ....schemas.base.limits import MAX_DECISIONS


class Decider:
    """The state of one policy on one request."""

    def __init__(self, policy: StoredPolicy, prompt_tokens: int) -> None:
        self.policy, self._condition, schedule = policy, policy.condition, policy.condition.schedule
        before = prompt_tokens if schedule.tokens == "generated" else 0
        stop = sys.maxsize if schedule.stop is None else before + schedule.stop
        self._scheduled = range(before + schedule.start, stop, schedule.every)
        self._add = _aggregate(policy.condition)
        self._on = bool(policy.inherited)
        self._ready = 0  # the first position at which it may turn on
        #: The position at which it ends the request; -1: none so far.
        self.stop_at = 0 if self._on and policy.takes("stop") else -1
        #: For each position read so far, whether the policy is on after it.
        self.states = bytearray()
        self.decisions: list[Decision] = []
        self.triggers: list[int] = []  # all positions at which it turned on

    def read(self, scores: Sequence[float]) -> None:
        """Read the scores of the positions that follow those read so far, up to one that decides
        and is not finite.
        """
        skipped = min(max(self._scheduled.start - len(self.states), 0), len(scores))
        self.states += bytes([self._on]) * skipped
        for position, score in enumerate(scores[skipped:], len(self.states)):
            if position in self._scheduled:
                if not isfinite(score):
                    return
                self._decide(position, self._add(score))
            self.states.append(self._on)

    def _decide(self, position: int, aggregate: float) -> None:
        condition = self._condition
        if self._on:
            below = condition.release_below
            below = condition.at_least if below is None else below
            if condition.latch != "none" or aggregate >= below:
                return
            self._on, self._ready = False, position + 1 + condition.cool_down
        elif aggregate >= condition.at_least and position >= self._ready:
            self._on = True
            if not self.triggers and self.policy.takes("stop"):
                self.stop_at = position
            self.triggers.append(position)
        else:
            return
        if len(self.decisions) < MAX_DECISIONS:
            self.decisions.append(
                Decision(
                    position=position,
                    event="trigger" if self._on else "release",
                    score=aggregate,
                )
            )

    def report(self, positions: int, checksum: int) -> tuple[dict[str, Any], int]:
        """Return the fields of a `ProbeScore` about the request's first `positions` tokens (the
        others were dropped), and the CRC32 of all decisions about them, continuing `checksum`.
        """
        fields = {
            "policy": self.policy,
            "decisions": [item for item in self.decisions if item.position < positions],
            "triggers": sum(position < positions for position in self.triggers),
        }
        content = msgspec.msgpack.encode((fields, bytes(self.states[:positions])))
        return fields, zlib.crc32(content, checksum)


def _aggregate(condition: Condition) -> Callable[[float], float]:
    """Return a function that takes the next score, and returns the aggregate up to it.

    A mean is the correctly rounded one, whatever the order of the scores: `fsum`. The last score is
    the mean of a window of one.
    """
    window: deque[float] = deque(maxlen=condition.window or 1)

    def add(score: float) -> float:
        if condition.decay is not None and window:
            # e_0 = s_0, e_p = decay · e_(p−1) + (1 − decay) · s_p
            score = condition.decay * window[-1] + (1.0 - condition.decay) * score
        window.append(score)
        return max(window) if condition.aggregation == "max" else fsum(window) / len(window)

    return add
