"""Do the documents say what is there: every setting, every link, every command?"""

import re
import tomllib
from pathlib import Path
from typing import Any

import code_tables
import pytest
from tree import ROOT

from midstream.schemas.settings.settings import Settings, values_of

#: Pages of packages.
PACKAGED = [*ROOT.glob("packages/*/docs/*.md")]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("packages/*/*.md"), *PACKAGED]
)
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

SETTING_ROW = re.compile(r"^\| `(?P<name>[\w.]+)` \| `(?P<default>[^`]*)` \| .+ \|$", re.MULTILINE)
#: What the table writes for a default of None, which TOML lacks.
UNSET = "unset"

FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+?) *$", re.MULTILINE)


def test_the_settings_page_and_the_settings_agree_both_ways() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    listed = [(row["name"], _value(row["default"])) for row in SETTING_ROW.finditer(page)]
    assert len(dict(listed)) == len(listed), "a setting stands in the page twice"
    assert dict(listed) == values_of(Settings())


@pytest.mark.parametrize("page", code_tables.PAGES.values(), ids=code_tables.PAGES)
def test_a_page_has_the_comments_of_the_code(page: Path) -> None:
    assert code_tables.rewritten(page) == page.read_text(), "run python tools/pages/code_tables.py"


def _value(text: str) -> Any:
    return None if text == UNSET else tomllib.loads(f"value = {text}")["value"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_every_relative_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    assert [target for target in _links(path.read_text()) if not _resolves(path, target)] == []


def test_the_package_index_shows_a_page_without_relative_links() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    links = _links((ROOT / project["readme"]).read_text())
    assert [link for link in links if not link.startswith("https://")] == []


def test_every_page_stands_in_the_index_once() -> None:
    """The site's navigation is read from there."""
    docs = ROOT / "docs"
    listed = [
        target
        for target in _links((docs / "README.md").read_text().partition("\n## ")[2])
        if target.endswith(".md") and (docs / target).resolve() in {*PACKAGED, *docs.rglob("*.md")}
    ]
    there = {*PACKAGED, *docs.rglob("*.md")} - {docs / "README.md"}
    assert len(listed) == len(set(listed))
    assert {(docs / target).resolve() for target in listed} == there


def _links(text: str) -> list[str]:
    return [link["target"] for link in LINK.finditer(FENCE.sub("", text))]


def _resolves(path: Path, target: str) -> bool:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):  # another site's
        return True
    file, _, anchor = target.partition("#")
    found = (path.parent / file).resolve() if file else path
    if not found.is_relative_to(ROOT) or not found.exists():
        return False
    return not anchor or anchor in {
        re.sub(r"[^\w\- ]", "", heading["title"].lower()).replace(" ", "-")
        for heading in HEADING.finditer(FENCE.sub("", found.read_text()))
    }
