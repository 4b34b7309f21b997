"""The command `features`: which features of a sparse autoencoder each token activates."""

from typing import Annotated, Any

import typer

from ...schemas.base.records import to_json
from ..render import features as render
from . import options
from .jobs import AsJson, Model, Url, connect, out


def register(app: typer.Typer) -> None:
    """Add this module's command to `midstream`."""
    app.command()(features)


@options.with_handling
def features(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    sae: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[:TOP_K]",
            help="A registered sparse autoencoder (`midstream sae list`); repeatable.",
        ),
    ],
    positions: Annotated[
        str, typer.Option(help="As for captures: last_prompt, all_prompt, all, 0,5,-1, 5:9, …")
    ] = "all_prompt",
    top_k: Annotated[
        int, typer.Option(help="Most active features of each token, where --sae names no number.")
    ] = 5,
    at: Annotated[
        str | None, typer.Option(help="before or after (default) steering at the same site.")
    ] = None,
    steer: Annotated[
        list[str] | None, typer.Option(metavar=options.STEER, help="As for submit; repeatable.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 1,
    model: Model = None,
    *,
    handling: dict[str, Any],  # the options of `with_handling`
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show the most active features of each token."""
    fields = {**handling, "steering": options.parse_steering(steer or [])} | (
        {} if model is None else {"model": model}
    )
    with connect(url) as client:
        request = [options.parse_features(value, "--sae") for value in sae]
        most = {value["sae"]: value.get("top_k", top_k) for value in request}
        result = client.features_of(
            prompt,
            most,
            positions=options.parse_positions(positions),
            at=at,
            max_tokens=max_tokens,
            **fields,
        )
    if json_:
        print(to_json([value.reading for value in result.values()]).decode())
    else:
        out.print(*(render.table(value, most[name]) for name, value in result.items()), sep="\n")
