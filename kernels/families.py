"""Which interventions are there, what does each do to a row of the stream, and what must its entries in the pool hold?

The table is closed: `reference.py` and `triton_site.py` hold one formula for each entry, and a test compares both with
the names here. `docs/kernels.md` says how to add one. Families are applied in the order of the table; within a family
the configuration rows of a token in the order of their columns.
"""

from dataclasses import dataclass
from typing import Literal

#: `rewrite`: reads the row s and gives a new one. `shift`: gives something to be added that does not depend on s.
#: A token that a rewrite changes is computed in float32 from the stream to the last family, and rounded once. A token that
#: is only shifted never leaves the model's dtype, if there is one shift; several are summed in float32 and added at once.
Effect = Literal["rewrite", "shift"]

#: Numbers of one pool entry: columns of `scalars`.
SCALARS = 4
#: Terms of one `lowrank` at most.
MAX_RANK = 64


@dataclass(frozen=True)
class Family:
    """One kind of intervention. s is the row of the stream as the family finds it, a float32 row of the hidden size.

    An application is `terms` terms; each takes `len(vectors)` consecutive entries of the pool, one term after the other.
    `scalars` are in the application's first entry, those named in `of_each_term` in the first entry of each term.
    """

    name: str
    effect: Effect
    formula: str
    source: str
    vectors: tuple[str, ...] = ("v0",)
    scalars: tuple[str, ...] = ()  # names of the first columns
    of_each_term: tuple[str, ...] = ()
    most_terms: int = 1
    graded: bool = False  # the first scalar is a strength: where it is 0 the row keeps its bits
    unit: bool = False  # its vectors are directions of length 1; `plan.laid_out` normalises them
    sums: bool = False  # sums over the row, in an order of the device's own: devices agree to float32's rounding, not to the bit

    def entries(self, terms: int = 1) -> int:
        """Consecutive pool entries of one application."""
        return len(self.vectors) * terms

    def column(self, scalar: str) -> int:
        """Where in `scalars` a number lies. Raises ValueError for one that the family does not have."""
        return self.scalars.index(scalar)


#: In the order in which they are applied.
FAMILIES: tuple[Family, ...] = (
    Family(
        "replace",
        "rewrite",
        "s ← (1 − alpha) · s + alpha · v0; alpha = 1 gives v0 bit for bit",
        "activation patching: Vig et al. 2020, arXiv:2004.12265; Meng et al. 2022, arXiv:2202.05262",
        scalars=("alpha",),
        graded=True,
    ),
    Family(
        "replace_masked",
        "rewrite",
        "where m = 1: s ← (1 − alpha) · s + alpha · v0, with alpha = 1 v0 bit for bit; where m = 0: s",
        "`replace` in some dimensions only; with m = 1 everywhere it gives the same bits",
        vectors=("v0", "m"),
        scalars=("alpha",),
        graded=True,
    ),
    Family(
        "lowrank",
        "rewrite",
        "s ← s + strength · Σ_i R_i · (W_i·s + b_i − R_i·s)",
        "LoReFT: Wu et al. 2024, arXiv:2404.03592",
        vectors=("R", "W"),
        scalars=("strength", "rank", "bias"),
        of_each_term=("bias",),
        most_terms=MAX_RANK,
        graded=True,
        sums=True,
    ),
    Family("add", "shift", "s ← s + v0", "activation addition: Turner et al. 2023, arXiv:2308.10248"),
    Family(
        "add_matched",
        "rewrite",
        "s ← s + scale · ‖s‖₂ · v0",
        "activation addition, scaled relative to the norm of the stream",
        scalars=("scale",),
        graded=True,
        unit=True,
        sums=True,
    ),
    Family(
        "ablate",
        "rewrite",
        "s ← s − strength · (s·v0) · v0",
        "directional ablation: Arditi et al. 2024, arXiv:2406.11717",
        scalars=("strength",),
        graded=True,
        unit=True,
        sums=True,
    ),
    Family(
        "clamp",
        "rewrite",
        "s ← s + strength · (min(max(s·v0, low), high) − s·v0) · v0; a component inside [low, high] leaves the row unchanged",
        "as feature clamping: Templeton et al. 2024, Scaling Monosemanticity",
        scalars=("strength", "low", "high"),
        graded=True,
        unit=True,
        sums=True,
    ),
)
#: Name → place in `FAMILIES`, which is also its row of `site_rows`.
PLACE: dict[str, int] = {family.name: place for place, family in enumerate(FAMILIES)}
