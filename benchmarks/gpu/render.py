"""The page of results: what was measured, beside the goal of each figure."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A number that a stage gives.

    `goal`: in words; `reached`: whether the stage's figures meet it.
    """

    means: str
    unit: str = ""
    goal: str = ""
    reached: Callable[[dict[str, float]], bool] | None = None
    digits: int = 2


def at_most(limit: float, of: str) -> Callable[[dict[str, float]], bool]:
    return lambda values: values[of] <= limit


def at_least(limit: float, of: str) -> Callable[[dict[str, float]], bool]:
    return lambda values: values[of] >= limit


def _limit(means: str, of: str, limit: float) -> Figure:
    return Figure(means, "", f"≤ {limit:g}", at_most(limit, of), 4)


#: Of which a kernel's rate is told.
ROWS = (1, 64, 2048)


def _rate(name: str, what: str, rows: int) -> Figure:
    means = f"{what} of {rows} rows, of a device copy's rate"
    return (
        Figure(means, "%", "≥ 85 %", at_least(85, f"{name}_{rows}"), 1)
        if rows >= 2048
        else Figure(means, "%", digits=1)
    )


#: Kind of load → the largest ratio of its step to stock vLLM's.
RATIOS = {"idle": 1.03, "one": 1.15, "steer": 1.12, "both": 1.27}
#: The longest step of each, of stock's median.
LONGEST = 3.0
_KINDS = {
    "idle": "unused hooks, 64 requests decode",
    "one": "one layer captured",
    "steer": "64 distinct steering configurations at every layer",
    "both": "the same, with every layer captured",
}
_ROUNDS = {
    kind: _limit(f"step with {means}, of stock's", kind, RATIOS[kind])
    for kind, means in _KINDS.items()
} | {
    f"longest_{kind}": _limit(
        f"longest step with {means}, of stock's median", f"longest_{kind}", LONGEST
    )
    for kind, means in _KINDS.items()
}
_WHY = (
    _ROUNDS
    | {
        f"many_{kind}": Figure(f"step with {means}, of stock's, 256 requests", digits=3)
        for kind, means in _KINDS.items()
    }
    | {
        f"{name}_{tag}": Figure(f"{what}, {where}", unit)
        for name, what, unit in (
            ("rate", "captured prompts until durable", "GB/s"),
            ("prompt", "prompts with every layer captured until the last token, of stock's", ""),
        )
        for tag, where in (
            ("memory", "files in memory"),
            ("disk", "files on the disk"),
        )
    }
    | {"disk_share": Figure("rate of the files on the disk, of its own in the same round", "%")}
)
#: Stage → its figures, in the order of the page.
FIGURES: dict[str, dict[str, Figure]] = {
    "smoke": {
        "rows": Figure("rows of one engine with graphs compared with eager steps'", digits=0),
        "row_error": _limit("largest error of those rows, of a row's length", "row_error", 0.03),
        "effect": Figure(
            "least change of a row by steering, of its length",
            "",
            "≥ 0.05",
            at_least(0.05, "effect"),
            3,
        ),
        "before_edit": _limit(
            "change of the row before it is steered, of its length", "before_edit", 0.03
        ),
        "patched_wrong": Figure(
            "patched rows with other bits than the source's",
            "",
            "0",
            at_most(0, "patched_wrong"),
            0,
        ),
        "score_error": _limit(
            "largest error of a probe's scores against captured rows", "score_error", 0.02
        ),
        "logprob_error": _limit(
            "largest error of a plain request's first log-probability", "logprob_error", 0.1
        ),
    },
    "why": _WHY,
    "kernels": {
        "cases": Figure(
            "random sites compared with the reference: every family, dtype and width", digits=0
        ),
        "graph_replays": Figure(
            "replays of a graph whose plan changes, compared with the reference", digits=0
        ),
        **{
            f"{name}_{rows}": _rate(name, what, rows)
            for name, what in (("gather", "capture"), ("steer", "addition"))
            for rows in ROWS
        },
    },
    "graphs": {
        "steps": Figure("mixed steps", "", "≥ 10,000", at_least(10_000, "steps"), 0),
        "rows": Figure("rows compared with the same steps without graphs", digits=0),
        "wrong_rows": Figure(
            "rows with other bits, or missing", "", "0", at_most(0, "wrong_rows"), 0
        ),
        "rows_after_equal_tokens": Figure(
            "those of them whose request had the same tokens until there",
            "",
            "0",
            at_most(0, "rows_after_equal_tokens"),
            0,
        ),
        "rows_after_other_tokens": Figure(
            "those of them whose request had other tokens before, so that they must differ",
            digits=0,
        ),
        "requests_after_equal_tokens": Figure(
            "requests with such rows after the same tokens",
            "",
            "0",
            at_most(0, "requests_after_equal_tokens"),
            0,
        ),
        "same_error": Figure(
            "largest error of a row with the same tokens until there, of the row's length", digits=5
        ),
        "other_tokens": Figure("requests that generated other tokens", digits=0),
        "eager_error": Figure("the same error against eager steps", digits=5),
        "family_differences": Figure(
            "numbers that a neighbour's capture changes",
            "",
            "0",
            at_most(0, "family_differences"),
            0,
        ),
    },
    "why-70b-shard": _ROUNDS,
    "why-30b-a3b": _ROUNDS,
}


