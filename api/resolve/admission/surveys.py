"""Validation of a survey against its harvest and the model's autoencoders."""

from ....broker.ledger.jobs.ledger import Ledger
from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.limits import MAX_SURVEY_BYTES, MAX_SURVEYS
from ....schemas.jobs.harvests import HarvestView, StoredHarvest
from ....schemas.jobs.models import ModelInfo
from ....schemas.jobs.surveys import (
    CONTEXT_BYTES,
    EXAMPLE_BYTES,
    FEATURE_BYTES,
    FeatureSurveyRequest,
    SurveyRequest,
)
from ....schemas.requests.harvest_work import HarvestPart, Survey
from ..readings.saes import named_sae

#: Number of the part that is a survey; a harvest may have several at a time.
SURVEYS = -3


async def feature_survey(
    body: FeatureSurveyRequest, harvest: StoredHarvest, model: ModelInfo, ledger: Ledger
) -> Survey:
    """Return the survey to store. Raises a 400 naming the field and what is valid."""
    sae = await named_sae(body.sae, "sae", model, ledger)
    check_sites(harvest, {sae.hook: sae.layer}, "sae", f"{sae.name!r} reads")
    size = example_bytes(body) * sae.form.d_sae
    if size > MAX_SURVEY_BYTES:
        raise invalid(
            "top",
            f"{body.top} examples of {sae.form.d_sae} features, with {body.context} tokens on "
            f"either side, take {size} bytes",
            allowed=f"at most {MAX_SURVEY_BYTES} bytes",
            hint="keep fewer examples, or less context",
        )
    return Survey(sae=sae.stored(), features=sae.form.d_sae, top=body.top, context=body.context)


def example_bytes(body: SurveyRequest) -> int:
    """Return the bytes of one feature in a survey's result."""
    return FEATURE_BYTES + body.top * (EXAMPLE_BYTES + (2 * body.context + 1) * CONTEXT_BYTES)


def check_sites(harvest: StoredHarvest, sites: dict[str, int], field: str, who: str) -> None:
    """Raises a 400 naming `field` if the harvest lacks a site that a survey reads."""
    for hook, layer in sites.items():
        if layer not in harvest.sites.get(hook, []):  # type: ignore[call-overload]
            kept = "; ".join(f"{name}: {layers}" for name, layers in harvest.sites.items())
            raise invalid(
                field, f"{who} {hook} of layer {layer}, which {harvest.id} lacks", allowed=kept
            )


def check_surveyed(view: HarvestView, surveys: int) -> None:
    """Raises a 409 for a harvest that has no result, or has as many surveys as are kept."""
    if view.state != "succeeded":
        raise MidstreamError("conflict", f"harvest {view.id} is {view.state}, not succeeded")
    if surveys >= MAX_SURVEYS:
        raise MidstreamError(
            "conflict",
            f"harvest {view.id} has {surveys} surveys, the most that are kept with a harvest",
        )


def survey_part(harvest: StoredHarvest, survey: Survey, rows: int) -> HarvestPart:
    return HarvestPart(
        harvest=harvest.id, part=SURVEYS, role="survey", tokens=max(1, rows), survey=survey
    )
