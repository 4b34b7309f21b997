"""Limits and usage of tenants: limits are stored by name, usage is counted by the ledger's
scripts.
"""

from typing import Any

import msgspec

from ....schemas.access.keys import Limits, Tenant, TenantUsage, TenantView
from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.limits import MAX_HARVESTS_KEPT, MAX_SURVEYS
from ....schemas.base.records import from_msgpack, now, to_msgpack
from ....schemas.settings.settings import Settings
from .reachable import reachable

#: name → packed `Tenant`, of tenants with limits of their own.
TENANTS = "ms:tenants"
#: `{tenant}/jobs`, `{tenant}/cells`, `{tenant}/bytes`, `{tenant}/room`: the memory that unfinished
#: jobs may still take (see `job_room`); without a tenant, the totals: `/cells`, `/queued`, `ROOM`.
USAGE = "ms:usage"
ROOM = "/room"

#: Limits of a tenant that have a default in the settings.
DEFAULTED = (
    "requests_per_minute",
    "tokens_per_minute",
    "jobs_in_flight",
    "capture_mib",
    "sweep_cells",
    "modules",
    "module_mib",
    "harvests",
)

#: Name of a limit → kind of problem and its detail.
REFUSALS: dict[str, tuple[str, str]] = {
    "closed": (
        "overloaded",
        "the service takes no new jobs for now: its operator is draining it (`midstream drain`)",
    ),
    "queue_limit": (
        "overloaded",
        "jobs waiting: {used}; the limit is {allowed} (setting queue_limit)",
    ),
    "redis_fill": (
        "overloaded",
        (
            "Redis memory would be {used} % full once all accepted jobs have ended; the limit for "
            "new jobs is {allowed} % (setting tuning.redis_fill_limit)"
        ),
    ),
    "tenant_room": (
        "too_many_jobs",
        (
            "unfinished jobs of tenant {tenant} may still store {used} MiB in Redis, and this one "
            "{more} MiB: together at most {allowed} MiB, half of the memory that neither is used "
            "nor is kept for other tenants"
        ),
    ),
    "jobs_in_flight": (
        "too_many_jobs",
        "jobs of tenant {tenant} in flight: {used}; the limit is {allowed}",
    ),
    "sweep_cells": (
        "too_many_cells",
        (
            "cells of tenant {tenant}'s sweeps, waiting or running: {used}; cells of this "
            "sweep: {more}"
        ),
    ),
    "sweep_cells_waiting": (
        "too_many_cells",
        "cells of other sweeps, waiting or running: {used}; cells of this sweep: {more}",
    ),
    "harvests": (
        "too_many_harvests",
        "harvests of tenant {tenant} that have not ended: {used}; the limit is {allowed}",
    ),
    "harvests_kept": (
        "too_many_harvests",
        "harvests of tenant {tenant} that are kept: {used}; the limit is {allowed}",
    ),
    "surveys": (
        "conflict",
        "surveys of the harvest, finished or under way: {used}; the limit is {allowed}",
    ),
    "webhooks_pending": (
        "too_many_webhooks",
        (
            "webhooks of tenant {tenant} that are not delivered: {used}; the limit is "
            "{allowed} (setting tuning.webhook_pending_limit)"
        ),
    ),
    "capture_mib": (
        "capture_limit",
        "the captures and harvests of tenant {tenant} use {used} MiB; the limit is {allowed} MiB",
    ),
    "modules": ("module_limit", "named modules of tenant {tenant}: {used}; the limit is {allowed}"),
    "module_mib": (
        "module_limit",
        (
            "with this module of {more} MiB, tenant {tenant} exceeds its limit of "
            "{allowed} MiB of named modules"
        ),
    ),
    "requests_per_minute": (
        "rate_limited",
        "tenant {tenant} has exceeded its limit of requests per minute ({allowed})",
    ),
    "tokens_per_minute": (
        "rate_limited",
        "tenant {tenant} may submit {allowed} tokens per minute and has used {used}",
    ),
}
_FEWER_CELLS = "retry when some have finished, or request fewer cells: at most {allowed} in total"
#: Name of a limit → advice.
HINTS: dict[str, str] = {
    "closed": "retry later; what was accepted runs, and its results can be read",
    "tenant_room": "retry when some have finished",
    "webhooks_pending": "wait, fix the receiver, or omit `callback_url`",
    "sweep_cells": _FEWER_CELLS,
    "sweep_cells_waiting": f"{_FEWER_CELLS} (setting sweep_cells_waiting)",
    "harvests_kept": "delete some that have ended (DELETE /v1/harvests/<harvest>)",
    "capture_mib": "delete some (DELETE /v1/captures/<job>, DELETE /v1/harvests/<harvest>)",
    "modules": "delete some (DELETE /v1/steering/modules/<name>)",
    "module_mib": "delete some (DELETE /v1/steering/modules/<name>), or use smaller ones",
}
_TOO_MANY_CELLS = (
    "pairs",
    "the sweep has {more} cells",
    "at most {allowed} over all sweeps (limit {name})",
)
#: Name of a limit → problem of a single item larger than the limit, for which waiting does not
#: help: field, message, what would be accepted.
TOO_LARGE: dict[str, tuple[str, str, str]] = {
    "sweep_cells": _TOO_MANY_CELLS,
    "sweep_cells_waiting": _TOO_MANY_CELLS,
    "module_mib": (
        "steering",
        "the module is {more} MiB",
        "at most {allowed} MiB over all modules (limit {name})",
    ),
}
MIB = 1 << 20


