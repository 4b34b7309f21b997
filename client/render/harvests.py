"""Harvests as text."""

from collections.abc import Sequence
from typing import Literal

from rich.table import Table

from ...schemas.jobs.harvests import HarvestView
from .jobs import minute, size


def harvests(views: Sequence[HarvestView]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("id", "state", "done", "rows", "size", "created"):
        justify: Literal["left", "right"] = "right" if name in ("done", "rows", "size") else "left"
        table.add_column(name, no_wrap=name != "created", justify=justify)
    for view in views:
        table.add_row(
            view.id,
            view.state,
            f"{view.share:.0%}",
            f"{view.rows:,}",
            size(view.bytes),
            minute(view.created),
        )
    return table


def harvest(view: HarvestView) -> str:
    """A few lines."""
    lines = [f"{view.id}  {view.state}" + (f": {view.reason}" if view.reason else "")]
    counts = f"{view.documents:,} documents, {view.tokens:,} tokens, {view.rows:,} rows"
    lines.append(f"{counts}, {size(view.bytes)} in {view.shards:,} shards")
    if view.units:
        remaining = "" if view.left_s is None else f", about {_time(view.left_s)} left"
        lines.append(
            f"{view.units_done:,} of {view.units:,} units ({view.share:.1%}), "
            f"{view.tokens_s:,.0f} tokens/s{remaining}"
        )
    if view.error is not None:
        lines.append(f"error: {view.error.detail}")
    return "\n".join([*lines, view.uri])


def _time(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
