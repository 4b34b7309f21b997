"""Routes of sweeps, attributions, doses and fits: a body is resolved on the model, checked against
the quotas, and accepted as a job like any other.
"""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, QueryParameter
from msgspec.structs import replace

from ...broker.ledger.jobs.sweeps import LedgerSweeps
from ...broker.ledger.named.probes import all_fitting, watched_model, with_policies
from ...schemas.artifacts.loras import LORAS, StoredLora
from ...schemas.artifacts.saes import SAES
from ...schemas.base import MidstreamError, from_json, to_json
from ...schemas.jobs.attributions import AttributionRequest
from ...schemas.jobs.doses import DoseRequest
from ...schemas.jobs.fits import FitRequest, LensFitRequest, StoredFit, StoredModuleFit
from ...schemas.jobs.jobs import JobResult, JobView
from ...schemas.jobs.models import ModelInfo
from ...schemas.jobs.sweep_units import Units
from ...schemas.jobs.sweep_views import (
    AttributionView,
    PlannedColumn,
    PlannedPair,
    SweepPlan,
    SweepView,
)
from ...schemas.jobs.sweeps import StoredPair, StoredSweep, SweepRequest
from ...schemas.jobs.works import FitWork, SweepWork
from ..context import AppContext
from ..resolve.admission.fits import (
    dose_layers,
    expanded,
    parse_dose,
    resolve_fit,
    resolve_lens_fit,
)
from ..resolve.edits.loras import named_lora
from ..resolve.prompts.tokenizer import Codec
from ..resolve.readings.gradients import check_gradients
from ..resolve.readings.saes import named_sae
from ..resolve.sweeps.alignment import CLEAN, CORRUPT
from ..resolve.sweeps.attribution import attributed, check_exact, check_method, on_its_site
from ..resolve.sweeps.plan import PlannedSweep, plan_sweep
from ..web.aside import call_aside
from ..web.auth import needs
from .jobs import ERRORS, PROBLEM, Submission, submits


async def submit_sweep(body: SweepRequest, submission: Submission) -> str:
    """Submit a sweep or an attribution like `AppContext.submit`. Raises MidstreamError, also
    `too_many_cells`.
    """
    context = submission.context
    info = await context.served.model(body.model)
    if known := await submission.known():
        return known  # its cells are counted already
    (sweep, blobs), lora = await _planned(context, body, info)
    job = submission.job(
        "sweep" if sweep.attributed is None else "attribution",
        info,
        body,
        work=SweepWork(sweep=sweep),
        lora=lora,
        global_captures=info.global_captures,
    )
    _, policies = await watched_model(context.ledger, info.name)
    job = with_policies(job, all_fitting(policies, info))
    if sweep.attributed is not None:
        stops = any("stop" in probe.actions for probe in job.probes)
        watched = replace(sweep, attribution=replace(sweep.attributed, watched=stops))
        job = replace(job, work=SweepWork(sweep=watched))
    pinned = [name for probe in job.probes for name in probe.content.tensors]
    return await context.accept(job, info, blobs, submission.idempotency, pinned, to_json(body))


async def _planned(
    context: AppContext, body: SweepRequest, info: ModelInfo
) -> tuple[PlannedSweep, StoredLora | None]:
    """Return the plan, and the adapter that the body names."""
    sae_name = body.sae if isinstance(body, AttributionRequest) else None
    found = await context.names.look_up(info, (LORAS, body.lora), (SAES, sae_name))
    lora = named_lora(body.lora, info, found)
    sae = None
    if isinstance(body, AttributionRequest):
        check_method(body)
        if body.sae is not None:
            sae = named_sae(body.sae, "sae", info, found).stored()
            body = on_its_site(body, sae)
        hooks = {f"hooks[{index}]": hook for index, hook in enumerate(body.hooks)}
        gradients = await context.ledger.gradients(info)
        steering = await context.steering.current(info.name)
        check_gradients(hooks, info, gradients, bool(steering.entries))
    codec = await context.served.codec(info)
    planned = await plan_sweep(body, info, codec, context.settings)
    if isinstance(body, AttributionRequest):
        planned = planned._replace(sweep=attributed(planned.sweep, body, sae))
        check_exact(planned.sweep, context.settings.sweep_cells)
    return planned, lora


