"""`python -m midstream.api` serves the HTTP API with the settings of the environment.

`--openapi` prints the OpenAPI document instead.
"""

import asyncio
import gc
import ipaddress
import logging
import socket
import sys
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ..broker.artifacts import fitness
from ..broker.ledger.people import keys
from ..broker.processes.hosts import allowed_names
from ..broker.redis_service import durability as redis_durability
from ..broker.telemetry import logs, metrics_server, traces
from ..schemas.base.errors import MidstreamError
from ..schemas.settings import faults
from ..schemas.settings.settings import (
    Settings,
    SettingsError,
    asks_for_keys,
    is_loopback,
    load_settings,
)
from . import openapi
from .app import make_app
from .operations.twin import Twin, only_for
from .web.connections import Connections
from .web.middleware import App

#: Seconds to wait at shutdown for bodies still being sent; held responses end immediately.
GRACE_S = 5
BACKLOG = 2048
#: Seconds to keep an idle connection open: longer than clients do (httpx2 5, OpenAI's 5, aiohttp
#: 15), so that a connection is never closed while a request is in flight.
KEEP_ALIVE_S = 75
#: Seconds between attempts to reach a Redis that was unreachable at the start.
ASK_AGAIN_S = 1.0
#: Allocations between two garbage collections. A body of 8 MiB makes some ten thousand objects;
#: with Python's default (700) every such body triggers a collection of the whole process, which
#: takes longer than decoding it.
GC_OBJECTS = 10_000
#: Seconds for which a thread that resolves a request may keep the event loop waiting (Python's
#: default is a hundred times as much). A small request needs the interpreter again some ten times.
SWITCH_S = 0.00005

NO_KEYS = (
    "MIDSTREAM_API_HOST={host}: API keys are required beyond loopback, but none "
    "exists. Create one with "
    "`midstream create key first --set scopes=admin --set redis_url=…`, or set "
    "MIDSTREAM_ADMIN_KEY (`midstream create admin-key` prints one), or "
    "MIDSTREAM_AUTH=keys to start without a key; MIDSTREAM_AUTH=open turns authentication off"
)

log = logging.getLogger("midstream.api")


class ApiServer(uvicorn.Server):
    """uvicorn that logs its address when ready and releases held responses on shutdown."""

    def __init__(
        self, config: uvicorn.Config, app: App, url: str, undecided: Settings | None = None
    ):
        """`url`: empty for a twin, which announces nothing. `undecided`: the settings, if it is not
        known yet whether any API key exists.
        """
        super().__init__(config)
        self.refused = ""
        self._undecided = undecided
        self._litestar = app
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._loop = asyncio.get_running_loop()
            gc.collect()
            gc.freeze()  # excludes all objects loaded so far from collections
            gc.set_threshold(GC_OBJECTS)
            sys.setswitchinterval(SWITCH_S)
            if self._undecided is not None:
                self._deciding = self._loop.create_task(self._decide(self._undecided))
            if self._url:
                logs.announce(f"api ready {self._url}")

    async def _decide(self, settings: Settings) -> None:
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            if (refused := await _refusal(settings)) is not None:
                break
        if refused:
            self.refused = refused
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if (context := getattr(self._litestar.state, "context", None)) is not None:
            self._loop.call_soon_threadsafe(context.close)
        self._loop.call_soon_threadsafe(self._litestar.stop)


def bind(host: str, port: int) -> tuple[socket.socket, str]:
    """Return a listening socket and its URL; port 0 takes a free port.

    Raises SettingsError naming the settings.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise SettingsError(
            f"MIDSTREAM_API_HOST={host}, MIDSTREAM_API_PORT={port}: {error.strerror}"
        ) from error
    listening.listen(BACKLOG)
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return listening, f"http://{shown}:{listening.getsockname()[1]}"


def trusted_proxies(settings: Settings) -> list[str]:
    """Return the entries of the setting `trusted_proxies`.

    Raises SettingsError for an entry that is neither an address nor a network.
    """
    entries = [entry for entry in map(str.strip, settings.trusted_proxies.split(",")) if entry]
    for entry in entries:
        try:
            ipaddress.ip_network(entry)
        except ValueError as error:
            valid = (
                "valid: addresses and networks, such as 127.0.0.1 or 10.0.0.0/8, separated by "
                "commas"
            )
            raise SettingsError(f"MIDSTREAM_TRUSTED_PROXIES: {error}; {valid}") from error
    return entries


def serve(settings: Settings) -> None:
    """Serve the API until SIGTERM or SIGINT."""
    if not settings.redis_url:
        raise SettingsError("MIDSTREAM_REDIS_URL: is required; `midstream up` sets it")
    keys.of_settings(settings)  # reports invalid keys before anything listens
    allowed_names(settings)
    proxies = trusted_proxies(settings)
    twin = Twin(partial(serve_as_twin, settings))  # before there is any thread
    redis_durability.require(settings)
    fitness.require(settings)
    refused = asyncio.run(_refusal(settings))
    if refused:
        raise SettingsError(refused)
    if settings.auth == "open" and not is_loopback(settings.api_host):
        log.warning(
            "MIDSTREAM_AUTH=open on %s: anyone who can reach this address has full access",
            settings.api_host,
        )
    faults.arm(settings.fault, settings.data_dir)
    traces.setup(settings, "api")
    metrics_server.identify("api")
    listening, url = bind(settings.api_host, settings.api_port)
    app = make_app(settings, twin)
    config = uvicorn.Config(
        app,
        http=Connections(settings),  # type: ignore[arg-type]  # called like the class
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies,
        **options_of(settings),
    )
    server = ApiServer(config, app, url, settings if refused is None else None)
    server.run(sockets=[listening])
    if server.refused:
        raise SettingsError(server.refused)


def options_of(settings: Settings) -> dict[str, Any]:
    """Return uvicorn's options for every process of the API."""
    return {
        "ws": "none",
        "log_level": settings.log_level.lower(),
        "log_config": None,  # uvicorn logs to our handlers
        "access_log": False,
        "timeout_graceful_shutdown": GRACE_S,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "server_header": False,
        "lifespan": "on",
    }


def serve_as_twin(settings: Settings, listening: socket.socket, token: str) -> None:
    """Serve the calls that another process of the API hands over, until SIGTERM."""
    faults.arm(settings.fault, settings.data_dir)
    traces.setup(settings, "api")
    app = make_app(settings)
    app.is_twin = True
    app.access_level = logging.DEBUG  # the other process logs the call
    config = uvicorn.Config(
        only_for(token, app),
        date_header=False,
        proxy_headers=True,
        forwarded_allow_ips="*",  # what the other process found out
        **options_of(settings),
    )
    ApiServer(config, app, url="").run(sockets=[listening])


async def _refusal(settings: Settings) -> str | None:
    """Return why this API must not run: keys are required beyond loopback, and none exists.

    Empty if it may run; None if Redis is unreachable, so that the caller must retry. Meanwhile the
    API requires keys, so it admits no caller.
    """
    if settings.auth != "auto" or not asks_for_keys(settings) or settings.admin_key:
        return ""
    try:
        return "" if await keys.any_key(settings) else NO_KEYS.format(host=settings.api_host)
    except MidstreamError as error:
        if error.kind != "unavailable":
            raise
        return None


def main() -> int:
    try:
        settings = load_settings()
        logs.setup(settings, "api")
        if sys.argv[1:] == ["--openapi"]:
            sys.stdout.buffer.write(openapi.document(make_app(settings)))
            return 0
        serve(settings)
    except SettingsError as error:
        print(f"midstream api: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
