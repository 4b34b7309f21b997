"""Tests the runner of documentation pages, and which blocks it leaves out."""

import re
from pathlib import Path

import pytest
from docs_page import OUTPUT, PYTHON, SHELL, Block, Page, blocks, commands, pattern_of
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


def run(text: str, folder: Path) -> list[str]:
    return Page(Path("page.md"), text, folder, {"PATH": "/usr/bin:/bin"}).run()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_block_is_left_out_for_a_known_reason_only(path: Path) -> None:
    left_out = [block for block in blocks(path.read_text()) if block.reason]
    assert [
        (block.line, block.reason) for block in left_out if not block.reason.startswith(REASONS)
    ] == []
    assert all(block.language in (PYTHON, *SHELL) for block in left_out), (
        "other blocks are never run"
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_stand_in_blocks_that_are_run(path: Path) -> None:
    found = list(blocks(path.read_text()))
    assert {block.language for block in found} <= {PYTHON, *SHELL, *OTHERS}
    assert [
        block.line for block in found if block.language in OTHERS and COMMAND.search(block.body)
    ] == []
    for block in found:
        if block.language == "console":
            list(commands(block))  # raises when output comes first


def test_a_fence_with_a_reason_is_found_with_it() -> None:
    text = "<!-- not run: it needs Docker -->\n```bash\ndocker ps\n```\n\n```python\n1\n```\n"
    assert list(blocks(text)) == [
        Block(2, "bash", "docker ps\n", "it needs Docker"),
        Block(6, "python", "1\n", ""),
    ]


def test_a_command_takes_the_lines_that_complete_it() -> None:
    body = "$ echo 'a\nb'\na\nb\n$ cat <<END\nc\nEND\nc\n$ echo d \\\n    e\nd e\n"
    assert list(commands(Block(1, "console", body, ""))) == [
        ("echo 'a\nb'", "a\nb"),
        ("cat <<END\nc\nEND", "c"),
        ("echo d \\\n    e", "d e"),
    ]


def test_blocks_share_variables_and_what_they_print_is_compared(tmp_path: Path) -> None:
    text = (
        "```console\n$ A=one\n$ echo $A\none\n```\n```python\nb = "
        "2\n```\n```python\nprint(b)\n```\n```text\n2\n```\n"
    )
    assert run(text, tmp_path) == []
    wrong = run(text.replace("\none\n", "\ntwo\n").replace("\n2\n", "\n3\n"), tmp_path)
    assert [found.partition("\n")[0] for found in wrong] == [
        "page.md:1: `echo $A` prints",
        "page.md:9: `print(b) …` prints",
    ]


def test_an_exit_code_and_an_exception_are_noticed(tmp_path: Path) -> None:
    text = (
        "```bash\ntrue\nfalse\n```\n```python\nraise "
        "ValueError('x')\n```\n```console\n$ false\n$ true\n```\n"
    )
    wrong = run(text, tmp_path)
    assert [found.split()[0] for found in wrong] == ["page.md:1:", "page.md:5:", "page.md:8:"]


def test_an_output_that_is_shown_may_end_with_any_code(tmp_path: Path) -> None:
    assert run("```console\n$ echo no; false\nno\n```\n", tmp_path) == []


def test_a_receipt_may_come_before_its_output_and_no_other_event(tmp_path: Path) -> None:
    output, receipt, done = (
        f"id: 1795148340213-{at}\nevent: {kind}\ndata: x\n\n"
        for at, kind in enumerate(["output", "receipt", "done"])
    )
    for order, same in [
        (output + receipt + done, True),
        (receipt + output + done, True),
        (output + done + receipt, False),
    ]:
        (tmp_path / "events").write_text(order)
        assert (
            run(f"```console\n$ cat {tmp_path}/events\n{output}{receipt}{done}```\n", tmp_path)
            == []
        ) is same


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
