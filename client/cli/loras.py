"""LoRA adapters on the command line: `midstream loras …`."""

from typing import Annotated

import typer

from ...schemas.artifacts.loras import Lora
from ..render import loras
from ..sdk.client import Client
from .jobs import AsJson, Model, Url, connect
from .registries import Registry

Name = Annotated[str, typer.Argument(metavar="NAME", help="An adapter's name.")]

loras_app = typer.Typer(
    no_args_is_help=True, help="Manage LoRA adapters: requests name one with --lora."
)

adapters: Registry[Lora] = Registry(
    "an adapter",
    "adapters",
    Client.loras,
    Client.lora,
    Client.unregister_lora,
    loras.listed,
    lambda lora: [loras.one(lora)],
)
adapters.add_to(loras_app)


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.add_typer(loras_app, name="loras")


@loras_app.command("add")
def loras_add(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="PEFT's folder, relative to the server's lora_dir."),
    ],
    description: Annotated[str, typer.Option(help="A description.")] = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register an adapter, or replace it; running requests keep the previous one."""
    with connect(url) as client:
        adapters.print(client.register_lora(name, path, model, description), json_)
