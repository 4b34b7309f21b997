"""What does the API say to a request that names a receiver of webhooks, if nothing installed would
send them?
"""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from litestar.testing import TestClient
from refusal_kit import refuses

from midstream.api.app import make_app
from midstream.api.resolve.prompts import callback_url
from midstream.api.resolve.prompts.callback_url import RECEIVERS, check_callback, check_receiver
from midstream.schemas import packages
from midstream.schemas.access.handling import Callback
from midstream.schemas.settings.settings import Settings

URL = "https://receiver.example/hook"
Install = Callable[[list[EntryPoint]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Replaces what is installed."""

    def there(offers: list[EntryPoint]) -> None:
        found = EntryPoints(offers)
        monkeypatch.setattr(packages, "entry_points", lambda **asked: found.select(**asked))
        callback_url._check.cache_clear()

    yield there
    callback_url._check.cache_clear()


@pytest.mark.parametrize(
    ("offers", "missing"),
    [
        ([], "midstream-webhooks"),
        ([EntryPoint("webhooks", "midstream_no_such:check", RECEIVERS)], "midstream_no_such"),
    ],
    ids=["the package", "what the package needs"],
)
def test_a_receiver_is_refused_by_field_and_extra_while_the_package_is_missing(
    install: Install, offers: list[EntryPoint], missing: str
) -> None:
    install(offers)
    said = f"a webhook needs the package {missing}: pip install 'midstream[webhooks]'"
    with refuses(f"callback_url: {said}", status=400):
        check_callback(Callback(url=URL, events=["job.failed"]), Settings())
    with refuses(f"actions[1].url: {said}", status=400):
        check_receiver(URL, "actions[1].url", Settings())


def test_a_request_without_a_receiver_needs_no_package(install: Install) -> None:
    install([])
    check_callback(None, Settings())


def test_an_installed_package_judges_the_receiver() -> None:
    check_receiver(URL, "callback_url", Settings())
    with refuses("callback_url: 10.0.0.8 is private", status=400):
        check_receiver("http://10.0.0.8/", "callback_url", Settings())
    check_receiver("http://10.0.0.8/", "callback_url", Settings(webhook_allow_private=True))


def test_calls_on_webhooks_are_refused_with_the_extra_while_the_package_is_missing(
    install: Install,
) -> None:
    install([])
    app = make_app(Settings(redis_url="redis://127.0.0.1:1/0"))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answer = client.get("/v1/webhooks/deliveries", params={"limit": 1})
    assert answer.status_code == 404
    assert "midstream-webhooks" in answer.text
    assert "pip install 'midstream[webhooks]'" in answer.text
