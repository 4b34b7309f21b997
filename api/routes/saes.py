"""Routes of sparse autoencoders: registration, listing, removal."""

from typing import Annotated, Any

import anyio.to_thread
from litestar import Response, delete, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, PathParameter

from ...schemas.errors import MidstreamError, unknown
from ...schemas.limits import MAX_MODULE_NAME, NAME_PATTERN
from ...schemas.saes import Sae, SaePage, SaeRequest
from ..context import AppContext, context_of
from ..resolve.saes import resolve_sae
from ..web.body import JsonRequest
from .jobs import ERRORS, PROBLEM, Model

Name = Annotated[
    str,
    PathParameter(
        description="The autoencoder's name: letters, digits, `.`, `_` and `-`", max_length=MAX_MODULE_NAME, pattern=NAME_PATTERN
    ),
]


@post(
    "/v1/saes",
    status_code=200,
    summary="Register or replace a sparse autoencoder",
    description="`path` is a folder below the setting `sae_dir` with `cfg.json` and `sae_weights.safetensors` (SAELens), or with "
    "`params.npz` (Gemma Scope), which requires `hook` and `layer`. The digest of its files is its identity: requests accepted earlier "
    "keep the former one, and fail if its files have changed.",
    responses={
        201: ResponseSpec(Sae, description="The name is new", generate_examples=False), **ERRORS, 413: PROBLEM, 415: PROBLEM
    },
)  # fmt: skip
async def post_sae(data: JSONBody[SaeRequest], request: JsonRequest) -> Response[Sae]:
    context = context_of(request)
    info = await context.the_model(data.model)
    made = await anyio.to_thread.run_sync(resolve_sae, data, info, context.settings.sae_dir)
    former = await context.saes.put(made)
    if former is None:
        where = f"{context.settings.public_url.rstrip('/')}/v1/saes/{data.name}"
        return Response(made, status_code=201, headers={"Location": where})
    return Response(made.replacing(former), status_code=200)


@get("/v1/saes", summary="List sparse autoencoders", responses=ERRORS)
async def list_saes(request: JsonRequest, model: Model = None) -> SaePage:
    context = context_of(request)
    return SaePage(saes=await context.saes.of_model((await context.the_model(model)).name))


@get("/v1/saes/{name:str}", summary="Get a sparse autoencoder", responses=ERRORS)
async def get_sae(name: Name, request: JsonRequest, model: Model = None) -> Sae:
    context = context_of(request)
    info = await context.the_model(model)
    sae = await context.saes.get(info.name, name)
    if sae is None:
        raise await _no_sae(context, info.name, name)
    return sae


@delete(
    "/v1/saes/{name:str}",
    status_code=204,
    summary="Delete a sparse autoencoder",
    description="Its files stay. Requests accepted earlier keep it.",
    responses=ERRORS,
)
async def delete_sae(name: Name, request: JsonRequest, model: Model = None) -> None:
    context = context_of(request)
    info = await context.the_model(model)
    if not await context.saes.delete(info.name, name):
        raise await _no_sae(context, info.name, name)


async def _no_sae(context: AppContext, model: str, name: str) -> MidstreamError:
    return unknown("sparse autoencoder", name, model, await context.saes.names(model))


ROUTES: list[Any] = [post_sae, list_saes, get_sae, delete_sae]
