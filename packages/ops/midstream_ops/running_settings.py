"""The settings of a stack that runs: those of its processes, not those of the command that asks."""

from pathlib import Path

from midstream.client.sdk.discovery import RunningStack
from midstream.schemas.settings.settings import PREFIX, Settings, load_settings


def settings_of(stack: RunningStack) -> Settings | None:
    """Return the settings with which a stack's API runs; None while it has none."""
    api, _ = stack.processes.get("api", (0, 0))
    try:
        variables = Path(f"/proc/{api}/environ").read_bytes().decode().split("\0")
    except OSError:  # it has ended, or is being started
        return None
    own = dict(line.split("=", 1) for line in variables if line.startswith(PREFIX))
    return load_settings(own)
