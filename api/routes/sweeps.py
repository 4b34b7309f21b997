"""Routes of sweeps: a body is resolved on the model, checked against the quota of cells, and
accepted as a job like any other.
"""

from litestar import Response, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody

from ...broker.ledger.jobs.ledger import new_job_id
from ...broker.ledger.jobs.sweeps import Sweeps
from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import from_json, now, to_json
from ...schemas.jobs.attributions import AttributionRequest
from ...schemas.jobs.jobs import Job, JobResult, JobView, Sampling
from ...schemas.jobs.models import ModelInfo
from ...schemas.jobs.sweep_units import Units
from ...schemas.jobs.sweep_views import PlannedColumn, PlannedPair, SweepPlan, SweepView
from ...schemas.jobs.sweeps import StoredPair, StoredSweep, SweepRequest
from ...schemas.requests.attributions import GRADIENTS
from ..context import AppContext
from ..resolve.admission.admission import handled
from ..resolve.edits.loras import named_lora
from ..resolve.readings.saes import named_sae
from ..resolve.sweeps.alignment import CLEAN, CORRUPT
from ..resolve.sweeps.attribution import (
    attributed,
    check_exact,
    check_gradients,
    check_method,
    on_its_site,
)
from ..resolve.sweeps.plan import Planned, plan_sweep
from ..web.auth import needs, seen
from ..web.body import JsonRequest
from .jobs import ERRORS, PROBLEM, SUBMIT_ERRORS, JobId, Key, Prefer, answer_submission


async def submit_sweep(
    context: AppContext, body: SweepRequest, idempotency: tuple[str, str] | None, caller: Caller
) -> str:
    """Submit a sweep or an attribution like `AppContext.submit`. Raises MidstreamError, also
    `too_many_cells`.
    """
    info = await context.model(body.model)
    if idempotency and (known := await context.ledger.repeated(idempotency)):
        return known  # its cells are counted already
    lora = await named_lora(body.lora, info, context.ledger)
    probes = await context.watching(info)
    sweep, blobs = await _planned(context, body, info, caller)
    job = Job(
        id=new_job_id(),
        kind="sweep" if sweep.attributed is None else "attribution",
        model=info.name,
        prompts=[],
        sampling=Sampling(max_tokens=1),
        created=now(),
        metadata=body.metadata,
        sweep=sweep,
        lora=lora,
        probes=probes,
        global_captures=info.global_captures,
        queue="" if sweep.attributed is None else GRADIENTS,
        identity=info.identity,
        **handled(body, caller),
    )
    pinned = [name for probe in probes for name in probe.content.tensors]
    return await context.accept(job, info, blobs, idempotency, pinned, to_json(body))


async def _planned(
    context: AppContext, body: SweepRequest, info: ModelInfo, caller: Caller
) -> Planned:
    global_steering = (await context.model_state(info.name, [], caller)).global_steering
    sae = None
    if isinstance(body, AttributionRequest):
        check_method(body)
        if body.sae is not None:
            sae = (await named_sae(body.sae, "sae", info, context.ledger)).stored()
            body = on_its_site(body, sae)
        gradients = await context.ledger.gradients(info)
        check_gradients(
            {f"hooks[{index}]": hook for index, hook in enumerate(body.hooks)},
            info,
            gradients,
            bool(global_steering.entries),
        )
    planned = await plan_sweep(
        body, info, await context.codec(info), context.settings, global_steering
    )
    if isinstance(body, AttributionRequest):
        planned = planned._replace(sweep=attributed(planned.sweep, body, sae))
        check_exact(planned.sweep, context.settings.sweep_cells)
    return planned


@post(
    "/v1/sweeps",
    opt=needs("submit"),
    status_code=202,
    summary="Submit a sweep of patches",
    description=(
        "One job: both prompts of every pair unpatched, then every cell. Follow, fetch "
        "and cancel it like any job."
    ),
    responses={
        200: ResponseSpec(
            JobResult, description="The result, with `Prefer: wait=N`", generate_examples=False
        ),
        **SUBMIT_ERRORS,
    },
)
async def post_sweep(
    data: JSONBody[SweepRequest],
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: Key = None,
    prefer: Prefer = None,
) -> Response[JobView]:
    job_id = await submit_sweep(context, data, request.idempotency(key), caller)
    return await answer_submission(request, context, job_id, prefer)


@post(
    "/v1/sweeps/plan",
    opt=needs("read"),
    status_code=200,
    summary="Check a sweep without running it",
    description=(
        "Takes a body of `POST /v1/sweeps`; answers its errors, or both prompts' "
        "tokens as they would be aligned."
    ),
    responses=SUBMIT_ERRORS,
)
async def post_sweep_plan(
    data: JSONBody[SweepRequest], context: AppContext, caller: Caller
) -> SweepPlan:
    return await plan_of(data, context, caller)


async def plan_of(data: SweepRequest, context: AppContext, caller: Caller) -> SweepPlan:
    """Return what a sweep or an attribution with this body would run."""
    info = await context.model(data.model)
    await named_lora(data.lora, info, context.ledger)
    sweep, _ = await _planned(context, data, info, caller)
    clean_is_patched = data.ablation is not None or data.direction == "noise"
    per_column = len(sweep.hooks) * len(sweep.layers)
    return SweepPlan(
        model=info.name,
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


@get(
    "/v1/sweeps/{job_id:str}",
    opt=needs("read"),
    summary="Get a sweep: its job, its request and its grids so far",
    responses={410: PROBLEM, **ERRORS},
)
async def get_sweep(job_id: JobId, context: AppContext, caller: Caller) -> SweepView:
    view = seen(caller, await context.ledger.view(job_id))
    if view.kind != "sweep":
        raise MidstreamError("not_found", f"job {job_id} is not a sweep")
    raw, result, last_event = await Sweeps(context.ledger).standing(job_id)
    await context.ledger.written()
    request = from_json(raw, SweepRequest) if raw else None
    return SweepView(job=view, request=request, result=result, last_event=last_event)


ROUTES = [post_sweep, post_sweep_plan, get_sweep]
