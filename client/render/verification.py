"""The page of `midstream verify`, as text that can be posted."""

from collections.abc import Iterator

from ..stack.promises import Outcome, Report

#: Columns of the page, and of the names of facts.
WIDTH, INDENT = 100, 14


def page(report: Report) -> str:
    """Return the page."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield f"midstream verify, {report.created}, {report.seconds:.0f} s"
    yield ""
    for name, value in {**report.host, **report.model}.items():
        yield f"{name:<{INDENT}}{value}"
    if report.settings:
        chosen = ", ".join(f"{name}={value}" for name, value in report.settings.items())
        yield f"{'settings':<{INDENT}}{chosen}"
    yield ""
    for outcome in report.outcomes:
        yield f"{outcome.verdict:<7}{outcome.name:<13}{_figure(outcome)}: {outcome.text}"
        if outcome.detail:
            yield f"{'':<20}{outcome.detail}"
    yield ""
    unsure = sum(outcome.verdict == "UNSURE" for outcome in report.outcomes)
    held = len(report.outcomes) - unsure - len(report.failed)
    parts = [f"{held} of {len(report.outcomes)} promises hold"]
    parts += [f"not decided: {unsure} (measure longer: --seconds)"] if unsure else []
    parts += [f"FAILED: {', '.join(report.failed)}"] if report.failed else []
    yield "; ".join(parts)


def _figure(outcome: Outcome) -> str:
    """Return figure, interval and limit, such as `1.02× [0.99, 1.04], at most 1.05×`."""
    if outcome.figure is None:
        return f"not measured, at most {_number(outcome.limit)}{outcome.unit}"
    spread = (
        f" [{_number(outcome.low)}, {_number(outcome.high)}]"
        if outcome.low is not None and outcome.high is not None
        else ""
    )
    figure = f"{_number(outcome.figure)}{outcome.unit}{spread}"
    return f"{figure}, at most {_number(outcome.limit)}{outcome.unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and value != 1 else f"{value:.3g}"
