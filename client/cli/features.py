"""The command `features`: which features of a sparse autoencoder each token activates."""

from typing import Annotated, Any

import typer

from ...schemas.base import to_json
from ..render import features as render
from . import options
from .jobs import AsJson, Model, Url, connect, out


def register(app: typer.Typer) -> None:
    """Add this module's command to `midstream`."""
    app.command()(features)


@options.with_handling
def features(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    sae: Annotated[str, typer.Option(help="A registered sparse autoencoder: see `midstream sae list`.")],
    positions: Annotated[str, typer.Option(help="As for captures: last_prompt, all_prompt, all, 0,5,-1, 5:9, …")] = "all_prompt",
    top_k: Annotated[int, typer.Option(help="Most active features of each token.")] = 5,
    at: Annotated[str | None, typer.Option(help="before or after (default) steering at the same site.")] = None,
    steer: Annotated[list[str] | None, typer.Option(metavar=options.STEER, help="As for submit; repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 1,
    model: Model = None,
    *,
    handling: dict[str, Any],  # the options of `with_handling`
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show the most active features of each token."""
    fields = {**handling, "steering": options.parse_steering(steer or [])} | ({} if model is None else {"model": model})
    with connect(url) as client:
        found = client.features(
            prompt, sae, positions=options.parse_positions(positions), top_k=top_k, at=at, max_tokens=max_tokens, **fields
        )
    if json_:
        print(to_json(found.reading).decode())
    else:
        out.print(render.table(found, top_k))
