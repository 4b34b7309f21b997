"""Scalars of gradient rows: what a request names, and the form that a job stores."""

from typing import Annotated, Literal

import msgspec

from ..artifacts.probes import PROBES, StoredProbe
from ..artifacts.registered import NamedArtifact, references
from ..artifacts.saes import SAES, StoredSae
from ..base.limits import MAX_PROBE_LABELS, Index, Reference
from ..base.records import Record
from ..prompts.selectors import RequestedPositions
from ..readings.lens import NamedToken

ScalarKind = Literal["logit", "loss", "probe", "feature"]


class ScalarSpec(Record):
    """The number whose gradient is taken, of each prompt; `kind` says which:

    `logit`: the logit of `token` after the prompt, minus that of `foil` if there is one. `loss`:
    −Σ log P of the prompt's tokens at `positions` (null: all but the first), each given those
    before it, in nats. `probe`: the score of a registered probe's `label`, summed over `positions`
    (null: the last of the prompt). `feature`: the activation of a feature of a registered sparse
    autoencoder `sae`, summed likewise. A field of another kind must be null.
    """

    kind: ScalarKind
    token: NamedToken | None = None
    foil: NamedToken | None = None
    positions: RequestedPositions | None = None
    probe: Reference | None = None
    # the place of a label of the probe; null: the first
    label: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PROBE_LABELS)] | None = None
    sae: Reference | None = None
    feature: Index | None = None

    @property
    def references(self) -> list[NamedArtifact]:
        """The registered artifact that it names."""
        return references((PROBES, self.probe), (SAES, self.sae))


#: Kind → the fields that it requires, and those that it may have.
SCALAR_FIELDS: dict[ScalarKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "logit": (("token",), ("foil",)),
    "loss": ((), ("positions",)),
    "probe": (("probe",), ("label", "positions")),
    "feature": (("sae", "feature"), ("positions",)),
}


class StoredScalar(Record, omit_defaults=True):
    """A scalar of one prompt after validation."""

    kind: ScalarKind
    token: int = 0
    foil: int | None = None
    positions: list[int] = []  # absolute, ascending
    probe: StoredProbe | None = None
    label: int = 0
    sae: StoredSae | None = None
    feature: int = 0
