"""Every failure seen elsewhere that this stage touches has a test that carries its number.

A test is marked by a comment: `# field case 12`, or `# field case 17, 20`.
"""

import re
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


def test_every_field_case_of_this_stage_has_a_named_test() -> None:
    covered = {
        int(number)
        for path in TESTS.rglob("test_*.py")
        for numbers in MARK.findall(path.read_text())
        for number in re.findall(r"\d+", numbers)
    }
    assert {number: what for number, what in REQUIRED.items() if number not in covered} == {}
