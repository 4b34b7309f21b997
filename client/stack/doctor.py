"""The checks of `midstream doctor`, each with advice.

Redis is queried directly, all other parts through the API. The checks remove everything they
create.
"""

from collections.abc import Iterator
from pathlib import Path

from ...schemas.base.settings import Settings
from ...schemas.service.status import Status
from ..sdk import wire
from .checks import disk_checks, engine_checks, redis_checks, service_checks
from .checks.finding import Finding


def examine(settings: Settings, redis_url: str, url: str) -> Iterator[Finding]:
    """Run all checks, in order of dependency. `redis_url`: empty if not configured."""
    if redis_url:
        yield from redis_checks.redis_server(redis_url, settings)
    else:
        yield Finding(
            "warn",
            "redis",
            "Redis URL not configured, and no `midstream up` is running on the data directory",
            (
                "set MIDSTREAM_REDIS_URL, or set MIDSTREAM_DATA_DIR to the data directory of a "
                "running `midstream up`"
            ),
        )
    headers = wire.headers(settings.api_key)
    yield from service_checks.api(url, headers)
    status = service_checks.status_of(redis_url, url, settings.api_key)
    if isinstance(status, Status):
        yield from service_checks.parts(status, settings)
    else:
        yield Finding(
            "fail",
            "service",
            f"cannot read the service's status: {status}",
            "fix the problems above, or use a key with scope observe",
        )
    yield from service_checks.models(url, headers)
    yield from engine_checks.vllm(settings)
    yield from engine_checks.extensions(settings)
    yield from disk_checks.folders(settings)
    yield from disk_checks.disk(Path(settings.data_dir).expanduser().resolve())
    yield from disk_checks.store(settings)
    yield from service_checks.keys(url, headers)
