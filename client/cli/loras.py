"""LoRA adapters on the command line: `midstream loras …`."""

from typing import Annotated

import typer

from ...schemas.base import to_json
from ...schemas.loras import Lora
from ..render import loras
from .jobs import AsJson, Model, Url, connect, out, print_list

Name = Annotated[str, typer.Argument(metavar="NAME", help="An adapter's name.")]

loras_app = typer.Typer(no_args_is_help=True, help="Manage LoRA adapters: requests name one with --lora.")


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.add_typer(loras_app, name="loras")


@loras_app.command("list")
def loras_list(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """List the adapters."""
    with connect(url) as client:
        found = client.loras(model)
    print_list(found, found, loras.listed, "adapters", json_)


@loras_app.command("add")
def loras_add(
    name: Name,
    path: Annotated[str, typer.Argument(metavar="PATH", help="PEFT's folder, relative to the server's lora_dir.")],
    description: Annotated[str, typer.Option(help="A description.")] = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register an adapter, or replace it; running requests keep the former one."""
    with connect(url) as client:
        _print(client.register_lora(name, path, model, description), json_)


@loras_app.command("show")
def loras_show(name: Name, model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Show an adapter."""
    with connect(url) as client:
        _print(client.lora(name, model), json_)


@loras_app.command("remove")
def loras_remove(name: Name, model: Model = None, url: Url = None) -> None:
    """Remove an adapter; its files stay. Requests accepted earlier keep it."""
    with connect(url) as client:
        client.unregister_lora(name, model)
    out.print(f"{name} removed", markup=False)


def _print(lora: Lora, as_json: bool) -> None:
    if as_json:
        print(to_json(lora).decode())
    else:
        out.print(loras.one(lora))
