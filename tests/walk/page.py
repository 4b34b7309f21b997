"""Writes `docs/models.md` from the results of the walk."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from results import Result, aliases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by `make walk` -->", "<!-- end of the part written by `make walk` -->"
HEAD = ("| class | served by | hooks | worst figure | notes |", "|---|---|---|---|---|")


def write(results: Mapping[str, Result]) -> None:
    """Replace the part of the page between its marks."""
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}\n\n" + "\n".join(_lines(results)) + f"\n\n{after}")


def _lines(results: Mapping[str, Result]) -> Iterable[str]:
    of = {
        outcome: [result for result in results.values() if result.outcome == outcome]
        for outcome in ("served", "laws", "differs", "refused", "not made")
    }
    distinct = {aliases().get(result.name, result.name) for result in of["served"]}
    versions = Counter((result.vllm, result.transformers) for result in results.values()).most_common()
    told = "; ".join(f"{count} with vLLM {vllm} and transformers {transformers}" for (vllm, transformers), count in versions)
    yield f"{len(results)} classes tried: {told}."
    yield f"{len(distinct)} distinct classes are served with rows equal to transformers'."
    yield from ("", "## Served, equal to transformers", "", *HEAD)
    yield from map(_served, of["served"])
    yield from ("", "## Served, proven by their laws alone", "", *HEAD)
    yield from map(_served, of["laws"])
    yield from ("", "## Refused", "", "| class | file | reason |", "|---|---|---|")
    for result in sorted(of["differs"] + of["refused"], key=lambda each: each.name):
        yield f"| `{result.name}` | {result.served_by} | {_cell(result.why)} |"
    yield from ("", "## Without a checkpoint", "", "| class | file | reason |", "|---|---|---|")
    for result in of["not made"]:
        yield f"| `{result.name}` | {result.served_by} | {_cell(result.why)} |"


def _served(result: Result) -> str:
    hooks = "all" if not result.absent else ", ".join(f"`{hook}`" for hook in result.hooks)
    notes = [*(f"no `{hook}`: {why}" for hook, why in result.absent.items()), *result.caveats, *([result.note] if result.note else [])]
    figure = "" if result.figure is None else f"{result.figure:.1e}" if result.dtype == "float32" else f"{result.figure:.2f} (bf16)"
    return f"| `{result.name}` | {result.served_by} | {hooks} | {figure} | {_cell('; '.join(notes))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
