"""Does the callbacks process run what packages offer beside its reaper?"""

import asyncio
import threading
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import pytest

from midstream.broker.callbacks import ADDED_WORK, make_callbacks_app
from midstream.schemas import packages
from midstream.schemas.settings.settings import Settings

NOWHERE = Settings(redis_url="redis://127.0.0.1:1/0")
begun = threading.Event()
ended = threading.Event()


async def work(settings: Settings) -> None:
    """What a package of this test offers."""
    assert settings is NOWHERE
    begun.set()
    try:
        await asyncio.sleep(600)
    finally:
        ended.set()


def test_offered_work_runs_on_a_thread_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = EntryPoints([EntryPoint("clock", f"{__name__}:work", ADDED_WORK)])
    monkeypatch.setattr(packages, "entry_points", lambda **asked: offers.select(**asked))
    app = make_callbacks_app(NOWHERE)
    steps = {step.name: step for step in app.steps["worker"]}
    assert {"midstream.clock", "midstream.reaper"} <= steps.keys()
    parent = SimpleNamespace(app=app, steps=[])
    thread = steps["midstream.clock"](parent).create(parent)
    thread.start()
    assert begun.wait(60)
    thread.stop()
    assert ended.is_set()


def test_webhooks_are_among_what_is_offered() -> None:
    assert "webhooks" in packages.offered(ADDED_WORK)
