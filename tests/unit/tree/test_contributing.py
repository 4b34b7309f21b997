"""CONTRIBUTING.md is short, and names rooms and files as they are."""

import re

from tree import ROOT, files, rooms, summary

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: Bytes that a newcomer reads in a quarter of an hour.
LONGEST = 15_140


def test_the_map_has_every_room_as_its_docstring_says() -> None:
    assert rooms() in TEXT, "put what `make rooms` prints into CONTRIBUTING.md"
    assert [line for line in rooms().splitlines() if len(line.split()) < 3] == []


def test_every_file_has_a_line_in_the_index() -> None:
    assert [str(path) for path in files() if not summary(path)] == []


def test_every_path_in_it_exists() -> None:
    named = re.findall(r"`([\w.]+/[\w./]+)`", TEXT)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_it_is_short() -> None:
    assert len(TEXT.encode()) <= LONGEST