def read(folder: Path, stages: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Stage → its record, of those that have one."""
    return {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in stages
        if (folder / f"{name}.json").exists()
    }


def page(stages: Sequence[str], records: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "# On a GPU",
        "",
        (
            "Written by `make bench-gpu` (`python benchmarks/gpu/all.py`); [what it "
            "runs](../../docs/capacity.md#on-a-gpu)."
        ),
        "",
    ]
    if not records:
        lines += [
            (
                "No stage has run on a GPU yet: the tables below show what will be measured, "
                "and the goals."
            ),
            "",
        ]
    if any(record.get("tiny") for record in records.values()):
        lines += [
            (
                "**Run with the smallest sizes (`--tiny`), which try the stages and measure "
                "nothing.**"
            ),
            "",
        ]
    for machine in dict.fromkeys(
        json.dumps(record.get("machine", {})) for record in records.values()
    ):
        if told := json.loads(machine):
            lines += [", ".join(f"{name} {value}" for name, value in told.items()), ""]
    for name in stages:
        lines += _stage(name, records.get(name))
    return "\n".join(lines)


def _stage(name: str, record: dict[str, Any] | None) -> list[str]:
    lines = [f"## {name}", "", _head(record), ""]
    if record and record["status"] == "failed":
        lines += ["```", record.get("log", "").strip()[-600:], "```", ""]
    found = (record or {}).get("figures", {})
    values = {key: figure["value"] for key, figure in found.items()}
    lines += ["| figure | measured | goal | |", "|---|---|---|---|"]
    for key, figure in FIGURES[name].items():
        verdict = ""
        if figure.reached is not None and key in values and not (record or {}).get("tiny"):
            verdict = "reached" if figure.reached(values) else "**not reached**"
        measured = _number(figure, found[key]) if key in found else "–"
        lines.append(f"| {figure.means} | {measured} | {figure.goal} | {verdict} |")
    for table in (record or {}).get("tables", []):
        lines += [
            "",
            f"{table['title']}:",
            "",
            f"| {' | '.join(table['columns'])} |",
            "|" + "---|" * len(table["columns"]),
        ]
        lines += [f"| {' | '.join(map(str, row))} |" for row in table["rows"]]
    if notes := (record or {}).get("notes", []):
        lines += ["", *(f"- {note}" for note in notes)]
    return [*lines, ""]


def _head(record: dict[str, Any] | None) -> str:
    if record is None:
        return "Not run."
    day = time.strftime("%Y-%m-%d", time.gmtime(record["at"]))
    if record["status"] == "skipped":
        return f"Skipped on {day}: {record['skipped']}."
    if record["status"] == "running":
        return f"Begun on {day}, and killed with the benchmark."
    if record["status"] == "failed":
        return f"**Failed** on {day} after {record['seconds']:.0f} s: {record['error']}."
    return f"Run on {day} in {record['seconds']:.0f} s, sources `{record['key']}`."


def _number(figure: Figure, found: dict[str, float]) -> str:
    def text(value: float) -> str:
        return (
            f"{value:.1e}"
            if 0 < abs(value) < 10**-figure.digits / 2
            else f"{value:,.{figure.digits}f}"
        )

    shown = f"{text(found['value'])} {figure.unit}".strip()
    return (
        (f"{shown} ({text(found['low'])} to {text(found['high'])}, {found['pairs']} pairs)")
        if "low" in found
        else shown
    )
