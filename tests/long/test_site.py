"""The documentation builds as a site, without the network, and a reader's browser loads nothing
from another host.
"""

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tree import ROOT

pytestmark = [pytest.mark.timeout(1500), pytest.mark.packages]
SITE = ROOT / ".cache" / "site"
#: What makes a browser load something: element → attributes. A link in the text (`a`) does not.
LOADS = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
OUTSIDE = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")
#: Proxies that nothing listens on.
NO_NETWORK = dict.fromkeys(
    ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    "http://127.0.0.1:9",
)


class References(HTMLParser):
    """What a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value for name, value in attrs if value and name == LOADS.get(tag)]


@pytest.fixture(scope="module")
def pages(library) -> dict[Path, References]:
    """The site's pages."""
    library("docs")
    done = subprocess.run(
        ["make", "docs"],
        cwd=ROOT,
        env={**os.environ, **NO_NETWORK},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: References(path.read_text()) for path in SITE.rglob("*.html")}


def test_pages_of_the_site_load_nothing_from_other_hosts(pages: dict[Path, References]) -> None:
    loaded = {(path.name, target) for path, page in pages.items() for target in page.loads}
    loaded |= {
        (path.name, next(filter(None, found)))
        for path in SITE.rglob("*.css")
        for found in STYLE.findall(path.read_text())
    }
    assert len(loaded) > 100
    assert [found for found in sorted(loaded) if OUTSIDE.match(found[1])] == []


def test_what_the_site_loads_is_there(pages: dict[Path, References]) -> None:
    """The build itself fails at a link that leads nowhere."""
    missing = [
        f"{path.relative_to(SITE)}: {target}"
        for path, page in pages.items()
        for target in page.loads
        if path.name != "404.html"
        and not urlsplit(target).scheme
        and not (path.parent / unquote(target).partition("#")[0]).is_file()
    ]
    assert missing == []


def test_references_of_the_site_have_every_command_endpoint_and_name(
    pages: dict[Path, References],
) -> None:
    import midstream
    import midstream.lens

    python, cli, http = (
        (SITE / "reference" / f"{name}.html").read_text() for name in ("python", "cli", "http")
    )
    assert [
        name
        for name in [*midstream.__all__, *midstream.lens.__all__]
        if not name.startswith("__") and not re.search(rf'id="midstream[\w.]*\b{name}"', python)
    ] == []
    assert re.search(r'id="[\w.]*\.Client\.sweep"', python), (
        "calls that the client inherits from its groups"
    )
    assert 'id="post-v1jobs"' in http
    assert 'id="midstream-modules-register"' in cli
