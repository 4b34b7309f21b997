"""The commands that submit prompts: `submit`, `lens` and `attention`; and the options of all that
submit work.

Each has options for what is typed daily; `--set` and `--file` give every field that HTTP takes.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from ...schemas.base.errors import invalid
from ...schemas.jobs.jobs import JobRequest
from ...schemas.prompts.selectors import RequestedPositions, Span
from .. import values
from ..captures.patterns import Attention, Behaviour, attention_of
from ..images import with_images
from ..render import (
    attention as show_attention,
    figures,
    readings,
)
from ..sdk.client import Client
from . import options
from .captures import open_capture
from .jobs import follow, report_end
from .terminal import (
    AsJson,
    FieldsOption,
    File,
    Model,
    Url,
    Wait,
    connecting,
    detach,
    first_model,
    out,
    print_json,
    say,
    with_client,
)

LAYERS = "all, 3, 0-5, or 0-5,9,-1."
LayersOption = Annotated[str | None, typer.Option(help=f"Capture these layers: {LAYERS}")]
HooksOption = Annotated[
    str | None,
    typer.Option(
        metavar=options.HOOKS_FORM,
        help="At these hooks, each with its own layers or with --layers; default: post_block.",
    ),
]
SteerOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar=options.STEER, help="Add a vector, apply op=…, or use a named module; repeatable."
    ),
]
PositionsOption = Annotated[
    str | None,
    typer.Option(
        help="last_prompt, all_prompt, all_generated, all, 0,5,-1, 5:9, 5:, last:64, or JSON: "
        '{"turn": -1}.'
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Tokens to generate; default: 16. 0: only rows, scores or readings."),
]
Figure = Annotated[
    Path | None, typer.Option(help="Draw a figure: out.png, out.pdf or out.svg (matplotlib).")
]
CellLayers = Annotated[str | None, typer.Option(help=f"Of the cells: {LAYERS}")]


@with_client
def submit(
    client: Client,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="One or more prompts.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help=f"Fields of the request (JSON, TOML), or prompts: {options.ROWS_FORM}.",
        ),
    ] = None,
    set_: FieldsOption = None,
    model: Model = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="PNG or JPEG file that is part of each prompt, in a chat; repeatable."),
    ] = None,
    layers: LayersOption = None,
    hooks: HooksOption = None,
    positions: PositionsOption = None,
    steer: SteerOption = None,
    max_tokens: MaxTokens = None,
    wait: Wait = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print receipts and the job's facts.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only print the tokens that positions select, and without tokens to generate "
            "how many layers are computed.",
        ),
    ] = False,
    json_: AsJson = False,
) -> None:
    """Submit a job; by default, wait for it and show the result."""
    capture = options.sites(hooks, layers) | {"positions": options.positions(positions)}
    typed = {
        "model": model,
        "prompts": prompts,
        "sampling.max_tokens": max_tokens,
        "steering": options.steering(steer),
        **{f"capture.{name}": item for name, item in capture.items()},
    }
    fields = options.fields(file, set_, typed, "prompts")
    values.known_keywords(fields, JobRequest)
    if not fields.keys() & {"prompts", "prompt", "messages"}:
        raise invalid("prompts", "give a prompt, or --file with prompts or a whole request")
    if image:
        texts = fields.pop("prompts")
        fields["messages"] = [
            with_images([{"role": "user", "content": text}], image) for text in texts
        ]
    request = values.request(None, of_a_model(client, fields), JobRequest)
    if dry_run:
        _print_positions(client, request, json_)
        if not request.sampling.max_tokens:
            _print_layers(client, request, json_)
        return
    view = client.submit(request)
    detach(view, wait, json_)
    if not json_:
        follow(client, view)
    report_end(client, client.wait(view.id), json_, verbose)


def _print_positions(client: Client, request: JobRequest, as_json: bool) -> None:
    """Print the tokens that each selector of positions selects in each prompt."""
    selectors = [*_selectors(client, request)] or [("prompt", "all_prompt")]
    for number, prompt in enumerate(request.prompts or request.messages or ()):
        for field, positions in selectors:
            late = isinstance(positions, Span) and positions.is_window
            found = [] if late else client.positions(prompt, positions, model=request.model)
            tokens = [at._asdict() for at in found]
            if not print_json({"prompt": number, "field": field, "tokens": tokens}, as_json):
                shown = "   …  known when the request ends" if late else found
                say(f"prompt {number}, {field}:\n{shown}")


def _print_layers(client: Client, request: JobRequest, as_json: bool) -> None:
    """Print how many layers a job without tokens computes."""
    plan = client.plan(request)
    if not print_json({"layers": plan.layers, "num_layers": plan.num_layers}, as_json):
        layers = plan.num_layers if plan.layers is None else plan.layers
        say(f"layers: {layers} of {plan.num_layers} are computed")


def _selectors(client: Client, request: JobRequest) -> Iterator[tuple[str, RequestedPositions]]:
    """Yield each selector of a request's capture, steering and patches by its field."""
    specs: dict[str, Any] = {"capture": request.capture} if request.capture else {}
    specs |= {f"steering[{index}]": spec for index, spec in enumerate(request.steering)}
    specs |= {f"patch[{index}]": spec for index, spec in enumerate(request.patch)}
    for field, spec in specs.items():
        if spec.positions is None and spec.module is not None:
            for number, entry in enumerate(client.modules.get(spec.module).entries):
                yield f"{field}, entry {number} of {spec.module}", entry.positions
        else:
            yield f"{field}.positions", spec.positions or "all"


