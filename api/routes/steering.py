"""Makes named modules; routes of global steering, and of the ranks' reports on it."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
from litestar import delete, put
from litestar.params import JSONBody

from ...broker.ledger.named.registry import Registry
from ...broker.ledger.named.steering import Account
from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.base.tensors import PackedBlobs, Tensor
from ...schemas.jobs.models import ModelInfo
from ...schemas.requests.steering import (
    MODULES,
    Dynamic,
    GlobalRequest,
    GlobalSteering,
    GlobalView,
    Module,
    ModuleRequest,
    content_digest,
    views_of,
)
from ...storage.formats.module_files import specs_of
from ..context import AppContext, context_of
from ..operations.global_change import change
from ..operations.rank_agreement import agreement
from ..resolve.edits import steering
from ..web.aside import call_aside
from ..web.audit import audited
from ..web.auth import needs
from ..web.request_context import AnyRequest
from .jobs import ERRORS, PROBLEM, ModelFilter, reads

#: Seconds that `GET /v1/steering/dynamic` waits for the workers' answers, and between its reads.
ANSWER_S = 2.0
LOOK_S = 0.02
CHANGE_ERRORS = {**ERRORS, 409: PROBLEM, 413: PROBLEM, 415: PROBLEM}
#: The questions by model, and the accounts of the workers that were asked.
Answers = tuple[dict[str, str], list[Account]]
#: Makes an artifact of the one that has its name; content hash → packed tensor.
Made = tuple[Callable[[Any], Any], PackedBlobs]


def module_of(raw: bytes) -> ModuleRequest:
    """Decode a body that is a safetensors file. Raises a 400."""
    with Translated(
        ValueError, lambda error: MidstreamError("invalid_request", f"the body: {error}")
    ):
        return ModuleRequest(steering=specs_of(raw))


# --- Named modules


async def make_module(
    data: ModuleRequest, name: str, info: ModelInfo, context: AppContext, caller: Caller
) -> Made:
    specs = await context.names.tokenised(info, data.steering)
    content = await call_aside(
        steering.resolve_module, specs, info, await context.names.features(info, specs), data.limit
    )
    module = data.registered(
        Module,
        name,
        info.name,
        digest=content_digest(content.entries),
        entries=content.entries,
        bytes=content.size,
        hidden_size=info.hidden_size,
        reach=content.reach,
    )
    return lambda _: module, content.blobs


async def named_module(
    context: AppContext, caller: Caller, model: str, name: str, field: str = "name"
) -> Module:
    """Return the caller's module. Raises a 404 naming `field` and the existing modules."""
    stored = MODULES.key_of(caller.tenant, name)
    return await Registry(context.ledger, MODULES).known(model, stored, field)


async def tensors_of(
    context: AppContext, name: str, keys: Iterable[str], field: str = "name"
) -> dict[str, Tensor]:
    """Return the tensors of a module that was just read, by content hash.

    Raises a 409 naming `field` if the module has changed meanwhile.
    """
    try:
        return {key: await context.steering.get_tensor(key) for key in dict.fromkeys(keys)}
    except MidstreamError as error:
        if error.kind != "intervention_failed":
            raise
        detail = f"module {name!r} was deleted or replaced while it was read"
        raise MidstreamError("conflict", detail, field=field, hint="ask again") from error


# --- Global steering


async def _of_models(request: AnyRequest) -> dict[str, GlobalView]:
    """Return the global steering of every model that has some: the body may name the model."""
    context = context_of(request)
    views = [
        _global(info.name, await context.steering.current(info.name))
        for info in await context.ledger.models()
    ]
    return {view.model: view for view in views if view.entries}


