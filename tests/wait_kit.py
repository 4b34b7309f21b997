"""Waits for what another thread, task or process does."""

import asyncio
import inspect
import time
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: Only a hang reaches it.
LONG_S = 60.0
WHY = "it did not happen in time"


def wait_until(
    holds: Callable[[], T],
    timeout: float = LONG_S,
    *,
    why: str | Callable[[], object] = WHY,
    pause_s: float = 0.02,
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """What `holds` returns, once that is true; the test fails with `why` where it never is."""
    deadline = time.monotonic() + timeout
    while not (found := holds()):
        assert time.monotonic() < deadline, why() if callable(why) else why
        pause(pause_s)
    return found


async def holding(holds: Callable[[], Awaitable[T] | T], timeout: float = LONG_S) -> T:
    """As `wait_until`, while the loop goes on with other tasks; `holds` may be a coroutine."""
    deadline = time.monotonic() + timeout
    while not (found := await _awaited(holds())):
        assert time.monotonic() < deadline, WHY
        await asyncio.sleep(0.005)
    return found


class Late(UserWarning):
    """Something took longer than it should: a slow machine, or a fault that a person looks at."""


def warn_if_late(took: float, within: float, why: str) -> None:
    """Warn if something `took` more than `within` seconds, and say why it should not. The run
    prints the warning at its end; no bound of time fails a test.
    """
    if took > within:
        warnings.warn(f"took {took:.1f} s of {within:g}: {why}", Late, stacklevel=2)


async def settled(turns: int = 20) -> None:
    """Let everybody do what can be done now."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def _awaited(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found
