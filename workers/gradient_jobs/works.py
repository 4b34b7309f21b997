"""Jobs of the gradient queue: the table of what runs each kind on a gradient worker."""

from collections.abc import Mapping

from ..serving.attempts import Work
from .attribution_attempt import estimate_cells
from .fit_attempt import fit

WORKS: Mapping[str, Work] = {"attribution": estimate_cells, "fit": fit}
