"""Findings of the checks: what was found, how bad it is, and what to do about it."""

from typing import Literal, NamedTuple

from ....schemas.base.version import __version__

Level = Literal["ok", "warn", "fail"]

#: Differences of two clocks in seconds: above the first, leases and deadlines are noticeably wrong;
#: above the second, they are useless.
SKEW_WARN_S, SKEW_FAIL_S = 0.5, 5.0
TIMEOUT_S = 5.0


class Finding(NamedTuple):
    """One line of `midstream doctor`."""

    level: Level
    about: str
    found: str
    advice: str = ""  # what to do about it


def clock_finding(about: str, ahead: float, warn: float = SKEW_WARN_S) -> Finding:
    """Judge a clock that is `ahead` seconds ahead of this machine's. `warn`: tolerated seconds."""
    level: Level = "fail" if abs(ahead) > SKEW_FAIL_S else "warn" if abs(ahead) > warn else "ok"
    text = f"{abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    return Finding(
        level,
        about,
        text,
        "" if level == "ok" else "leases and deadlines depend on clocks: run NTP on both machines",
    )


def version_finding(about: str, version: str, more: str = "") -> Finding:
    """Judge the version of another process by this command's."""
    text = f"version {version}{' ' + more if more else ''}"
    if version == __version__:
        return Finding("ok", about, text)
    return Finding(
        "warn",
        about,
        f"{text}; this command's version is {__version__}",
        "run one version everywhere: see the notes on upgrades",
    )
