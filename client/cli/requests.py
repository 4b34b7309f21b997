"""The commands that submit work: `submit`, `sweep`, `attribute`, `dose`, `lens`, `attention`,
`harvest` and `survey`.

Each has options for what is typed daily; `--set` and `--file` give every field that HTTP takes.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

import typer

from ...schemas.base import MidstreamError, invalid
from ...schemas.jobs.attributions import AttributionRequest
from ...schemas.jobs.jobs import JobRequest
from ...schemas.jobs.sweeps import SweepRequest
from ...schemas.prompts.selectors import RequestedPositions, Span
from .. import values
from ..captures.patterns import Attention, Behaviour, attention_of
from ..images import with_images
from ..render import (
    attention as show_attention,
    attributions as show_attributions,
    doses,
    figures,
    readings,
    records,
    sweeps as show_sweeps,
)
from ..sdk.answers.progress import bar, harvest_bar
from ..sdk.client import Client
from ..sdk.sweeps import sweep_request
from ..study.patch_study import PatchStudy
from ..texts import split
from . import options
from .captures import open_capture
from .jobs import follow, print_view, report_end, words_of
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

R = TypeVar("R", bound=SweepRequest)
#: The fields of a pair that may be given once for all pairs.
_SHARED = ("clean", "corrupt", "answer", "foil", "spans")

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
MaxTokens = Annotated[int | None, typer.Option(help="Tokens to generate; default: 16.")]
Figure = Annotated[
    Path | None, typer.Option(help="Draw a figure: out.png, out.pdf or out.svg (matplotlib).")
]
Pair = Annotated[int | None, typer.Option(help="Show this pair; default: the mean of all.")]
Clean = Annotated[str | None, typer.Option(help="The prompt with the right answer.")]
Corrupt = Annotated[str | None, typer.Option(help="A prompt with a different answer.")]
AnswerOption = Annotated[
    str | None, typer.Option(help="The answer to --clean, usually with a leading space.")
]
Foil = Annotated[
    str | None, typer.Option(help="The answer to --corrupt, usually with a leading space.")
]
CellHooks = Annotated[
    str | None, typer.Option(help="Such as resid_pre,attn_out,mlp_out; default: post_block.")
]
CellLayers = Annotated[str | None, typer.Option(help=f"Of the cells: {LAYERS}")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    for command in (submit, sweep, attribute, dose, lens, attention, harvest, survey):
        app.command()(command)


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
        bool, typer.Option("--dry-run", help="Only print the tokens that positions select.")
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
    request = values.request(None, _of_a_model(client, fields), JobRequest)
    if dry_run:
        _print_positions(client, request, json_)
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


def _of_a_model(client: Client, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, with the first served model if they name none."""
    return fields if "model" in fields else {"model": first_model(client), **fields}


# --- Grids


@with_client
def sweep(
    client: Client,
    clean: Clean = None,
    corrupt: Corrupt = None,
    answer: AnswerOption = None,
    foil: Foil = None,
    hooks: CellHooks = None,
    layers: CellLayers = None,
    file: File = None,
    set_: FieldsOption = None,
    model: Model = None,
    figure: Figure = None,
    save: Annotated[Path | None, typer.Option(help="Save as JSON, for PatchStudy.load.")] = None,
    pair: Pair = None,
    top: Annotated[int, typer.Option(help="Number of strongest cells to list.")] = 5,
    wait: Wait = True,
    json_: AsJson = False,
) -> None:
    """Causal tracing: patch rows of one prompt into another, cell by cell, and measure how far each
    patch recovers the answer.
    """
    if save is not None and not save.absolute().parent.is_dir():
        raise invalid("--save", f"{save}: no such folder")
    typed = _typed(clean, corrupt, answer, foil=foil, hooks=hooks, layers=layers, model=model)
    request = _pairs(
        client, options.fields(file, set_, typed, "pairs", _SHARED), pair, figure, SweepRequest
    )
    view = client.sweeps.submit(request)
    detach(view, wait, json_)
    with bar("sweep") as progress:
        result = client.sweeps.result(view, progress, cancel=True)
    if save is not None:
        PatchStudy.of(view.id, request, result).save(save)
    if not print_json(result, json_):
        out.print(show_sweeps.report(result, pair, top))
    _finish(view.id, figure, lambda path: figures.plot(result, path, pair=pair), json_)
    if not result.summary.cells:  # exit non-zero, so that a script stops
        raise MidstreamError(
            "intervention_failed",
            "; ".join(["no cell has a value", *show_sweeps.without_value(result)[:1]]),
        )


