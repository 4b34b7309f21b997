"""Serves a process's metrics over HTTP."""

import logging
import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from ...schemas.base.version import __version__
from ...schemas.settings.settings import Settings, SettingsError
from .metrics import BUILD

log = logging.getLogger(__name__)


class MetricsServer:
    """This process's metrics over HTTP on their own thread; `close` ends it."""

    def __init__(self, server: WSGIServer, thread: threading.Thread):
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start(settings: Settings, process: str) -> MetricsServer | None:
    """Serve this process's metrics at `metrics_host:metrics_port`; None when no port is set.

    Raises SettingsError when the port cannot be used.
    """
    identify(process)
    if not settings.metrics_port:
        return None
    try:
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host)
    except OSError as error:
        where = (
            f"MIDSTREAM_METRICS_HOST={settings.metrics_host}, "
            f"MIDSTREAM_METRICS_PORT={settings.metrics_port}"
        )
        raise SettingsError(f"{where}: {error.strerror or error}") from error
    log.info(
        "metrics of %s at http://%s:%d/metrics", process, settings.metrics_host, server.server_port
    )
    return MetricsServer(server, thread)


def identify(process: str) -> None:
    """Name this process and its version in `midstream_build_info`."""
    BUILD.labels(process, __version__).set(1)
