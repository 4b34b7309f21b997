"""Does the history of the service's figures go on after an error?"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.api.operations.waiting import ended
from midstream_page import service_figures


async def test_the_history_goes_on_after_an_unforeseen_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    again = asyncio.Event()

    async def workers() -> list[Any]:
        if "cannot be read" in caplog.text:
            again.set()
        raise ValueError("a report cannot be read")

    monkeypatch.setattr(service_figures, "STEP_S", 0.0)
    context: Any = SimpleNamespace(ledger=SimpleNamespace(workers=workers))
    figures = service_figures.ServiceFigures(context)
    recording = asyncio.create_task(figures.record())
    async with asyncio.timeout(60):
        await again.wait()
        await ended(recording)
