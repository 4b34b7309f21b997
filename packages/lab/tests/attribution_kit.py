"""An attribution's result, made by hand, beside the sweep's of `sweep_kit`."""

from typing import Any

from msgspec.structs import replace
from sweep_kit import FAILED, LAYERS, PEAK, grid, pair, result

from midstream_lab.records.attributions import (
    AttributionResult,
    CheckedCell,
    EstimateAgreement,
    PairAttribution,
    Recall,
)
from midstream_lab.records.estimates import Edge, EdgeEnd, FeatureScore, Verify

#: The exact values are those of `sweep_kit`'s peak and of a weaker cell; the estimate of the latter
#: is wrong.
STRONG = PEAK
WRONG = (2, 1)
HOOK = "pre_attn"


def cell(at: tuple[int, int], estimate: float, exact: float | None, off: bool) -> CheckedCell:
    return CheckedCell(
        hook="pre_attn", layer=at[0], column=at[1], label=" x", why=["top"], estimate=estimate,
        exact=exact, difference=None if exact is None else estimate - exact, off=off,
        estimate_effect=estimate, exact_effect=exact,
    )  # fmt: skip


CHECKED = [
    cell(WRONG, 0.6, 0.1, True),
    cell(STRONG, 0.9, 0.95, False),
    cell(FAILED, 0.2, None, False),
]


def exact_grid() -> list[list[float | None]]:
    known = {(item.layer, item.column): item.exact for item in CHECKED}
    return [[known.get((layer, column)) for column in range(6)] for layer in LAYERS]


def estimated(**given: Any) -> PairAttribution:
    fields: dict[str, Any] = {
        "estimates": {"pre_attn": grid(0.9), "mlp_out": grid(-0.2)},
        "base": -9.0,
        "source": 4.8,
        "checked": CHECKED,
        "all": EstimateAgreement(cells=2, spearman=0.9, unchanged=0),
        "random": EstimateAgreement(cells=4, spearman=0.5, unchanged=1),
        "recall": Recall(top=4, known=6, found=3, recall=0.75),
        "forwards": 3.4,
    }
    return PairAttribution(**fields | given)


def attribution(*pairs: PairAttribution, **given: Any) -> AttributionResult:
    whole = list(pairs or [estimated()])
    nothing: list[list[float | None]] = [[None] * 6 for _ in LAYERS]
    exact = [pair(grids={"pre_attn": exact_grid(), "mlp_out": nothing}) for _ in whole]
    sweep = result(*exact, skipped=[])
    fields = {name: getattr(sweep, name) for name in sweep.__struct_fields__}
    how: dict[str, Any] = {
        "method": "attribution", "steps": 1, "seed": 3, "verify": Verify(top=4), "estimated": whole,
    }  # fmt: skip
    return AttributionResult(**fields | how | given)


def edges() -> AttributionResult:
    """Two edges and no grid."""
    nothing: dict[str, Any] = {
        hook: [[None] * 6 for _ in LAYERS] for hook in ("pre_attn", "mlp_out")
    }
    head = EdgeEnd(kind="head", layer=3, head=5)
    weak = Edge(
        sender=EdgeEnd(kind="embed", layer=-1), receiver=EdgeEnd(kind="mlp", layer=0), score=0.1
    )
    strong = Edge(sender=head, receiver=EdgeEnd(kind="q", layer=7, head=2), score=-0.4)
    found = estimated(estimates=nothing, checked=[], all=None, random=None, recall=None)
    return attribution(replace(found, edges=[weak, strong]), method="edges", verify=None)


def features() -> AttributionResult:
    scores = [
        FeatureScore(column=3, feature=-1, score=0.1),
        FeatureScore(column=3, feature=12, score=0.3),
    ]
    return attribution(estimated(features=scores))


def verified_features() -> AttributionResult:
    """Two listed features, of which one was verified, and a drawn one that is not listed."""
    scores = [
        FeatureScore(column=3, feature=12, score=0.3),
        FeatureScore(column=3, feature=-1, score=0.1),
    ]
    kept = {"hook": "pre_attn", "layer": 2, "column": 3, "label": " x", "reason": ""}
    checked = [
        CheckedCell(
            **kept,
            feature=12,
            why=["top"],
            estimate=0.3,
            exact=0.02,
            difference=0.28,
            off=True,
            estimate_effect=0.3,
            exact_effect=0.02,
        ),
        CheckedCell(
            **kept,
            feature=7,
            why=["random"],
            estimate=0.05,
            exact=-0.06,
            difference=0.11,
            off=True,
            estimate_effect=0.05,
            exact_effect=-0.06,
        ),
    ]
    return attribution(estimated(features=scores, checked=checked))
