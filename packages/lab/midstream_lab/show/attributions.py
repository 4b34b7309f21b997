"""Terminal output of an attribution: its estimates, and the cells whose exact value is known."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from midstream.client.render.jobs import count, table

from ..client.attribution import Attribution, Score, estimated, place_name
from ..client.grid import titled
from ..records.attributions import NotLookedAt
from .sweeps import Heatmap, remarks

#: Above a map that has the words of a sweep.
_ESTIMATES = Text("Estimates by gradients", style="bold")


def _signed(value: float | None) -> str:
    return "–" if value is None else format(value, "+.3f")


def report(attribution: Attribution, most: int = 10) -> RenderableType:
    """Return the estimates as a heatmap (of edges and features: a list of the `most` strongest),
    and the findings.
    """
    scores = attribution.edges or attribution.features
    estimates: list[RenderableType] = (
        [scores_table(scores, most)]
        if scores
        else [_ESTIMATES, Heatmap(estimated(attribution.result), attribution.pair)]
    )
    return Group(*estimates, Text(""), findings(attribution, most))


def findings(attribution: Attribution, most: int = 10) -> RenderableType:
    """Return the `most` strongest cells whose exact value is known, others that disagree, and how
    well both agree.
    """
    checked = [checked_table(attribution, most)] if attribution.cells else []
    lines = map(Text, agreement(attribution))
    return Group(*checked, *lines, *remarks(attribution.result))


def scores_table(scores: list[Score], most: int) -> Table:
    """Return a table of the strongest edges or features."""
    title = f"The {min(most, len(scores))} strongest of {len(scores)}"
    return table(
        title,
        "what",
        "estimate",
        rows=[(escape(item.name), f"{item.score:+.3f}") for item in scores[:most]],
        right=("estimate",),
    )


def checked_table(attribution: Attribution, most: int) -> Table:
    """Return a table of the `most` strongest cells with an exact value, and of the next `most` that
    disagree.
    """
    numbers = ("layer", "estimated", "exact", "difference")
    title = f"Effects of {_kind(attribution)}s computed exactly"
    names = attribution.estimates.names
    cells = attribution.cells
    rows = [
        (
            escape(place_name(names, cell.column, cell.feature)),
            titled(cell.hook),
            str(cell.layer),
            *map(_signed, (cell.estimate_effect, cell.exact_effect, cell.difference)),
            ", ".join(cell.why),
            "[red]off[/]" if cell.off else "",
        )
        for cell in [*cells[:most], *[cell for cell in cells[most:] if cell.off][:most]]
    ]
    return table(title, "at", "hook", *numbers, "chosen as", "", rows=rows, right=numbers)


def agreement(attribution: Attribution) -> Iterator[str]:
    """Yield lines on how well estimates and exact values agree, and what they cost."""
    result = attribution.result
    cells = attribution.cells
    kind = _kind(attribution)
    known = sum(cell.exact is not None for cell in cells)
    if result.verify is not None and known:
        yield (
            f"{len(attribution.off)} of {count(known, kind)} off by more than the noise floor "
            f"and {result.verify.tolerance:g}"
        )
    whole = "the grid" if kind == "cell" else "all that differ"
    correlations = (
        (f"the random {kind}s, which stand for {whole}", attribution.spearman),
        (f"all computed {kind}s, chosen ones included", attribution.spearman_checked),
    )
    for over, value in correlations:
        if value is not None:
            yield f"Spearman's rank correlation over {over}: {value:.3f}"
    if attribution.recall is not None and result.verify is not None:
        yield (
            f"{attribution.recall:.0%} of the {result.verify.top} strongest computed {kind}s are "
            f"among the {result.verify.top} largest estimates of computed {kind}s"
        )
    for number, item in enumerate(result.estimated):
        if attribution.pair not in (None, number):
            continue
        of = f" of pair {number}" if len(result.estimated) > 1 else ""
        if item.reason:
            yield f"no estimates{of}: {item.reason}"
        if item.not_looked_at is not None:
            yield f"not computed{of}: {_left(item.not_looked_at)}"
    forwards = sum(item.forwards for item in result.estimated)
    if forwards:
        yield f"the estimates took the time of {forwards:.1f} forward passes of both prompts"


def _kind(attribution: Attribution) -> str:
    """Return what was computed exactly: `cell` or `feature`."""
    return "cell" if all(cell.feature is None for cell in attribution.cells) else "feature"


def _left(left: NotLookedAt) -> str:
    figures = (
        ("largest estimated effect", left.largest),
        ("at most, by the worst errors found", left.bound),
        ("weakest of the top cells", left.last),
    )
    known = [f"{name} {value:.3f}" for name, value in figures if value is not None]
    end = (
        f"settled, if {left.assumption}; tested on a random sample of {count(left.sampled, 'cell')}"
        if left.settled
        else "not settled: the budget was used up"
    )
    return "; ".join([count(left.cells, "cell"), *known, end])
