"""Keys and tenants on the command line: `keys create`, `list`, `revoke`, `generate`; `tenants set`,
`show`, `list`.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from ...schemas.access.handling import Priority
from ...schemas.access.keys import (
    DEFAULT_TENANT,
    SCOPES,
    CreatedKey,
    KeyRequest,
    KeyView,
    Limits,
    TenantView,
)
from ...schemas.base.errors import MidstreamError, invalid
from ...schemas.base.records import to_json
from ...schemas.base.settings import load_settings
from ...schemas.service.choices import suggestion
from ..durations import seconds
from ..render import jobs
from ..sdk import wire
from ..sdk.service import key_request
from .jobs import AsJson, Url, connect, err, out, print_list

RedisUrl = Annotated[
    str | None,
    typer.Option(
        help=(
            "Write directly to this Redis, without the API: for the first key. `-`: the "
            "Redis of the settings."
        ),
        show_default=False,
    ),
]
TenantOption = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="A tenant; default: the key's own.")
]

keys_app = typer.Typer(no_args_is_help=True, help="Manage API keys.")
tenants_app = typer.Typer(no_args_is_help=True, help="Manage tenants: limits and usage.")


def register(app: typer.Typer) -> None:
    """Add `keys …` and `tenants …` to `midstream`."""
    app.add_typer(keys_app, name="keys")
    app.add_typer(tenants_app, name="tenants")


# --- Keys
# --------------------------------------------------------------------------------------------------


@keys_app.command("create")
def keys_create(
    name: Annotated[str, typer.Argument(help="A label: its owner or purpose.")],
    tenant: Annotated[
        str, typer.Option(help="Tenant that owns everything created with it.")
    ] = DEFAULT_TENANT,
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"Scopes: {', '.join(SCOPES)}; repeatable. Default: submit and read."),
    ] = None,
    expires_in: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Such as 90d, 12h or 600 (seconds); default: never."),
    ] = None,
    redis_url: RedisUrl = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Create a key. It is printed only here; the service stores a hash of its secret."""
    request = key_request(
        name, tenant, scope or ["submit", "read"], seconds(expires_in, "--expires-in")
    )
    if redis_url is None:
        with connect(url) as client:
            made = client.create_key(
                request.name,
                tenant=request.tenant,
                scopes=request.scopes,
                expires_in=request.expires_in,
            )
    else:
        made = asyncio.run(_create(redis_url, request))
    if json_:
        print(to_json(made).decode())
        return
    until = "" if made.expires is None else f"; expires: {_time(made.expires)}"
    err.print(
        (
            f"key {made.id} ({made.name}) of tenant {made.tenant}; scopes: "
            f"{', '.join(made.scopes)}{until}"
        ),
        style="dim",
        markup=False,
    )
    print(made.key)


async def _create(redis_url: str, request: KeyRequest) -> CreatedKey:
    from ...broker.ledger.jobs.ledger import Ledger
    from ...broker.ledger.people.keys import Keys
    from ..stack.supervisor import own_redis_url

    settings = load_settings()
    if redis_url != "-":
        settings = msgspec.structs.replace(settings, redis_url=redis_url)
    elif not settings.redis_url:
        settings = msgspec.structs.replace(
            settings, redis_url=own_redis_url(Path(settings.data_dir).expanduser().resolve())
        )
    if not settings.redis_url:
        allowed = (
            "redis://host:port/0, MIDSTREAM_REDIS_URL, or MIDSTREAM_DATA_DIR of a running "
            "`midstream up`"
        )
        raise invalid("--redis-url", "no Redis configured", allowed=allowed)
    ledger = Ledger.connect(settings)
    try:
        return await Keys(ledger).create(request)
    finally:
        await ledger.close()


@keys_app.command("generate")
def keys_generate() -> None:
    """Print a new random key for the setting admin_key (MIDSTREAM_ADMIN_KEY, or a file:
    MIDSTREAM_ADMIN_KEY_FILE).
    """
    from ...broker.ledger.people.keys import new_key

    print(new_key())


@keys_app.command("list")
def keys_list(json_: AsJson = False, url: Url = None) -> None:
    """List the keys of all tenants."""
    with connect(url) as client:
        api_keys = client.api_keys()
    print_list(api_keys, api_keys, _keys, "keys", json_)


@keys_app.command("revoke")
def keys_revoke(
    ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="The key's id: the part between ms_ and the secret."),
    ],
    url: Url = None,
) -> None:
    """Revoke keys: they are rejected everywhere within five seconds."""
    with connect(url) as client:
        for key_id in ids:
            client.revoke_key(key_id)
            out.print(f"{key_id} revoked", markup=False)


