"""Flower, the dashboard of the task queue: `python -m midstream_ops.flower`, configured by the
environment.

Flower gets secrets through its environment and the Celery app, never on a command line, which
everyone on the machine can read. It is read-only, because a task revoked without the ledger would
be sent again. If a password is set, every path requires it; Flower itself leaves `/metrics` and
`/healthcheck` open. Without a password, calls under a foreign host name are refused, as in the API,
against DNS rebinding.
"""

import hmac
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

from midstream.broker.ledger.people import keys
from midstream.broker.processes.hosts import Hosts
from midstream.broker.processes.install import basic
from midstream.broker.queue.celery_app import make_app
from midstream.schemas.base.errors import STATUS_OF_KIND
from midstream.schemas.settings.settings import (
    Settings,
    SettingsError,
    asks_for_keys,
    is_loopback,
    load_settings,
)

EXIT_BAD_SETTINGS = 2
#: Milliseconds between two saves of the tasks, which Flower keeps in memory: a killed Flower loses
#: little.
SAVE_EVERY_MS = 15_000
#: About 5 KiB each, in memory and in the file; older tasks are dropped.
TASKS_KEPT = 5_000
WORKERS_KEPT = 200
#: Columns of the tasks page: kind, job, state, times, queue (one per model), and the error.
COLUMNS = "name,args,state,received,runtime,routing_key,worker,exception"
#: Seconds for which a disconnected worker stays listed.
OFFLINE_KEPT_S = 3600
INSPECT_TIMEOUT_MS = 3000
MISDIRECTED = STATUS_OF_KIND["misdirected"]
UNAUTHORIZED = STATUS_OF_KIND["unauthorized"]
#: The path that the key of the setting `observe_key` also opens.
METRICS = "/metrics"


class Door:
    """Admits every caller if there is no password, else callers with the password, or with the
    observe key for the metrics.
    """

    def __init__(self, settings: Settings) -> None:
        self._valid = [basic(pair).encode() for pair in settings.flower_auth.split(",") if pair]
        self._keys = keys.of_settings(settings)

    def admits(self, authorization: str, path: str) -> bool:
        if not self._valid:
            return True
        if any([hmac.compare_digest(authorization.encode(), valid) for valid in self._valid]):
            return True
        scheme, _, text = authorization.partition(" ")
        shown = keys.parse(text.strip()) if scheme.lower() == "bearer" and path == METRICS else None
        return shown is not None and keys.is_right(shown, self._keys.get(shown.id))


def options(settings: Settings) -> dict[str, str]:
    """Return the environment variables with Flower's options.

    Raises SettingsError naming the setting.
    """
    if settings.flower_auth and not all(
        re.fullmatch(r"[^:]+:.+", pair) for pair in settings.flower_auth.split(",")
    ):
        raise SettingsError(
            "MIDSTREAM_FLOWER_AUTH: must be user:password; separate several with commas"
        )
    if not settings.flower_auth and not is_loopback(settings.flower_host):
        raise SettingsError(
            f"MIDSTREAM_FLOWER_HOST={settings.flower_host} is not loopback: "
            "MIDSTREAM_FLOWER_AUTH=user:password is required, "
            "because Flower shows the jobs of all tenants"
        )
    if not settings.flower_auth and asks_for_keys(settings):
        raise SettingsError(
            "MIDSTREAM_FLOWER_AUTH: user:password is required when the API requires keys, "
            "because Flower shows the jobs of all tenants"
        )
    result = {
        "FLOWER_ADDRESS": settings.flower_host,
        "FLOWER_PORT": str(settings.flower_port),
        "FLOWER_PERSISTENT": "true",
        "FLOWER_DB": str(Path(settings.data_dir).resolve() / "flower.db"),
        "FLOWER_STATE_SAVE_INTERVAL": str(SAVE_EVERY_MS),
        "FLOWER_MAX_TASKS": str(TASKS_KEPT),
        "FLOWER_MAX_WORKERS": str(WORKERS_KEPT),
        "FLOWER_TASKS_COLUMNS": COLUMNS,
        "FLOWER_PURGE_OFFLINE_WORKERS": str(OFFLINE_KEPT_S),
        "FLOWER_INSPECT_TIMEOUT": str(INSPECT_TIMEOUT_MS),
        "FLOWER_READ_ONLY": "true",
    }
    if settings.flower_auth:
        result["FLOWER_BASIC_AUTH"] = settings.flower_auth
    return result


def serve(settings: Settings) -> None:
    """Run Flower's own command until the process ends."""
    from flower import command
    from tornado.web import ErrorHandler

    hosts = Hosts(settings, settings.flower_host, bool(settings.flower_auth))
    door = Door(settings)

    class Closed(ErrorHandler):
        def write_error(self, status_code: int, **more: Any) -> None:
            self.set_header("WWW-Authenticate", 'Basic realm="flower"')
            super().write_error(status_code, **more)

    class Flower(command.Flower):
        def find_handler(self, request: Any, **options: Any) -> Any:
            if not hosts.allows(request.headers.get_list("Host")):
                return self.get_handler_delegate(
                    request, ErrorHandler, {"status_code": MISDIRECTED}
                )
            if not door.admits(request.headers.get("Authorization", ""), request.path):
                return self.get_handler_delegate(request, Closed, {"status_code": UNAUTHORIZED})
            return super().find_handler(request, **options)

    command.Flower = Flower  # the class that the command starts
    make_app(settings).start(["flower"])


def main() -> int:
    """Run until stopped; returns the exit code."""
    try:
        settings = load_settings()
        if not settings.redis_url:
            raise SettingsError("MIDSTREAM_REDIS_URL: is required by Flower")
        os.environ.update(options(settings))
    except SettingsError as error:
        print(f"flower failed: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_SETTINGS
    Path(settings.data_dir).mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    serve(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
