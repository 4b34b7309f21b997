"""Routes of tuned lenses: registration, listing, removal."""

from typing import Annotated, Any

import anyio.to_thread
from litestar import Response, delete, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, PathParameter

from ...schemas.errors import MidstreamError, unknown
from ...schemas.lens import TunedLens, TunedLensPage, TunedLensRequest
from ...schemas.limits import MAX_MODULE_NAME, NAME_PATTERN
from ..context import AppContext, context_of
from ..resolve.tuned_lenses import resolve_tuned
from ..web.body import JsonRequest
from .jobs import ERRORS, PROBLEM, Model

Name = Annotated[
    str,
    PathParameter(description="The tuned lens's name: letters, digits, `.`, `_` and `-`", max_length=MAX_MODULE_NAME, pattern=NAME_PATTERN),
]


@post(
    "/v1/lenses",
    status_code=200,
    summary="Register or replace a tuned lens",
    description="`path` is a folder below the setting `lens_dir` with `lens.safetensors`: `{layer}.weight` and `{layer}.bias` of each "
    "layer. The digest of the file is its identity: requests accepted earlier keep the former one, and fail if the file has changed.",
    responses={
        201: ResponseSpec(TunedLens, description="The name is new", generate_examples=False), **ERRORS, 413: PROBLEM, 415: PROBLEM
    },
)  # fmt: skip
async def post_lens(data: JSONBody[TunedLensRequest], request: JsonRequest) -> Response[TunedLens]:
    context = context_of(request)
    info = await context.the_model(data.model)
    made = await anyio.to_thread.run_sync(resolve_tuned, data, info, context.settings.lens_dir)
    former = await context.lenses.put(made)
    if former is None:
        where = f"{context.settings.public_url.rstrip('/')}/v1/lenses/{data.name}"
        return Response(made, status_code=201, headers={"Location": where})
    return Response(made.replacing(former), status_code=200)


@get("/v1/lenses", summary="List tuned lenses", responses=ERRORS)
async def list_lenses(request: JsonRequest, model: Model = None) -> TunedLensPage:
    context = context_of(request)
    return TunedLensPage(lenses=await context.lenses.of_model((await context.the_model(model)).name))


@get("/v1/lenses/{name:str}", summary="Get a tuned lens", responses=ERRORS)
async def get_lens(name: Name, request: JsonRequest, model: Model = None) -> TunedLens:
    context = context_of(request)
    info = await context.the_model(model)
    tuned = await context.lenses.get(info.name, name)
    if tuned is None:
        raise await _no_lens(context, info.name, name)
    return tuned


@delete(
    "/v1/lenses/{name:str}",
    status_code=204,
    summary="Delete a tuned lens",
    description="Its files stay. Requests accepted earlier keep it.",
    responses=ERRORS,
)
async def delete_lens(name: Name, request: JsonRequest, model: Model = None) -> None:
    context = context_of(request)
    info = await context.the_model(model)
    if not await context.lenses.delete(info.name, name):
        raise await _no_lens(context, info.name, name)


async def _no_lens(context: AppContext, model: str, name: str) -> MidstreamError:
    return unknown("tuned lens", name, model, await context.lenses.names(model))


ROUTES: list[Any] = [post_lens, list_lenses, get_lens, delete_lens]
