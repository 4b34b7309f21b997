"""The promises that `midstream doctor --deep` checks, and the verdict on what was measured."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .finding import CheckFinding, Level

#: Percentiles of the bootstrapped median that bound a figure's interval, and the number of draws.
INTERVAL = (2.5, 97.5)
DRAWS = 2000


class Promise(NamedTuple):
    """One promise: it holds if the measured figure is at most `limit`."""

    text: str
    limit: float
    unit: str = ""


#: In the order of the page. Costs are whole calls over HTTP, relative to those of stock vLLM's own
#: server; docs/capacity.md has the reasons for the limits.
PROMISES = {
    "certificate": Promise("laws of the hook points that fail on the loaded model", 0),
    "idle": Promise("cost of a call that captures and edits nothing", 1.05, "×"),
    "capture": Promise("cost of capturing a hook in every layer, at every prompt token", 1.10, "×"),
    "steer": Promise("cost of steering every token in every layer", 1.10, "×"),
    "patch": Promise("cost of patching a prompt token in every layer", 1.10, "×"),
    "neighbour": Promise("rows beside a steered request that differ from those without it", 0),
    "noise": Promise("difference of a row alone and in a batch, relative to its norm", 1e-3),
    "receipts": Promise("files and receipts missing or wrong when a held response arrives", 0),
    "durability": Promise("accepted jobs lost when a process is killed", 0),
    "processes": Promise("processes left behind at the end", 0),
}


def judge(
    name: str, figures: Sequence[float], detail: str, limit: float | None = None
) -> CheckFinding:
    """Judge a promise by its figures: one, or one for each pair. It fails if their median and the
    median's whole interval are above the limit, or if a figure is missing or not a number; if only
    the median is above it, the measurement cannot decide.

    `limit` replaces the promise's.
    """
    text, most, unit = PROMISES[name]
    most = most if limit is None else limit
    measured = [float(figure) for figure in figures]
    bound = f"at most {_number(most)}{unit}: {text}\n{detail}"
    if not measured or not all(map(math.isfinite, measured)):
        return CheckFinding("fail", name, f"not measured, {bound}", "", measured, most)
    figure = float(np.median(measured))
    low, high = interval(measured)
    spread = f" [{_number(low)}, {_number(high)}]" if len(measured) > 1 else ""
    level: Level = "fail"
    if figure <= most:
        level = "ok"
    elif low <= most:
        level = "warn"
    advice = "not decided: measure longer (--seconds)" if level == "warn" else ""
    return CheckFinding(
        level, name, f"{_number(figure)}{unit}{spread}, {bound}", advice, measured, most
    )


def interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median, by bootstrap."""
    draws = np.random.default_rng(0).integers(len(figures), size=(DRAWS, len(figures)))
    low, high = np.percentile(np.median(np.array(figures)[draws], axis=1), INTERVAL)
    return float(low), float(high)


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and value != 1 else f"{value:.3g}"
