"""The commands that this package adds to `midstream`."""

from pathlib import Path
from typing import Annotated

import typer

from midstream.client.cli.terminal import say
from midstream.schemas.base.errors import Translated, invalid
from midstream.schemas.prompts.selectors import as_ranges

from .formats import jacobian


def add(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command()(convert)


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A lens of neuronpedia or TransformerLens: .pt.")
    ],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder to write, below the server's artifacts_dir/lenses."
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder of the model's checkpoint, whose output matrix edits need."),
    ] = None,
) -> None:
    """Write a folder that can be registered from another tool's file of a Jacobian lens."""
    with Translated((OSError, ValueError), lambda error: invalid("FILE", str(error))):
        layers = jacobian.convert(file, folder, checkpoint)
    say(f"{folder}: layers {as_ranges(layers)}")
