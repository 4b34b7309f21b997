"""`midstream doctor`: one list of checks, at three depths."""

import os
import secrets
import shutil
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from midstream.client.cli.keys import own_redis_url
from midstream.client.cli.options import overrides
from midstream.client.cli.terminal import AsJson, Url, err, out, print_json
from midstream.client.sdk import discovery
from midstream.schemas.settings.settings import (
    Settings,
    SettingsError,
    engine_options,
    load_settings,
)

from .checks.finding import findings_of
from .checks.report import Report
from .checks.service import Service
from .engine_packages import COMMANDS, need_engine
from .processes import sigterm_as_interrupt
from .running_settings import settings_of
from .start import DataDirOption, EngineOption, Set, check_engine

#: Seconds of the timed pairs, with which all measurements take about three minutes.
PAIRS_S = 60.0


def doctor(
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Start stock vLLM's server and a new stack instead, and measure what is promised.",
        ),
    ] = False,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Print what serving the model needs, starting nothing."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="With --deep and --plan: the checkpoint; default: the settings' model."),
    ] = None,
    data_dir: DataDirOption = None,
    set_: Set = None,
    engine: EngineOption = None,
    seconds: Annotated[
        float, typer.Option(help="With --deep: time for calls to both servers.", min=0, max=3600)
    ] = PAIRS_S,
    kill_worker: Annotated[
        bool,
        typer.Option("--kill-worker", help="With --deep: kill the worker too: a minute more."),
    ] = False,
    tokens_per_second: Annotated[
        float, typer.Option(help="With --plan: tokens that the engine computes per second.", min=0)
    ] = 5000.0,
    gpu_memory_gib: Annotated[
        float, typer.Option(help="With --plan: memory of one GPU; 0: unknown.", min=0)
    ] = 0.0,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="With --plan: on CPUs instead of GPUs.")
    ] = False,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Check Redis, clocks, disk, versions, workers, relay, webhooks and keys, with advice.

    With --deep, measure on this machine, with this model, what Midstream promises: about three
    minutes with the demo model on two cores. Exit code 1 if a check fails.
    """
    if deep and plan:
        raise typer.BadParameter("--deep and --plan exclude each other")
    try:
        given: dict[str, Any] = {
            "given": overrides(set_ or []),
            "model": model,
            "engine_options": engine_options(engine or []) or None,
            "data_dir": str(data_dir) if data_dir else None,
        }
        settings = _of_both_servers(given) if deep else load_settings(**given)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error
    # imported here, as what reads configs of models takes a second
    from .beside_stock import measured
    from .checks.plan import planned
    from .checks.table import of

    if deep:
        killed = ("relay", "worker") if kill_worker else ("relay",)
        findings = measured(settings, seconds, killed, lambda line: err.print(line, style="dim"))
    elif plan:
        findings = findings_of(
            of("plan"), planned(settings, not cpu, tokens_per_second, gpu_memory_gib)
        )
    else:
        findings = findings_of(of("quick"), _service(settings, url, data_dir is not None))
    report = Report(Console(quiet=True) if json_ else out)
    with sigterm_as_interrupt():
        report.add(findings)
    print_json(report.findings, json_)
    code = 0 if plan else report.end()  # a plan only has facts
    if deep and not code:  # otherwise the logs stay
        shutil.rmtree(settings.data_dir, ignore_errors=True)
    raise typer.Exit(code)


def _service(settings: Settings, url: str | None, of_folder: bool) -> Service:
    """Return the service that the settings name; with `of_folder`, the stack that runs there."""
    data = discovery.data_dir(settings)
    stack = discovery.running(data)
    of_stack = None if stack is None else settings_of(stack)
    if of_stack is not None:  # what it runs with, which the settings of this command may not be
        settings = msgspec.structs.replace(of_stack, api_key=settings.api_key)
    address = (
        url
        or (stack.url if of_folder and stack else "")
        or discovery.find_url(settings, sure=False)
    )
    url_of_redis = settings.redis_url or own_redis_url(data)
    return Service(settings, url_of_redis, address, is_of_stack=of_stack is not None)


def _of_both_servers(given: dict[str, Any]) -> Settings:
    """Return the settings of stock vLLM's server and a new stack, in a new folder below the data
    directory: what is there is not ours to replace. Raises SettingsError.
    """
    need_engine("`midstream doctor --deep`", *COMMANDS["deep"])
    from .supervisor import OWN

    base = load_settings(data_dir=given["data_dir"])
    folder = Path(base.data_dir).expanduser().resolve() / f"deep-{secrets.token_hex(4)}"
    settings = load_settings(**(given | OWN | {"data_dir": str(folder)}))
    # both engines compute on the same number of cores, as stock vLLM does by default
    if len(os.sched_getaffinity(0)) > 1:
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    check_engine(settings)
    return settings
