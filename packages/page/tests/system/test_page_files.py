"""The page's files: served once, complete and of known origin."""

import hashlib
from pathlib import Path

import pytest
from edge import Api

import midstream_page
from midstream_page.files import page_files

SUMS = (Path(midstream_page.__file__).parent / "assets" / "README.md").read_text()


def test_a_file_of_the_page_is_served_once(api: Api) -> None:
    for name, file in page_files().items():
        first = api.http.get(f"/page/{name}")
        assert first.status_code == 200
        assert first.headers["content-encoding"] == "gzip"
        assert first.headers["cache-control"] == "no-cache"
        assert first.content == file.raw
        again = api.http.get(f"/page/{name}", headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304
        assert again.content == b""
        plain = api.http.get(f"/page/{name}", headers={"accept-encoding": "identity"})
        assert plain.headers.get("content-encoding") is None
        assert plain.content == file.raw
        policy = first.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["nothing.js", "../pages.css", "..%2f..%2fapp.py", "vendor", ""])
def test_nothing_else_is_served_as_the_page(api: Api, path: str) -> None:
    assert api.http.get(f"/page/{path}").status_code == 404


def test_the_vendored_library_is_the_published_file() -> None:
    assert (
        f"{hashlib.sha256(page_files()['vendor/preact.js'].raw).hexdigest()}  vendor/preact.js"
    ) in SUMS
