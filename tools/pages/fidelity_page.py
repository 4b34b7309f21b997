"""Reads and writes the tables of `docs/reference/fidelity.md`: measured by `fidelity.py`, checked
without an engine.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from families import FAMILIES
from tiny import CHECKPOINTS
from tolerances import FIDELITY

from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.workers.runner.hooks.architectures import describe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "fidelity.md"
#: `fidelity.py` writes the part of the page between these lines.
BEGIN = "<!-- written by `make fidelity` -->"
END = "<!-- end of the part written by `make fidelity` -->"


def hooks_of(name: str) -> tuple[Hook, ...]:
    """The hooks that the architecture of checkpoint `name` has."""
    made = CHECKPOINTS[name]
    return describe(made.architecture, made.hf_config()).hooks


SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Way:
    """One combination of runner, mode and dtype."""

    runner: str  # v1 | v2
    mode: str  # eager | compiled
    dtype: str  # float32 | bfloat16 | float16

    @property
    def name(self) -> str:
        return f"{self.runner} {self.mode} {SHORT[self.dtype]}"

    @property
    def tolerance(self) -> float:
        return FIDELITY[self.dtype].limit


WAYS = tuple(
    Way(*choice)
    for choice in itertools.product(("v1", "v2"), ("eager", "compiled"), ("float32", "bfloat16"))
)


@dataclass(frozen=True)
class Figure:
    """The figures of one hook.

    `rows`: rows captured there; `edits`: rows of all hooks, with the edits made there.

    fp32: the largest error of a row, relative to its norm. bf16: distance from transformers in
    fp32, of all rows together, as a multiple of transformers' own in bf16; where a router chooses
    experts, of the median row, and the median of several prompts.
    """

    rows: float
    edits: float

    @property
    def worst(self) -> float:
        return max(self.rows, self.edits)

    def __str__(self) -> str:
        return (
            f"{self.rows:.1e} / {self.edits:.1e}"
            if self.worst < 0.01
            else f"{self.rows:.2f} / {self.edits:.2f}"
        )


def parse(cell: str) -> Figure:
    """The figure of a table cell. Raises ValueError for other text."""
    rows, edits = cell.split("/")
    return Figure(float(rows), float(edits))


Table = dict[tuple[str, str], dict[str, str]]  # (checkpoint, hook) → way's name → figure as text


def read_page(text: str) -> Table:
    """The figures of the page."""
    lines = [
        line
        for line in text[text.index(BEGIN) : text.index(END)].splitlines()
        if line.startswith("| `")
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = [way.name for way in WAYS]
    return {
        (row[0].strip("`"), row[1].strip("`")): dict(zip(names, row[2:], strict=True))
        for row in rows
    }


def write_page(text: str, table: Table) -> str:
    """The page with these figures, checkpoints in the order of `CHECKPOINTS`, hooks in that of
    `HOOKS`; the rest is unchanged.
    """
    names = [way.name for way in WAYS]
    lines = ["| figures | tolerance | reason |", "|---|---|---|"]
    lines += [f"| {dtype} | {each.limit:g} | {each.reason} |" for dtype, each in FIDELITY.items()]
    lines += [
        "",
        "| checkpoint | hook | " + " | ".join(names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    order = [
        (name, hook)
        for name in [*CHECKPOINTS, *FAMILIES]
        for hook in HOOKS
        if (name, hook) in table
    ]
    lines += [
        f"| `{name}` | `{hook}` | "
        + " | ".join(table[name, hook].get(way, "") for way in names)
        + " |"
        for name, hook in order
    ]
    before = text[: text.index(BEGIN) + len(BEGIN)]
    after = text[text.index(END) :]
    return f"{before}\n\n" + "\n".join(lines) + f"\n\n{after}"