@put(
    "/v1/steering/global",
    opt=needs("steer-global") | audited("global steering", _of_models),
    summary="Set a model's global steering",
    description="Every rank of every live worker checks that it could apply the change; if one "
    "cannot, nothing changes (409, 503). Once the response is "
    "sent, jobs that begin run under the new steering; running jobs keep the old.",
    responses=CHANGE_ERRORS,
)
async def put_global(
    data: JSONBody[GlobalRequest], context: AppContext, caller: Caller, model: ModelFilter = None
) -> GlobalView:
    info = await context.served.the_model(data.model or model)
    model_state = await context.names.state(info, steering.modules_named(data.steering), caller)
    specs = await context.names.tokenised(info, data.steering)
    model_state = replace(model_state, features=await context.names.features(info, specs))
    content = await call_aside(steering.resolve_global, specs, info, model_state)
    wait_s = context.settings.steering_wait_s
    return _global(
        info.name,
        await change(context.steering, wait_s, info.name, content.entries, content.blobs),
    )


@delete(
    "/v1/steering/global",
    opt=needs("steer-global") | audited("global steering", _of_models),
    status_code=200,
    summary="Remove global steering from a model",
    description="Running jobs keep it. Has no effect if no global steering is set.",
    responses=CHANGE_ERRORS,
)
async def delete_global(context: AppContext, info: ModelInfo) -> GlobalView:
    wait_s = context.settings.steering_wait_s
    return _global(info.name, await change(context.steering, wait_s, info.name, [], {}))


@reads("/v1/steering/global", summary="Get a model's global steering")
async def get_global(context: AppContext, info: ModelInfo) -> GlobalView:
    return _global(info.name, await context.steering.current(info.name))


def _global(model: str, steering: GlobalSteering) -> GlobalView:
    return GlobalView(
        model=model,
        version=steering.version,
        digest=steering.digest,
        entries=views_of(steering.entries),
        changed=steering.changed,
    )


# --- Status reported by the ranks


@reads(
    "/v1/steering/dynamic",
    summary="Steering applied by the ranks, and whether they agree",
    description=(
        "Queries every live worker. Answers with 200 even if ranks differ or a worker "
        "does not answer: see `determinism`."
    ),
)
async def get_dynamic(context: AppContext, caller: Caller, model: ModelFilter = None) -> Dynamic:
    if model is not None:
        await context.served.model(model)
    asks, accounts = await answers_of_ranks(context, model, ANSWER_S)
    agreed = agreement(accounts, asks)
    if "admin" not in caller.scopes and agreed.detail:  # it may name modules of other tenants
        agreed = msgspec.structs.replace(
            agreed,
            detail="some ranks or workers do not agree; callers with scope admin see the details",
        )
    reports = [account.report for account in accounts if account.report is not None]
    if "admin" not in caller.scopes:  # as above
        reports = [msgspec.structs.replace(report, detail="") for report in reports]
    return Dynamic(workers=reports, determinism=agreed)


async def answers_of_ranks(context: AppContext, model: str | None, seconds: float) -> Answers:
    """Put a question to the live workers of each model, and return the questions by model and the
    accounts of `fresh`: once for all concurrent callers, each of whom gets answers to a question
    that is put after its call.
    """

    async def look() -> Answers:
        models = {account.info.model for account in await context.steering.accounts(model)}
        asks = {name: await context.steering.ask(name) for name in sorted(models)}
        return asks, await fresh(context, model, asks, seconds)

    answers: Answers = await context.looks.of_next(("ranks", model, seconds), look)
    return answers


async def fresh(
    context: AppContext, model: str | None, asks: dict[str, str], seconds: float
) -> list[Account]:
    """Return the accounts of the workers asked, once all have answered or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        accounts = [
            account
            for account in await context.steering.accounts(model)
            if account.info.model in asks
        ]
        if (
            all(account.answers(asks[account.info.model]) for account in accounts)
            or time.monotonic() > deadline
        ):
            return accounts
        await asyncio.sleep(LOOK_S)


ROUTES: list[Any] = [
    put_global,
    delete_global,
    get_global,
    get_dynamic,
]
