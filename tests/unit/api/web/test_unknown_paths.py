"""What a client of ours or of OpenAI's reads at a path or method that does not exist, and at those
of the documentation that `make docs` built.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from litestar import Litestar

from midstream.api.app import make_app
from midstream.api.routes import pages
from midstream.api.web import problems
from midstream.api.web.body import JsonRequest
from midstream.api.web.problems import nearest
from midstream.schemas.settings.settings import Settings


@pytest.fixture(scope="module")
def app() -> Any:
    return make_app(Settings(redis_url="redis://127.0.0.1:1/0"))


async def ask(app: Any, path: str, method: str = "GET", **headers: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v1/chat/completion", "did you mean '/v1/chat/completions'?"),
        ("POST", "/v1/v1/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("POST", "/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("GET", "/v1/job", "did you mean '/v1/jobs'?"),
        ("GET", "/v1/jobs/job_1/reslt", "did you mean '/v1/jobs/job_1/result'?"),
        ("POST", "/v1/responses", "use /v1/chat/completions or /v1/completions"),
        ("POST", "/v1/embeddings", "capture rows: POST /v1/jobs with the field capture"),
        ("POST", "/embeddings", "the paths are listed at /schema"),
        ("POST", "/v1/audio/speech", "the paths are listed at /schema"),
        ("POST", "/v1/rerank", "the paths are listed at /schema"),
        ("GET", "/" + "x" * 5000, "the paths are listed at /schema"),
    ],
)
async def test_an_unknown_path_has_both_shapes_and_the_nearest_path(
    app: Any, method: str, path: str, hint: str
) -> None:
    answer = await ask(app, path, method)
    problem = answer.json()
    assert answer.status_code == 404
    assert problem["type"] == "urn:midstream:not_found"
    assert problem["hint"] == hint
    assert "allowed" not in problem
    assert problem["error"] == {
        "message": f"{problem['detail']}; {hint}",
        "type": "not_found",
        "code": "not_found",
        "param": None,
    }
    assert len(answer.content) < 1500


async def test_a_job_that_is_deleted_is_cancelled_by_another_call(app: Any) -> None:
    answer = await ask(app, "/v1/jobs/job_1", "DELETE")
    hint = "POST /v1/jobs/ID/cancel cancels a job"
    assert answer.status_code == 405
    assert answer.json()["hint"] == hint


async def test_a_wrong_method_has_both_shapes_and_the_right_methods(app: Any) -> None:
    answer = await ask(app, "/v1/chat/completions")
    problem = answer.json()
    assert answer.status_code == 405
    assert problem["type"] == "urn:midstream:method_not_allowed"
    assert set(problem["allowed"].split(", ")) == {"POST", "OPTIONS"}
    assert problem["error"]["message"] == (
        f"GET is not supported at /v1/chat/completions (allowed: {problem['allowed']})"
    )


def test_a_parameter_stands_for_any_segment() -> None:
    served = ["/v1/jobs/{job_id}/result", "/v1/keys/{key_id}"]
    assert nearest("/v1/jobs/x/rslt", served) == "did you mean '/v1/jobs/x/result'?"
    assert nearest("/a", served) == "the paths are listed at /schema"


# --- Docs site ---


@pytest.fixture(scope="module")
def docs_app() -> Any:
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


async def test_a_site_is_served_as_soon_as_it_is_built(docs_app: Any, site: Path) -> None:
    answer = await ask(docs_app, "/docs/index.html")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "the documentation is not built on this server"
    assert "`make docs`" in answer.json()["hint"]
    assert "docs" not in pages.links(Settings())
    assert (await ask(docs_app, "/docs/index.html")).status_code == 404
    (site / "index.html").write_text("<h1>now</h1>")
    assert (await ask(docs_app, "/docs/index.html")).text == "<h1>now</h1>"


async def test_a_built_site_is_served_with_the_pages_policy(docs_app: Any, site: Path) -> None:
    (site / "index.html").write_text("<h1>one</h1>")
    (site / "images" / "a.png").write_bytes(b"\x89PNG")
    assert (await ask(docs_app, "/docs")).headers["location"] == "/docs/index.html"
    page = await ask(docs_app, "/docs/index.html")
    assert page.text == "<h1>one</h1>"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert (await ask(docs_app, "/docs/images/a.png")).headers["content-type"] == "image/png"
    again = await ask(docs_app, "/docs/index.html", **{"if-none-match": page.headers["etag"]})
    assert again.status_code == 304
    assert pages.links(Settings())["docs"][0] == "/docs/index.html"


@pytest.mark.parametrize("path", ["none.html", "..%2fsecret.html", "images", "LICENSE"])
async def test_nothing_else_is_served_as_documentation(
    docs_app: Any, site: Path, path: str
) -> None:
    (site / "index.html").write_text("<h1>one</h1>")
    (site / "LICENSE").write_text("a file of no type that is served")
    answer = await ask(docs_app, f"/docs/{path}")
    assert answer.status_code == 404
    assert answer.json()["hint"] == "its first page is /docs/index.html"


def test_requests_that_come_together_read_the_site_once(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "index.html").write_text("<h1>one</h1>")
    read: list[str] = []

    def slowly(folder: Path) -> Iterator[tuple[str, pages.ServedFile]]:
        read.append(folder.name)
        time.sleep(0.05)
        yield "index.html", pages.ServedFile("text/html", "", b"", b"")

    monkeypatch.setattr(pages, "files_below", slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: len(pages.site_files()), range(4)))
    assert found == [1] * 4
    assert read == ["site"]
