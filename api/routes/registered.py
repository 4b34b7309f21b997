"""Routes of what is registered from a folder on the server: LoRA adapters, sparse autoencoders,
tuned lenses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import anyio.to_thread
from litestar import Response, delete, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, PathParameter

from ...schemas.artifacts.loras import Lora, LoraPage, LoraRequest
from ...schemas.artifacts.saes import Sae, SaePage, SaeRequest
from ...schemas.base.errors import MidstreamError, unknown
from ...schemas.base.limits import MAX_MODULE_NAME, NAME_PATTERN
from ...schemas.base.settings import Settings
from ...schemas.jobs.models import ModelInfo
from ...schemas.requests.lens import TunedLens, TunedLensPage, TunedLensRequest
from ..context import AppContext, context_of
from ..resolve.edits.loras import resolve_lora
from ..resolve.readings.saes import resolve_sae
from ..resolve.readings.tuned_lenses import resolve_tuned
from ..web.auth import needs
from ..web.body import JsonRequest
from .jobs import ERRORS, PROBLEM, Model


@dataclass(frozen=True)
class Kind:
    """Differences between the routes of registered kinds.

    `plural`: the last part of their path, the page's field, and the context's member.
    """

    singular: str  # in the names of the handlers
    plural: str
    thing: str  # in summaries, with its article
    things: str
    noun: str  # in errors
    short: str
    asked: Any
    made: Any
    page: Any
    resolve: Callable[[Any, ModelInfo, str], Any]  # reads files: not for the event loop
    folder: Callable[[Settings], str]
    description: str


KINDS = (
    Kind(
        "lora",
        "loras",
        "a LoRA adapter",
        "LoRA adapters",
        "adapter",
        "adapter",
        LoraRequest,
        Lora,
        LoraPage,
        resolve_lora,
        lambda settings: settings.lora_dir,
        "`path` is a folder below the setting `lora_dir`, as PEFT saves an adapter. "
        "The digest of its files is its identity: "
        "requests accepted earlier keep the former one, and fail if its files have changed.",
    ),
    Kind(
        "sae",
        "saes",
        "a sparse autoencoder",
        "sparse autoencoders",
        "sparse autoencoder",
        "autoencoder",
        SaeRequest,
        Sae,
        SaePage,
        resolve_sae,
        lambda settings: settings.sae_dir,
        "`path` is a folder below the setting `sae_dir` with `cfg.json` and "
        "`sae_weights.safetensors` (SAELens), or with "
        "`params.npz` (Gemma Scope), which requires `hook` and `layer`. The digest of "
        "its files is its identity: requests accepted earlier "
        "keep the former one, and fail if its files have changed.",
    ),
    Kind(
        "lens",
        "lenses",
        "a tuned lens",
        "tuned lenses",
        "tuned lens",
        "tuned lens",
        TunedLensRequest,
        TunedLens,
        TunedLensPage,
        resolve_tuned,
        lambda settings: settings.lens_dir,
        "`path` is a folder below the setting `lens_dir` with `lens.safetensors`: "
        "`{layer}.weight` and `{layer}.bias` of each "
        "layer. The digest of the file is its identity: requests accepted earlier keep "
        "the former one, and fail if the file has changed.",
    ),
)


def routes_of(kind: Kind) -> list[Any]:
    """Register, list, get and delete."""
    path = f"/v1/{kind.plural}"
    Name = Annotated[
        str,
        PathParameter(
            description=f"The {kind.short}'s name: letters, digits, `.`, `_` and `-`",
            max_length=MAX_MODULE_NAME,
            pattern=NAME_PATTERN,
        ),
    ]

    async def put_in(data: JSONBody[kind.asked], request: JsonRequest) -> Response[kind.made]:  # type: ignore[name-defined]
        context = context_of(request)
        info = await context.the_model(data.model)
        made = await anyio.to_thread.run_sync(
            kind.resolve, data, info, kind.folder(context.settings)
        )
        former = await registry(context).put(made)
        if former is None:
            where = f"{context.settings.public_url.rstrip('/')}{path}/{data.name}"
            return Response(made, status_code=201, headers={"Location": where})
        return Response(made.replacing(former), status_code=200)

    async def every(request: JsonRequest, model: Model = None) -> kind.page:  # type: ignore[name-defined]
        context = context_of(request)
        return kind.page(
            **{kind.plural: await registry(context).of_model((await context.the_model(model)).name)}
        )

    async def one(name: Name, request: JsonRequest, model: Model = None) -> kind.made:  # type: ignore[name-defined]
        context = context_of(request)
        info = await context.the_model(model)
        result = await registry(context).get(info.name, name)
        if result is None:
            raise await missing(context, info.name, name)
        return result

    async def forget(name: Name, request: JsonRequest, model: Model = None) -> None:
        context = context_of(request)
        info = await context.the_model(model)
        if not await registry(context).delete(info.name, name):
            raise await missing(context, info.name, name)

    def registry(context: AppContext) -> Any:
        return getattr(context, kind.plural)

    async def missing(context: AppContext, model: str, name: str) -> MidstreamError:
        return unknown(kind.noun, name, model, await registry(context).names(model))

    created = ResponseSpec(kind.made, description="The name is new", generate_examples=False)
    for handler, named in ((put_in, "post"), (one, "get"), (forget, "delete")):
        handler.__name__ = f"{named}_{kind.singular}"
    every.__name__ = f"list_{kind.plural}"
    return [
        post(
            path,
            opt=needs("steer-global"),
            status_code=200,
            summary=f"Register or replace {kind.thing}",
            description=kind.description,
            responses={201: created, **ERRORS, 413: PROBLEM, 415: PROBLEM},
        )(put_in),
        get(path, opt=needs("read"), summary=f"List {kind.things}", responses=ERRORS)(every),
        get(
            f"{path}/{{name:str}}", opt=needs("read"), summary=f"Get {kind.thing}", responses=ERRORS
        )(one),
        delete(
            f"{path}/{{name:str}}",
            opt=needs("steer-global"),
            status_code=204,
            summary=f"Delete {kind.thing}",
            description="Its files stay. Requests accepted earlier keep it.",
            responses=ERRORS,
        )(forget),
    ]


ROUTES: list[Any] = [route for kind in KINDS for route in routes_of(kind)]
