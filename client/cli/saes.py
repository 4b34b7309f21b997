"""Sparse autoencoders on the command line: `midstream sae …`."""

from typing import Annotated

import typer

from ...schemas.base import to_json
from ...schemas.saes import Sae
from ..render import saes
from .jobs import AsJson, Model, Url, connect, out, print_list

Name = Annotated[str, typer.Argument(metavar="NAME", help="An autoencoder's name.")]

sae_app = typer.Typer(no_args_is_help=True, help="Manage sparse autoencoders, whose features requests read and steer.")


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.add_typer(sae_app, name="sae")


@sae_app.command("list")
def sae_list(model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """List the sparse autoencoders."""
    with connect(url) as client:
        found = client.saes(model)
    print_list(found, found, saes.listed, "sparse autoencoders", json_)


@sae_app.command("register")
def sae_register(
    name: Name,
    path: Annotated[str, typer.Argument(metavar="PATH", help="SAELens' or Gemma Scope's folder, relative to the server's sae_dir.")],
    reads: Annotated[str, typer.Option(metavar="HOOK:LAYER", help="What it reads, if its files do not name it.")] = "",
    description: Annotated[str, typer.Option(help="A description.")] = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a sparse autoencoder, or replace it; running requests keep the former one."""
    hook, _, layer = reads.partition(":")
    if reads and not layer.isdigit():
        raise typer.BadParameter(f"{reads!r} is not HOOK:LAYER, such as post_block:12", param_hint="--reads")
    with connect(url) as client:
        _print(client.register_sae(name, path, hook or None, int(layer) if layer else None, model, description), json_)


@sae_app.command("show")
def sae_show(name: Name, model: Model = None, json_: AsJson = False, url: Url = None) -> None:
    """Show a sparse autoencoder."""
    with connect(url) as client:
        _print(client.sae(name, model), json_)


@sae_app.command("delete")
def sae_delete(name: Name, model: Model = None, url: Url = None) -> None:
    """Remove a sparse autoencoder; its files stay. Requests accepted earlier keep it."""
    with connect(url) as client:
        client.unregister_sae(name, model)
    out.print(f"{name} removed", markup=False)


def _print(sae: Sae, as_json: bool) -> None:
    if as_json:
        print(to_json(sae).decode())
    else:
        out.print(saes.one(sae))
