"""`python -m midstream.api`: serve the HTTP edge with the settings of the environment. `--openapi` prints the document instead."""

import asyncio
import logging
import socket
import sys
from types import FrameType

import uvicorn
from litestar import Litestar

from ..broker import logs, metrics, traces
from ..broker.keys import Keys
from ..broker.ledger import Ledger
from ..schemas import faults
from ..schemas.errors import MidstreamError
from ..schemas.settings import Settings, SettingsError, is_loopback, load_settings
from . import auth, openapi
from .app import make_app

#: Held responses end at once when the server stops; this is for bodies that are still being sent, in seconds.
GRACE_S = 5
BACKLOG = 2048


class Server(uvicorn.Server):
    """uvicorn, which says where it listens and lets go of held responses when it is told to stop."""

    def __init__(self, config: uvicorn.Config, app: Litestar, url: str):
        super().__init__(config)
        self._litestar = app
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._loop = asyncio.get_running_loop()
            print(f"api ready {self._url}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        edge = getattr(self._litestar.state, "edge", None)
        if edge is not None:
            self._loop.call_soon_threadsafe(edge.close)


def bind(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its URL; port 0 takes a free one. Raises SettingsError naming the setting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise SettingsError(f"MIDSTREAM_API_HOST={host}, MIDSTREAM_API_PORT={port}: {error.strerror}") from error
    listening.listen(BACKLOG)
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return listening, f"http://{shown}:{listening.getsockname()[1]}"


def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    if not settings.redis_url:
        raise SettingsError("MIDSTREAM_REDIS_URL: is required here; `midstream up` sets it")
    auth.admin_key(settings)  # what is wrong with it is said before anything listens
    refused = asyncio.run(_refusal(settings))
    if refused:
        raise SettingsError(refused)
    if settings.auth == "open" and not is_loopback(settings.api_host):
        log.warning("MIDSTREAM_AUTH=open on %s: whoever reaches this address may do everything", settings.api_host)
    faults.arm(settings.fault, settings.data_dir)
    traces.setup(settings, "api")
    metrics.identify("api")
    listening, url = bind(settings.api_host, settings.api_port)
    app = make_app(settings)
    config = uvicorn.Config(
        app,
        log_level=settings.log_level.lower(),
        log_config=None,  # its lines go where ours go
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
        lifespan="on",
    )
    Server(config, app, url).run(sockets=[listening])


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