@with_client
def attribute(
    client: Client,
    clean: Clean = None,
    corrupt: Corrupt = None,
    answer: AnswerOption = None,
    foil: Foil = None,
    hooks: CellHooks = None,
    layers: CellLayers = None,
    file: File = None,
    set_: FieldsOption = None,
    model: Model = None,
    figure: Figure = None,
    pair: Pair = None,
    top: Annotated[int, typer.Option(help="Number of cells, edges or features to list.")] = 10,
    wait: Wait = True,
    json_: AsJson = False,
) -> None:
    """Attribution: estimate the cells of a sweep by gradients, and compute some of them exactly to
    see how far the estimates can be trusted.
    """
    typed = _typed(clean, corrupt, answer, foil=foil, hooks=hooks, layers=layers, model=model)
    fields = options.fields(file, set_, typed, "pairs", _SHARED)
    view = client.attributions.submit(_pairs(client, fields, pair, figure, AttributionRequest))
    detach(view, wait, json_)
    with bar("attribution") as progress:
        found = client.attributions.result(view, progress, cancel=True)
    shown = found if pair is None else found.of(pair)
    if not print_json(found.result, json_):
        out.print(show_attributions.report(shown, top))
    _finish(view.id, figure, shown.plot, json_)


def _typed(
    clean: str | None,
    corrupt: str | None,
    answer: str | None,
    foil: str | None,
    hooks: str | None,
    layers: str | None,
    model: str | None,
) -> dict[str, Any]:
    """Return the fields that the options of grids give."""
    named = hooks.replace(" ", "").split(",") if hooks else None
    pair = {"clean": clean, "corrupt": corrupt, "answer": answer, "foil": foil}
    return {**pair, "hooks": named, "layers": options.layers(layers), "model": model}


def _pairs(
    client: Client, fields: dict[str, Any], shown: int | None, figure: Path | None, kind: type[R]
) -> R:
    """Build the request; fields of a pair among its fields are those of every pair. Raises
    MidstreamError naming the field.
    """
    figures.check(figure, "--figure")
    shared = {name: fields.pop(name) for name in _SHARED if name in fields}
    pairs = fields.pop("pairs", [{}])
    if twice := [name for pair in pairs for name in shared if name in pair]:
        raise invalid(twice[0], "is also in `pairs`: give it once")
    pairs = [shared | pair for pair in pairs]
    if not all("clean" in pair for pair in pairs):
        raise invalid("--clean", "is required unless --file has the pairs")
    if shown is not None and not 0 <= shown < len(pairs):
        raise invalid("--pair", f"no pair {shown}", allowed=f"0 to {len(pairs) - 1}")
    return sweep_request(None, _of_a_model(client, {**fields, "pairs": pairs}), kind)


def _finish(
    job: str, path: Path | None, draw: Callable[[Path], Any], as_json: bool = False
) -> None:
    """Draw the figure, if there is one, and print where things are."""
    if path is not None:
        draw(path)
    if not as_json:
        say(f"job: {job}" + (f"\ndrawn: {path}" if path else ""))


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
        "prompts": [*(prompt or []), *options.texts(prompts, "--prompts")],
        "held_out": options.texts(held_out, "--held-out"),
        "steering": options.steering(steer),
        "layers": options.layers(layers),
        "model": model,
    }
    result = client.dose(None, **_of_a_model(client, options.fields(file, set_, typed)))
    if not print_json(result, json_) and result.dose:
        out.print(*doses.drawn(result.dose, texts), sep="\n")
    _finish(result.id, figure, result.plot, json_)


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
            help="A capture of q and k at all positions, or a prompt of several words.",
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
    if prompt is None and source is not None and " " in source and not Path(source).exists():
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
            fields = _of_a_model(connect(), fields)
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
    _finish(result.job, figure, lambda path: result.plot(path, panels=panels), json_)


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


# --- Harvests


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
    view = client.harvests.submit(None, **_of_a_model(client, fields))
    detach(view, wait, json_)
    with harvest_bar() as progress:
        view = client.harvests.wait(view, progress)
    print_view(view, json_)


@with_client
def survey(
    client: Client,
    harvest: Annotated[str, typer.Argument(metavar="HARVEST", help="The harvest's id.")],
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
        out.print(*records.survey(view, words), sep="\n", soft_wrap=True)
