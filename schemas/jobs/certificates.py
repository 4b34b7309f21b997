"""The certificate of a loaded model: which hook points were proven before the first request, by
which laws, with which figures.
"""

from ..base.records import Published
from ..extensions import Extension


class LawFigure(Published):
    """The worst figure of one law over all layers, rows and requests that it was checked on."""

    law: str  # see docs/architectures.md
    figure: float  # in the unit of `tolerance`; -1: not finite
    tolerance: float
    checked: int  # layers, or requests
    layer: int = -1  # of the worst figure; -1: the law has no layers
    hooks: list[str] = []  # hook points that the law concerns
    ok: bool = True


class Certificate(Published):
    """Made at the start of an engine, from real requests on the real weights.

    Kept in the data folder.
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
    seconds: float  # that it took
    proven: list[str]  # hook points
    absent: dict[str, str] = {}  # hook point → why it is not served
    # hook point that is served without proof → the reason: the hooks that would prove it are not
    # installed
    unproven: dict[str, str] = {}
    readings: dict[str, str] = {}  # kind of reading (`lens`) → why the certification excluded it
    laws: list[LawFigure] = []
    not_compared: dict[str, str] = {}  # law → why it was not checked
    extensions: list[Extension] = []  # loaded on every rank, with the properties that were tested
    # also in every manifest: for example options and hooks that are not proven
    caveats: list[str] = []

    @property
    def served(self) -> list[str]:
        """Served hook points: the proven ones, then the unproven ones."""
        return [*self.proven, *self.unproven]

    @property
    def failed(self) -> list[LawFigure]:
        return [law for law in self.laws if not law.ok]
