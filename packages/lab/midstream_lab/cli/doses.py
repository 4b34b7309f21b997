"""The command `dose`."""

from pathlib import Path
from typing import Annotated

import typer

from midstream.client.cli import options
from midstream.client.cli.requests import CellLayers, Figure, SteerOption, finish, of_a_model
from midstream.client.cli.terminal import (
    AsJson,
    FieldsOption,
    File,
    Model,
    out,
    print_json,
    with_client,
)
from midstream.client.render import figures
from midstream.client.sdk.client import Client

from ..show import doses

#: What is meant by a text in place of the file of `--prompts`.
_TYPED = "a prompt itself is given without the option: midstream dose 'TEXT'"


@with_client
def dose(
    client: Client,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts to continue.")
    ] = None,
    file: File = None,
    set_: FieldsOption = None,
    model: Model = None,
    steer: SteerOption = None,
    layers: CellLayers = None,
    prompts: Annotated[
        Path | None, typer.Option(help=f"Prompts to continue: {options.ROWS_FORM}.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Texts that have nothing to do with the effect: likewise.")
    ] = None,
    figure: Figure = None,
    texts: Annotated[bool, typer.Option(help="Print the whole text of each scale.")] = False,
    json_: AsJson = False,
) -> None:
    """Weigh the effect of steering against its damage, by layer and scale; `--set scales=…`,
    `--set effect.target=…` and the like give the other fields.
    """
    figures.check(figure, "--figure")
    typed = {
        "prompts": [*(prompt or []), *options.texts(prompts, "--prompts", _TYPED)],
        "held_out": options.texts(held_out, "--held-out"),
        "steering": options.steering(steer),
        "layers": options.layers(layers),
        "model": model,
    }
    result = client.dose(None, **of_a_model(client, options.fields(file, set_, typed)))
    if not print_json(result, json_) and result.dose:
        out.print(*doses.drawn(result.dose, texts), sep="\n")
    finish(result.id, figure, result.plot, json_)


COMMANDS = (dose,)
