"""Terminal output of sparse autoencoders."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from ...schemas.artifacts.saes import Sae
from .jobs import facts, size, table
from .steering import digest


def listed(saes: Sequence[Sae]) -> Table:
    """One line per name."""
    shown = table("Sparse autoencoders", "name", "kind", "reads", "features", "bytes", "path")
    for sae in saes:
        reads, features = f"{sae.hook} {sae.layer}", f"{sae.form.d_sae:,}"
        cells = (sae.name, _kind(sae), reads, features, size(sae.bytes), sae.path)
        shown.add_row(*map(escape, cells))
    return shown


def one(sae: Sae) -> Table:
    """All about one name."""
    return facts(
        ("autoencoder", escape(sae.name)),
        ("model", escape(sae.model)),
        ("trained on", escape(sae.trained_on)),
        ("digest", digest(sae)),
        ("path", escape(sae.path)),
        ("kind", _kind(sae)),
        ("reads", f"{sae.hook} of layer {sae.layer}"),
        ("features", f"{sae.form.d_sae:,} of rows of width {sae.form.d_in:,}"),
        ("weights", size(sae.bytes)),
        ("description", escape(sae.description)),
    )


def _kind(sae: Sae) -> str:
    """Its architecture, with `k`."""
    return f"topk {sae.form.k}" if sae.form.architecture == "topk" else sae.form.architecture
