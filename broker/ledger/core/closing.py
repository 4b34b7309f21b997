"""Closes the service to new jobs, and opens it again.

One field of Redis says so, which the scripts that accept jobs and harvests read in their commit: no
path and no process goes around it. What was accepted goes on; a repeat of an accepted submission is
answered as before.
"""

from typing import Any

from ...redis_service.ledger_schema import SERVICE
from .reachable import reachable

#: Field of the facts about the installation.
CLOSED = "closed"


@reachable
async def close(redis: Any, at: float) -> float:
    """Take no new jobs; return since when none are taken."""
    await redis.hsetnx(SERVICE, CLOSED, repr(at))
    return float(await redis.hget(SERVICE, CLOSED))


@reachable
async def reopen(redis: Any) -> bool:
    """Take new jobs; return whether the service was closed."""
    return bool(await redis.hdel(SERVICE, CLOSED))


@reachable
async def closed_since(redis: Any) -> float | None:
    """Return since when no new jobs are taken; None: they are taken."""
    raw = await redis.hget(SERVICE, CLOSED)
    return None if raw is None else float(raw)
