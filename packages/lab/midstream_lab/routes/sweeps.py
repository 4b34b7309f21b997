"""Routes of sweeps and attributions: a body is resolved on the model, checked against the
quotas, and accepted as a job like any other.
"""

from typing import Any, Literal, NamedTuple

from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody
from msgspec.structs import replace

from midstream.api.context import AppContext
from midstream.api.resolve.edits.loras import named_lora
from midstream.api.resolve.readings.saes import named_sae
from midstream.api.routes.jobs import ERRORS, PROBLEM, DryRun, Submission, submits
from midstream.api.web.aside import call_aside
from midstream.api.web.auth import needs
from midstream.broker.ledger.named.probes import all_fitting, watched_model, with_policies
from midstream.schemas.artifacts.loras import LORAS, StoredLora
from midstream.schemas.artifacts.saes import SAES
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.jobs import JobView
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.jobs.results import JobResult

from ..admit.alignment import CLEAN, CORRUPT
from ..admit.attribution import attributed, check_exact, check_method, on_its_site
from ..admit.gradient_rows import check_gradients
from ..admit.plan import PlannedSweep, plan_sweep
from ..records.attributions import AttributionRequest
from ..records.sweep_units import SweepWork, Units
from ..records.sweep_views import AttributionView, PlannedColumn, PlannedPair, SweepPlan, SweepView
from ..records.sweeps import StoredPair, StoredSweep, SweepRequest
from ..results import ledger_sweeps


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
        work=SweepWork(sweep=sweep).packed,
        lora=lora,
        global_captures=info.global_captures,
    )
    _, policies = await watched_model(context.ledger, info.name)
    job = with_policies(job, all_fitting(policies, info))
    if sweep.attributed is not None:
        stops = any("stop" in probe.actions for probe in job.probes)
        watched = replace(sweep, attribution=replace(sweep.attributed, watched=stops))
        job = replace(job, work=SweepWork(sweep=watched).packed)
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
        gradients = await context.ledger.gradients(info.name)
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
    return await call_aside(_shown, info.name, sweep)


def _shown(model: str, sweep: StoredSweep) -> SweepPlan:
    per_column = len(sweep.hooks) * len(sweep.layers)
    return SweepPlan(
        model=model,
        hooks=sweep.hooks,
        layers=sweep.layers,
        axis=sweep.axis,
        patched=CLEAN if sweep.patches_clean else CORRUPT,
        cells=sweep.num_cells,
        skipped=sum(not column.places for pair in sweep.pairs for column in pair.columns)
        * per_column,
        tokens=Units(sweep).tokens,
        pairs=[_planned_pair(sweep, pair) for pair in sweep.pairs],
    )


def _planned_pair(sweep: StoredSweep, pair: StoredPair) -> PlannedPair:
    clean, corrupt = (
        (pair.base_tokens, pair.source_tokens)
        if sweep.patches_clean
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
        raw, result, last_event = await ledger_sweeps.standing(context.ledger, view.id)
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


ROUTES: list[Any] = [route for row in GRIDS for route in grid_routes(row)]
