"""Does Midstream answer OpenAI's calls as stock vLLM's server does?

Every call of `tests/engine/openai_calls.py`, field by field.

    python tools/pages/openai_page.py [--only TEXT] [--page]

Both servers run on this machine with the demo model in float32, on the same engine options, side by
side; each call goes to one, then to the other. `--page` writes the table in
`docs/coming-from.md`.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("", "engine", "fake_engine", "system")]

from openai_answers import ENGINE, TOOL_PARSER, answer, differences, stock_server  # noqa: E402
from openai_calls import Call, calls  # noqa: E402
from stack import Stack  # noqa: E402

from midstream_ops.demo_model import fetch_demo_model  # noqa: E402

PAGE = ROOT / "docs" / "coming-from.md"
BEGIN = "<!-- written by tools/pages/openai_page.py --page -->"
END = "<!-- end of the part written by tools/pages/openai_page.py -->"


def compared(only: str, folder: Path) -> list[tuple[Call, list[str]]]:
    """Each call with the differences between the two answers."""
    options = {
        "engine": "vllm",
        "model": str(fetch_demo_model()),
        "model_name": "demo",
        "kv_cache_gib": 0.5,
        "tool_parser": TOOL_PARSER,
    }
    stack = Stack(
        folder,
        api=True,
        start_timeout_s=400,
        lease_s=60.0,
        **{"tuning.visibility_timeout_s": 120},
        **options,
        **ENGINE,
    )
    found = []
    with stock_server(folder) as stock, stack:
        for call in calls():
            if only in call.name:
                found.append((call, differences(answer(stock, call), answer(stack.url, call))))
                print(
                    "=" if not found[-1][1] else "≠",
                    call.name,
                    *found[-1][1],
                    sep="\n    " if found[-1][1] else " ",
                    flush=True,
                )
    return found


def table(found: list[tuple[Call, list[str]]]) -> str:
    """The result as Markdown: numbers by kind of call, and the differences."""
    kinds: dict[str, Counter[str]] = {}
    for call, differ in found:
        kind = (
            call.name.partition(":")[0].split(", refused")[0]
            if "refused" not in call.name
            else f"{call.path}, refused by both"
        )
        kind = f"{call.path}, different by design" if call.differs else kind
        kinds.setdefault(kind, Counter())["differ" if differ else "equal"] += 1
    lines = ["| calls | equal | different |", "|---|---|---|"]
    lines += [
        f"| {kind} | {counts['equal']} | {counts['differ']} |" for kind, counts in kinds.items()
    ]
    equal = sum(counts["equal"] for counts in kinds.values())
    lines += [f"| all {len(found)} | {equal} | {len(found) - equal} |", ""]
    reasons: dict[str, list[str]] = {}
    for call, differ in found:
        if differ:
            reasons.setdefault(call.differs or "not by design", []).append(call.name)
    return "\n".join(
        [
            *lines,
            "| different because | calls |",
            "|---|---|",
            *(f"| {why} | {'; '.join(n)} |" for why, n in reasons.items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE.name}")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compared(chosen.only, Path(folder))
    written = table(found)
    print(written)
    if chosen.page:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{written}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
