"""What does the `callbacks` process say without this package?"""

from importlib.metadata import EntryPoints

import pytest

from midstream.broker.callbacks import make_callbacks_app
from midstream.schemas import packages
from midstream.schemas.settings.settings import Settings

SETTINGS = Settings(redis_url="redis://127.0.0.1:1/0")


def test_it_says_that_it_sends_no_webhooks_and_what_would(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packages, "entry_points", lambda **_: EntryPoints())
    make_callbacks_app(SETTINGS)
    assert "this process sends no webhooks" in caplog.text
    assert packages.installing("webhooks") in caplog.text


def test_it_says_nothing_of_the_kind_with_it(caplog: pytest.LogCaptureFixture) -> None:
    make_callbacks_app(SETTINGS)
    assert "webhooks" not in caplog.text
