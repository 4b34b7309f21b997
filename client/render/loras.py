"""Terminal output of LoRA adapters."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from ...schemas.artifacts.loras import Lora
from .jobs import facts, minute, size, table
from .steering import DIGEST, digest


def listed(loras: Sequence[Lora]) -> Table:
    """One line per name."""
    shown = table("Adapters", "name", "digest", "rank", "bytes", "path", "since", "description")
    for lora in loras:
        cells = (
            lora.name,
            lora.digest[:DIGEST],
            str(lora.rank),
            size(lora.bytes),
            lora.path,
            minute(lora.created),
            lora.description,
        )
        shown.add_row(*map(escape, cells))
    return shown


def one(lora: Lora) -> Table:
    """All about one name."""
    return facts(
        ("adapter", escape(lora.name)),
        ("model", escape(lora.model)),
        ("digest", digest(lora)),
        ("path", escape(lora.path)),
        ("rank", str(lora.rank)),
        ("modules", escape(", ".join(lora.modules))),
        ("weights", size(lora.bytes)),
        ("description", escape(lora.description)),
    )
