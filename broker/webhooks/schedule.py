"""Retry schedule of webhooks: the ladder of Standard Webhooks, jitter and Retry-After.

Pure functions.
"""

import random
from email.utils import parsedate_to_datetime

#: Seconds before each attempt, counted from the end of the one before: a little over three days in
#: all.
LADDER_S = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
#: A pause is longer by up to this share, so that what failed together does not come back together.
JITTER = 0.2
#: The longest pause that a receiver may wish for, in seconds.
RETRY_AFTER_MAX_S = 24 * 3600.0
#: The answers with which it may wish for one.
WISHING = frozenset({429, 503})


def due_again(
    tries: int, at: float, request: float = 0.0, chance: random.Random | None = None
) -> float | None:
    """When to send again after `tries` attempts (at least 1) of which the last ended at `at`; None:
    that was the last rung.

    `request`: seconds that the receiver asked to be left alone, at least. `at` and the answer in
    seconds since the epoch.
    """
    if tries >= len(LADDER_S):
        return None
    pause = LADDER_S[tries] * (1.0 + JITTER * (chance or random).random())
    return at + max(pause, request)


def retry_after(status: int, header: str | None, at: float) -> float:
    """Seconds that the answer asks us to wait (RFC 9110: a number, or an HTTP date), 0 when it does
    not; a day at most.
    """
    if status not in WISHING or header is None:
        return 0.0
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), RETRY_AFTER_MAX_S)
    try:
        moment = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):  # no date, or one outside of all calendars
        return 0.0
    return min(max(moment - at, 0.0), RETRY_AFTER_MAX_S)
