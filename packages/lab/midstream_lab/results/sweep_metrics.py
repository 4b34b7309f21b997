"""Computes the requested metric of sweep cells from the log-probabilities that ranks report."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..records.sweep_units import Node
from ..records.sweeps import Metric, StoredPair

#: A recovered share needs two prompts whose metric differs by at least this, in nats, …
LEAST_DIFFERENCE = 0.1
#: … and by at least this many times the effect of a no-op patch.
LEAST_OVER_NOISE = 10.0


class Grades(NamedTuple):
    """Reported values of one unit, in nats."""

    # of the answer: the sum over its tokens, each given the tokens before it; None: no answer
    logprob: float | None
    foil_logprob: float | None
    kl: float | None = None  # D(P_clean ‖ P) over the token after the prompt; None: not requested


def grades(
    pair: StoredPair,
    nodes: Sequence[Node],
    graded: Sequence[Sequence[float]],
    compared: bool = False,
) -> Grades:
    """Return the values of one unit.

    `graded`: for each node, the log-probability of each of its token ids, in nats; if `compared`,
    the first node has one value more at the end, its divergence. Raises ValueError for values of
    another shape, or not finite.
    """
    for number, (node, values) in enumerate(zip(nodes, graded, strict=True)):
        expected = len(node.token_ids)
        if compared and number == 0:
            expected += 1
        if len(values) != expected:
            raise ValueError(
                f"values for the next token: {len(values)} returned, {expected} requested"
            )
        if not all(map(math.isfinite, values)):
            raise ValueError(
                f"the values returned for the next token are not finite: {list(values)}"
            )
    known = {
        (node.prefix, token): value
        for node, values in zip(nodes, graded, strict=True)
        for token, value in zip(node.token_ids, values, strict=False)
    }

    def logprob(continuation: list[int]) -> float | None:
        if not continuation:
            return None
        return math.fsum(
            known[tuple(continuation[:place]), token] for place, token in enumerate(continuation)
        )

    return Grades(logprob(pair.answer), logprob(pair.foil), graded[0][-1] if compared else None)


def in_nats(metric: Metric, grades: Grades) -> float:
    """Return the metric in nats; for `recovered`, the value from which the share is computed: the
    difference between answer and foil, or without a foil the answer's log-probability.

    Raises ValueError if a value that it needs was not requested.
    """
    value = grades.kl if metric == "kl" else grades.logprob
    if metric == "logit_diff" or (metric == "recovered" and grades.foil_logprob is not None):
        value = (
            None
            if grades.logprob is None or grades.foil_logprob is None
            else grades.logprob - grades.foil_logprob
        )
    if value is None:
        raise ValueError(f"{metric} needs values that were not requested")
    return value


def recovered(value: float, base: float, source: float) -> float:
    """Return the share that a patch recovers of the difference between the two prompts of a pair.

    `value`: of the patched prompt with the patch; `base`: of the same prompt without a patch;
    `source`: of the other prompt. All in nats.
    """
    return (value - base) / (source - base) + 0.0  # 0 instead of −0


def unchanged(metric: Metric, base: float) -> float:
    """Return the value of a cell whose patch changes nothing, in the metric's units."""
    return 0.0 if metric == "recovered" else base


def noise_floor(metric: Metric, values: Sequence[float], base: float | None) -> float | None:
    """Return the largest effect of a no-op patch, in the metric's units; None without `values`.

    `values`: of no-op patches. `base`: of the unpatched prompt, as `Baseline.value`; not used for
    `recovered`, whose value without a change is 0.
    """
    if not values or base is None:
        return None
    return max(abs(value - unchanged(metric, base)) for value in values)


def useless_baseline(base: float, source: float, noise: Sequence[float]) -> str:
    """Return why the recovered share is undefined; empty if it is defined.

    `noise`: values of no-op patches. All in nats.
    """
    floor = max((abs(value - base) for value in noise), default=0.0)
    needed = max(LEAST_DIFFERENCE, LEAST_OVER_NOISE * floor)
    difference = abs(source - base)
    if difference >= needed:
        return ""
    return (
        f"the two prompts differ too little for `recovered`: {base:.4f} nats for the "
        f"prompt to patch and {source:.4f} for the other, a "
        f"difference of {difference:.4f}; at least {needed:.4f} are needed (a no-op "
        f"patch changes the value by {floor:.4f}); use prompts "
        "that differ in the answer, or another metric"
    )
