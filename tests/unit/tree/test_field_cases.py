"""Does every failure seen elsewhere that this stage touches have a test that carries its number?

A test is marked by a comment above it or inside it: `# field case 12`, or `# field case 17, 20`.
The mark counts only if the test runs and its own body asserts.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]

#: Case → what must be shown not to happen.
REQUIRED: dict[int, str] = {
    1: "in a batch, rows of another request",
    2: "a stream captured without its branch, or a branch without its norm",
    3: "an edit of the stream does not reach the branch that reads it next",
    4: "all layers of a capture are the last one's",
    5: "a compiled or replayed graph leaves the op out",
    6: "rows captured twice after preemption",
    7: "padded, dummy or warm-up rows captured",
    8: "off by one layer",
    9: "positional steering fires again on every decode step or prefill chunk",
    10: "a scaling goes by the branch instead of the stream",
    11: "a prompt of a batch, or a streamed request, runs unsteered",
    12: "outputs are judged by tokens that rounding may flip",
    13: "steered KV serves a plain request",
    14: "a capture is short by the cached prefix",
    15: "other content under an old name serves stale KV",
    16: "decode-only steering forks the prompt's KV",
    17: "results arrive only with the next engine step",
    18: "the wait ends with the first stage or the first prompt",
    19: "ok is reported before files are durable",
    20: "finalising waits for all writers to be idle",
    21: "a failure before registration leaves the wait to time out",
    22: "no directory fsync after rename; a false setting read as true",
    23: "Path objects become bytes on the way to the ranks",
    24: "more configurations than rows fail or kill the engine",
    25: "a module of one phase is looked up in the other",
    26: "a module is unregistered under a request that has it",
    27: "bad input reaches the engine",
    28: "a rank that fails to apply leaves its peers waiting in a collective",
    29: "a rank's refusal is discarded",
    30: "ranks that differ are seen only when somebody polls",
    31: "a source run is gone when a row of it is needed, and the cell is reported as if patched",
    32: "cells that were not patched are looked for under other names than theirs",
    33: "an answer outside the most likely tokens has no grade",
    34: "rows land at shifted positions; a position beyond the prompt never fires",
    35: "a share is told of a baseline that allows none",
    36: "one failing cell ends the sweep; leases end before it does; nothing limits its cells",
    37: "a crash loses jobs, or a job runs twice at once",
    38: "a swallowed notification leaves a client waiting",
    39: "a failure is answered 200",
    40: "ids can be guessed or chosen; a tag escapes the root",
    41: "a callback goes out unsigned, without limit, or anywhere",
    42: "pickle or a client's code is executed",
    43: "versions differ and nobody says which",
    44: "Python loops over layers and requests, a synchronisation each",
    45: "a vector is hashed as text per request",
    46: "one disk round trip per file",
    47: "rows travel as JSON floats",
}

MARK = re.compile(r"#\s*field cases?\s+(\d+(?:\s*(?:,|and)\s*\d+)*)", re.IGNORECASE)


def asserts(test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the test's body has an assertion and no decorator skips it."""
    if any(re.search(r"\bmark\.(skip|xfail)\b", ast.unparse(mark)) for mark in test.decorator_list):
        return False
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Attribute) and re.match("raises$|assert_", node.attr))
        for node in ast.walk(test)
    )


def marks_of(source: str) -> dict[int, list[str]]:
    """Case number → names of the tests in `source` that carry it and assert."""
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    found: dict[int, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith(
            "test_"
        ):
            continue
        if not asserts(node):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        while first > 1 and lines[first - 2].lstrip().startswith("#"):
            first -= 1
        for number in range(first, (node.end_lineno or first) + 1):
            for match in MARK.finditer(comments.get(number, "")):
                for case in re.findall(r"\d+", match.group(1)):
                    found.setdefault(int(case), []).append(node.name)
    return found


def test_every_field_case_of_this_stage_has_a_named_test() -> None:
    covered: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text()
        if MARK.search(source):
            covered |= marks_of(source).keys()
    assert {number: what for number, what in REQUIRED.items() if number not in covered} == {}


def test_a_mark_counts_only_where_a_test_carries_it() -> None:
    source = "\n\n".join(
        [
            "# field case 1\nHELPER = 1",
            "# field case 2, 3\n# and a word\n@decorated\ndef test_above():\n    assert run()",
            "def test_inside():\n    # Field cases 4 and 5\n    assert run('# field case 7')",
            "def helper():\n    # field case 6\n    assert run()",
            "def test_empty():\n    run()  # field case 8",
            "# field case 9\n@pytest.mark.skip\ndef test_skipped():\n    assert run()",
            "def test_raises():\n    with pytest.raises(Error):\n        run()  # field case 10",
        ]
    )
    assert marks_of(source) == {
        2: ["test_above"],
        3: ["test_above"],
        4: ["test_inside"],
        5: ["test_inside"],
        10: ["test_raises"],
    }
