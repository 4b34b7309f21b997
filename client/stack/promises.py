"""The promises that `midstream verify` checks: a table, and the verdict on what was measured."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

Verdict = Literal["PASS", "FAIL", "UNSURE"]

#: Percentiles of the bootstrapped median that bound a figure's interval, and the number of draws.
INTERVAL, DRAWS = (2.5, 97.5), 2000


class Promise(NamedTuple):
    """One promise: it holds if the measured figure is at most `limit`."""

    name: str
    text: str
    limit: float
    unit: str = ""


#: In the order of the page. Costs are whole calls over HTTP, relative to those of stock vLLM's own
#: server; docs/verify.md has the reasons for the limits.
PROMISES = (
    Promise("certificate", "laws of the hook points that fail on the loaded model", 0),
    Promise("idle", "cost of a call that captures and edits nothing", 1.05, "×"),
    Promise("capture", "cost of capturing a hook in every layer, at every prompt token", 1.10, "×"),
    Promise("steer", "cost of steering every token in every layer", 1.10, "×"),
    Promise("patch", "cost of patching a prompt token in every layer", 1.10, "×"),
    Promise("neighbour", "rows beside a steered request that differ from those without it", 0),
    Promise("noise", "difference of a row alone and in a batch, relative to its norm", 1e-3),
    Promise("receipts", "files and receipts missing or wrong when a held response arrives", 0),
    Promise("durability", "accepted jobs lost when a process is killed", 0),
    Promise("processes", "processes left behind at the end", 0),
)


class Measured(NamedTuple):
    """Figures of a promise: one, or one for each pair. `limit` replaces the promise's."""

    figures: Sequence[float]
    detail: str = ""
    limit: float | None = None


class Outcome(msgspec.Struct, frozen=True):
    """A promise with its figure (the median), its interval, and the verdict."""

    name: str
    text: str
    verdict: Verdict
    figure: float | None  # None: it was not measured
    limit: float
    unit: str = ""
    low: float | None = None  # of the median's interval, if there are several figures
    high: float | None = None
    figures: list[float] = []
    detail: str = ""


class Report(msgspec.Struct, frozen=True):
    """The page of `midstream verify`."""

    created: str  # UTC
    seconds: float
    host: dict[str, str]
    model: dict[str, str]
    settings: dict[str, str]  # those that differ from the defaults
    outcomes: list[Outcome]

    @property
    def failed(self) -> list[str]:
        """The names of the promises that do not hold."""
        return [outcome.name for outcome in self.outcomes if outcome.verdict == "FAIL"]


def judge(promise: Promise, measured: Measured) -> Outcome:
    """Judge a promise by its figures. It fails if their median and the median's whole interval are
    above the limit, or if a figure is missing or not a number; if only the median is above it, the
    measurement cannot decide.
    """
    figures = [float(figure) for figure in measured.figures]
    limit = promise.limit if measured.limit is None else measured.limit
    common = (limit, promise.unit)
    if not figures or not all(map(math.isfinite, figures)):
        detail = measured.detail or "not measured"
        return Outcome(promise.name, promise.text, "FAIL", None, *common, detail=detail)
    figure, low, high = float(np.median(figures)), None, None
    if len(figures) > 1:
        low, high = interval(figures)
    verdict: Verdict = "PASS"
    if figure > limit:
        verdict = "UNSURE" if low is not None and low <= limit else "FAIL"
    return Outcome(
        promise.name, promise.text, verdict, figure, *common, low, high, figures, measured.detail
    )


def interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median, by bootstrap."""
    draws = np.random.default_rng(0).integers(len(figures), size=(DRAWS, len(figures)))
    low, high = np.percentile(np.median(np.array(figures)[draws], axis=1), INTERVAL)
    return float(low), float(high)
