"""Writes `docs/reference/models.md` from the results of the walk."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from own_configs import config_class
from results import Result, in_our_words

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
BEGIN = "<!-- written by `make walk` -->"
END = "<!-- end of the part written by `make walk` -->"
BACKEND = "Transformers backend"
LOADED = "load_format"  # in the caveat of how the walk loads what has no checkpoint
HEAD = ("| class | served by | hooks | worst figure | laws | notes |", "|---|---|---|---|---|---|")
REASONS = ("| class | file | reason |", "|---|---|---|")


def write(results: Mapping[str, Result]) -> None:
    """Bring the page up to date."""
    PAGE.write_text(rewritten(PAGE.read_text(), results))


def rewritten(text: str, results: Mapping[str, Result]) -> str:
    """The page with the part between its marks replaced."""
    before = text[: text.index(BEGIN) + len(BEGIN)]
    after = text[text.index(END) :]
    return f"{before}\n\n" + "\n".join(_lines(results)) + f"\n\n{after}"


def distinct(served: Iterable[Result]) -> set[str]:
    """Names that are one class of vLLM count once; its backend runs transformers' own class."""
    return {result.name if result.served_by == BACKEND else result.served_by for result in served}


def _lines(results: Mapping[str, Result]) -> Iterable[str]:
    of = {
        outcome: [result for result in results.values() if result.outcome == outcome]
        for outcome in ("served", "laws", "differs", "refused", "not made")
    }
    versions = Counter(
        (result.vllm, result.transformers) for result in results.values()
    ).most_common()
    shown = "; ".join(
        f"{count} with vLLM {vllm} and transformers {transformers}"
        for (vllm, transformers), count in versions
    )
    yield f"{len(results)} classes tried: {shown}."
    count = len(distinct(of["served"]))
    yield (
        f"{len(of['served'])} are served with rows equal to transformers': {count} "
        "distinct classes of vLLM and its backend."
    )
    yield from ("", "## Served, equal to transformers", "", *HEAD)
    yield from map(_served, of["served"])
    yield from ("", "## Served, proven by their laws alone", "")
    yield (
        "transformers has no class for "
        f"{len(of['laws']) + sum(result.alone for result in of['refused'])} names of "
        "the registry, and so "
        f"nothing to compare with. {len(of['laws'])} of them are served: "
        f"{len(distinct(of['laws']))} distinct classes."
    )
    yield from ("", *HEAD, *map(_served, of["laws"]))
    yield from ("", "The others of these names are refused:", "", *REASONS)
    yield from (_refused(result) for result in of["refused"] if result.alone)
    yield from ("", "## Refused", "", *REASONS)
    refused = [result for result in of["differs"] + of["refused"] if not result.alone]
    yield from map(_refused, sorted(refused, key=lambda each: each.name))
    yield from ("", "## Without a checkpoint", "")
    yield from ("Of these, transformers makes no tiny checkpoint:", "", *REASONS)
    yield from (_refused(result, known=False) for result in of["not made"])


def _refused(result: Result, known: bool = True) -> str:
    return f"| `{result.name}` | {result.served_by} | {_cell(result.why, known)} |"


def _served(result: Result) -> str:
    hooks = "all" if not result.absent else ", ".join(f"`{hook}`" for hook in result.hooks)
    notes = [
        *(f"no `{hook}`: {why}" for hook, why in result.absent.items()),
        *(each for each in result.caveats if LOADED not in each),
        *([result.note] if result.note else []),
        *([f"config: {config_class(result.name)}"] if result.alone else []),
    ]
    figure = ""
    if result.figure is not None:
        in_bf16 = result.dtype != "float32"
        figure = f"{result.figure:.2f} (bf16)" if in_bf16 else f"{result.figure:.1e}"
    return (
        f"| `{result.name}` | {result.served_by} | {hooks} | {figure} | "
        f"{result.laws or ''} | {_cell('; '.join(notes))} |"
    )


def _cell(text: str, known: bool = True, alone: bool = False) -> str:
    """The reason in our words, or without the names of Python's exceptions."""
    shown = (known and in_our_words(text, alone)) or re.sub(
        (
            r"^([\w.]*(Error|Exception|Uncertified): |the engine did not start: |model: "
            r"(\w+: )?)+"
        ),
        "",
        text,
    )
    return shown.replace("|", "\\|").replace("\n", " ")
