"""Steering on the command line: `modules …`, `global …`, `dynamic`."""

from pathlib import Path
from typing import Annotated

import typer

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import to_json
from ...schemas.requests.steering import GlobalView, ModuleView
from ..render import steering
from ..sdk.client import Client
from ..vectors import FORMATS
from . import options
from .jobs import AsJson, Model, Url, connect, out
from .registries import Registry

Name = Annotated[str, typer.Argument(metavar="NAME", help="A module's name.")]
Steer = Annotated[
    list[str], typer.Option(metavar=options.STEER, help="Steering for every request; repeatable.")
]

modules_app = typer.Typer(
    no_args_is_help=True, help="Manage named modules: steering that requests refer to by name."
)
global_app = typer.Typer(
    no_args_is_help=True, help="Manage global steering: steering of every request to a model."
)

registry: Registry[ModuleView] = Registry(
    "a module",
    "modules",
    Client.modules,
    Client.module,
    Client.unregister_module,
    steering.modules,
    lambda view: [steering.module(view), steering.entries(view.entries)],
)
registry.add_to(modules_app)


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.add_typer(modules_app, name="modules")
    app.add_typer(global_app, name="global")
    app.command("dynamic")(dynamic)


@modules_app.command("register")
def modules_register(
    name: Name,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help=f"A file of vectors, or {options.STEER_FILE}."),
    ],
    description: Annotated[str, typer.Option(help="A description.")] = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a module, or replace it; running requests keep the old content."""
    entries = options.parse_steering(files, "FILE")
    with connect(url) as client:
        registry.print(client.register_module(name, entries, model, description), json_)


@modules_app.command("export")
def modules_export(
    name: Name,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    format: Annotated[
        str | None,
        typer.Option("--format", help=f"{', '.join(FORMATS)}; by default that of the suffix."),
    ] = None,
    model: Model = None,
    url: Url = None,
) -> None:
    """Write a module to a file that other tools read."""
    with connect(url) as client:
        written = client.export_module(name, file, format, model)
    out.print(f"{name} written to {file} as {written}", markup=False, soft_wrap=True)


@global_app.command("show")
def global_show(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Show global steering, and whether every worker has applied it."""
    with connect(url) as client:
        _print_global(client.global_steering(model), json_)


@global_app.command("set")
def global_set(steer: Steer, model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Set global steering for new requests; exits non-zero, with nothing changed, if a rank rejects
    it.
    """
    entries = options.parse_steering(steer)
    with connect(url) as client:
        _print_global(client.set_global(entries, model), json_)


@global_app.command("clear")
def global_clear(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Clear global steering for new requests."""
    with connect(url) as client:
        _print_global(client.clear_global(model), json_)


def dynamic(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Show each rank's checksums, table, versions and queues now.

    Exits non-zero if they disagree.
    """
    with connect(url) as client:
        result = client.dynamic(model)
    if json_:
        print(to_json(result).decode())
    else:
        for worker in result.workers:
            out.print(steering.worker_line(worker), soft_wrap=True)
            out.print(steering.ranks(worker, result.determinism))
        out.print(steering.agreement_line(result), soft_wrap=True)
    if not result.determinism.consistent:
        raise MidstreamError(
            "ranks_disagree", result.determinism.detail or "the ranks do not agree"
        )


def _print_global(view: GlobalView, as_json: bool) -> None:
    if as_json:
        print(to_json(view).decode())
        return
    out.print(steering.global_line(view), soft_wrap=True)
    if view.entries:
        out.print(steering.entries(view.entries))
