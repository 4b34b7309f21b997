"""Blocks of documentation pages are left out of their test for known reasons only, and what the
pages show is compared with what is printed.
"""

import re
from pathlib import Path

import pytest
from docs_page import OUTPUT, PYTHON, SHELL, blocks, commands, pattern_of
from tree import ROOT

#: Why a block may be left out: how its reason begins.
REASONS = (
    "it needs Docker",
    "it needs a GPU",
    "it needs a bucket",
    "it needs a gradient worker",
    "it needs several machines",
    "it needs a cluster",
    "it takes minutes",
    "it installs system packages",
    "it ends the stack",
    "it starts two engines",
    "the path is a placeholder",
    "the tests start one stack",
    "the tests have it on the path",
)
#: Fences without commands to run.
OTHERS = {"", OUTPUT, "toml", "yaml", "json"}
COMMAND = re.compile(
    (
        r"^(?:\$ |(?:sudo|midstream|curl|make|docker|python3?|celery|source|export|pip) "
        r"[a-z-]+(?: |$))"
    ),
    re.MULTILINE,
)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_are_run_or_left_out_for_a_known_reason(path: Path) -> None:
    found = list(blocks(path.read_text()))
    assert {block.language for block in found} <= {PYTHON, *SHELL, *OTHERS}
    for block in found:
        assert not block.reason or block.reason.startswith(REASONS), block
        if block.language in OTHERS:
            assert not block.reason, f"{block}: such a block is never run"
            assert not COMMAND.search(block.body), block
        if block.language == "console":
            list(commands(block))  # raises when output comes first


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("job_1m7v…b1 is over", "job_2abc0 is over", True),
        ("12.3 ms", "9 ms", True),
        ("rows 420", "rows 421", False),
        ("crc ddf7377c", "crc 00000000", True),
        ("a … b", "a, then b", True),
        ("a … b", "b, then a", False),
        ("│ ──── │", "│ ───────── │", True),
        ("two words", "two  \n words", True),
        (
            '"state":"queued","attempt":0,"version":1,',
            '"state":"running","attempt":1,"version":2,',
            True,
        ),
        (
            '"state":"queued","attempt":0,"version":1,',
            '"state":"failed","attempt":1,"version":2,',
            False,
        ),
        ("two words", "two swords", False),
    ],
)
def test_docs_output_masks_only_varying_values(shown: str, printed: str, same: bool) -> None:
    assert bool(pattern_of(shown).fullmatch(re.sub(r"\s+", "", printed))) is same