def of_a_model(client: Client, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, with the first served model if they name none."""
    return fields if "model" in fields else {"model": first_model(client), **fields}


def finish(job: str, path: Path | None, draw: Callable[[Path], Any], as_json: bool = False) -> None:
    """Draw the figure, if there is one, and print where things are."""
    if path is not None:
        draw(path)
    if not as_json:
        say(f"job: {job}" + (f"\ndrawn: {path}" if path else ""))


# --- Readings


@with_client
def lens(
    client: Client,
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    layers: Annotated[str, typer.Option(help=LAYERS)] = "all",
    positions: PositionsOption = "all_prompt",
    token: Annotated[
        list[str] | None,
        typer.Option(help="Token whose rank to show: its text, with its leading space, or its id."),
    ] = None,
    steer: SteerOption = None,
    file: File = None,
    set_: FieldsOption = None,
    model: Model = None,
    figure: Figure = None,
    json_: AsJson = False,
) -> None:
    """Show the most likely next token by layer and position, through the model's own final norm and
    output matrix; `--set jacobian=NAME` or `tuned=NAME`: through a registered lens.
    """
    figures.check(figure, "--figure")
    typed = {
        "layers": options.layers(layers),
        "positions": options.positions(positions),
        "tokens": [int(item) if item.isdecimal() else item for item in token or []],
        "steering": options.steering(steer),
        "model": model,
    }
    result = client.lens(prompt, **options.fields(file, set_, typed))
    if json_:
        print_json(client.result(result.job).lens)
    else:
        out.print(readings.lens_table(result))
        if result.named:
            out.print(readings.named_table(result))
    if figure is not None:
        result.plot(figure)


def attention(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB|FOLDER|PROMPT]",
            help="A capture of q and k at all positions, or a prompt.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Run this prompt instead, and capture its queries and keys.")
    ] = None,
    layers: Annotated[str, typer.Option(help=LAYERS)] = "all",
    heads: Annotated[str | None, typer.Option(help="all (default), 3, or 0-3,5.")] = None,
    show: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER.HEAD", help="Draw this head; repeatable. Default: the strongest."
        ),
    ] = None,
    behaviour: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(get_args(Behaviour)), help="Draw the heads that show this most."
        ),
    ] = None,
    figure: Figure = None,
    request: Annotated[int, typer.Option(help="Which prompt of the job.")] = 0,
    set_: FieldsOption = None,
    model: Model = None,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Show what tokens attend to: a map of tokens by tokens for each head, and the strongest heads
    of each behaviour, such as attention to the previous token.
    """
    if prompt is None and source is not None and _is_prompt(source):
        source, prompt = None, source
    if (source is None) == (prompt is None):
        raise invalid("--prompt", "give either a prompt or a capture (job or folder)")
    figures.check(figure, "--figure")
    if behaviour is not None and behaviour not in get_args(Behaviour):
        raise invalid(
            "--behaviour", f"{behaviour!r} is not known", allowed=", ".join(get_args(Behaviour))
        )
    chosen: tuple[Any, Any] = (options.layers(layers), options.layers(heads))
    fields = options.fields(None, set_, {"model": model})
    with connecting(url) as connect:
        if prompt is not None:
            fields = of_a_model(connect(), fields)
            result = connect().attention(prompt, layers=chosen[0], heads=chosen[1], **fields)
        else:
            with open_capture(connect, str(source)) as reader:
                result = attention_of(reader, *chosen, request)
    valid = cast(Behaviour | None, behaviour)
    panels = (
        parse_panels(result, show) if show else show_attention.panels_of(result, behaviour=valid)
    )
    if not print_json(_facts(result), json_):
        out.print(show_attention.report(result, panels))
    finish(result.job, figure, lambda path: result.plot(path, panels=panels), json_)


def _is_prompt(source: str) -> bool:
    """Return whether a source is a prompt: it names no job, no folder and no store."""
    named = source.startswith("job_") or "/" in source
    return not Path(source).exists() and (" " in source or not named)


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


def parse_panels(attention: Attention, texts: Sequence[str]) -> list[show_attention.Panel]:
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


COMMANDS = (submit, lens, attention)
