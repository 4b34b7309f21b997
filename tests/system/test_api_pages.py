"""Pages of the API: complete without any other host, and a front page instead of a 404."""

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from edge import Api

from midstream.api.routes.pages import PAGE_TYPES

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SUMS = (Path(__file__).resolve().parents[2] / "api/assets/README.md").read_text()


class Loaded(HTMLParser):
    """What a page has a browser load by itself, and where its links lead."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.resources: list[str] = []
        self.links: list[str] = []
        self.inline = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if (
            tag == "style"
            or (tag == "script" and "src" not in given)
            or any(name.startswith("on") for name in given)
        ):
            self.inline += 1
        found = [value for name, value in given.items() if name in ("src", "href") and value]
        (self.links if tag == "a" else self.resources).extend(found)


@pytest.mark.parametrize("path", ["/", "/schema", "/schema/swagger"])
def test_pages_load_only_from_this_api(api: Api, path: str) -> None:
    answer = api.http.get(path, headers=BROWSER)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    found = Loaded(answer.text)
    assert found.inline == 0
    assert [
        url for url in found.resources if not url.startswith(("/schema/assets/", "/page/", "data:"))
    ] == []
    for url in found.resources:
        if url.startswith("/"):
            assert api.http.get(url).status_code == 200
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {source for sources in policy.values() for source in sources.split()} <= {
        "'none'",
        "'self'",
        "'unsafe-inline'",
        "data:",
        "blob:",
    }
    assert policy["script-src"] == "'self'"


def test_swagger_ui_uses_our_document_and_no_validator(api: Api) -> None:
    script = api.http.get("/schema/assets/swagger-start.js").text
    assert re.findall(r"\w+://", script) == []
    assert 'url: "/schema/openapi.json"' in script
    assert "validatorUrl: null" in script


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
@pytest.mark.parametrize("name", ["swagger-ui-bundle.js", "swagger-ui.css"])
def test_vendored_assets_are_the_published_files(api: Api, name: str, encoding: str) -> None:
    answer = api.http.get(f"/schema/assets/{name}", headers={"accept-encoding": encoding})
    assert answer.headers.get("content-encoding", "identity") == encoding
    assert answer.headers["content-type"].startswith(PAGE_TYPES[Path(name).suffix])
    assert f"{hashlib.sha256(answer.content).hexdigest()}  {name}" in SUMS


def test_an_unknown_asset_is_not_found(api: Api) -> None:
    answer = api.http.get("/schema/assets/..%2Fopenapi.py")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_front_links_resolve(api: Api) -> None:
    answer = api.http.get("/", headers={"accept": "application/json"})
    assert answer.headers["content-type"] == "application/json"
    links = answer.json()["links"]
    for url in links.values():
        if url.startswith("/"):
            # no worker: not ready
            assert api.http.get(url).status_code == (503 if url == "/readyz" else 200), url
    assert links["flower"].startswith("http://127.0.0.1:")
    assert api.http.get("/").headers["content-type"] == "application/json"  # as curl asks
