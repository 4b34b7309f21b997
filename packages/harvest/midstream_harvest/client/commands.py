"""The commands `harvest`, `survey`, `pause` and `resume`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from midstream.client.cli import options
from midstream.client.cli.jobs import print_view, words_of
from midstream.client.cli.requests import HooksOption, LayersOption, of_a_model
from midstream.client.cli.terminal import (
    AsJson,
    FieldsOption,
    File,
    Model,
    Wait,
    detach,
    out,
    print_json,
    with_client,
)
from midstream.client.sdk.client import Client
from midstream.client.texts import split
from midstream.schemas.base.errors import invalid

from .progress import harvest_bar
from .shown import survey_tables

HarvestArgument = Annotated[str, typer.Argument(help="A harvest's id.")]


@with_client
def harvest(
    client: Client,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="File, with its column as FILE:COLUMN, or folder below the server's "
            "harvest_sources.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Fields of the request (JSON, TOML), or documents that are sent with it: "
            f"{options.ROWS_FORM}.",
        ),
    ] = None,
    set_: FieldsOption = None,
    model: Model = None,
    layers: LayersOption = None,
    hooks: HooksOption = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of all sequences; default: the whole source.")
    ] = None,
    wait: Wait = True,
    json_: AsJson = False,
) -> None:
    """Harvest the rows of a corpus. Interrupting it leaves the harvest running."""
    path, column = split(source or "")
    typed: dict[str, Any] = {
        "source.path": source and str(path),
        "source.field": column or None,
        "model": model,
        "max_tokens": max_tokens,
    }
    fields = options.fields(file, set_, typed | options.sites(hooks, layers), "source.lines")
    if "source" not in fields:
        raise invalid("SOURCE", "is required unless --file has documents or a whole request")
    view = client.harvests.submit(None, **of_a_model(client, fields))
    detach(view, wait, json_)
    with harvest_bar() as progress:
        view = client.harvests.wait(view, progress)
    print_view(view, json_)


@with_client
def survey(
    client: Client,
    harvest: HarvestArgument,
    file: File = None,
    set_: FieldsOption = None,
    feature: Annotated[
        int | None, typer.Option(help="Whose examples are shown; default: the first listed.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Survey the features of a finished harvest (`--set sae=NAME`), or compare it with another of
    the same tokens (`--set against=HARVEST`).
    """
    found = client.harvests.survey(harvest, **options.fields(file, set_))
    view = found.view(limit=20, feature=feature)
    if not print_json(view, json_):
        tokens = sorted({token for one in view.examples for token in one.token_ids})
        words = words_of(client, client.harvests.get(harvest).model, tokens)
        out.print(*survey_tables(view, words), sep="\n", soft_wrap=True)


@with_client
def pause(client: Client, harvest: HarvestArgument, json_: AsJson = False) -> None:
    """Pause a harvest; finished shards are kept."""
    print_view(client.harvests.pause(harvest), json_)


@with_client
def resume(client: Client, harvest: HarvestArgument, json_: AsJson = False) -> None:
    """Continue a paused harvest."""
    print_view(client.harvests.resume(harvest), json_)


COMMANDS = (harvest, survey, pause, resume)
