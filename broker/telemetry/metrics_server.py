"""Serves a process's metrics over HTTP."""

import logging

from prometheus_client import start_http_server

from ...schemas.base.version import __version__
from ...schemas.settings.settings import Settings, SettingsError
from .metrics import BUILD

log = logging.getLogger(__name__)


def start(settings: Settings, process: str) -> None:
    """Serve this process's metrics at `metrics_host:metrics_port` until it ends, if a port is set.

    Raises SettingsError when the port cannot be used.
    """
    identify(process)
    if not settings.metrics_port:
        return
    try:
        server, _ = start_http_server(settings.metrics_port, settings.metrics_host)
    except OSError as error:
        where = (
            f"MIDSTREAM_METRICS_HOST={settings.metrics_host}, "
            f"MIDSTREAM_METRICS_PORT={settings.metrics_port}"
        )
        raise SettingsError(f"{where}: {error.strerror or error}") from error
    log.info(
        "metrics of %s at http://%s:%d/metrics", process, settings.metrics_host, server.server_port
    )


def identify(process: str) -> None:
    """Name this process and its version in `midstream_build_info`."""
    BUILD.labels(process, __version__).set(1)
