"""`midstream top`: live status of the service."""

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from ...schemas.base.errors import MidstreamError
from ...schemas.service.status import ServiceStatus
from ..render import status as show_status
from ..render.jobs import moment
from .terminal import AsJson, Url, connect, out, print_json

#: The default number of seconds between two updates.
INTERVAL_S = 2.0


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    updates: Annotated[
        int, typer.Option("-n", help="Exit after this many updates.", min=1, show_default=False)
    ] = 1 << 40,
    interval: Annotated[float, typer.Option(help="Seconds between updates.", min=0.2)] = INTERVAL_S,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show live status: queues, workers, relay, webhooks, Redis. Stop with Ctrl-C."""
    with connect(url) as client:
        if once or json_ or updates == 1:
            status = client.status()
            if not print_json(status, json_):
                out.print(show_status.status(status, client.url))
            return
        before = client.status()  # an error on the first call ends the command
        try:
            with Live(
                show_status.status(before, client.url),
                console=out,
                screen=out.is_terminal,
                auto_refresh=False,
            ) as live:
                for _ in range(1, updates):
                    time.sleep(interval)
                    before, rendering = _update(client.status, client.url, before)
                    live.update(rendering, refresh=True)
        except KeyboardInterrupt:
            return


def _update(
    ask: Callable[[], ServiceStatus], url: str, before: ServiceStatus
) -> tuple[ServiceStatus, RenderableType]:
    """Return the new status and its rendering; if the service does not answer, the last status and
    the error.
    """
    try:
        status = ask()
    except MidstreamError as error:
        updated = moment(before.at).partition(" ")[2]
        return before, Text.assemble((f"{error}\n", "bold red"), f"last update at {updated}")
    return status, show_status.status(status, url, before)


COMMANDS = (top,)
