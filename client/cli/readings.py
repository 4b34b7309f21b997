"""The commands `lens`, `features` and `attention`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from ...schemas.base.errors import invalid
from ..captures.patterns import Attention, Behaviour, attention_of
from ..render import attention as show, figures, readings
from . import options
from .captures import open_capture
from .jobs import AsJson, Model, Url, connect, only_model, out, print_json

Prompt = Annotated[str, typer.Argument(help="The prompt.")]
Positions = Annotated[
    str, typer.Option(help="As for captures: last_prompt, all_prompt, all, 0,5,-1, 5:9, …")
]
At = Annotated[
    str | None, typer.Option(help="before or after (default) steering at the same site.")
]
Steer = Annotated[
    list[str] | None, typer.Option(metavar=options.STEER, help="As for submit; repeatable.")
]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    for command in (lens, features, attention):
        app.command()(command)


def _fields(handling: dict[str, Any], steer: list[str] | None, model: str | None) -> dict[str, Any]:
    """Return the job's other fields, without the reading."""
    steering = {"steering": options.parse_steering(steer or [])}
    return {**handling, **steering, **({} if model is None else {"model": model})}


@options.with_handling
def lens(
    prompt: Prompt,
    layers: Annotated[str, typer.Option(help="all, 3, 0-5, or 0-5,9,-1.")] = "all",
    positions: Positions = "all_prompt",
    hooks: Annotated[
        str | None,
        typer.Option(metavar="HOOK", help="Read the rows of this hook point; default: post_block."),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Most likely tokens of each row.")] = 5,
    token: Annotated[
        list[str] | None,
        typer.Option(help="Token whose rank to show: its text, with its leading space, or its id."),
    ] = None,
    tuned: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Send rows through the maps of this tuned lens first."),
    ] = None,
    jacobian: Annotated[
        str | None, typer.Option(metavar="NAME", help="Multiply rows by this Jacobian lens first.")
    ] = None,
    at: At = None,
    steer: Steer = None,
    max_tokens: MaxTokens = 1,
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
    fields = _fields(handling, steer, model)
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
            jacobian=jacobian,
            at=at,
            max_tokens=max_tokens,
            **fields,
        )
        if json_:
            print_json(client.result(result.job).lens)
        else:
            out.print(readings.lens_table(result))
            if result.named:
                out.print(readings.named_table(result))
    if figure is not None:
        figures.lens_figure(result, figure)


@options.with_handling
def features(
    prompt: Prompt,
    sae: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[:TOP_K]",
            help="A registered sparse autoencoder (`midstream sae list`); repeatable.",
        ),
    ],
    positions: Positions = "all_prompt",
    top_k: Annotated[
        int, typer.Option(help="Most active features of each token, if --sae has no number.")
    ] = 5,
    at: At = None,
    steer: Steer = None,
    max_tokens: MaxTokens = 1,
    model: Model = None,
    *,
    handling: dict[str, Any],  # the options of `with_handling`
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show the most active features of each token."""
    fields = _fields(handling, steer, model)
    with connect(url) as client:
        request = [options.parse_features(value, "--sae") for value in sae]
        most = {value["sae"]: value.get("top_k", top_k) for value in request}
        result = client.readings.features_of(
            prompt,
            most,
            positions=options.parse_positions(positions),
            at=at,
            max_tokens=max_tokens,
            **fields,
        )
    if not print_json([value.reading for value in result.values()], json_):
        tables = [readings.features_table(value, most[name]) for name, value in result.items()]
        out.print(*tables, sep="\n")


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
    """Show what tokens attend to: a map of tokens by tokens for each head, and the strongest heads
    of each behaviour, such as attention to the previous token.
    """
    if (source is None) == (prompt is None):
        raise invalid("--prompt", "give either a prompt or a capture (job or folder)")
    if source is not None and " " in source and not Path(source).exists():
        raise invalid("--prompt", "a prompt without this option", hint="give it as --prompt TEXT")
    if figure_ is not None:
        figures.check(figure_, "--figure")
    if behaviour is not None and behaviour not in get_args(Behaviour):
        raise invalid(
            "--behaviour", f"{behaviour!r} is not known", allowed=", ".join(get_args(Behaviour))
        )
    chosen_layers, chosen_heads = (
        options.parse_layers(layers),
        None if heads is None else options.parse_layers(heads),
    )
    if prompt is not None:
        with connect(url) as client:
            result = client.attention(
                prompt, layers=chosen_layers, heads=chosen_heads, model=model or only_model(client)
            )
    else:
        with open_capture(str(source), url) as reader:
            result = attention_of(reader, chosen_layers, chosen_heads, request)
    valid = cast(Behaviour | None, behaviour)
    panels = parse_panels(result, show_) if show_ else show.panels_of(result, behaviour=valid)
    if not print_json(_facts(result), json_):
        out.print(show.report(result, panels))
        out.print(f"job: {result.job}", style="dim", markup=False, soft_wrap=True)
    if figure_ is not None:
        figures.attention_figure(result, figure_, panels)
        if not json_:
            out.print(f"drawn: {figure_}", markup=False, soft_wrap=True)


def _facts(attention: Attention) -> dict[str, Any]:
    """Return the JSON output: tokens, and every head's scores."""
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


def parse_panels(attention: Attention, texts: Sequence[str]) -> list[show.Panel]:
    """Parse texts such as `5.3` (layer and head).

    Raises MidstreamError that names `--show`, or lists the valid heads.
    """
    panels = []
    for text in texts:
        layer, dot, head = text.partition(".")
        if not (dot and layer.isdecimal() and head.isdecimal()):
            raise invalid("--show", f"{text!r} is not LAYER.HEAD", allowed="such as 5.3")
        attention.of(int(layer), int(head))
        panels.append((int(layer), int(head)))
    return panels
