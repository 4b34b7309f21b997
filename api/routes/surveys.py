"""Routes of surveys of harvests: submit, list, read."""

from collections.abc import Callable
from contextlib import closing
from typing import Annotated, TypeVar

import anyio.to_thread
from litestar import Response, get
from litestar.params import JSONBody, QueryParameter

from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError
from ...schemas.base.limits import MAX_PAGE, MAX_SAE_WIDTH
from ...schemas.base.records import to_json
from ...schemas.jobs.jobs import JobView
from ...schemas.jobs.surveys import (
    ExampleList,
    FeatureListing,
    FeatureSurveyRequest,
    SurveyList,
    SurveyOrder,
)
from ...storage.formats.capture_blobs import DamagedBlob
from ...storage.store import open_store
from ...storage.surveys import Surveyed
from ..context import AppContext
from ..resolve.admission.surveys import check_surveyed, feature_survey, survey_part
from ..web.auth import needs
from .harvests import HarvestId, seen_harvest
from .jobs import ERRORS, JobId, Submission, submits

T = TypeVar("T")
Order = Annotated[
    SurveyOrder | None, QueryParameter(description="The figure of which the largest come first")
]
Limit = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE, description="How many features")]
Feature = Annotated[int, QueryParameter(ge=0, lt=MAX_SAE_WIDTH, description="The feature's number")]


@submits(
    "/v1/harvests/{harvest_id:str}/features",
    summary="Survey a harvest's features",
    description=(
        "One pass over the rows of a finished harvest: the density of each feature of an "
        "autoencoder, and the contexts where it is most active. A job: follow, fetch and cancel it "
        "like any job; the survey has the job's id."
    ),
)
async def post_feature_survey(
    harvest_id: HarvestId, data: JSONBody[FeatureSurveyRequest], submission: Submission
) -> Response[JobView]:
    context = submission.context
    view, job_id = (
        await seen_harvest(context, submission.caller, harvest_id),
        await submission.known(),
    )
    if job_id is None:
        check_surveyed(view, len(await context.harvests.surveys(view.id)))
        info = await context.model(view.model)
        harvest = await context.harvests.stored(view.id)
        survey = await feature_survey(data, harvest, info, context.ledger)
        job = submission.job("harvest", info, data, harvest=survey_part(harvest, survey, view.rows))
        job_id = await context.accept(job, info, {}, submission.idempotency, request=to_json(data))
    return await submission.answer(job_id)


@get(
    "/v1/harvests/{harvest_id:str}/surveys",
    opt=needs("read"),
    summary="List a harvest's surveys",
    responses=ERRORS,
)
async def list_surveys(harvest_id: HarvestId, context: AppContext, caller: Caller) -> SurveyList:
    await seen_harvest(context, caller, harvest_id)
    return SurveyList(surveys=[*(await context.harvests.surveys(harvest_id)).values()])


@get(
    "/v1/harvests/{harvest_id:str}/surveys/{job_id:str}",
    opt=needs("read"),
    summary="Get a survey and its features",
    responses=ERRORS,
)
async def get_survey(
    harvest_id: HarvestId,
    job_id: JobId,
    context: AppContext,
    caller: Caller,
    order: Order = None,
    limit: Limit = 50,
) -> FeatureListing:
    def read(found: Surveyed) -> FeatureListing:
        return FeatureListing(survey=found.entry, features=found.features(order, limit))

    return await _read(context, caller, harvest_id, job_id, read)


@get(
    "/v1/harvests/{harvest_id:str}/surveys/{job_id:str}/examples",
    opt=needs("read"),
    summary="Get the strongest examples of a feature",
    description="Of a comparison, feature 0: the tokens with the largest KL divergence.",
    responses=ERRORS,
)
async def get_examples(
    harvest_id: HarvestId, job_id: JobId, context: AppContext, caller: Caller, feature: Feature = 0
) -> ExampleList:
    def read(found: Surveyed) -> ExampleList:
        figures = None if found.entry.against else found.feature(feature)
        return ExampleList(figures=figures, examples=found.examples(feature))

    return await _read(context, caller, harvest_id, job_id, read)


async def _read(
    context: AppContext,
    caller: Caller,
    harvest_id: str,
    job_id: str,
    read: Callable[[Surveyed], T],
) -> T:
    """Return what `read` reads of a survey that the caller may see. Raises `not_found`, and
    `capture_damaged` if its file cannot be read.
    """
    view = await seen_harvest(context, caller, harvest_id)
    entry = (await context.harvests.surveys(harvest_id)).get(job_id)
    if entry is None:
        raise MidstreamError("not_found", f"harvest {harvest_id} has no survey {job_id}")

    def opened() -> T:
        with closing(Surveyed(open_store(view.uri), entry)) as found:
            return read(found)

    try:
        return await anyio.to_thread.run_sync(opened)
    except (OSError, DamagedBlob) as error:
        raise MidstreamError("capture_damaged", f"{entry.key}: {error}") from error


ROUTES = [post_feature_survey, list_surveys, get_survey, get_examples]
