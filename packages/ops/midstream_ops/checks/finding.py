"""Checks and findings: what was found, how bad it is, and what to do about it."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from midstream.schemas.base.version import __version__

#: `info`: a fact that no check judges.
Level = Literal["info", "ok", "warn", "fail"]
#: See `table`.
Depth = Literal["plan", "quick", "deep", "demo", "end"]

#: Differences of two clocks in seconds: above the first, leases and deadlines are noticeably wrong;
#: above the second, they are useless.
SKEW_WARN_S = 0.5
SKEW_FAIL_S = 5.0
TIMEOUT_S = 5.0


class CheckFinding(msgspec.Struct, frozen=True):
    """One line of `midstream doctor` and `demo`."""

    level: Level
    about: str
    found: str
    advice: str = ""  # what to do about it
    # of a measured promise: one, or one for each pair; of a plan: the numbers in the text
    figures: list[float] = []
    limit: float | None = None  # of the figures' median


class Check(NamedTuple):
    """A row of the table of checks."""

    depths: tuple[Depth, ...]
    about: str  # of its findings; several are separated by commas
    take: Callable[[Any], Iterable[CheckFinding]]
    advice: str = ""  # if it cannot be taken


def findings_of(
    checks: Iterable[Check], subject: Any, say: Callable[[str], None] = lambda line: None
) -> Iterator[CheckFinding]:
    """Take checks of a subject in turn. One that raises fails, with the error as its reason."""
    for check in checks:
        say(f"checking: {check.about}")
        try:
            yield from check.take(subject)
        except Exception as error:  # the other checks still find what they can
            ours = type(error).__module__.startswith("midstream")
            why = str(error) if ours else f"{type(error).__name__}: {error}"
            for about in check.about.split(", "):
                yield CheckFinding("fail", about, why, check.advice)


def graded(
    about: str, value: float, found: str, advice: str = "", warn: float = 1, fail: float = 1
) -> CheckFinding:
    """Judge a value, or what is wrong: from `fail` on it fails, from `warn` on it is worth a
    warning, and else needs no advice.
    """
    level: Level = "ok"
    if value >= fail:
        level = "fail"
    elif value >= warn:
        level = "warn"
    return CheckFinding(level, about, found, "" if level == "ok" else advice)


def timed(times: int, call: Callable[[], object]) -> tuple[float, str]:
    """Call repeatedly; return the median of the milliseconds, and a text with the maximum."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1000)
    middle = statistics.median(took)
    return middle, f"median {middle:.2f} ms, maximum {max(took):.2f} ms in {times}"


def clock_finding(about: str, ahead: float, warn: float = SKEW_WARN_S) -> CheckFinding:
    """Judge a clock that is `ahead` seconds ahead of this machine's. `warn`: tolerated seconds."""
    text = f"{abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    advice = "leases and deadlines depend on clocks: run NTP on both machines"
    return graded(about, abs(ahead), text, advice, warn, SKEW_FAIL_S)


def version_finding(about: str, version: str, more: str = "") -> CheckFinding:
    """Judge the version of another process by this command's."""
    text = f"version {version}{' ' + more if more else ''}"
    if version == __version__:
        return CheckFinding("ok", about, text)
    text += f"; this command's version is {__version__}"
    return CheckFinding(
        "warn", about, text, "run one version everywhere: see the notes on upgrades"
    )
