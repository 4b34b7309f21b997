"""Routes of LoRA adapters: registration, listing, removal."""

from typing import Annotated, Any

import anyio.to_thread
from litestar import Response, delete, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, PathParameter

from ...schemas.errors import MidstreamError, unknown
from ...schemas.limits import MAX_MODULE_NAME, NAME_PATTERN
from ...schemas.loras import Lora, LoraPage, LoraRequest
from ..context import AppContext, context_of
from ..resolve.loras import resolve_lora
from ..web.body import JsonRequest
from .jobs import ERRORS, PROBLEM, Model

Name = Annotated[
    str,
    PathParameter(description="The adapter's name: letters, digits, `.`, `_` and `-`", max_length=MAX_MODULE_NAME, pattern=NAME_PATTERN),
]


@post(
    "/v1/loras",
    status_code=200,
    summary="Register or replace a LoRA adapter",
    description="`path` is a folder below the setting `lora_dir`, as PEFT saves an adapter. The digest of its files is its identity: "
    "requests accepted earlier keep the former one, and fail if its files have changed.",
    responses={
        201: ResponseSpec(Lora, description="The name is new", generate_examples=False), **ERRORS, 413: PROBLEM, 415: PROBLEM
    },
)  # fmt: skip
async def post_lora(data: JSONBody[LoraRequest], request: JsonRequest) -> Response[Lora]:
    context = context_of(request)
    info = await context.the_model(data.model)
    made = await anyio.to_thread.run_sync(resolve_lora, data, info, context.settings.lora_dir)
    former = await context.loras.put(made)
    if former is None:
        where = f"{context.settings.public_url.rstrip('/')}/v1/loras/{data.name}"
        return Response(made, status_code=201, headers={"Location": where})
    return Response(made.replacing(former), status_code=200)


@get("/v1/loras", summary="List LoRA adapters", responses=ERRORS)
async def list_loras(request: JsonRequest, model: Model = None) -> LoraPage:
    context = context_of(request)
    return LoraPage(loras=await context.loras.of_model((await context.the_model(model)).name))


@get("/v1/loras/{name:str}", summary="Get a LoRA adapter", responses=ERRORS)
async def get_lora(name: Name, request: JsonRequest, model: Model = None) -> Lora:
    context = context_of(request)
    info = await context.the_model(model)
    lora = await context.loras.get(info.name, name)
    if lora is None:
        raise await _no_lora(context, info.name, name)
    return lora


@delete(
    "/v1/loras/{name:str}",
    status_code=204,
    summary="Delete a LoRA adapter",
    description="Its files stay. Requests accepted earlier keep it.",
    responses=ERRORS,
)
async def delete_lora(name: Name, request: JsonRequest, model: Model = None) -> None:
    context = context_of(request)
    info = await context.the_model(model)
    if not await context.loras.delete(info.name, name):
        raise await _no_lora(context, info.name, name)


async def _no_lora(context: AppContext, model: str, name: str) -> MidstreamError:
    return unknown("adapter", name, model, await context.loras.names(model))


ROUTES: list[Any] = [post_lora, list_loras, get_lora, delete_lora]
