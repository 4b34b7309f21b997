"""Container health checks: `python -m midstream.broker.health api|relay|worker|callbacks|flower`
exits 0 if healthy.

A check tests the function, not whether the process runs: of the API, whether a job would run now;
of relay, worker and reaper, whether they have recently reported to Redis.
"""

import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec
import redis

from ..schemas.base.records import from_json
from ..schemas.jobs.models import WorkerInfo
from ..schemas.settings.settings import Settings, SettingsError, load_settings
from .processes.install import basic
from .processes.liveness import REAPER_KEY, RELAY_KEY
from .redis_service import opening as redis_open

TIMEOUT_S = 5.0
#: File in a container's temporary folder, which exists until its worker is ready. It is empty, or
#: has the reason why the worker cannot start.
STARTING = "midstream-worker-starting"
#: Time limit of a start, which downloads and loads a model.
START_S = 1800.0
#: Seconds between two checks.
LOOK_S = 1.0


def api(settings: Settings) -> str:
    return _answers(f"http://127.0.0.1:{settings.api_port}/readyz")


def flower(settings: Settings) -> str:
    user = settings.flower_auth.partition(",")[0]
    return _answers(
        f"http://127.0.0.1:{settings.flower_port}/healthcheck", basic(user) if user else ""
    )


def relay(settings: Settings) -> str:
    return (
        "" if _redis(settings).exists(RELAY_KEY) else "the relay has not reported to Redis recently"
    )


def callbacks(settings: Settings) -> str:
    return (
        ""
        if _redis(settings).exists(REAPER_KEY)
        else "the reaper has not completed a pass recently"
    )


def worker(settings: Settings) -> str:
    """Return why the worker of this machine (or container) is unhealthy; empty if it is healthy.

    Waits for its start, for at most `START_S`.
    """
    note = Path(tempfile.gettempdir()) / STARTING
    deadline = time.monotonic() + START_S
    while trouble := _worker_seen(settings):
        try:
            failure = note.read_text().strip()
        except FileNotFoundError:  # the worker was ready before
            return trouble
        if failure or time.monotonic() > deadline:
            return failure or trouble
        time.sleep(LOOK_S)
    note.unlink(missing_ok=True)
    return ""


def _worker_seen(settings: Settings) -> str:
    client = _redis(settings)
    known = [from_json(raw, WorkerInfo) for raw in client.hvals("ms:workers")]
    infos = [info for info in known if info.host == socket.gethostname()]
    alive = [info for info in infos if client.get(f"ms:alive:{info.worker}") == info.boot.encode()]
    if not alive:
        return "no worker on this machine has reported to Redis recently"
    return "; ".join(info.detail or "it is not healthy" for info in alive if not info.healthy)


CHECKS: dict[str, Callable[[Settings], str]] = {
    "api": api,
    "relay": relay,
    "worker": worker,
    "callbacks": callbacks,
    "flower": flower,
}


def _answers(url: str, authorization: str = "") -> str:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(
                url, headers={"Authorization": authorization} if authorization else {}
            ),
            timeout=TIMEOUT_S,
        ):
            return ""
    except urllib.error.HTTPError as error:
        return f"{url} responds with {error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return f"{url} does not respond: {error}"


def _redis(settings: Settings) -> "redis.Redis":
    return redis_open.client(
        settings.redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
    )


def main(arguments: list[str]) -> int:
    """Return 0 if healthy; 1 if unhealthy, and print the reason; 2 for an unknown check."""
    if len(arguments) != 1 or arguments[0] not in CHECKS:
        print(f"usage: python -m midstream.broker.health {'|'.join(CHECKS)}", file=sys.stderr)
        return 2
    try:
        trouble = CHECKS[arguments[0]](load_settings())
    except SettingsError as error:
        trouble = str(error)
    except redis.RedisError as error:
        trouble = f"Redis does not answer: {error}"
    except msgspec.DecodeError as error:
        trouble = f"a worker's record is invalid: {error}"
    if trouble:
        print(trouble)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
