"""The command `midstream dose`: submit, wait, draw."""

from pathlib import Path
from typing import Annotated

import typer

from ...schemas.jobs.doses import DoseRequest
from ..render.doses import drawn
from . import options
from .jobs import AsJson, Url, connect, out, print_json


def dose(
    file: Annotated[Path, typer.Argument(help="The body of `POST /v1/doses` as JSON.")],
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Weigh the effect of steering against its damage, by layer and scale."""
    with connect(url) as client:
        result = client.dose(options.read_json(file, DoseRequest, "FILE"))
    if not print_json(result, json_):
        out.print(*drawn(result), sep="\n")


def register(app: typer.Typer) -> None:
    """Add this module's command to `midstream`."""
    app.command()(dose)
