"""The commands `lens`, each layer's prediction of the next token, and `tuned`, the maps that
rows may go through first.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ...schemas.base.records import to_json
from ...schemas.requests.lens import TunedLens
from ..render import figures
from ..render import lens as render
from ..sdk.client import Client
from . import options
from .jobs import AsJson, Model, Url, connect, out
from .registries import Registry

Name = Annotated[str, typer.Argument(metavar="NAME", help="A tuned lens's name.")]

tuned_app = typer.Typer(
    no_args_is_help=True,
    help="Manage tuned lenses, whose maps rows go through before the logit lens.",
)

lenses: Registry[TunedLens] = Registry(
    "a tuned lens",
    "tuned lenses",
    Client.tuned_lenses,
    Client.tuned_lens,
    Client.unregister_lens,
    render.listed,
    lambda tuned: [render.one(tuned)],
)
lenses.add_to(tuned_app)


def register(app: typer.Typer) -> None:
    """Add this module's command to `midstream`."""
    app.command()(lens)
    app.add_typer(tuned_app, name="tuned")


@options.with_handling
def lens(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    layers: Annotated[str, typer.Option(help="all, 3, 0-5, or 0-5,9,-1.")] = "all",
    positions: Annotated[
        str, typer.Option(help="As for captures: last_prompt, all_prompt, all, 0,5,-1, 5:9, …")
    ] = "all_prompt",
    hooks: Annotated[
        str | None,
        typer.Option(metavar="HOOK", help="Read the rows of this hook point; default: post_block."),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Most likely tokens of each row.")] = 5,
    token: Annotated[
        list[str] | None,
        typer.Option(
            help="Token whose rank is wanted: its text, with its leading space, or its id."
        ),
    ] = None,
    tuned: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Send rows through the maps of this tuned lens first."),
    ] = None,
    at: Annotated[
        str | None, typer.Option(help="before or after (default) steering at the same site.")
    ] = None,
    steer: Annotated[
        list[str] | None, typer.Option(metavar=options.STEER, help="As for submit; repeatable.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 1,
    figure: Annotated[
        Path | None, typer.Option(help="Write the heat map to this file: .png, .pdf, .svg, …")
    ] = None,
    model: Model = None,
    *,
    handling: dict[str, Any],  # the options of `with_handling`
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show the most likely next token by layer and position, through the model's own final norm and
    output matrix.
    """
    if figure is not None:
        figures.check(figure, "figure")
    fields = {**handling, "steering": options.parse_steering(steer or [])} | (
        {} if model is None else {"model": model}
    )
    with connect(url) as client:
        named = [int(item) if item.isdecimal() else item for item in token or []]
        result = client.lens(
            prompt,
            layers=options.parse_layers(layers),
            positions=options.parse_positions(positions),
            top_k=top_k,
            tokens=named,
            hook=hooks,
            tuned=tuned,
            at=at,
            max_tokens=max_tokens,
            **fields,
        )
        if json_:
            print(to_json(client.result(result.job).lens).decode())
        else:
            out.print(render.table(result))
            if result.named:
                out.print(render.named_table(result))
    if figure is not None:
        render.figure(result, figure)


@tuned_app.command("register")
def tuned_register(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="Folder with lens.safetensors, relative to the server's lens_dir."
        ),
    ],
    reads: Annotated[
        str, typer.Option(metavar="HOOK", help="Hook point whose rows the maps take.")
    ] = "post_block",
    residual: Annotated[
        bool, typer.Option("--residual", help="The maps give what is added to a row.")
    ] = False,
    description: Annotated[str, typer.Option(help="A description.")] = "",
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Register a tuned lens, or replace it; running requests keep the previous one."""
    with connect(url) as client:
        lenses.print(client.register_lens(name, path, reads, residual, model, description), json_)
