"""Is a wait that is given up really over, however often its cancellation is lost on the way? And
does a task that should never end go on after an error?
"""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.api.operations import service_figures
from midstream.api.operations.waiting import ended


async def test_nested_waits_are_cancelled() -> None:
    async def stubborn() -> None:
        for _ in range(4):
            with contextlib.suppress(asyncio.CancelledError):
                # it is lost, as asyncio.wait_for may before Python 3.12
                await asyncio.sleep(3600)

    async def waiting(inner: "asyncio.Task[None]") -> None:
        try:
            await asyncio.wait({inner})
        finally:
            await ended(inner)

    inner = asyncio.create_task(stubborn())
    outer = asyncio.create_task(waiting(inner))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await ended(outer)
    assert inner.done(), "nobody is left behind"
    assert outer.cancelled()


async def test_the_history_goes_on_after_an_unforeseen_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    again = asyncio.Event()

    async def workers() -> list[Any]:
        if "cannot be read" in caplog.text:
            again.set()
        raise ValueError("a report cannot be read")

    monkeypatch.setattr(service_figures, "STEP_S", 0.0)
    ledger: Any = SimpleNamespace(workers=workers)
    figures = service_figures.ServiceFigures(*[ledger] * 5)
    recording = asyncio.create_task(figures.record())
    async with asyncio.timeout(60):
        await again.wait()
        await ended(recording)
