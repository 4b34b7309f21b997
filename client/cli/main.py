"""The `midstream` command: `demo`, `model`, `version`, and the commands that the other modules
register.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import to_json
from ...schemas.base.settings import SettingsError
from ...schemas.base.version import __version__
from ..extras import COMMANDS, MissingExtraError, explained, need
from ..sdk import discovery
from ..sdk.client import Client
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
    start,
    sweeps,
    verify,
    webhooks,
)
from .jobs import AsJson, Url, err, out, with_client

#: Section of `midstream --help` → its commands and groups, in this order.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start and stop": ("up", "serve", "demo", "status", "logs", "down", "model"),
    "Requests": (
        *("submit", "sweep", "attribute", "dose", "lens", "features", "attention"),
        *("job", "capture", "harvest"),
    ),
    "Named artifacts": (
        *("modules", "global", "runs", "probe", "policy"),
        *("sae", "tuned", "jacobian", "loras"),
    ),
    "Operations": (
        *("top", "doctor", "verify", "dynamic", "keys", "tenants", "webhooks"),
        *("acl", "curve", "version"),
    ),
}


class Commands(TyperGroup):
    """The top-level commands, in sections; for an unknown command that a group has, suggests its
    full name.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of their sections."""
        known = super().list_commands(ctx)
        listed = [name for names in SECTIONS.values() for name in names if name in known]
        return [*listed, *(name for name in known if name not in listed)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, with its section set."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = next(
                (title for title, names in SECTIONS.items() if command.name in names), None
            )
        return command

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
        if args[1:2] == ["remove"] and "delete" in getattr(self.commands[args[0]], "commands", ()):
            ctx.fail(f"No such command 'remove'. Did you mean 'midstream {args[0]} delete'?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(no_args_is_help=True, help="Fetch the demo model; list the served models.")
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
        need("cpu", "`midstream demo`", *COMMANDS["demo"])
    from .demo import run_demo

    raise typer.Exit(run_demo(data, url, keep=keep))


@model_app.command("fetch")
def model_fetch(
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute the checksums of the cached files.")
    ] = False,
) -> None:
    """Download the demo model, SmolLM2-135M-Instruct, to the cache folder and print its path."""
    from ...workers.demo_model import fetch_demo_model

    print(fetch_demo_model(say=lambda line: err.print(line, style="dim"), verify=verify))


@model_app.command("list")
@with_client
def model_list(client: Client, json_: AsJson = False) -> None:
    """List the served models."""
    served = client.models()
    print(to_json(served).decode() if json_ else "\n".join(served) or "no models")


@app.command()
def version(url: Url = None) -> None:
    """Print this version, and the server's if one answers."""
    import httpx2

    from ..sdk.wire import VERSION_HEADER

    print(f"midstream {__version__}")
    address = discovery.find_url(url, sure=False)
    try:
        server = httpx2.get(f"{address}/healthz", timeout=3.0).headers.get(VERSION_HEADER)
        print(
            f"server {server} at {address}"
            if server
            else f"the server at {address} is not Midstream"
        )
    except httpx2.TransportError:
        print(f"no server at {address}")


for _module in (
    start,
    jobs,
    captures,
    readings,
    registered,
    probes,
    sweeps,
    harvests,
    service,
    verify,
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
