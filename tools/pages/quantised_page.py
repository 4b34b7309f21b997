"""How far are the rows of checkpoints quantised to FP8 from transformers' rows of the same weights,
dequantised?

    make quantised                  # some minutes; writes the table of docs/vllm.md

Each checkpoint is run as in `fidelity.py`: all hooks, plain and edited. A part of this runs in
`test_quantised.py`.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fidelity import judge, nursery_for, run
from fidelity_page import SHORT, Figure, Way
from quantised import DTYPES, Made, QuantisedTruth, make
from tolerances import QUANTISED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
BEGIN, END = (
    "<!-- written by `make quantised` -->",
    "<!-- end of the part written by `make quantised` -->",
)
#: Pairs, pairs with norms on both sides, single tensors, and a model of vLLM's Transformers
#: backend.
CHECKPOINTS = ("llama", "qwen3", "gemma3", "opt", "gpt-neox")
#: With every checkpoint and dtype; the others with `llama` in bf16 only, to which compiling takes a
#: minute each.
EVERYWHERE, LLAMA = ("v1 eager",), ("v1 compiled", "v2 eager")
Row = tuple[str, str]  # checkpoint, dtype as the page has it
Table = dict[Row, dict[str, str]]  # → runner and mode → figure as text


def cases() -> Iterator[tuple[Row, str, Way]]:
    """Row and column of the table, and how to run it."""
    for name in CHECKPOINTS:
        for dtype in DTYPES:
            for column in EVERYWHERE + (LLAMA if (name, dtype) == ("llama", "bfloat16") else ()):
                runner, mode = column.split()
                yield (name, SHORT[dtype]), column, Way(runner, mode, dtype)


def tolerance(dtype: str) -> float:
    return next(each.limit for dtypes, each in QUANTISED.items() if dtype in dtypes)


def figure(nurseries, folder: Path, made: Made, way: Way, name: str) -> Figure:
    """The worst of all hooks.

    Raises AssertionError when a replaced row is not, bit for bit, what replaces it.
    """
    draws = run(nurseries(way.runner), folder, name.replace(" ", "-"), made.quantised, way)
    hooks = judge(draws, QuantisedTruth(made, way.dtype), way.dtype).values()
    return Figure(max(each.rows for each in hooks), max(each.edits for each in hooks))


def read_page(text: str) -> Table:
    """The figures of the page."""
    lines = [
        line
        for line in text[text.index(BEGIN) : text.index(END)].splitlines()
        if line.startswith("| `")
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        (row[0].strip("`"), row[1]): dict(zip(EVERYWHERE + LLAMA, row[2:], strict=True))
        for row in rows
    }


def write_page(text: str, table: Table) -> str:
    columns = EVERYWHERE + LLAMA
    lines = ["| figures | tolerance | reason |", "|---|---|---|"]
    lines += [
        f"| {dtypes} | {each.limit:g} | {each.reason} |" for dtypes, each in QUANTISED.items()
    ]
    lines += [
        "",
        "| checkpoint | dtype | " + " | ".join(columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    order = dict.fromkeys(row for row, _, _ in cases() if row in table)
    lines += [
        f"| `{row[0]}` | {row[1]} | "
        + " | ".join(table[row].get(each, "") for each in columns)
        + " |"
        for row in order
    ]
    return (
        f"{text[: text.index(BEGIN) + len(BEGIN)]}\n\n"
        + "\n".join(lines)
        + f"\n\n{text[text.index(END) :]}"
    )


def main() -> None:
    table: Table = {}
    exceeded = []
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        started = {runner: nursery_for(runner, folder / runner) for runner in ("v1", "v2")}
        try:
            for row, column, way in cases():
                made = make(row[0], folder / "checkpoints")
                found = figure(started.__getitem__, folder / way.runner, made, way, row[0])
                table.setdefault(row, {})[column] = str(found)
                print(*row, column, found, flush=True)
                if found.worst > tolerance(row[1]):
                    exceeded.append(f"{row} {column}: {found}")
                PAGE.write_text(write_page(PAGE.read_text(), table))
        finally:
            for each in started.values():
                each.close()
    if exceeded:
        sys.exit("beyond their tolerance:\n" + "\n".join(exceeded))


if __name__ == "__main__":
    main()