async def plan_of(data: SweepRequest, context: AppContext) -> SweepPlan:
    """Return what a sweep or an attribution with this body would run."""
    info = await context.served.model(data.model)
    (sweep, _), _ = await _planned(context, data, info)
    return await call_aside(_shown, info.name, data, sweep)


def _shown(model: str, data: SweepRequest, sweep: StoredSweep) -> SweepPlan:
    clean_is_patched = data.ablation is not None or data.direction == "noise"
    per_column = len(sweep.hooks) * len(sweep.layers)
    return SweepPlan(
        model=model,
        hooks=sweep.hooks,
        layers=sweep.layers,
        axis=sweep.axis,
        patched=CLEAN if clean_is_patched else CORRUPT,
        cells=sweep.num_cells,
        skipped=sum(not column.places for pair in sweep.pairs for column in pair.columns)
        * per_column,
        tokens=Units(sweep).tokens,
        pairs=[_planned_pair(sweep, pair, clean_is_patched) for pair in sweep.pairs],
    )


def _planned_pair(sweep: StoredSweep, pair: StoredPair, clean_is_patched: bool) -> PlannedPair:
    clean, corrupt = (
        (pair.base_tokens, pair.source_tokens)
        if clean_is_patched
        else (pair.source_tokens, pair.base_tokens)
    )
    return PlannedPair(
        clean_tokens=clean,
        corrupt_tokens=corrupt,
        columns=[
            PlannedColumn(
                label=column.label,
                positions=[place for place, _ in column.places],
                sources=[source for _, source in column.places if sweep.ablation is None],
                reason=column.reason,
                head=column.head,
            )
            for column in pair.columns
        ],
        answer_tokens=pair.answer,
        foil_tokens=pair.foil,
        notes=pair.notes,
    )


HELD = ResponseSpec(
    JobResult | SweepPlan,  # type: ignore[arg-type]
    description="The result, with `Prefer: wait=N`; or the plan, with `dry_run`",
    generate_examples=False,
)
DryRun = Annotated[
    bool,
    QueryParameter(
        description="Run nothing: 200 with both prompts' tokens as they would be aligned, or the "
        "errors of the submission"
    ),
]


class Grids(NamedTuple):
    """A kind of job with grids, and the texts of its routes."""

    kind: Literal["sweep", "attribution"]
    body: type[SweepRequest]
    view: Any  # the type of the answer to GET
    submit: tuple[str, str]  # summary and description
    get: str  # summary


GRIDS = (
    Grids(
        "sweep",
        SweepRequest,
        SweepView,
        (
            "Submit a sweep of patches",
            "One job: both prompts of every pair unpatched, then every cell. Follow, fetch "
            "and cancel it like any job.",
        ),
        "Get a sweep: its job, its request and its grids so far",
    ),
    Grids(
        "attribution",
        AttributionRequest,
        AttributionView,
        (
            "Submit an attribution: a grid estimated by gradients and checked by exact patches",
            "One job: a gradient worker estimates every cell, then vLLM workers compute the cells "
            "of `verify` exactly. Follow, fetch and cancel it like any job.",
        ),
        "Get an attribution: its job, its request and its grids so far",
    ),
)


