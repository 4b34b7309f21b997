"""`midstream verify`: one page on what holds on this machine, with this model."""

import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import Annotated

import typer

from ...schemas.base.records import to_json
from ...schemas.base.settings import SettingsError, engine_options, load_settings
from ..extras import COMMANDS, need
from ..render.findings import Report
from ..stack.processes import sigterm_as_interrupt
from .options import overrides
from .start import DataDir
from .terminal import err, out

#: Seconds of the timed pairs, with which the whole command takes about three minutes.
PAIRS_S = 60.0


def register(app: typer.Typer) -> None:
    """Add `verify` to `midstream`."""
    app.command()(verify)


def verify(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub name; default: the demo model.")
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the page as JSON.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time for the calls to both servers.", min=0, max=3600)
    ] = PAIRS_S,
    kill_worker: Annotated[
        bool, typer.Option("--kill-worker", help="Also kill the worker: a minute more.")
    ] = False,
    data_dir: DataDir = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="NAME=VALUE", help="An option of vLLM; repeatable."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable."),
    ] = None,
) -> None:
    """Check on this machine, with this model, what Midstream promises; print one page.

    Starts stock vLLM's server and the stack, and stops both. Takes about three minutes with the
    demo model on two cores. Exit code 1 if a promise does not hold.
    """
    need("cpu", "`midstream verify`", *COMMANDS["verify"])
    from ...workers.engines import check_options
    from ..stack.supervisor import OWN
    from ..stack.verify import verify as verified

    try:
        base = load_settings(data_dir=str(data_dir) if data_dir else None)
        # a new one: what is there is not ours to replace
        folder = Path(base.data_dir).expanduser().resolve() / f"verify-{secrets.token_hex(4)}"
        settings = load_settings(
            given=overrides(set_ or []),
            model=model,
            engine_options=engine_options(engine or []) or None,
            data_dir=str(folder),
            **OWN,
        )
        logging.disable(logging.WARNING)  # vLLM logs when it is imported
        check_options(settings)
        logging.disable(logging.NOTSET)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error
    if json_ is not None and not json_.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {json_}: no such folder")
    # both engines compute on the same number of cores, as stock vLLM does by default
    if len(os.sched_getaffinity(0)) > 1:
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    killed = ("relay", "worker") if kill_worker else ("relay",)
    report = Report(out)
    with sigterm_as_interrupt():
        report.add(verified(settings, seconds, killed, lambda line: err.print(line, style="dim")))
    if json_ is not None:
        json_.write_bytes(to_json(report.findings))
    if not (code := report.end()):
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(code)
