"""Routes of registered artifacts, and the kinds that are registered from a folder on the server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import anyio.to_thread
from litestar import Response, delete, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, PathParameter

from ...broker.ledger.named.registry import Registry
from ...schemas.access.keys import Caller
from ...schemas.artifacts.jacobian_lenses import JACOBIAN_LENSES
from ...schemas.artifacts.loras import LORAS
from ...schemas.artifacts.registered import ArtifactKind, Registered
from ...schemas.artifacts.saes import SAES
from ...schemas.artifacts.tuned_lenses import TUNED_LENSES
from ...schemas.base.limits import MAX_MODULE_NAME, NAME_PATTERN
from ...schemas.base.settings import Settings
from ...schemas.jobs.models import ModelInfo
from ...storage.formats.lens_files import lens_of
from ..context import AppContext
from ..resolve.edits.loras import resolve_lora
from ..resolve.readings.saes import resolve_sae
from ..resolve.readings.tuned_lenses import resolve_tuned
from ..web.auth import needs
from .jobs import ERRORS, PROBLEM


@dataclass(frozen=True)
class KindWords:
    """The words for a kind in the descriptions of its routes."""

    kind: ArtifactKind[Any]
    thing: str  # in summaries, with its article
    things: str
    short: str


@dataclass(frozen=True)
class FromFolder(KindWords):
    """A kind that is registered from a folder on the server."""

    resolve: Callable[[Any, ModelInfo, str], Registered]  # reads files: not for the event loop
    folder: Callable[[Settings], str]
    description: str


#: Descriptions of what identifies a registration.
FILE, FILES = (
    f"The digest of {what} is its identity: requests accepted earlier keep the previous one, and "
    f"fail if {what} {changed}."
    for what, changed in (("the file", "has changed"), ("its files", "have changed"))
)
FROM_FOLDERS = (
    FromFolder(
        LORAS,
        "a LoRA adapter",
        "LoRA adapters",
        "adapter",
        resolve_lora,
        lambda settings: settings.lora_dir,
        f"`path` is a folder below the setting `lora_dir`, as PEFT saves an adapter. {FILES}",
    ),
    FromFolder(
        SAES,
        "a sparse autoencoder",
        "sparse autoencoders",
        "autoencoder",
        resolve_sae,
        lambda settings: settings.sae_root,
        "`path` is a folder below the setting `sae_dir` with `cfg.json` and "
        "`sae_weights.safetensors` (SAELens), or with "
        f"`params.npz` (Gemma Scope), which requires `hook` and `layer`. {FILES}",
    ),
    FromFolder(
        TUNED_LENSES,
        "a tuned lens",
        "tuned lenses",
        "tuned lens",
        resolve_tuned,
        lambda settings: settings.lens_root,
        "`path` is a folder below the setting `lens_dir` with `lens.safetensors`: "
        f"`{{layer}}.weight` and `{{layer}}.bias` of each layer. {FILE}",
    ),
    FromFolder(
        JACOBIAN_LENSES,
        "a Jacobian lens",
        "Jacobian lenses",
        "Jacobian lens",
        lens_of,
        lambda settings: settings.lens_root,
        "`path` is a folder below the setting `lens_dir` with `lens.safetensors`, as fits write it "
        f"and `midstream convert` makes it of other tools' files. {FILE}",
    ),
)


def name_parameter(short: str) -> PathParameter:
    """Return the path parameter that names an artifact."""
    return PathParameter(
        description=f"The {short}'s name: letters, digits, `.`, `_` and `-`",
        max_length=MAX_MODULE_NAME,
        pattern=NAME_PATTERN,
    )


def put_responses(record: type[Registered]) -> dict[int, ResponseSpec]:
    """Return the documented responses of a registration, except 200."""
    created = ResponseSpec(record, description="The name is new", generate_examples=False)
    return {201: created, **ERRORS, 409: PROBLEM, 413: PROBLEM, 415: PROBLEM}


def put_response(
    context: AppContext, kind: ArtifactKind[Any], artifact: Registered, former: Registered | None
) -> Response[Any]:
    """Return the response to a registration: 201 with its address where the name is new."""
    if former is not None:
        return Response(artifact.replacing(former), status_code=200)
    where = context.url(f"{kind.plural}/{artifact.name}")
    return Response(artifact, status_code=201, headers={"Location": where})


def folder_route(row: FromFolder) -> Any:
    """Return the route that registers a folder."""
    kind = row.kind

    async def register(
        data: JSONBody[kind.request],  # type: ignore[name-defined]
        context: AppContext,
    ) -> Response[kind.record]:  # type: ignore[name-defined]
        info = await context.served.the_model(data.model)
        folder = row.folder(context.settings)
        artifact = await anyio.to_thread.run_sync(row.resolve, data, info, folder)
        registry = Registry(context.ledger, kind)
        _, former = await registry.put(info.name, artifact.name, lambda _: artifact, {})
        return put_response(context, kind, artifact, former)

    register.__name__ = f"post_{kind.singular}"
    return post(
        f"/v1/{kind.plural}",
        opt=needs("steer-global"),
        status_code=200,
        summary=f"Register or replace {row.thing}",
        description=row.description,
        responses=put_responses(kind.record),
    )(register)


def name_routes(row: KindWords) -> list[Any]:
    """Return the routes that list, get and delete artifacts of a kind."""
    kind, path = row.kind, f"/v1/{row.kind.plural}"
    Name = Annotated[str, name_parameter(row.short)]

    async def every(
        context: AppContext,
        caller: Caller,
        info: ModelInfo,
    ) -> kind.page:  # type: ignore[name-defined]
        found = await Registry(context.ledger, kind).of_model(info.name)
        return kind.page(**{kind.plural: [each.shown_to(caller) for each in found]})

    async def one(
        name: Name,
        context: AppContext,
        caller: Caller,
        info: ModelInfo,
    ) -> kind.record:  # type: ignore[name-defined]
        return (await Registry(context.ledger, kind).known(info.name, name)).shown_to(caller)

    async def forget(name: Name, context: AppContext, info: ModelInfo) -> None:
        if not await Registry(context.ledger, kind).delete(info.name, name):
            raise await Registry(context.ledger, kind).unknown(info.name, name)

    every.__name__ = f"list_{kind.plural}"
    one.__name__, forget.__name__ = f"get_{kind.singular}", f"delete_{kind.singular}"
    return [
        get(path, opt=needs("read"), summary=f"List {row.things}", responses=ERRORS)(every),
        get(
            f"{path}/{{name:str}}", opt=needs("read"), summary=f"Get {row.thing}", responses=ERRORS
        )(one),
        delete(
            f"{path}/{{name:str}}",
            opt=needs("steer-global"),
            status_code=204,
            summary=f"Delete {row.thing}",
            description=("Its files stay. " if isinstance(row, FromFolder) else "")
            + "Requests accepted earlier keep it.",
            responses=ERRORS,
        )(forget),
    ]


def folder_routes(row: FromFolder) -> list[Any]:
    """Return all routes of a kind that is registered from a folder."""
    return [folder_route(row), *name_routes(row)]


ROUTES: list[Any] = [route for row in FROM_FOLDERS for route in folder_routes(row)]
