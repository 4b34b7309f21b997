"""Attributions: a gradient worker estimates the cells of a sweep, and some of them are then
computed exactly.

The first-order estimate is attribution patching (Nanda 2023; arXiv:2310.10348), the corrected one
AtP* (arXiv:2403.00745), `integrated` averages gradients between the two prompts (arXiv:1703.01365),
and `edges` is edge attribution patching, with `steps` > 1 its integrated form (arXiv:2403.17806).
"""

from typing import Annotated, Literal

import msgspec

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.limits import MAX_VERIFIED
from midstream.schemas.base.records import Record

EstimateMethod = Literal["attribution", "integrated", "edges", "adaptive"]
#: Why a cell is computed exactly: among the largest estimates, drawn at random, known to be
#: estimated badly, or chosen by the method `adaptive`.
Why = Literal["top", "random", "doubtful", "adaptive"]

Chosen = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERIFIED)]
Tolerance = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Verify(Record):
    """The cells of every pair that are computed exactly, by patching on a vLLM worker."""

    top: Chosen = 20  # with the largest estimated effects
    random: Chosen = 20  # drawn without replacement from all other cells that can be patched
    doubtful: Chosen = 10  # where the method is known to fail
    # estimated effects that differ from the exact one by more than the noise floor and this are
    # marked; in the metric's units
    tolerance: Tolerance = 0.05
    # of the method `adaptive`: the most cells of a pair; null: a tenth of its grid, and at least 5
    # times `top`
    budget: Annotated[int, msgspec.Meta(ge=1, le=MAX_VERIFIED)] | None = None

    @property
    def most(self) -> int:
        """The most cells of a pair; those of `adaptive` have `StoredAttribution.budget`."""
        return self.top + self.random + self.doubtful


# `omit_defaults`: workers without the newer fields accept attributions that do not use them
class StoredAttribution(Record, omit_defaults=True):
    """The resolved method of an attribution, in its `StoredSweep`."""

    method: EstimateMethod
    steps: int  # points between the prompts at which gradients are taken
    seed: int  # of the random cells
    keep: int  # how many edges or features are listed, strongest first
    verify: Verify | None = None
    budget: int = 0  # of `adaptive`: the most cells of a pair
    sae: StoredSae | None = None  # estimates are of its features and its error, not of cells
    # a policy of all traffic may end the prompts: estimates are shown once both have been read
    watched: bool = False

    @property
    def most(self) -> int:
        """The most cells of a pair that are computed exactly."""
        if self.verify is None:
            return 0
        return self.budget if self.method == "adaptive" else self.verify.most

    def checked_features(self, estimate: "Estimate") -> "list[FeatureScore]":
        """Return the features of a pair that are computed exactly, each once; empty without `sae`
        or `verify`.
        """
        if self.sae is None or self.verify is None:
            return []
        scores = [*estimate.features[: self.verify.top], *estimate.drawn]
        return list({(score.column, score.feature): score for score in scores}.values())


class EdgeEnd(Record):
    """An end of an edge. Senders: `embed`, `head`, `mlp`; receivers: the inputs of a head (`q`,
    `k`, `v`) and of an MLP, and `logits`.
    """

    kind: Literal["embed", "head", "mlp", "q", "k", "v", "logits"]
    layer: int  # −1 for `embed`, the number of layers for `logits`
    head: int = -1  # −1: not of a head


class Edge(Record):
    """An edge between two parts of the model. `score`: the estimated effect on the metric, in its
    units, of patching what the sender contributes to the receiver, at all positions.
    """

    sender: EdgeEnd
    receiver: EdgeEnd
    score: float


class FeatureScore(Record):
    """The estimated effect of patching one feature of a sparse autoencoder in one column, in the
    metric's units.
    """

    column: int  # of the grid
    feature: int  # −1: the autoencoder's error
    score: float


class Estimate(Record):
    """The estimates of one pair, in the record of its estimate unit. A gradient engine returns it
    without `chosen`.
    """

    # the metric of the patched and of the other prompt on the gradient worker, as `Baseline.value`
    base: float
    source: float | None = None  # null: an ablation
    # of the pair's cells, in the order of their numbers: the metric with the cell's patch, in its
    # units; null: the column is skipped; empty for edges and features
    values: list[float | None] = []
    doubtful: list[int] = []  # indices in `values`, most doubtful first
    edges: list[Edge] = []  # strongest first
    features: list[FeatureScore] = []  # strongest first
    # drawn at random from all features that differ between the prompts, and from the errors
    drawn: list[FeatureScore] = []
    forwards: float = 0.0  # the time that it took, in forward passes of the two prompts
    # numbers of the cells, or of the features, to be computed exactly
    chosen: dict[Why, list[int]] = {}
