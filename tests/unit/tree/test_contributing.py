"""CONTRIBUTING.md lists every room, and the paths and names of its change map exist."""

import re

from tree import ROOT, rooms, summary

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_map_lists_every_room() -> None:
    assert set(re.findall(r"^\| `([\w/]+/)` \|", TEXT, re.MULTILINE)) == rooms().keys()


def test_every_file_says_what_it_is() -> None:
    files = [file for room in rooms().values() for file in room]
    assert [str(file) for file in files if len(summary(file).split()) < 2] == []


def test_every_path_of_the_page_exists() -> None:
    """In backticks, or as a link."""
    named = set(re.findall(r"`([\w./-]+/[\w./-]*)`|\]\(([\w./-]+)\)", TEXT))
    paths = {path or link for path, link in named}
    assert len(paths) > 80
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_change_map_names_what_it_points_at() -> None:
    """`schemas/base/states.py` (`State`): the module has the name."""
    part = TEXT.partition("## Change map")[2].partition("\n## ")[0]
    wrong = [
        f"{path}: {name}"
        for path, names in re.findall(r"`([\w./]+\.(?:py|lua))` \(([^)]*)\)", part)
        for name in re.findall(r"`(\w+)`", names)
        if not re.search(rf"\b{name}\b", (ROOT / path).read_text())
    ]
    assert wrong == []
