"""Sparse autoencoders on the command line: `midstream sae …`."""

from typing import Annotated

import typer

from ...schemas.artifacts.saes import Sae
from ..render import saes
from ..sdk.client import Client
from .jobs import AsJson, Model, Url, connect
from .registries import Registry

Name = Annotated[str, typer.Argument(metavar="NAME", help="An autoencoder's name.")]

sae_app = typer.Typer(
    no_args_is_help=True, help="Manage sparse autoencoders, whose features requests read and steer."
)

autoencoders: Registry[Sae] = Registry(
    "a sparse autoencoder",
    "sparse autoencoders",
    Client.saes,
    Client.sae,
    Client.unregister_sae,
    saes.listed,
    lambda sae: [saes.one(sae)],
)
autoencoders.add_to(sae_app)


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.add_typer(sae_app, name="sae")


@sae_app.command("register")
def sae_register(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="SAELens' or Gemma Scope's folder, relative to the server's sae_dir.",
        ),
    ],
    reads: Annotated[
        str, typer.Option(metavar="HOOK:LAYER", help="What it reads, if its files do not name it.")
    ] = "",
    description: Annotated[str, typer.Option(help="A description.")] = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a sparse autoencoder, or replace it; running requests keep the previous one."""
    hook, _, layer = reads.partition(":")
    if reads and not layer.isdigit():
        raise typer.BadParameter(
            f"{reads!r} is not HOOK:LAYER, such as post_block:12", param_hint="--reads"
        )
    with connect(url) as client:
        autoencoders.print(
            client.register_sae(
                name, path, hook or None, int(layer) if layer else None, model, description
            ),
            json_,
        )
