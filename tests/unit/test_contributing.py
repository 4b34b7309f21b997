"""CONTRIBUTING.md: its map lists every room, and its paths exist."""

import re

from tree import PACKAGES, ROOT, sources

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: The most files that a change may need to touch, as the change map counts them.
AIMS = {
    "a hook point": 2,
    "an op": 4,
    "a capture dtype": 2,
    "a sampling field of `POST /v1/jobs`": 2,
    "a scheduling field of `POST /v1/jobs`": 5,
    "a terminal state": 3,
    "a metric": 1,
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
    listed = set(re.findall(r"^\| `([\w/]+/)` \|", TEXT, re.MULTILINE))
    rooms = {
        f"{path.parent.relative_to(ROOT)}/"
        for path in sources(*PACKAGES)
        if path.name == "__init__.py"
    }
    assert listed == rooms


def test_every_path_of_the_page_exists() -> None:
    named = {*paths(TEXT), *re.findall(r"\]\(([\w./-]+)\)", TEXT)}
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


def test_changes_stay_as_small_as_was_aimed_at() -> None:
    counts = {change: len(paths(changes()[change])) for change in AIMS}
    assert {change: count for change, count in counts.items() if count > AIMS[change]} == {}
