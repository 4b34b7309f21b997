"""One browser and one stack for each process, a fresh profile for each test."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright
from web_kit import Site, Visit, launched, visiting

SAES = Path(__file__).parents[4] / "tests" / "data" / "saes"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = launched(playwright)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(SAES, folder / "saes")
    stores = {"artifacts_dir": str(folder), "harvest_stores": str(folder / "rows")}
    with Site(folder / "site", **stores) as started:
        yield started


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Visit]:
    with visiting(browser, site.url) as opened:
        yield opened
