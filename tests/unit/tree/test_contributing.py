"""CONTRIBUTING.md: its map lists every room, its paths exist, and its change map is complete."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from tree import EVERY_FILE, PACKAGES, ROOT, rooms, sources, summary, with_index

from midstream.schemas.access.handling import Handling
from midstream.schemas.base.states import TERMINAL
from midstream.schemas.jobs.jobs import Sampling
from midstream.schemas.requests.interventions import FAMILIES

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: Change → the names that exist now. A file that spells all of them needs an edit for a new one.
SPELLED = {
    "an op": {family.name for family in FAMILIES},
    "a sampling field of `POST /v1/jobs`": set(Sampling.__struct_fields__),
    "a scheduling field of `POST /v1/jobs`": set(Handling.__struct_fields__),
    "a terminal state": {str(state) for state in TERMINAL},
}


def paths(text: str) -> list[str]:
    """What stands in backticks and looks like a file or a folder of the tree."""
    return re.findall(r"`([\w./-]+/[\w./-]*)`", text)


def changes() -> dict[str, str]:
    """Change → the code that it touches."""
    part = TEXT.partition("## Change map")[2].partition("\n## ")[0]
    return {
        row[0]: row[1]
        for row in re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", part, re.MULTILINE)[1:]
    }


def test_the_map_lists_every_room() -> None:
    assert set(re.findall(r"^\| `([\w/]+/)` \|", TEXT, re.MULTILINE)) == rooms().keys()


def test_the_index_is_that_of_the_present_files() -> None:
    """If not: `python tests/tree.py --index`."""
    assert with_index(TEXT) == TEXT


@pytest.mark.parametrize("room", rooms())
def test_every_file_says_what_it_is(room: str) -> None:
    silent = [str(path) for path in rooms()[room] if len(summary(path).split()) < 2]
    assert silent == []


def test_every_path_of_the_page_exists() -> None:
    before = TEXT.partition(EVERY_FILE)[0]  # docstrings name paths of other kinds
    named = {*paths(before), *re.findall(r"\]\(([\w./-]+)\)", TEXT)}
    assert len(named) > 80
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_change_map_names_what_it_points_at() -> None:
    """`schemas/base/states.py` (`State`): the module defines the name."""
    wrong = []
    for code in changes().values():
        for path, names in re.findall(r"`([\w./]+\.(?:py|lua))` \(([^)]*)\)", code):
            text = (ROOT / path).read_text()
            wrong += [
                f"{path}: {name}"
                for name in re.findall(r"`(\w+)`", names)
                if not re.search(rf"\b{name}\b", text)
            ]
    assert wrong == []


@cache
def spelled_in(path: Path) -> set[str]:
    """Strings, fields, parameters and members of `State` that a file of Python spells out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr.lower() if ast.unparse(node.value) == "State" else node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return names


@pytest.mark.parametrize("change", SPELLED)
def test_the_change_map_names_every_file_that_lists_all_names(change: str) -> None:
    listing = {
        str(path.relative_to(ROOT))
        for path in sources(*PACKAGES)
        if spelled_in(path) >= SPELLED[change]
    }
    assert len(listing) > 1, "the scan finds nothing"
    assert listing <= set(paths(changes()[change]))
