"""A slow reference for the decisions of policies."""

import sys
from collections.abc import Sequence

from midstream.schemas.artifacts.probes import Condition


def decisions_of(
    scores: Sequence[float], condition: Condition, prompt_tokens: int
) -> list[tuple[str, int, float]]:
    """Decide each position from the list of all scheduled scores up to it."""
    schedule = condition.schedule
    result: list[tuple[str, int, float]] = []
    first = schedule.start + (prompt_tokens if schedule.tokens == "generated" else 0)
    last = first - schedule.start + schedule.stop if schedule.stop is not None else len(scores)
    on, off_at = False, sys.maxsize
    for position in range(len(scores)):
        seen = [scores[p] for p in range(first, min(position + 1, last), schedule.every)]
        if position not in range(first, last, schedule.every):
            continue
        recent = seen[-(condition.window or len(seen)) :]
        if condition.aggregation == "exponential":
            value = seen[0]
            for score in seen[1:]:
                value = condition.decay * value + (1 - condition.decay) * score
        else:
            value = {"last": seen[-1], "max": max(recent), "mean": sum(recent) / len(recent)}[
                condition.aggregation
            ]
        below = condition.at_least if condition.release_below is None else condition.release_below
        cooling = off_at < position <= off_at + condition.cool_down
        if not on and value >= condition.at_least and not cooling:
            on = True
            result.append(("trigger", position, value))
        elif on and value < below and condition.latch == "none":
            on, off_at = False, position
            result.append(("release", position, value))
    return result