def limits_of(settings: Settings) -> dict[str, int]:
    """Return the default limits of tenants, and limits over all tenants; 0 means no limit."""
    defaults: dict[str, int] = {name: getattr(settings.limits, name) for name in DEFAULTED}
    return {
        **defaults,
        "queue_limit": settings.queue_limit,
        "webhooks_pending": settings.tuning.webhook_pending_limit,
        "sweep_cells_waiting": settings.sweep_cells_waiting,
        "redis_fill": round(100 * settings.tuning.redis_fill_limit),
        "harvests_kept": MAX_HARVESTS_KEPT,
        "surveys": MAX_SURVEYS,
    }


def refusal(
    tenant: str, name: str, used: int, allowed: int, more: int, retry_after: float | None
) -> MidstreamError:
    """Return the error for a rejected item, and what would be accepted.

    `more`: how much the item would add to `used`.
    """
    facts = {"name": name, "tenant": tenant, "used": used, "allowed": allowed, "more": more}
    if name in TOO_LARGE and more > allowed:
        field, *words = TOO_LARGE[name]
        detail, accepted = (text.format(**facts) for text in words)
        return invalid(field, detail, allowed=accepted)
    kind, text = REFUSALS[name]
    advice = HINTS.get(name)
    return MidstreamError(
        kind,
        text.format(**facts),
        hint=advice.format(**facts) if advice else None,
        retry_after=retry_after,
    )


class LedgerTenants:
    """Tenants in a redis.asyncio client's Redis, such as a ledger's. Belongs to its event loop."""

    def __init__(self, redis: Any, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings

    @reachable
    async def put(self, tenant: Tenant) -> None:
        """Set the tenant's limits; they also apply to what it has already submitted."""
        await self._redis.hset(TENANTS, tenant.name, to_msgpack(tenant))

    @reachable
    async def delete(self, name: str) -> bool:
        """Remove the tenant's own limits, so that the settings apply again; False if it had
        none.
        """
        return bool(await self._redis.hdel(TENANTS, name))

    @reachable
    async def get(self, name: str) -> Tenant:
        """Return the tenant with its own limits; limits that are None default to the settings."""
        raw = await self._redis.hget(TENANTS, name)
        return Tenant(name=name) if raw is None else from_msgpack(raw, Tenant)

    @reachable
    async def list(self) -> list[Tenant]:
        """Return the tenants with limits of their own, by name."""
        raw = await self._redis.hgetall(TENANTS)
        return [from_msgpack(raw[name], Tenant) for name in sorted(raw)]

    @reachable
    async def usage(self, name: str) -> TenantUsage:
        """Return a tenant's current usage, and what it has submitted in this clock minute."""
        counted = await self._redis.hmget(
            USAGE, [f"{name}/{what}" for what in ("jobs", "cells", "bytes")]
        )
        jobs, cells, kept = (max(0, int(number or 0)) for number in counted)
        rates = await self._redis.hmget(f"ms:rate:{name}", "minute", "requests", "tokens")
        minute, requests, tokens = (int(number or 0) for number in rates)
        current = minute == int(now() // 60)
        sizes: list[bytes] = await self._redis.hvals(f"ms:module-bytes:{name}")
        return TenantUsage(
            jobs_in_flight=jobs,
            sweep_cells=cells,
            capture_bytes=kept,
            tokens_this_minute=tokens if current else 0,
            requests_this_minute=requests if current else 0,
            modules=len(sizes),
            module_bytes=sum(map(int, sizes)),
            harvests=int(await self._redis.scard(f"ms:harvests-open:{name}")),
        )

    @reachable
    async def view(self, name: str) -> TenantView:
        """Return a tenant's effective limits, with defaults filled in, and its usage."""
        return TenantView(
            name=name,
            limits=filled((await self.get(name)).limits, self._settings),
            usage=await self.usage(name),
        )


def filled(limits: Limits, settings: Settings) -> Limits:
    """Return the limits with the settings' defaults filled in."""
    defaults = limits_of(settings)
    return msgspec.structs.replace(
        limits, **{name: defaults[name] for name in DEFAULTED if getattr(limits, name) is None}
    )
