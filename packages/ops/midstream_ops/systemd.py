"""Writes a unit of systemd that runs `midstream up` with the settings that it was given."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings, to_environment, variable

#: Seconds that the stack gets to stop: workers finish or give back their jobs.
STOP_S = 150
UNIT = """[Unit]
Description=Midstream, {model}, on {data}
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
WorkingDirectory={folder}
EnvironmentFile={environment}
ExecStart={python} -P -m midstream.client up
# Ctrl-C for `midstream up` alone, which stops its processes in order
KillMode=mixed
TimeoutStopSec={stop}
Restart=on-failure
RestartSec=10
UMask=0077

[Install]
WantedBy={target}
"""


def write(settings: Settings, given: Mapping[str, object], user: bool | None = None) -> list[str]:
    """Write the unit and the file with its variables; return what to do with them. `given`: the
    settings that a source names; the others stay those of the version that is started. `user`: a
    unit of this account; None: unless this is root. Raises MidstreamError, OSError.
    """
    user = os.geteuid() != 0 if user is None else user
    data = Path(settings.data_dir).expanduser().resolve()
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    units = Path(f"{home}/systemd/user" if user else "/etc/systemd/system").expanduser()
    name = f"midstream-{data.parent.name}-{data.name.removeprefix('.')}"
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = data / "systemd.env"
    variables = to_environment(settings)
    named = {variable(each) for each in given} | {variable("data_dir"), variable("engine_options")}
    kept = {each: text for each, text in variables.items() if each in named}
    kept[variable("data_dir")] = str(data)
    _write(environment, "".join(f"{each}={_quoted(kept[each])}\n" for each in sorted(kept)))
    units.mkdir(parents=True, exist_ok=True)
    unit = units / f"{name}.service"
    _write(
        unit,
        UNIT.format(
            model=settings.served_model or "the demo model",
            data=data,
            folder=Path.cwd(),
            environment=environment,
            python=sys.executable,
            stop=STOP_S,
            target="default.target" if user else "multi-user.target",
        ),
        mode=0o644,
    )
    control = "systemctl --user" if user else "systemctl"
    lines = [
        f"wrote {unit}",
        f"its settings: {environment} (readable to this account alone)",
        f"start it now and at every boot: {control} daemon-reload && {control} enable --now {name}",
    ]
    if user:
        lines.append("also while you are not logged in: loginctl enable-linger")
    return [*lines, f"its messages: journalctl {'--user ' if user else ''}-u {name} -f"]


def _quoted(text: str) -> str:
    """Return a value as systemd reads it from a file of variables. Raises MidstreamError."""
    if "\n" in text:
        raise MidstreamError(
            "invalid_request", "a setting with a line break has no place in a unit"
        )
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _write(path: Path, text: str, mode: int = 0o600) -> None:
    aside = path.with_name(f".{path.name}.part")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    aside.rename(path)
