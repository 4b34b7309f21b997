"""What does the API answer without this package?"""

from importlib.metadata import EntryPoints
from typing import Any

import httpx2
import pytest

from midstream.api.app import make_app
from midstream.schemas import packages
from midstream.schemas.settings.settings import Settings

SETTINGS = Settings(redis_url="redis://127.0.0.1:1/0")
HERE = "http://127.0.0.1"
REMEDY = packages.installing("page")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The API as the core alone has it."""
    monkeypatch.setattr(packages, "entry_points", lambda **_: EntryPoints())
    return make_app(SETTINGS)


async def ask(app: Any, path: str, method: str = "GET", **headers: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app)
    async with app.lifespan(), httpx2.AsyncClient(transport=transport, base_url=HERE) as client:
        return await client.request(method, path, headers=headers)


async def test_a_browser_is_told_which_extra_has_the_page(bare: Any) -> None:
    answer = await ask(bare, "/", accept="text/html")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert f"<code>{REMEDY}</code>" in answer.text
    assert '<a href="/schema">' in answer.text


async def test_other_clients_get_the_same_links_with_the_page_and_without(bare: Any) -> None:
    without = await ask(bare, "/")
    complete = await ask(make_app(SETTINGS), "/")
    assert without.json() == complete.json()
    assert without.headers["vary"] == "Accept"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/page/main.js"),
        ("GET", "/session"),
        ("POST", "/session"),
        ("DELETE", "/session"),
        ("GET", "/v1/feed?limit=1"),
        ("GET", "/v1/captures/job_1/norms"),
    ],
)
async def test_calls_of_the_page_are_not_found_and_say_what_has_them(
    bare: Any, method: str, path: str
) -> None:
    answer = await ask(bare, path, method)
    assert answer.status_code == 404
    problem = answer.json()
    assert problem["type"] == "urn:midstream:not_found"
    assert "midstream-page" in problem["detail"]
    assert problem["hint"] == REMEDY


async def test_other_paths_are_as_they_are(bare: Any) -> None:
    paths = {route.path for route in make_app(SETTINGS).routes}
    assert {route.path for route in bare.routes} == paths
