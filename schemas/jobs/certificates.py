"""The certificate of a loaded model: the hook points that were proven before the first request, the
laws, and their figures.
"""

from ..base.records import Published
from ..extensions import Extension


class LawFigure(Published):
    """The worst figure of one law over all checked layers, rows and requests."""

    law: str  # see docs/architectures.md
    figure: float  # in the unit of `tolerance`; -1: not finite
    tolerance: float
    checked: int  # number of layers or requests
    layer: int = -1  # of the worst figure; -1: the law has no layers
    hooks: list[str] = []  # hook points that the law concerns
    ok: bool = True


class Certificate(Published):
    """The result of certification at an engine's start, from real requests on the real weights.

    Stored in the data folder.
    """

    model: str
    architecture: str
    vllm: str  # its version
    version: str  # Midstream's
    runner: str
    mode: str  # eager | compiled
    dtype: str
    tp: int
    pp: int
    created: float  # seconds since the epoch
    seconds: float  # duration of the certification
    proven: list[str]  # hook points
    absent: dict[str, str] = {}  # hook point → why it is not served
    # hook point that is served without proof, because the hooks that would prove it are not
    # installed → the reason
    unproven: dict[str, str] = {}
    readings: dict[str, str] = {}  # kind of reading (`lens`) → why the certification excluded it
    laws: list[LawFigure] = []
    not_compared: dict[str, str] = {}  # law → why it was not checked
    extensions: list[Extension] = []  # loaded on every rank, with the tested properties
    # also in every manifest: for example options and hooks that are not proven
    caveats: list[str] = []

    @property
    def served(self) -> list[str]:
        """The served hook points: first the proven, then the unproven ones."""
        return [*self.proven, *self.unproven]

    @property
    def failed(self) -> list[LawFigure]:
        return [law for law in self.laws if not law.ok]
