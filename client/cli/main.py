"""The `midstream` command: `up`, `demo`, `model`, `version`, and the commands that the other
modules register.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import to_json
from ...schemas.base.settings import SettingsError, engine_options, load_settings
from ...schemas.base.version import __version__
from ...schemas.service.global_capture import from_settings
from ..extras import MissingExtraError, explained, need
from ..sdk import discovery
from . import (
    captures,
    harvests,
    jobs,
    keys,
    probes,
    readings,
    registered,
    service,
    stack,
    sweeps,
    webhooks,
)
from .jobs import AsJson, Url, connect, err, out
from .options import HOOKS_FORM, overrides


class Commands(TyperGroup):
    """The top-level commands; for an unknown command that a group has, suggests its full name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            similar = [
                f"midstream {name} {args[0]}"
                for name, group in self.commands.items()
                if args[0] in getattr(group, "commands", ())
            ]
            if similar:
                ctx.fail(
                    f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, similar))}?"
                )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(no_args_is_help=True, help="Checkpoints.")
app.add_typer(model_app, name="model")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"midstream {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Activation steering, capture and patching on stock vLLM, as a job service."""


@app.command()
def up(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub name; default: the demo model.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for Redis data, captures and logs.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API; 0: any free port.")] = None,
    flower_port: Annotated[
        int | None, typer.Option(help="Port of Flower; 0: any free port.")
    ] = None,
    global_capture: Annotated[
        str | None,
        typer.Option(
            metavar=HOOKS_FORM,
            help="Capture these sites for every request, such as post_block:all;pre_attn:0-17.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine", metavar="NAME=VALUE", help="An option of vLLM, such as seed=1; repeatable."
        ),
    ] = None,
    engine_unproven: Annotated[
        bool,
        typer.Option(
            "--engine-unproven",
            help="Also pass options that are not proven; /v1/models and manifests name them.",
        ),
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable."),
    ] = None,
) -> None:
    """Run the whole stack on this machine until Ctrl-C.

    Settings come from the file named by MIDSTREAM_CONFIG, MIDSTREAM_* in the environment, and these
    options, in increasing precedence.
    """
    need("up", "`midstream up`")
    from ...workers.engines import check_options
    from ..stack.supervisor import Supervisor

    options: dict[str, Any] = {
        "model": model,
        "data_dir": str(data_dir) if data_dir else None,
        "api_port": port,
        "flower_port": flower_port,
        "global_capture": global_capture,
        "engine_options": engine_options(engine or []) or None,
        "engine_unproven": engine_unproven or None,
    }
    settings = load_settings(given=overrides(set_ or []), **options)
    from_settings(settings)  # raises for an invalid global capture before anything starts
    check_options(settings)
    raise typer.Exit(Supervisor(settings, say=lambda line: print(line, flush=True)).run())


@app.command()
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
    need("demo" if url is None else "client", "`midstream demo`")
    from .demo import run_demo, run_demo_at

    raise typer.Exit(run_demo(data, keep=keep) if url is None else run_demo_at(url, data))


@model_app.command("fetch")
def model_fetch(
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute the checksums of the cached files.")
    ] = False,
) -> None:
    """Download the demo model, SmolLM2-135M-Instruct, to the cache folder and print its path."""
    from ...workers.demo_model import fetch_demo_model

    folder = fetch_demo_model(say=lambda line: err.print(line, style="dim"), verify=verify)
    print(folder)


@model_app.command("list")
def model_list(json_: AsJson = False, url: Url = None) -> None:
    """List the served models."""
    with connect(url) as client:
        served = client.models()
    print(to_json(served).decode() if json_ else "\n".join(served) or "no models")


@app.command()
def version(url: Url = None) -> None:
    """Print this version, and the server's if one answers."""
    import httpx

    from ..sdk.wire import VERSION_HEADER

    print(f"midstream {__version__}")
    address = discovery.find_url(url, sure=False)
    try:
        server = httpx.get(f"{address}/healthz", timeout=3.0).headers.get(VERSION_HEADER)
        print(
            f"server {server} at {address}"
            if server
            else f"the server at {address} is not Midstream"
        )
    except httpx.TransportError:
        print(f"no server at {address}")


for _module in (
    jobs,
    captures,
    readings,
    registered,
    probes,
    sweeps,
    harvests,
    service,
    stack,
    webhooks,
    keys,
):
    _module.register(app)


def main(arguments: list[str] | None = None) -> Any:
    """Run the console script; every error is one readable line on stderr and a non-zero exit
    status.
    """
    try:
        return app(arguments, prog_name="midstream")
    except MidstreamError as error:
        _fail(str(error))
    except (SettingsError, TimeoutError, OSError) as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        explanation = explained(error)
        if not isinstance(explanation, MissingExtraError):
            raise
        _fail(str(explanation))


def _fail(message: str) -> None:
    out.file.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
