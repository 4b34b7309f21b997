"""Terminal output of LoRA adapters."""

import time
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from ...schemas.loras import Lora
from .jobs import size, table
from .steering import DIGEST


def listed(loras: Sequence[Lora]) -> Table:
    """One line per name."""
    shown = table("Adapters", "name", "digest", "rank", "bytes", "path", "since", "description")
    for lora in loras:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(lora.created))
        shown.add_row(
            escape(lora.name), lora.digest[:DIGEST], str(lora.rank), size(lora.bytes), escape(lora.path), since, escape(lora.description)
        )
    return shown


def one(lora: Lora) -> Table:
    """All about one name."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    shown.add_column(style="dim")
    shown.add_column(overflow="fold")
    replaced = f" (before: {lora.replaced[:DIGEST]})" if lora.replaced else ""
    for name, value in (
        ("adapter", lora.name),
        ("model", lora.model),
        ("digest", lora.digest + replaced),
        ("path", lora.path),
        ("rank", str(lora.rank)),
        ("modules", ", ".join(lora.modules)),
        ("weights", size(lora.bytes)),
        ("description", lora.description),
    ):
        if value:
            shown.add_row(name, escape(value))
    return shown
