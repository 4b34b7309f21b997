"""Starts logging, tracing and metrics by the settings: the first call of every process."""

from typing import Any

from ...schemas.settings.settings import Settings
from . import logs, metrics_server, traces


def start(settings: Settings, process: str, **fields: Any) -> None:
    """Start all three.

    `fields`: on every line that the process logs. Raises SettingsError naming the setting that does
    not work.
    """
    logs.setup(settings, process, **fields)
    traces.setup(settings, process)
    metrics_server.start(settings, process)
