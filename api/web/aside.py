"""Decodes and resolves large requests elsewhere: in the twin, if the process has one and the call
has changed nothing yet, or on an event loop in a thread of its own.

One thread that computes keeps the loop that answers calls waiting for the interpreter only briefly
(`SWITCH_S` of `api.__main__`); each further one would do so as often again. Large requests
therefore share this one.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

from .request_context import HandedOver, hand_over

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop


async def on(loop: Loop, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` on `loop`, which may run in another thread."""
    if loop is asyncio.get_running_loop():
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def aside(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` on the loop for large requests.

    Raises HandedOver if the twin answers the call instead.
    """
    try:
        hand_over()
    except HandedOver:
        work.close()  # it was never begun
        raise
    return await on(_loop(), work)


async def call_aside(work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, computed on the loop for large requests."""

    async def called() -> T:
        return work(*args)

    return await aside(called())


@cache
def _loop() -> Loop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="midstream-aside", daemon=True).start()
    return loop
