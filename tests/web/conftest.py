"""One browser per process, one stack per file, a fresh profile per test."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright
from web_kit import Site, Visit, launched, visiting


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = launched(playwright)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site")) as started:
        yield started


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Visit]:
    with visiting(browser, site.url) as opened:
        yield opened
