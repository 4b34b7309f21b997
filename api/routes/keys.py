"""Routes of API keys and tenants, with each tenant's limits and usage."""

from typing import Annotated, Any

from litestar import Response, delete, get, post, put
from litestar.params import JSONBody, PathParameter

from ...broker.ledger.people.keys import view_of
from ...schemas.access.keys import (
    TENANT_PATTERN,
    Caller,
    CreatedKey,
    KeyList,
    KeyRequest,
    KeyView,
    Limits,
    Tenant,
    TenantList,
    TenantView,
)
from ...schemas.base.errors import invalid
from ...schemas.base.limits import MAX_TAG
from ...schemas.base.records import now
from ...schemas.settings.roots import allowed_roots
from ..context import AppContext, context_of
from ..web.audit import audited
from ..web.auth import needs
from ..web.request_context import AnyRequest
from .jobs import ERRORS, PROBLEM, reads

BODY_ERRORS = {400: PROBLEM, 413: PROBLEM, 415: PROBLEM, 503: PROBLEM}

KeyIdParameter = Annotated[
    str,
    PathParameter(
        max_length=MAX_TAG, description="The key's id: the part between `ms_` and the secret"
    ),
]
TenantParameter = Annotated[
    str,
    PathParameter(
        description="The tenant's name: lower-case letters, digits and `-`",
        max_length=MAX_TAG,
        pattern=TENANT_PATTERN,
    ),
]


async def _key(request: AnyRequest) -> KeyView | None:
    """Return the key of the path."""
    key = await context_of(request).keys.get(request.path_params["key_id"])
    return None if key is None else view_of(key)


async def _limits(request: AnyRequest) -> Limits:
    """Return the limits of the tenant of the path, without defaults."""
    tenants = context_of(request).ledger.tenants
    return (await tenants.get(request.path_params["name"])).limits


# --- Keys


@post(
    "/v1/keys",
    opt=needs("admin") | audited("key"),
    summary="Create a key",
    description=(
        "Only this response contains the key; the service stores the SHA-256 of its secret."
    ),
    responses=BODY_ERRORS,
)
async def create_key(data: JSONBody[KeyRequest], context: AppContext) -> Response[CreatedKey]:
    made = await context.keys.create(data)
    headers = {"Cache-Control": "no-store", "Location": context.url(f"keys/{made.id}")}
    return Response(made, status_code=201, headers=headers)


@get(
    "/v1/keys",
    opt=needs("admin"),
    summary="List keys",
    description="Keys of all tenants, oldest first, including expired ones.",
    responses=ERRORS,
)
async def list_keys(context: AppContext) -> KeyList:
    return KeyList(keys=[view_of(key) for key in await context.keys.list()])


@delete(
    "/v1/keys/{key_id:str}",
    opt=needs("admin") | audited("key", _key, "key_id"),
    summary="Revoke a key",
    description="Within five seconds, every process rejects the key and ends its event streams "
    "and held responses. The key's jobs continue.",
    responses=ERRORS,
)
async def revoke_key(key_id: KeyIdParameter, context: AppContext) -> None:
    await context.keys.revoke(key_id)


# --- Tenants


@get(
    "/v1/tenants",
    opt=needs("admin"),
    summary="List tenants",
    description="Tenants that have keys or limits of their own.",
    responses={503: PROBLEM},
)
async def list_tenants(context: AppContext) -> TenantList:
    names = {tenant.name for tenant in await context.ledger.tenants.list()} | {
        key.tenant
        for key in await context.keys.list()
        if key.expires is None or now() < key.expires
    }
    return TenantList(tenants=[await context.ledger.tenants.view(name) for name in sorted(names)])


@get(
    "/v1/tenants/{name:str}",
    opt=needs("admin"),
    summary="Get a tenant's limits and usage",
    description=(
        "A tenant need not be created: a tenant without limits of its own has those of "
        "the settings."
    ),
    responses=ERRORS,
)
async def get_tenant(name: TenantParameter, context: AppContext) -> TenantView:
    return await context.ledger.tenants.view(name)


@put(
    "/v1/tenants/{name:str}",
    opt=needs("admin") | audited("tenant", _limits, "name"),
    summary="Set a tenant's limits",
    description="Replaces all limits: an omitted one takes its `limit_*` setting; 0 means no "
    "limit. They apply from the next "
    "submission on.",
    responses=BODY_ERRORS,
)
async def put_tenant(
    name: TenantParameter, data: JSONBody[Limits], context: AppContext
) -> TenantView:
    allowed = context.settings.harvest_sources
    for index, source in enumerate(data.harvest_sources or []):
        if not allowed_roots(allowed, [source]):
            present = ", ".join(allowed_roots(allowed)) or "nothing"
            raise invalid(
                f"harvest_sources[{index}]",
                f"the setting harvest_sources does not contain {source!r}",
                allowed=f"an entry of that setting, or a folder below one: {present}",
            )
    await context.ledger.tenants.put(Tenant(name=name, limits=data))
    return await context.ledger.tenants.view(name)


@reads("/v1/tenant", summary="Get your tenant's limits and usage", responses={503: PROBLEM})
async def own_tenant(context: AppContext, caller: Caller) -> TenantView:
    return await context.ledger.tenants.view(caller.tenant)


ROUTES: list[Any] = [
    create_key,
    list_keys,
    revoke_key,
    list_tenants,
    get_tenant,
    put_tenant,
    own_tenant,
]
