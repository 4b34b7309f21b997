"""The commands that this package adds to `midstream`."""

from pathlib import Path
from typing import Annotated

import typer

from midstream.client.cli.terminal import err

from . import doctor, running, start
from .engine_packages import COMMANDS, need_engine
from .upkeep import commands as upkeep


def add(app: typer.Typer) -> None:
    """Add the commands to an app: the entry point `ops` of the group `midstream.commands`."""
    app.command(cls=start.ServeCommand)(start.serve)
    own = (
        *(start.up, demo, fetch, running.status, running.logs, running.down, doctor.doctor),
        *(upkeep.drain, upkeep.backup, upkeep.restore, upkeep.rollback),
    )
    for command in own:
        app.command()(command)


def demo(
    data: Annotated[
        Path | None, typer.Option(help="Keep data and captures in this folder.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the stack and its page open until Ctrl-C.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            help="Use this running stack, which serves the demo model, instead of starting one."
        ),
    ] = None,
) -> None:
    """Start the stack; capture, steer and patch a real model; check the results; stop.

    Exits non-zero if a check fails.
    """
    if url is None:
        need_engine("`midstream demo`", *COMMANDS["demo"])
    from .demo import run_demo

    raise typer.Exit(run_demo(data, url, keep=keep))


def fetch(
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute the checksums of the cached files.")
    ] = False,
) -> None:
    """Download the demo model, SmolLM2-135M-Instruct, to the cache folder and print its path."""
    from .demo_model import fetch_demo_model

    print(fetch_demo_model(say=lambda line: err.print(line, style="dim"), verify=verify))
