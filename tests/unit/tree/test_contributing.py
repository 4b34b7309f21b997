"""CONTRIBUTING.md lists every room."""

import re

from tree import ROOT, rooms

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_map_lists_every_room() -> None:
    assert set(re.findall(r"^\| `([\w/]+/)` \|", TEXT, re.MULTILINE)) == rooms().keys()
