"""Routes of what is registered, and of source runs."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Union

import anyio.to_thread
import msgspec
from litestar import Response, delete, patch, put
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, Operation, Reference, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIFormat, OpenAPIType
from litestar.params import JSONBody, PathParameter, QueryParameter

from ...broker.ledger.named.registry import Registry
from ...broker.ledger.named.source_runs import LedgerRuns
from ...schemas.access.keys import Caller, unscoped
from ...schemas.artifacts.probes import PROBES, ProbeRequest
from ...schemas.artifacts.registered import ArtifactKind, Registered
from ...schemas.base.errors import MidstreamError
from ...schemas.base.limits import (
    MAX_DESCRIPTION,
    MAX_MODULE_NAME,
    MAX_NAME,
    MAX_POLICY_VERSIONS,
    NAME_PATTERN,
)
from ...schemas.jobs.models import ModelInfo
from ...schemas.requests.artifact_kinds import ARTIFACTS, artifact_kind
from ...schemas.requests.policies import (
    POLICIES,
    Policy,
    PolicyChange,
    PolicyRequest,
    PolicyVersion,
    Steer,
)
from ...schemas.requests.source_runs import RunPage, RunView
from ...schemas.requests.steering import MODEL_HEADER
from ...schemas.settings.settings import ArtifactFolder
from ...storage.formats.lens_files import lens_of
from ...storage.formats.module_files import to_bytes
from ..context import AppContext, context_of
from ..resolve.edits import module_export
from ..resolve.edits.loras import resolve_lora
from ..resolve.readings.lens import resolve_tuned
from ..resolve.readings.policy_warnings import needed, warnings_of
from ..resolve.readings.probes import (
    changed,
    check_beside,
    check_fit,
    digest_of,
    replaceable,
    resolve_policy,
    resolve_probe,
)
from ..resolve.readings.saes import resolve_sae
from ..web.aside import call_aside
from ..web.audit import audited
from ..web.auth import needs
from ..web.body import FILE_TYPES, BodyForms
from ..web.request_context import AnyRequest
from .jobs import ERRORS, PROBLEM, CursorParameter, ModelFilter, PageSize, reads
from .steering import CHANGE_ERRORS, Made, named_module, tensors_of


async def make_probe(
    data: ProbeRequest, name: str, info: ModelInfo, context: AppContext, caller: Caller
) -> Made:
    made, blobs = await call_aside(resolve_probe, data, name, info)
    return lambda _: made, blobs


async def make_policy(
    data: PolicyRequest, name: str, info: ModelInfo, context: AppContext, caller: Caller
) -> Made:
    found = await context.names.look_up(info, (PROBES, data.probe))
    named = [action.module for action in data.actions if isinstance(action, Steer)]
    probe = found.known(PROBES, data.probe, "probe")
    state = await context.names.state(info, named, caller)
    resolved = partial(resolve_policy, model_state=state, caller=caller, settings=context.settings)
    made = await call_aside(resolved, data, name, info, probe)
    return lambda former: _with(replaceable(former, data), made, info.name, name), {}


async def warned(context: AppContext, model: ModelInfo, policy: Policy) -> Policy:
    """Return a policy with the warnings about its current version, if it is shown as a whole."""
    version = policy.current
    if not version.tenant:
        return policy
    with suppress(MidstreamError):  # replaced meanwhile
        tensors = {name: await context.steering.get_tensor(name) for name in needed(version)}
        found = await call_aside(warnings_of, version, model, tensors)
        return msgspec.structs.replace(policy, warnings=found)
    return policy


def _with(former: Policy | None, made: PolicyVersion, model: str, name: str) -> Policy:
    """Return the policy with one version more. Beyond `MAX_POLICY_VERSIONS`, the oldest is dropped
    whose content is also that of a newer one; else the oldest.
    """
    kept = [] if former is None else former.versions
    number = kept[-1].version + 1 if kept else 1
    made = msgspec.structs.replace(made, version=number, digest=digest_of(made))
    versions = [*kept, made]
    if len(versions) > MAX_POLICY_VERSIONS:
        newest = {each.registered: each for each in versions}
        repeated = [each for each in versions if newest[each.registered] is not each]
        versions.remove(repeated[0] if repeated else versions[0])
    return Policy(
        name=name,
        model=model,
        digest=made.digest,
        created=made.created,
        description=made.content.description,
        versions=versions,
    )


def from_folder(
    resolve: Callable[[Any, str, ModelInfo, str], Registered], folder: ArtifactFolder
) -> Any:
    """Return the `make` of a kind that is registered from a folder on the server. `resolve` reads
    files.
    """

    async def make(
        data: Any, name: str, info: ModelInfo, context: AppContext, caller: Caller
    ) -> Made:
        artifact = await anyio.to_thread.run_sync(
            resolve, data, name, info, context.settings.artifacts_of(folder)
        )
        return lambda _: artifact, {}

    return make


make_lora = from_folder(resolve_lora, "loras")
make_sae = from_folder(resolve_sae, "saes")
make_tuned = from_folder(resolve_tuned, "lenses")
make_jacobian = from_folder(lens_of, "lenses")


async def completed(context: AppContext, kind: ArtifactKind[Any], found: list[Any]) -> list[Any]:
    complete = kind.load("complete")
    return found if complete is None else await complete(context.ledger, found)


def body_of(kind: ArtifactKind[Any]) -> BodyForms:
    return BodyForms(kind.request, kind.load("file"))


def name_parameter(short: str) -> PathParameter:
    """Return the path parameter that names an artifact."""
    return PathParameter(
        description=f"The {short}'s name: letters, digits, `.`, `_` and `-`",
        max_length=MAX_MODULE_NAME,
        pattern=NAME_PATTERN,
    )


async def artifacts_named(request: AnyRequest) -> dict[str, Any]:
    """Return what the name of the path stands for, by model: the body may name the model."""
    kind = artifact_kind(request.path_params["kind"])
    caller: Caller = request.scope["auth"]
    ledger = context_of(request).ledger
    name = kind.key_of(caller.tenant, request.path_params["name"])
    registry = Registry(ledger, kind)
    found: dict[str, Any] = {}
    for info in await ledger.models():
        try:
            artifact = await registry.get(info.name, name)
        except MidstreamError as error:
            if error.kind != "version_mismatch":
                raise
            found[info.name] = {"unreadable": error.detail}
        else:
            if artifact is not None:
                found[info.name] = artifact.shown_to(caller)
    return found


def artifact_routes() -> list[Any]:
    """Return the routes of artifacts of all kinds."""
    Name = Annotated[str, name_parameter("artifact")]
    KindParameter = Annotated[
        str,
        PathParameter(
            description=", ".join(f"`{each}`" for each in ARTIFACTS), max_length=MAX_NAME
        ),
    ]
    record: Any = Union[tuple(row.view for row in ARTIFACTS.values())]  # noqa: UP007 (of a tuple)
    page: Any = Union[tuple(row.page for row in ARTIFACTS.values())]  # noqa: UP007

    changes = needs("steer-global") | audited("", artifacts_named, "name")
    changes |= {"scope_of": lambda params: artifact_kind(params["kind"]).scope}

    @dataclass
    class PutOperation(Operation):
        """Documents the body of each kind."""

        def __post_init__(self) -> None:
            bodies = [
                Reference(f"#/components/schemas/{row.request.__name__}")
                for row in ARTIFACTS.values()
            ]
            file = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
            forms = {"application/json": Schema(one_of=bodies)} | dict.fromkeys(FILE_TYPES, file)
            self.request_body = RequestBody(
                content={form: OpenAPIMediaType(schema=each) for form, each in forms.items()},
                required=True,
            )

    @put(
        "/v1/artifacts/{kind:str}/{name:str}",
        opt=changes | {"body": lambda params: body_of(artifact_kind(params["kind"]))},
        summary="Register or replace an artifact",
        description="Requests accepted earlier keep the previous content, which its digest "
        "identifies; they fail if files of it have changed.\n\n"
        + "\n".join(f"- `{row.plural}`: {row.takes}" for row in ARTIFACTS.values()),
        responses={
            201: ResponseSpec(record, description="The name is new", generate_examples=False),
            **CHANGE_ERRORS,
            429: PROBLEM,
        },
        operation_class=PutOperation,
    )
    async def put_artifact(
        kind: KindParameter,
        name: Name,
        data: JSONBody[Any],
        context: AppContext,
        caller: Caller,
        model: ModelFilter = None,
        description: Annotated[
            str | None,
            QueryParameter(max_length=MAX_DESCRIPTION, description="If the body is a file"),
        ] = None,
    ) -> Response[record]:
        row = artifact_kind(kind)
        info = await context.served.the_model(data.model or model)
        data = msgspec.structs.replace(data, description=description or data.description)
        stored = row.key_of(caller.tenant, name)
        make, blobs = await row.load("make")(data, stored, info, context, caller)
        check = row.load("check")
        made, former = await Registry(context.ledger, row).put(
            info.name, stored, make, blobs, check and partial(check, info)
        )
        shown = made.shown_to(caller)
        if warn := row.load("warn"):
            shown = await warn(context, info, shown)
        if former is not None:
            return Response(shown.replacing(former), status_code=200)
        return Response(
            shown,
            status_code=201,
            headers={"Location": context.url(f"artifacts/{kind}/{name}")},
        )

    @reads("/v1/artifacts/{kind:str}", summary="List the artifacts of a kind")
    async def list_artifacts(
        kind: KindParameter, context: AppContext, caller: Caller, info: ModelInfo
    ) -> page:
        of = artifact_kind(kind)
        every = await completed(context, of, await Registry(context.ledger, of).of_model(info.name))
        found = [
            each.shown_to(caller)
            for each in every
            if not of.of_tenants or unscoped(each.name)[0] == caller.tenant
        ]
        return of.page(**{of.plural: found})

    @reads("/v1/artifacts/{kind:str}/{name:str}", summary="Get an artifact")
    async def get_artifact(
        kind: KindParameter, name: Name, context: AppContext, caller: Caller, info: ModelInfo
    ) -> record:
        of = artifact_kind(kind)
        found = await Registry(context.ledger, of).known(info.name, of.key_of(caller.tenant, name))
        return (await completed(context, of, [found]))[0].shown_to(caller)

    @delete(
        "/v1/artifacts/{kind:str}/{name:str}",
        opt=changes,
        summary="Delete an artifact",
        description="Requests accepted earlier keep it; so do its files, on the server. The probe "
        "and the modules of a policy's current version cannot be deleted.",
        responses={**ERRORS, 409: PROBLEM},
    )
    async def delete_artifact(
        kind: KindParameter, name: Name, context: AppContext, caller: Caller, info: ModelInfo
    ) -> None:
        of = artifact_kind(kind)
        registry = Registry(context.ledger, of)
        stored = of.key_of(caller.tenant, name)
        policies = await Registry(context.ledger, POLICIES).of_model(info.name)
        if users := [each.name for each in policies if (of.plural, stored) in each.current.named]:
            raise MidstreamError(
                "conflict",
                f"the current version of a policy has the {of.noun} {name!r}: {', '.join(users)}",
                field="name",
                hint="change or delete the policy first",
            )
        if not await registry.delete(info.name, stored):
            raise await registry.unknown(info.name, stored)

    return [put_artifact, list_artifacts, get_artifact, delete_artifact]


@reads(
    "/v1/artifacts/{kind:str}/{name:str}/file",
    summary="Get a named module as a file",
    description=(
        "A safetensors file of its entries: sent back, it is the same module. "
        "`X-Midstream-Model` is the model."
    ),
    media_type=FILE_TYPES[0],
    responses={
        200: ResponseSpec(
            bytes, media_type=FILE_TYPES[0], description="The file", generate_examples=False
        ),
        **ERRORS,
        409: PROBLEM,
    },
)
async def get_artifact_file(
    kind: Literal["modules"],
    name: Annotated[str, name_parameter("module")],
    context: AppContext,
    caller: Caller,
    info: ModelInfo,
) -> Response[bytes]:
    module = await named_module(context, caller, info.name, name)
    entries = module_export.entries_of(module, await tensors_of(context, name, module.tensors))
    headers = {
        MODEL_HEADER: info.name,
        "Content-Disposition": f'attachment; filename="{name}.safetensors"',
    }
    return Response(
        await anyio.to_thread.run_sync(to_bytes, entries), media_type=FILE_TYPES[0], headers=headers
    )


@patch(
    "/v1/artifacts/{kind:str}/{name:str}",
    opt=needs("steer-global") | audited("", artifacts_named, "name"),
    summary="Change a policy's mode, or restore a version",
    description="Makes a new version, which applies to requests accepted from now on.",
    responses={**ERRORS, 409: PROBLEM, 415: PROBLEM},
)
async def patch_artifact(
    kind: Literal["policies"],
    name: Annotated[str, name_parameter("policy")],
    data: JSONBody[PolicyChange],
    context: AppContext,
    caller: Caller,
    info: ModelInfo,
) -> Policy:
    policies = Registry(context.ledger, POLICIES)
    missing = await policies.unknown(info.name, name)

    def make(now: Policy | None) -> Policy:
        if now is None:
            raise missing
        made = changed(now, data)
        # the present version may stop applying to all traffic also where it fits no longer
        if data.version is not None or made.content.all_traffic:
            check_fit(made, info)
        return _with(now, made, info.name, name)

    check = partial(check_beside, info)
    policy, _ = await policies.put(info.name, name, make, {}, check)
    return await warned(context, info, policy.shown_to(caller))


RunParameter = Annotated[
    str,
    PathParameter(
        max_length=MAX_NAME, description="A run's name, or the id of a job with capture files"
    ),
]


@reads("/v1/runs", summary="List the source runs, newest first", description="Named runs only.")
async def list_runs(
    context: AppContext,
    caller: Caller,
    info: ModelInfo,
    limit: PageSize = 50,
    cursor: CursorParameter = None,
) -> RunPage:
    return await LedgerRuns(context.ledger, caller).list(info.name, limit, cursor)


@reads("/v1/runs/{name:str}", summary="Describe a source run")
async def get_run(
    name: RunParameter, context: AppContext, caller: Caller, info: ModelInfo
) -> RunView:
    return await LedgerRuns(context.ledger, caller).view(info.name, name)


@delete(
    "/v1/runs/{name:str}",
    opt=needs("submit"),
    summary="Delete a source run",
    description="Deletes its captures, as `DELETE /v1/captures/{id}` does, and its name. Jobs "
    "that have loaded its rows keep them; "
    "later jobs fail.",
    responses={**ERRORS, 409: PROBLEM},
)
async def delete_run(
    name: RunParameter, context: AppContext, caller: Caller, info: ModelInfo
) -> None:
    await LedgerRuns(context.ledger, caller).delete(info.name, name)


ROUTES: list[Any] = [
    *artifact_routes(),
    get_artifact_file,
    patch_artifact,
    list_runs,
    get_run,
    delete_run,
]
