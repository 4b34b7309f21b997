"""Which interventions are there, and what does each do to a row of the stream?

The table is closed: `reference.py` and `triton_site.py` hold one formula for each entry, and a test compares both with
the names here. `docs/kernels.md` says how to add one. Families are applied in the order of the table; within a family
the configuration rows of a token in the order of their columns.
"""

from dataclasses import dataclass
from typing import Literal

#: `rewrite`: reads the row s and gives a new one. Computed in float32 over all of a token's rows, rounded once.
#: `shift`: gives something to be added that does not depend on s. The sum over a token's rows is taken in float32, and
#: the addition rounded once; one row alone is added as the model's dtype adds.
Effect = Literal["rewrite", "shift"]

#: Numbers of one pool entry: columns of `scalars`.
SCALARS = 4


@dataclass(frozen=True)
class Family:
    """One kind of intervention. `v0, v1, …` are the vectors of its pool entry, s the row of the stream."""

    name: str
    effect: Effect
    formula: str
    entries: int = 1  # consecutive pool rows that one application reads
    scalars: tuple[str, ...] = ()  # names of the first columns of its entry's `scalars`
    graded: bool = False  # the first scalar is a strength: where it is 0 the row keeps its bits


#: In the order in which they are applied.
FAMILIES: tuple[Family, ...] = (
    Family("replace", "rewrite", "s ← (1 − alpha) · s + alpha · v0; alpha = 1 gives v0 bit for bit", scalars=("alpha",), graded=True),
    Family("add", "shift", "s ← s + v0"),
)
#: Name → place in `FAMILIES`, which is also its row of `site_rows`.
PLACE: dict[str, int] = {family.name: place for place, family in enumerate(FAMILIES)}