def grid_routes(row: Grids) -> list[Any]:
    """Return the routes that submit, plan and get jobs of a kind."""
    kind = row.kind
    path = f"/v1/{row.kind}s"

    async def submit(
        data: JSONBody[row.body],  # type: ignore[name-defined]
        submission: Submission,
        dry_run: DryRun = False,
    ) -> Response[JobView]:
        if dry_run:
            planned: Any = await plan_of(data, submission.context)
            return Response(planned, status_code=200)
        return await submission.answer(await submit_sweep(data, submission))

    async def standing(
        view: JobView,
        context: AppContext,
    ) -> row.view:  # type: ignore[name-defined]
        if view.kind != kind:
            raise MidstreamError("not_found", f"job {view.id} is not of kind {kind!r}")
        raw, result, last_event = await LedgerSweeps(context.ledger).standing(view.id)
        await context.ledger.written()
        request = from_json(raw, row.body) if raw else None
        return row.view(job=view, request=request, result=result, last_event=last_event)

    submit.__name__ = f"post_{kind}"
    standing.__name__ = f"get_{kind}"
    return [
        submits(path, summary=row.submit[0], description=row.submit[1], held=HELD)(submit),
        get(
            f"{path}/{{job_id:str}}",
            opt=needs("read"),
            summary=row.get,
            responses={410: PROBLEM, **ERRORS},
        )(standing),
    ]


@submits(
    "/v1/doses",
    summary="Weigh the effect of steering against its damage",
    description=(
        "Steers a few prompts at several scales and layers, and measures the effect, the loss on "
        "held-out texts, repetition and the relative sizes of the edits. A job: follow, fetch and "
        "cancel it like any job; its result has `dose`."
    ),
)
async def post_dose(data: JSONBody[DoseRequest], submission: Submission) -> Response[JobView]:
    layers = dose_layers(data, await submission.context.served.model(data.model))
    job_id = await submission.context.submit(
        parse_dose(data),
        submission.idempotency,
        submission.caller,
        lambda job: expanded(job, data, layers),
    )
    return await submission.answer(job_id)


#: Body of a fit.
B = TypeVar("B", FitRequest, LensFitRequest)


@submits(
    "/v1/modules/fit",
    summary="Fit a module to examples",
    description=(
        "Learns a direction or an edit from examples, measures its effect on held-out examples, "
        "and registers it as a named module. A job on the model's gradient worker: follow, fetch "
        "and cancel it like any job; its result has `fit`."
    ),
)
async def post_fit(data: JSONBody[FitRequest], submission: Submission) -> Response[JobView]:
    return await _submit_fit(resolve_fit, data, submission)


@submits(
    "/v1/jacobians/fit",
    scope="steer-global",
    summary="Fit a Jacobian lens to a corpus",
    description=(
        "Computes a Jacobian lens from prompts, writes it below `lenses` in `artifacts_dir`, and "
        "registers it for all tenants. A job on the model's gradient worker, which shares that "
        "folder with the service; its result has `fit`."
    ),
)
async def post_lens_fit(
    data: JSONBody[LensFitRequest], submission: Submission
) -> Response[JobView]:
    return await _submit_fit(resolve_lens_fit, data, submission)


async def _submit_fit(
    resolve: Callable[[B, ModelInfo, Codec], Coroutine[Any, Any, StoredFit]],
    data: B,
    submission: Submission,
) -> Response[JobView]:
    """Accept a fit as a job, and answer as any submission."""
    context = submission.context
    info = await context.served.model(data.model)
    job_id = await submission.known()
    if job_id is None:
        resolving = resolve(data, info, await context.served.codec(info))
        fit = await submission.request.resolved(resolving)
        steering = await context.steering.current(info.name)
        hooks = {"hook": fit.hook} if isinstance(fit, StoredModuleFit) else {}
        check_gradients(hooks, info, await context.ledger.gradients(info), bool(steering.entries))
        job = submission.job("fit", info, data, work=FitWork(fit=fit))
        job_id = await context.accept(job, info, {}, submission.idempotency, request=to_json(data))
    return await submission.answer(job_id)


ROUTES: list[Any] = [
    *(route for row in GRIDS for route in grid_routes(row)),
    post_dose,
    post_fit,
    post_lens_fit,
]
