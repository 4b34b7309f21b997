"""The kinds of registered artifacts: the rows of this package and those of installed ones."""

import re
from typing import Any

from ..artifacts.jacobian_lenses import JACOBIAN_LENSES
from ..artifacts.loras import LORAS
from ..artifacts.probes import PROBES
from ..artifacts.registered import ArtifactKind
from ..artifacts.saes import SAES
from ..artifacts.tuned_lenses import TUNED_LENSES
from ..base.errors import MidstreamError, suggestion
from ..packages import load_all
from .policies import POLICIES
from .steering import MODULES

#: Entry points of rows: any name → an `ArtifactKind`.
GROUP = "midstream.artifacts"
#: The rows of this package, as lists show them.
OWN = (MODULES, LORAS, SAES, TUNED_LENSES, JACOBIAN_LENSES, PROBES, POLICIES)


def _by_plural(rows: list[ArtifactKind[Any]]) -> dict[str, ArtifactKind[Any]]:
    """Return the table of kinds. Raises ValueError for a name that two have, or none may have."""
    result: dict[str, ArtifactKind[Any]] = {}
    # installed readers and ops have names of theirs in `Job.contents`
    taken = {"reader", "op"}
    for row in rows:
        names = {row.plural, row.short, row.command}
        # they stand in addresses, keys of Redis and Python as they are
        if taken & names or not all(re.fullmatch("[a-z][a-z0-9_]*", name) for name in names):
            raise ValueError(f"{row.plural!r} cannot be another kind of registered artifacts")
        taken |= names
        result[row.plural] = row
    return result


#: Plural of a kind → its row.
ARTIFACTS = _by_plural([*OWN, *load_all(GROUP)])


def artifact_kind(plural: str) -> ArtifactKind[Any]:
    """Return the row of a kind. Raises `not_found`."""
    if plural not in ARTIFACTS:
        raise MidstreamError(
            "not_found",
            f"unknown kind of artifact {plural!r}",
            field="kind",
            allowed=", ".join(ARTIFACTS),
            hint=suggestion(plural, ARTIFACTS),
        )
    return ARTIFACTS[plural]
