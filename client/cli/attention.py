"""Attention patterns on the command line: `midstream attention` of a prompt, or of captured queries
and keys.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from ...schemas.base.errors import invalid
from ...schemas.base.records import to_json
from ..captures.patterns import Attention, Behaviour, attention_of
from ..render import attention as show
from ..render.attention_figure import figure
from ..render.figures import check
from . import options
from .captures import open_capture
from .jobs import AsJson, Url, connect, only_model, out


def register(app: typer.Typer) -> None:
    """Add this module's command to `midstream`."""
    app.command()(attention)


def attention(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[JOB|FOLDER]", help="A capture of q and k at all positions."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Run this prompt instead, and capture its queries and keys.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first model served.")] = None,
    layers: Annotated[str, typer.Option(help="all (default), 3, 0-5, or 0-5,9,-1.")] = "all",
    heads: Annotated[str | None, typer.Option(help="all (default), 3, or 0-3,5.")] = None,
    show_: Annotated[
        list[str] | None,
        typer.Option(
            "--show",
            metavar="LAYER.HEAD",
            help="Draw this head; repeatable. Default: the strongest.",
        ),
    ] = None,
    behaviour: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(get_args(Behaviour)), help="Draw the heads that show this most."
        ),
    ] = None,
    figure_: Annotated[
        Path | None,
        typer.Option("--figure", help="Draw a picture: out.png, out.pdf or out.svg (matplotlib)."),
    ] = None,
    request: Annotated[int, typer.Option(help="Which prompt of the job.")] = 0,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show what tokens attend to: a map of tokens by tokens per head, and the heads that attend to
    the previous token, and so on.
    """
    if (source is None) == (prompt is None):
        raise invalid("--prompt", "give either a prompt, or a capture's job or folder")
    if figure_ is not None:
        check(figure_, "--figure")
    if behaviour is not None and behaviour not in get_args(Behaviour):
        raise invalid(
            "--behaviour", f"{behaviour!r} is not known", allowed=", ".join(get_args(Behaviour))
        )
    chosen, of_heads = (
        options.parse_layers(layers),
        None if heads is None else options.parse_layers(heads),
    )
    if prompt is not None:
        with connect(url) as client:
            result = client.attention(
                prompt, layers=chosen, heads=of_heads, model=model or only_model(client)
            )
    else:
        with open_capture(str(source), url) as reader:
            result = attention_of(reader, chosen, of_heads, request)
    valid = cast(Behaviour | None, behaviour)
    panels = named(result, show_) if show_ else show.panels_of(result, behaviour=valid)
    if json_:
        print(to_json(_facts(result)).decode())
    else:
        out.print(show.report(result, panels))
        out.print(f"job: {result.job}", style="dim", markup=False, soft_wrap=True)
    if figure_ is not None:
        figure(result, figure_, panels)
        if not json_:
            out.print(f"drawn: {figure_}", markup=False, soft_wrap=True)


def _facts(attention: Attention) -> dict[str, Any]:
    """For programs: tokens, and every head's scores."""
    scores = {
        behaviour: [score._asdict() for score in attention.scores(behaviour)]
        for behaviour in attention.behaviours()
    }
    return {
        "job": attention.job,
        "positions": attention.positions,
        "tokens": attention.tokens,
        "absent": attention.absent,
        "scores": scores,
    }


def named(attention: Attention, texts: Sequence[str]) -> list[show.Panel]:
    """`5.3`, layer and head, of each text.

    Raises MidstreamError naming `--show`, or the heads that there are.
    """
    panels = []
    for text in texts:
        layer, dot, head = text.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise invalid("--show", f"{text!r} is not LAYER.HEAD", allowed="such as 5.3")
        attention.of(int(layer), int(head))
        panels.append((int(layer), int(head)))
    return panels
