"""The certificate of a loaded model: the hook points that were proven before the first request, the
laws, and their figures.
"""

from ..base.records import Published
from ..extensions import Extension

#: Begins a caveat that names what no test ran with: an option, a version, a quantisation.
UNPROVEN = "unproven: "


class LawFigure(Published):
    """The worst figure of one law over all checked layers, rows and requests."""

    law: str  # see docs/architectures.md
    figure: float  # in the unit of `tolerance`; -1: not finite
    tolerance: float
    checked: int  # number of layers or requests
    layer: int = -1  # of the worst figure; -1: the law has no layers
    hooks: list[str] = []  # hook points that the law concerns
    ok: bool = True


class Started(Published, kw_only=True):
    """Has what the start of an engine found out about its model."""

    architecture: str
    dtype: str
    absent: dict[str, str] = {}  # hook point that is not served → the reason
    # kind of reading (`lens`) → why it is not served; empty: it is served
    readings: dict[str, str] = {}
    extensions: list[Extension] = []  # loaded on every rank, with the tested properties
    # how its rows differ from transformers' for the same checkpoint; also in every manifest
    caveats: list[str] = []


class Certificate(Started, kw_only=True):
    """The result of certification at an engine's start, from real requests on the real weights.

    Stored in the data folder.
    """

    model: str
    vllm: str  # its version
    version: str  # Midstream's
    runner: str
    mode: str  # eager | compiled
    tp: int
    pp: int
    created: float  # seconds since the epoch
    seconds: float  # duration of the certification
    proven: list[str]  # hook points
    # hook point that is served without proof, because the hooks that would prove it are not
    # installed → the reason
    unproven: dict[str, str] = {}
    laws: list[LawFigure] = []
    not_compared: dict[str, str] = {}  # law → why it was not checked
    # hook point → of each layer, the typical norm of a row in the run; and that of the first
    # token's row, which is an outlier in most models
    row_norms: dict[str, list[float]] = {}
    first_norms: dict[str, list[float]] = {}

    @property
    def served(self) -> list[str]:
        """The served hook points: first the proven, then the unproven ones."""
        return [*self.proven, *self.unproven]

    @property
    def failed(self) -> list[LawFigure]:
        return [law for law in self.laws if not law.ok]
