"""Notebooks as tests and benchmarks see them: their code, what they print, and whether two runs
print the same.
"""

import re
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "examples" / "tutorials").glob("*.ipynb"))
#: How far two numbers with decimals, or with three digits and more, may be apart: as a share of the
#: larger one, and at least.
SHARE = 0.02
LEAST = 0.021
_NUMBER = re.compile(r"-?(?:\d+\.\d+|\d{3,})")
_PEER = re.compile(r"```python\n(.*?)```", re.DOTALL)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code(notebook: Any) -> str:
    """All code cells, as a script."""
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code") + "\n"


def peer_code(notebook: Any) -> str:
    """What the last cell shows of the same study with TransformerLens."""
    (found,) = _PEER.findall(notebook.cells[-1].source)
    return str(found)


def printed(cell: Any) -> str:
    """On standard output."""
    return "".join(
        output.text
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


def shown(cell: Any) -> set[str]:
    """MIME types of the values that it shows."""
    return {kind for output in cell.outputs for kind in output.get("data", {})}


def lines(source: str) -> int:
    """Of code: without blank ones and comments."""
    return sum(
        1 for line in source.splitlines() if line.strip() and not line.strip().startswith("#")
    )


def difference(one: str, other: str) -> str:
    """Where two texts differ by more than the rounding of numbers; empty: nowhere."""
    ours = one.splitlines()
    theirs = other.splitlines()
    if len(ours) != len(theirs):
        return f"{len(ours)} lines and {len(theirs)}:\n{one}\nand\n{other}"
    for a, b in zip(ours, theirs, strict=True):
        words = [re.sub(r"\s+", " ", _NUMBER.sub("#", each)).strip() for each in (a, b)]
        numbers = [[float(number) for number in _NUMBER.findall(each)] for each in (a, b)]
        if words[0] != words[1]:
            return f"{a!r}\nand\n{b!r}"
        for x, y in zip(*numbers, strict=True):
            if abs(x - y) > max(LEAST, SHARE * max(abs(x), abs(y))):
                return f"{x} and {y} in\n{a!r}\nand\n{b!r}"
    return ""
