"""The API serves the documentation that `make docs` built, and says how to build it."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from litestar import Litestar

from midstream.api.routes import pages
from midstream.api.web import problems
from midstream.api.web.body import JsonRequest
from midstream.schemas.base.settings import Settings


@pytest.fixture(scope="module")
def app() -> Any:
    return Litestar(
        [pages.docs, pages.docs_file],
        request_class=JsonRequest,
        exception_handlers=problems.HANDLERS,
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the one that the site is built in, next to another file."""
    (tmp_path / "secret.html").write_text("not for the network")
    site = tmp_path / "site"
    (site / "images").mkdir(parents=True)
    monkeypatch.setattr(pages, "SITE", site)
    return site


def ask(app: Any, path: str, **headers: str) -> httpx2.Response:
    async def call() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(call())


def test_an_unbuilt_site_is_a_404_that_names_the_command(app: Any, site: Path) -> None:
    answer = ask(app, "/docs/index.html")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "the documentation is not built on this server"
    assert "`make docs`" in answer.json()["hint"]
    assert "docs" not in pages.links(Settings())


def test_a_built_site_is_served_with_the_pages_policy(app: Any, site: Path) -> None:
    (site / "index.html").write_text("<h1>one</h1>")
    (site / "images" / "a.png").write_bytes(b"\x89PNG")
    assert ask(app, "/docs").headers["location"] == "/docs/index.html"
    page = ask(app, "/docs/index.html")
    assert (page.text, page.headers["content-type"]) == (
        "<h1>one</h1>",
        "text/html; charset=utf-8",
    )
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert ask(app, "/docs/images/a.png").headers["content-type"] == "image/png"
    again = ask(app, "/docs/index.html", **{"if-none-match": page.headers["etag"]})
    assert again.status_code == 304
    assert pages.links(Settings())["docs"][0] == "/docs/index.html"


def test_a_rebuilt_site_is_served_without_a_restart(app: Any, site: Path) -> None:
    assert ask(app, "/docs/index.html").status_code == 404
    (site / "index.html").write_text("<h1>now</h1>")
    assert ask(app, "/docs/index.html").text == "<h1>now</h1>"


@pytest.mark.parametrize("path", ["none.html", "..%2fsecret.html", "images", "LICENSE"])
def test_nothing_else_is_served_as_documentation(app: Any, site: Path, path: str) -> None:
    (site / "index.html").write_text("<h1>one</h1>")
    (site / "LICENSE").write_text("a file of no type that is served")
    answer = ask(app, f"/docs/{path}")
    assert answer.status_code == 404
    assert answer.json()["hint"] == "its first page is /docs/index.html"


def test_requests_that_come_together_read_the_site_once(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "index.html").write_text("<h1>one</h1>")
    read: list[str] = []

    def slowly(folder: Path) -> Iterator[tuple[str, pages.PageFile]]:
        read.append(folder.name)
        time.sleep(0.05)
        yield "index.html", pages.PageFile("text/html", "", b"", b"")

    monkeypatch.setattr(pages, "_files", slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: len(pages.site_files()), range(4)))
    assert (found, read) == ([1] * 4, ["site"])
