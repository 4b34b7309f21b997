"""Resolves how an attribution estimates and checks its cells; a 400 names what is not valid."""

import secrets
from collections.abc import Iterable

from msgspec.structs import replace

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.errors import Excluded, check_excluded, invalid

from ..records.attributions import AttributionRequest
from ..records.estimates import EstimateMethod, StoredAttribution, Verify
from ..records.sweeps import StoredSweep, SweepPair

#: Points between the prompts if the request names none.
INTEGRATED_STEPS = 8
#: `adaptive` computes at most this share of a pair's grid, and at least `LEAST_TOPS` × its top
#: cells.
BUDGET_SHARE = 0.1
LEAST_TOPS = 5
#: Fields that choose cells; not valid where there is no grid.
CELLS = ("hooks", "layers", "heads", "neurons", "window", "alpha", "mask")


def on_its_site(body: AttributionRequest, sae: StoredSae) -> AttributionRequest:
    """Return the request at the hook and layer of the autoencoder that it names."""
    check_excluded(_defaults(body, "sae, whose hook and layer are used", CELLS))
    return replace(body, hooks=[sae.hook], layers=[sae.layer])


def check_method(body: AttributionRequest) -> None:
    """Check fields that exclude or require each other. Raises a 400."""
    method = body.method
    steps = steps_of(body)
    edges = body.method == "edges"
    check_excluded(
        [
            *_defaults(body, "estimates: they are of cells without a path", ("path",)),
            *_defaults(body, "gradients: their workers load no adapters", ("lora",)),
            *_defaults(
                body,
                "method 'edges', which scores all edges of a pair",
                ("axis", "ablation", *CELLS) if edges else (),
            ),
            Excluded(
                "verify",
                edges and body.verify is not None,
                "is not valid with method 'edges': an edge is no cell of the grid",
                hint="patch an edge exactly by POST /v1/sweeps with `path`",
            ),
            *(() if body.sae is None else _of_features(method, body.verify, body.keep)),
            Excluded(
                "steps",
                method in ("attribution", "adaptive") and steps > 1,
                f"is not valid with method {method!r}",
                allowed="1",
            ),
            Excluded(
                "steps",
                method == "integrated" and steps < 2,
                "must be larger for method 'integrated'",
                allowed="2 or more",
            ),
            Excluded(
                "metric",
                body.metric == "kl" and steps == 1 and (body.ablation or body.direction == "noise"),
                "the gradient of kl is zero at the clean prompt, which is the patched one here",
                hint="use method 'integrated', direction 'denoise', or another metric",
            ),
            *(() if body.verify is None else _of_cells(method, body.verify)),
        ]
    )


def _of_cells(method: EstimateMethod, verify: Verify) -> list[Excluded]:
    return [
        Excluded(
            "verify.budget",
            method != "adaptive" and verify.budget is not None,
            "is valid with method 'adaptive' only: omit it",
        ),
        Excluded(
            "verify.top",
            method == "adaptive" and not verify.top,
            "must be at least 1 for method 'adaptive'",
        ),
        Excluded("verify", not verify.most, "chooses no cells", allowed="null, or a count above 0"),
    ]


def _of_features(method: EstimateMethod, verify: Verify | None, keep: int) -> list[Excluded]:
    chosen = verify or Verify()
    return [
        Excluded(
            "method",
            method != "attribution",
            f"{method!r} is not valid with sae",
            allowed="attribution",
        ),
        Excluded(
            "verify.doubtful",
            chosen.doubtful not in (0, Verify().doubtful),
            "is not valid with sae: no feature is known to be doubtful; omit it",
        ),
        Excluded(
            "verify.top",
            verify is not None and verify.top > keep,
            "exceeds keep, the features listed",
            allowed=f"0 to {keep}",
        ),
        Excluded(
            "verify",
            not chosen.top + chosen.random,
            "chooses no features",
            allowed="top or random above 0",
        ),
    ]


def check_exact(sweep: StoredSweep, limit: int) -> None:
    """Check the number of features that are computed exactly, which no grid bounds. Raises a
    400.
    """
    if sweep.num_exact > limit:
        raise invalid(
            "verify",
            f"chooses {sweep.num_exact} features of all pairs",
            allowed=f"at most {limit} (setting sweep_cells)",
        )


def steps_of(body: AttributionRequest) -> int:
    return body.steps or (INTEGRATED_STEPS if body.method == "integrated" else 1)


def attributed(
    sweep: StoredSweep,
    body: AttributionRequest,
    sae: StoredSae | None,
) -> StoredSweep:
    """Return the planned sweep with how its cells are estimated and checked."""
    verify = body.verify or (Verify() if body.method == "adaptive" else None)
    if verify is not None and sae is not None:
        verify = replace(verify, doubtful=0)
    budget = 0
    if verify is not None and body.method == "adaptive":
        least = max(int(BUDGET_SHARE * sweep.cells_of_pair), LEAST_TOPS * verify.top)
        budget = min(verify.budget or least, sweep.cells_of_pair)
    attribution = StoredAttribution(
        method=body.method,
        steps=steps_of(body),
        seed=secrets.randbelow(1 << 31) if body.seed is None else body.seed,
        keep=body.keep,
        verify=verify,
        budget=budget,
        sae=sae,
    )
    return replace(sweep, attribution=attribution)


def _defaults(body: AttributionRequest, reason: str, names: Iterable[str]) -> list[Excluded]:
    default = AttributionRequest(model="", pairs=[SweepPair(clean="")])
    return [
        Excluded(
            name,
            getattr(body, name) != getattr(default, name),
            f"is not valid with {reason}: omit it",
        )
        for name in names
    ]
