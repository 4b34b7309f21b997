"""`midstream top` and `midstream doctor`: live status of the service, and checks with advice."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ...schemas.base.errors import MidstreamError
from ...schemas.base.settings import load_settings
from ...schemas.service.status import Status
from ..render import status as show_status
from ..render.findings import Report
from ..sdk import discovery
from ..stack.checks.finding import findings_of
from ..stack.checks.service import Service
from .options import overrides
from .terminal import AsJson, Url, connect, out, print_json

#: The default number of seconds between two updates.
INTERVAL_S = 2.0


def register(app: typer.Typer) -> None:
    """Add `top` and `doctor` to `midstream`."""
    app.command()(top)
    app.command()(doctor)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between updates.", min=0.2)] = INTERVAL_S,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show live status: queues, workers, relay, webhooks, Redis. Stop with Ctrl-C."""
    with connect(url) as client:
        if once or json_:
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
                while True:
                    time.sleep(interval)
                    before, rendering = _update(client.status, client.url, before)
                    live.update(rendering, refresh=True)
        except KeyboardInterrupt:
            return


def _update(ask: Callable[[], Status], url: str, before: Status) -> tuple[Status, RenderableType]:
    """Return the new status and its rendering; if the service does not answer, the last status and
    the error.
    """
    try:
        status = ask()
    except MidstreamError as error:
        moment = time.strftime("%H:%M:%S", time.localtime(before.at))
        return before, Text.assemble((f"{error}\n", "bold red"), f"last update at {moment}")
    return status, show_status.status(status, url, before)


def doctor(
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Data directory of a `midstream up`; default: from the settings."),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT",
            help=(
                "Instead of checks, print what serving this checkpoint needs. `-`: the settings' "
                "model."
            ),
        ),
    ] = None,
    tokens_per_second: Annotated[
        float, typer.Option(help="With --plan: tokens that the engine computes per second.", min=0)
    ] = 5000.0,
    gpu_memory_gib: Annotated[
        float, typer.Option(help="With --plan: memory of one GPU; 0: unknown.", min=0)
    ] = 0.0,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="With --plan: on CPUs instead of GPUs.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting; repeatable."),
    ] = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Check Redis, clocks, disk, versions, workers, relay, webhooks and keys, with advice.

    Exit code 1 if a check fails.
    """
    from ..stack import plan as plans
    from ..stack.checks.table import PLANNED, RUNNING
    from ..stack.supervisor import own_redis_url

    settings = load_settings(
        given=overrides(set_ or []), data_dir=str(data_dir) if data_dir else None
    )
    report = Report(Console(quiet=True) if json_ else out)
    if plan is not None:
        result = plans.planned(
            plan.removeprefix("-"),
            settings,
            gpu=not cpu,
            tokens_per_second=tokens_per_second,
            gpu_memory_gib=gpu_memory_gib,
        )
        report.add(findings_of(PLANNED, result))
        print_json(plans.facts(result), json_)
        return
    data = discovery.data_dir(settings)
    stack = discovery.running(data)
    address = (
        url
        or (stack.url if data_dir and stack else "")
        or discovery.find_url(None, settings, sure=False)
    )
    service = Service(settings, settings.redis_url or own_redis_url(data), address)
    report.add(findings_of(RUNNING, service))
    print_json(report.findings, json_)
    raise typer.Exit(report.end())
