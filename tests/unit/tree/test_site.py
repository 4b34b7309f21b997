"""The pages that the documentation's site is rendered from, without rendering them."""

import runpy

from tree import ROOT


def test_navigation_leads_to_pages_and_links_stay_on_the_site() -> None:
    build = runpy.run_path(str(ROOT / "docs" / "site" / "build.py"))
    pages = build["pages"]()
    listed = [page for section in build["navigation"]().values() for page in section]
    assert set(listed) <= set(pages)
    assert len(listed) == len(set(listed))
    assert {"tour.md", "reference/python.md", "repository/benchmarks/RESULTS.md"} <= set(listed)
    assert "](repository/overview.md)" in pages["README.md"]
    assert "](../tour.md)" in pages["repository/overview.md"]
    assert "## `client.jobs`\n" in pages["reference/python.md"]
    unsearched = {page for page, text in pages.items() if text.startswith("---\nsearch:")}
    assert unsearched & {"tour.md", "decisions/0001-contracts.md"} == {
        "decisions/0001-contracts.md"
    }


def test_a_page_has_no_inline_script_and_no_other_host() -> None:
    build = runpy.run_path(str(ROOT / "docs" / "site" / "build.py"))
    page = f'<script src="{build["SHIM"]}"></script><script>a=1</script>'
    text, scripts = build["local"](page, "reference/python.html")
    ((name, script),) = scripts.items()
    assert script == "a=1"
    assert text == (
        f'<script src="../assets/iframe-worker.js"></script><script src="../{name}"></script>'
    )
