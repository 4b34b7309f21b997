"""Makes what `create` does: API keys, the CURVE keys of workers and relay, and Redis users."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ...schemas.access.keys import DEFAULT_TENANT, CreatedKey, KeyRequest
from ...schemas.base.errors import invalid
from ...schemas.settings.settings import load_settings
from ..render.jobs import minute
from ..sdk import discovery
from ..sdk.service import key_request
from .terminal import Connector, err

#: The highest database number that a Redis may be configured to have.
MAX_DATABASE = (1 << 31) - 2


def key(
    connect: Connector,
    name: str,
    /,
    *,
    tenant: str = DEFAULT_TENANT,
    scopes: str | Sequence[str] = ("submit", "read"),
    expires_in: float | str | None = None,
    redis_url: str | None = None,
) -> CreatedKey:
    """Create an API key; its secret is not shown again: the service stores only a hash. `name`: a
    label, such as its owner or purpose.

    `redis_url`: write directly to this Redis, without the API, to create the first key; `-`: the
    Redis of the settings.
    """
    request = key_request(name, tenant, scopes, expires_in)  # raises before anything is asked
    if redis_url is not None:
        return asyncio.run(_create(redis_url, request))
    return connect().keys.create(name, tenant=tenant, scopes=scopes, expires_in=expires_in)


def show_key(_: Connector, created: CreatedKey) -> None:
    """Print the key alone to standard output, for a shell's variable."""
    until = "" if created.expires is None else f"; expires: {minute(created.expires)}"
    scopes = ", ".join(created.scopes)
    err.print(
        f"key {created.id} ({created.name}) of tenant {created.tenant}; scopes: {scopes}{until}",
        style="dim",
        markup=False,
    )
    print(created.key)


async def _create(redis_url: str, request: KeyRequest) -> CreatedKey:
    from ...broker.ledger.jobs.ledger import Ledger
    from ...broker.ledger.people.audit import LedgerAudit
    from ...broker.ledger.people.keys import LedgerKeys

    settings = load_settings()
    if redis_url == "-":
        folder = Path(settings.data_dir).expanduser().resolve()
        redis_url = settings.redis_url or own_redis_url(folder)
    if not redis_url:
        allowed = (
            "redis://host:port/0, MIDSTREAM_REDIS_URL, or MIDSTREAM_DATA_DIR of a running "
            "`midstream up`"
        )
        raise invalid("redis_url", "no Redis configured", allowed=allowed)
    ledger = Ledger.connect(msgspec.structs.replace(settings, redis_url=redis_url))
    try:
        created = await LedgerKeys(ledger).create(request)
        after = msgspec.structs.replace(created, key="")
        await LedgerAudit(ledger).append("create key", "key", created.id, after=after)
        return created
    finally:
        await ledger.close()


def own_redis_url(data: Path) -> str:
    """Return the URL, with password, of the Redis that a `midstream up` runs on `data`; empty if
    none runs there.
    """
    from ...broker.processes.install import kept_redis_url

    shown = discovery.written(data, own=False).redis_url
    return (kept_redis_url(data) or shown) if shown else ""


def show_lines(_: Connector, lines: Sequence[str]) -> None:
    print("\n".join(lines))


def admin_key(_: Connector, /) -> list[str]:
    """Return a new random key for the setting admin_key (MIDSTREAM_ADMIN_KEY, or a file:
    MIDSTREAM_ADMIN_KEY_FILE).
    """
    from ...broker.ledger.people.keys import new_key

    return [new_key()]


def curve(
    _: Connector, role: Literal["relay", "worker"], name: str, /, *, folder: str = "curve"
) -> list[str]:
    """Create the key pair of the relay or of a worker (`name`: its worker_id): NAME.key is private
    and goes to its owner, NAME.pub is public.
    """
    from ...broker.receipts.curve import new_keys

    if role not in ("relay", "worker"):
        raise invalid("role", f"unknown role {role!r}", allowed="relay, worker")
    private, public = new_keys(role, name, Path(folder))
    if role == "relay":
        clients = f"MIDSTREAM_CURVE_CLIENTS_DIR={Path(folder) / 'clients'}"
        return [
            f"the relay: MIDSTREAM_CURVE_SECRET_FILE={private} {clients}",
            f"every worker: MIDSTREAM_CURVE_SERVER_KEY_FILE={public}",
        ]
    return [
        f"worker {name}: MIDSTREAM_WORKER_ID={name} MIDSTREAM_CURVE_SECRET_FILE={private}",
        f"the relay: {public} in its MIDSTREAM_CURVE_CLIENTS_DIR",
    ]


def acl(
    _: Connector,
    /,
    *,
    folder: str = "acl",
    database: Annotated[int, msgspec.Meta(ge=0, le=MAX_DATABASE)] = 0,
    host: str = "HOST:6379",
) -> list[str]:
    """Write an ACL file for Redis with one least-privilege user per part of Midstream, their
    passwords, and the URLs with which they open it. `database`: the number of the database that
    Midstream uses; `host`: Redis' host and port.
    """
    from ...broker.redis_service.acl import ROLES, USERS_FILE, write_users

    place = Path(folder)
    write_users(place, database, host)
    return [
        f"redis: aclfile {(place / USERS_FILE).resolve()}",
        *(f"{role}: MIDSTREAM_REDIS_URL_FILE={place / f'{role}.url'}" for role in ROLES),
    ]
