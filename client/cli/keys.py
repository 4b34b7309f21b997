"""The commands `keys`, `tenants`, `curve` (keys of workers and relay) and `acl` (Redis users)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

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
from ...schemas.base.errors import MidstreamError, invalid, suggestion
from ...schemas.base.settings import load_settings
from ..durations import seconds
from ..render.jobs import facts, minute, size
from ..sdk import wire
from ..sdk.client import Client
from ..sdk.service import key_request
from .jobs import AsJson, Url, connect, delete, err, out, print_json, print_list, with_client

RedisUrl = Annotated[
    str | None,
    typer.Option(
        help=(
            "Write directly to this Redis, without the API, to create the first key. `-`: the "
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
curve_app = typer.Typer(
    no_args_is_help=True,
    help="CURVE keys that authenticate workers and relay to each other across machines.",
)
#: User of a Redis process → where Redis' own configuration names the user and its password.
SERVER_SETTINGS = {
    "replica": "masteruser replica, masterauth: the content of",
    "sentinel": "sentinel auth-user NAME sentinel, sentinel auth-pass NAME: the content of",
}
#: The highest database number that a Redis may be configured to have.
MAX_DATABASE = (1 << 31) - 2


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.add_typer(keys_app, name="keys")
    app.add_typer(tenants_app, name="tenants")
    app.add_typer(curve_app, name="curve")
    app.command()(acl)


# --- Keys


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
    """Create a key and print it. It is not shown again: the service stores only a hash."""
    request = key_request(
        name, tenant, scope or ["submit", "read"], seconds(expires_in, "--expires-in")
    )
    if redis_url is None:
        with connect(url) as client:
            created = client.keys.create(
                request.name,
                tenant=request.tenant,
                scopes=request.scopes,
                expires_in=request.expires_in,
            )
    else:
        created = asyncio.run(_create(redis_url, request))
    if print_json(created, json_):
        return
    until = "" if created.expires is None else f"; expires: {minute(created.expires)}"
    err.print(
        (
            f"key {created.id} ({created.name}) of tenant {created.tenant}; scopes: "
            f"{', '.join(created.scopes)}{until}"
        ),
        style="dim",
        markup=False,
    )
    print(created.key)


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
@with_client
def keys_list(client: Client, json_: AsJson = False) -> None:
    """List the keys of all tenants."""
    api_keys = client.keys.list()
    print_list(api_keys, api_keys, KeyView, "keys", json_)


@keys_app.command("revoke")
@with_client
def keys_revoke(
    client: Client,
    ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="The key's id: the part between ms_ and the secret."),
    ],
) -> None:
    """Revoke keys: they are rejected everywhere within five seconds."""
    delete(ids, client.keys.delete, "revoked")


# --- Tenants


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
        list[str] | None, typer.Option(help="Folder or URI that may be harvested; repeatable.")
    ] = None,
    weight: Annotated[int, typer.Option(help="Weight of the tenant's share of the engine.")] = 1,
    highest_priority: Annotated[
        str, typer.Option(help="high, normal or low: the highest priority its jobs may have.")
    ] = "high",
    edit_limit: Annotated[
        float | None, typer.Option(help="Largest relative size of its edits, such as 0.7.")
    ] = None,
    edit_limit_then: Annotated[
        str, typer.Option(help="scale or fail: what happens to larger ones.")
    ] = "scale",
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Set all limits of a tenant; omitted limits follow the service's settings. 0: no limit."""
    limits = {
        "edit_limit": None
        if edit_limit is None
        else {"relative": edit_limit, "then": edit_limit_then},
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
        _show([client.tenants.put(name, wire.checked(limits, Limits))], json_)


@tenants_app.command("show")
@with_client
def tenants_show(client: Client, name: TenantOption = None, json_: AsJson = False) -> None:
    """Show a tenant's limits and current usage."""
    if name is not None and name not in (known := [view.name for view in client.tenants.list()]):
        raise MidstreamError(
            "not_found",
            f"unknown tenant {name!r}: it has neither keys nor limits of its own",
            allowed=", ".join(known) or None,
            hint=suggestion(name, known),
        )
    _show([client.tenants.get(name)], json_)


@tenants_app.command("list")
@with_client
def tenants_list(client: Client, json_: AsJson = False) -> None:
    """List the tenants that have keys or limits of their own."""
    tenants = client.tenants.list()
    if print_json(tenants, json_):
        return
    _show(tenants, False)
    if not tenants:
        out.print("no tenants", style="dim")


def _show(tenant_views: Sequence[TenantView], as_json: bool) -> None:
    if as_json:
        print_json(tenant_views[0])
        return
    for view in tenant_views:
        usage, limits = view.usage, view.limits
        out.print(f"tenant {view.name}: used / limit", style="bold", markup=False)
        out.print(
            facts(
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
                *(
                    [("edits", f"{limits.edit_limit.relative:g} ({limits.edit_limit.then})")]
                    if limits.edit_limit is not None
                    else []
                ),
            )
        )


def _size_of(used: int, allowed_mib: int | None) -> str:
    return f"{size(used)} / {f'{allowed_mib} MiB' if allowed_mib else '∞'}"


def _of(used: int, allowed: int | None) -> str:
    return f"{used:,} / {allowed:,}" if allowed else f"{used:,} / ∞"


# --- Credentials of Midstream's processes


@curve_app.command("new")
def curve_new(
    role: Annotated[
        str, typer.Argument(metavar="relay|worker", help="Owner of the key: relay or worker.")
    ],
    name: Annotated[str, typer.Argument(help="For a worker: its worker_id.")],
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the files.")] = Path("curve"),
) -> None:
    """Create a key pair: NAME.key is private and goes to its owner, NAME.pub is public."""
    from ...broker.receipts.curve import new_keys

    roles: dict[str, Literal["relay", "worker"]] = {"relay": "relay", "worker": "worker"}
    if role not in roles:
        raise invalid("role", f"unknown role {role!r}", allowed="relay, worker")
    private, public = new_keys(roles[role], name, folder)
    if role == "relay":
        text = [
            (
                "the relay",
                (
                    f"MIDSTREAM_CURVE_SECRET_FILE={private} "
                    f"MIDSTREAM_CURVE_CLIENTS_DIR={folder / 'clients'}"
                ),
            ),
            ("every worker", f"MIDSTREAM_CURVE_SERVER_KEY_FILE={public}"),
        ]
    else:
        text = [
            (f"worker {name}", f"MIDSTREAM_WORKER_ID={name} MIDSTREAM_CURVE_SECRET_FILE={private}"),
            ("the relay", f"{public} in its MIDSTREAM_CURVE_CLIENTS_DIR"),
        ]
    for owner, settings in text:
        print(f"{owner}: {settings}")


def acl(
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the files.")] = Path("acl"),
    database: Annotated[
        int,
        typer.Option(min=0, max=MAX_DATABASE, help="Number of the database that Midstream uses."),
    ] = 0,
    host: Annotated[str, typer.Option(help="Redis' host and port, for the URLs.")] = "HOST:6379",
) -> None:
    """Write an ACL file for Redis with one least-privilege user per part of Midstream, their
    passwords, and the URLs with which they open it.
    """
    from ...broker.ops.acl import ROLES, SERVERS, USERS_FILE, write_users

    write_users(folder, database, host)
    print(f"redis: aclfile {(folder / USERS_FILE).resolve()}")
    for role in ROLES:
        print(f"{role}: MIDSTREAM_REDIS_URL_FILE={folder / f'{role}.url'}")
    for role in SERVERS:
        print(f"{role}: {SERVER_SETTINGS[role]} {folder / f'{role}.password'}")
