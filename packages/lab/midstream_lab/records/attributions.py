"""Attributions as users see them: the request, the result and its view.

An attribution is a job with a sweep's grid. The API resolves an `AttributionRequest` to a
`StoredSweep` with a `StoredAttribution`; readers get an `AttributionResult`.
"""

from typing import Annotated

import msgspec

from midstream.schemas.base.limits import MAX_ATTRIBUTION_STEPS, MAX_LISTED_SCORES, Index, Reference
from midstream.schemas.base.records import Record
from midstream.schemas.prompts.selectors import KeyedByHook

from .estimates import Edge, EstimateMethod, FeatureScore, Verify, Why
from .sweeps import CellPlace, GridValues, SweepRequest, SweepResult


class AttributionRequest(SweepRequest, kw_only=True):
    """Body of `POST /v1/attributions`: a sweep's, and how its cells are estimated.

    `path` is not valid.
    """

    # `attribution`: first order; `integrated`: mean of gradients between the prompts; `edges`:
    # senders and receivers; `adaptive`: exact cells, coarse to fine, guided by the estimates
    method: EstimateMethod = "attribution"
    # points between the two prompts at which gradients are taken; null: 1, and 8 for `integrated`
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_ATTRIBUTION_STEPS)] | None = None
    verify: Verify | None = None  # `adaptive` requires it; null there: the defaults
    seed: Index | None = None  # of the random cells; null: drawn, and returned with the result
    # a sparse autoencoder: the effects of its features and its error, instead of the grid
    sae: Reference | None = None
    # the edges or features to list, strongest first
    keep: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED_SCORES)] = 1000


class CheckedCell(CellPlace, kw_only=True):
    """A cell, or a feature in a column, that was chosen to be computed exactly."""

    why: list[Why]
    estimate: float | None  # in the metric's units
    exact: float | None  # null: not computed yet, or `reason`
    # each a difference to the unpatched prompt on its own worker; null: not known
    estimate_effect: float | None = None
    exact_effect: float | None = None
    difference: float | None = None  # the estimated effect minus the exact one
    off: bool  # the effects differ by more than the noise floor and the tolerance


class EstimateAgreement(Record):
    """How well the estimates of some cells agree with their exact values."""

    cells: int  # with both
    # Spearman's rank correlation of the effects, ties with their mean rank; null: fewer than 3
    # cells, or all estimates or all exact values are the same
    spearman: float | None
    # cells whose effect is within the noise floor in both: their ranks mean nothing
    unchanged: int


class Recall(Record):
    """The cells with the largest exact effects that are also among the largest estimates, of the
    cells whose exact value is known. Says nothing about cells that were not computed.
    """

    top: int  # k
    known: int  # cells with an exact value; at least one more than `top`
    found: int  # of the `top` largest exact effects, among the `top` largest estimates
    recall: float  # `found / top`


class NotLookedAt(Record):
    """The cells of a pair that `adaptive` did not compute."""

    cells: int
    largest: float | None  # estimated effect among them, in the metric's units
    # the largest effect that one of them can have under `assumption`
    bound: float | None
    last: float | None  # exact effect of the last of the top cells
    # the whole sample was computed, and the bound is below `last`: under the assumption, these are
    # the top cells; false: the budget was used up before
    settled: bool
    sampled: int = 0  # cells computed of a random sample of each part, which tests the assumption
    assumption: str = (
        "the estimates of these cells are too small by no more than the worst computed estimate in "
        "the same part of the grid, and by no larger factor than the worst one of the grid"
    )


class PairAttribution(KeyedByHook, Record):
    """The estimates of one pair, beside its `PairResult`, which has the exact values."""

    # `[layers][columns]`, in the metric's units; null: skipped, not finite, or not known yet
    estimates: GridValues
    base: float | None  # of the patched prompt on the gradient worker, as `Baseline.value`
    source: float | None
    checked: list[CheckedCell] = []
    all: EstimateAgreement | None = (
        None  # over all cells with an exact value: the chosen ones raise it
    )
    random: EstimateAgreement | None = None  # over the random cells alone, which stand for the grid
    recall: Recall | None = None  # null: no exact values beyond the top cells
    not_looked_at: NotLookedAt | None = None  # of `adaptive`
    edges: list[Edge] = []
    features: list[FeatureScore] = []
    forwards: float = 0.0  # time of the estimates, in forward passes of the two prompts
    reason: str = ""  # why there are no estimates


class AttributionResult(SweepResult, kw_only=True):
    """`JobResult.attribution`: a sweep's result, whose grids have the exact values that were
    computed, and the estimates of each pair.
    """

    method: EstimateMethod
    steps: int
    seed: int
    verify: Verify | None
    estimated: list[PairAttribution]


class EstimatedPair(Record):
    """Data of the event `estimate`: a pair's estimates, before any cell of it."""

    pair: int
    attribution: PairAttribution
