"""Retries of a worker while Redis is unreachable, and their end at shutdown.

`patiently` retries, so that a restart of Redis costs no running job. `end_tasks` cancels until the
task has ended, not once: redis-py awaits its writes with `asyncio.wait_for`, which on Python 3.11
swallows a cancellation that arrives together with the result.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, ParamSpec, TypeVar

from ...broker.ledger.core.reachable import Unreachable

T = TypeVar("T")
Given = ParamSpec("Given")
logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
CANCEL_AGAIN_S = 0.5


async def patiently(
    call: Callable[Given, Awaitable[T]], /, *arguments: Given.args, **named: Given.kwargs
) -> T:
    """Returns the result of `call`, retried while Redis is unreachable; other errors propagate.

    A call whose answer was lost may run twice: every ledger transition is fenced or idempotent, so
    the second is refused.
    """
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await call(*arguments, **named)
        except Unreachable as error:
            if pause == FIRST_PAUSE_S:
                name = call.__name__.strip("_").replace("_", " ")
                logger.warning("%s waiting for Redis: %s", name, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


async def end_tasks(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancels `tasks` until each has ended; their exceptions are not raised."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