def _keys(key_views: Sequence[KeyView]) -> Table:
    """Each key with its tenant below its name."""
    made = jobs.table("keys", "id", "name, tenant", "scopes", "created", "expires")
    for key in key_views:
        expires = (
            "never"
            if key.expires is None
            else _day(key.expires)
            if key.expires > time.time()
            else "[red]expired[/]"
        )
        made.add_row(
            key.id,
            f"{escape(key.name)}\n{key.tenant}",
            " ".join(key.scopes),
            _day(key.created),
            expires,
        )
    return made


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at))


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


# --- Tenants
# --------------------------------------------------------------------------------------------------


@tenants_app.command("set")
def tenants_set(
    name: Annotated[str, typer.Argument(help="The tenant's name.")],
    requests_per_minute: Annotated[int | None, typer.Option(help="Submissions per minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Prompt tokens and max_tokens per minute.")
    ] = None,
    jobs_in_flight: Annotated[int | None, typer.Option(help="Jobs that have not ended.")] = None,
    capture_mib: Annotated[
        int | None, typer.Option(help="Capture files and harvests, in MiB.")
    ] = None,
    sweep_cells: Annotated[
        int | None, typer.Option(help="Cells of sweeps that have not ended.")
    ] = None,
    modules: Annotated[int | None, typer.Option(help="Named steering modules.")] = None,
    module_mib: Annotated[int | None, typer.Option(help="Named steering modules, in MiB.")] = None,
    harvests: Annotated[int | None, typer.Option(help="Harvests that have not ended.")] = None,
    harvest_source: Annotated[
        list[str] | None, typer.Option(help="Folder or URI that it may harvest; repeatable.")
    ] = None,
    weight: Annotated[int, typer.Option(help="Weight of the tenant's share of the engine.")] = 1,
    highest_priority: Annotated[
        str, typer.Option(help="high, normal or low: the highest priority its jobs may have.")
    ] = "high",
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Set all limits of a tenant; omitted ones follow the service's settings. 0: no limit."""
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "jobs_in_flight": jobs_in_flight,
        "capture_mib": capture_mib,
        "sweep_cells": sweep_cells,
        "modules": modules,
        "module_mib": module_mib,
        "harvests": harvests,
        "harvest_sources": harvest_source or None,
        "weight": weight,
        "highest_priority": wire.checked(
            highest_priority,
            Priority,  # type: ignore[arg-type]
            "highest_priority",
        ),
    }
    with connect(url) as client:
        _show([client.set_tenant(name, wire.checked(given, Limits))], json_)


@tenants_app.command("show")
def tenants_show(name: TenantOption = None, json_: AsJson = False, url: Url = None) -> None:
    """Show a tenant's limits and current usage."""
    with connect(url) as client:
        if name is not None and name not in (known := [view.name for view in client.tenants()]):
            suggested = suggestion(name, known)
            detail = f"unknown tenant {name!r}: it has neither keys nor limits of its own" + (
                f"; {suggested}" if suggested else ""
            )
            raise MidstreamError("not_found", detail, allowed=", ".join(known) or None)
        _show([client.tenant(name)], json_)


@tenants_app.command("list")
def tenants_list(json_: AsJson = False, url: Url = None) -> None:
    """List the tenants that have keys or limits of their own."""
    with connect(url) as client:
        tenants = client.tenants()
    if json_:
        print(to_json(tenants).decode())
    elif tenants:
        _show(tenants, False)
    else:
        out.print("no tenants", style="dim")


def _show(tenant_views: Sequence[TenantView], as_json: bool) -> None:
    if as_json:
        print(to_json(tenant_views[0]).decode())
        return
    for view in tenant_views:
        usage, limits = view.usage, view.limits
        out.print(f"tenant {view.name}: used / limit", style="bold", markup=False)
        out.print(
            jobs.facts(
                ("jobs in flight", _of(usage.jobs_in_flight, limits.jobs_in_flight)),
                (
                    "requests this minute",
                    _of(usage.requests_this_minute, limits.requests_per_minute),
                ),
                ("tokens this minute", _of(usage.tokens_this_minute, limits.tokens_per_minute)),
                ("captures, harvests", _size_of(usage.capture_bytes, limits.capture_mib)),
                ("sweep cells", _of(usage.sweep_cells, limits.sweep_cells)),
                (
                    "modules",
                    (
                        f"{_of(usage.modules, limits.modules)}, "
                        f"{_size_of(usage.module_bytes, limits.module_mib)}"
                    ),
                ),
                ("open harvests", _of(usage.harvests, limits.harvests)),
                *(
                    [("may harvest", ", ".join(limits.harvest_sources))]
                    if limits.harvest_sources is not None
                    else []
                ),
                ("weight", str(limits.weight)),
                ("highest priority", limits.highest_priority),
            )
        )


def _size_of(used: int, allowed_mib: int | None) -> str:
    return f"{jobs.size(used)} / {f'{allowed_mib} MiB' if allowed_mib else '∞'}"


def _of(used: int, allowed: int | None) -> str:
    return f"{used:,} / {allowed:,}" if allowed else f"{used:,} / ∞"
