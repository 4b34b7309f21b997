"""The pages that the documentation's site is rendered from, and what becomes of its HTML."""

import importlib.util
import re
import sys
from types import ModuleType

import pytest
from tree import ROOT


@pytest.fixture(scope="module")
def build() -> ModuleType:
    path = ROOT / "docs" / "site" / "build.py"
    spec = importlib.util.spec_from_file_location("docs_site_build", path)
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    # tests/engine also has a `reference`: neither takes the other's place
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        for name in ("notebook", "reference"):
            patch.delitem(sys.modules, name, raising=False)
        spec.loader.exec_module(found)
        for name in ("notebook", "reference"):
            del sys.modules[name]
    return found


@pytest.fixture(scope="module")
def pages(build: ModuleType) -> dict[str, str]:
    return build.pages()  # type: ignore[no-any-return]


def test_navigation_leads_to_pages(build: ModuleType, pages: dict[str, str]) -> None:
    listed = [page for section in build.navigation().values() for page in section]
    assert set(listed) <= set(pages)
    assert len(listed) == len(set(listed))
    assert {"tour.md", "reference/python.md", "repository/benchmarks/RESULTS.md"} <= set(listed)


def test_search_leaves_out_decisions_results_and_sources(pages: dict[str, str]) -> None:
    found = {page for page, text in pages.items() if text.startswith("---\nsearch:")}
    assert "repository/benchmarks/RESULTS.md" in found
    assert "decisions/0001-contracts.md" in found
    assert all(page in found for page in pages if re.search(r"\.(py|yaml|lua)\.md$", page))
    assert not found & {"steering.md", "tour.md", "client.md", "repository/overview.md"}


def test_the_python_reference_has_every_group_of_calls(pages: dict[str, str]) -> None:
    shown = re.findall(
        r"^## `client\.(\w+)`\n\n::: midstream\.client\.sdk\.\w+\.\w+$",
        pages["reference/python.md"],
        re.MULTILINE,
    )
    assert {"jobs", "captures", "modules", "loras", "webhooks"} <= set(shown)
    assert len(shown) == 19


def test_links_out_of_docs_lead_to_pages_of_the_site(pages: dict[str, str]) -> None:
    assert "](repository/overview.md)" in pages["README.md"]
    assert "](../repository/examples/first_hour.ipynb.md)" not in pages["README.md"]
    assert "](../tour.md)" in pages["repository/overview.md"]


def test_a_page_has_no_inline_script_and_no_other_host(build: ModuleType) -> None:
    page = (
        f'<script src="{build.SHIM}"></script><script>a=1</script>'
        '<script id="__config" type="application/json">{}</script>'
    )
    text, scripts = build.local(page, "reference/python.html")
    (name,) = scripts
    assert scripts[name] == "a=1"
    assert text == (
        '<script src="../assets/iframe-worker.js"></script>'
        f'<script src="../{name}"></script>'
        '<script id="__config" type="application/json">{}</script>'
    )
