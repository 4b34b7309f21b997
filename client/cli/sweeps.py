"""The commands `midstream sweep` and `midstream attribute`: submit, follow, draw and save."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from ...schemas.base.errors import MidstreamError, invalid
from ...schemas.base.records import to_json
from ...schemas.jobs.attributions import AttributionRequest
from ...schemas.jobs.jobs import JobView
from ...schemas.jobs.sweeps import SweepRequest
from ...schemas.requests.attributions import Verify
from ..render import attributions as show_attributions
from ..render import figures
from ..render import sweeps as show_sweeps
from ..render.figures import check
from ..sdk.answers.progress import bar
from ..sdk.client import Client
from ..sdk.sweeps import sweep_request
from ..study.patch_study import PatchStudy
from . import jobs, options
from .jobs import AsJson, Url, connect, out, print_json

#: The groups of options in `--help`.
PAIR: dict[str, Any] = {"rich_help_panel": "Prompts"}
CELLS: dict[str, Any] = {"rich_help_panel": "Cells"}
RESULT: dict[str, Any] = {"rich_help_panel": "Result"}
#: What `parse_verify` reads.
VERIFY_FORM = "defaults|NAME=NUMBER,…"
#: The options of path patching, which attributions lack.
_PATH = ("sender", "receivers", "frozen")
R = TypeVar("R", bound=SweepRequest)


class Asked(NamedTuple):
    """The options for prompts and cells."""

    body: Path | None
    pairs: Path | None
    pair: dict[str, str | None]  # the fields of the only pair
    spans: list[str]
    fields: dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.command()(sweep)
    app.command()(attribute)


def cells(
    *,
    clean: Annotated[
        str | None, typer.Option(help="The prompt with the right answer.", **PAIR)
    ] = None,
    corrupt: Annotated[
        str | None, typer.Option(help="A prompt with a different answer.", **PAIR)
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option(help="The answer to --clean, usually with a leading space.", **PAIR),
    ] = None,
    foil: Annotated[
        str | None,
        typer.Option(help="The answer to --corrupt, usually with a leading space.", **PAIR),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="File with several pairs: a JSON list of objects with the fields of one pair.",
            **PAIR,
        ),
    ] = None,
    body: Annotated[
        Path | None,
        typer.Option(help="The whole body of the request as JSON, instead of the options.", **PAIR),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the first model served.", **PAIR)
    ] = None,
    hooks: Annotated[
        str | None,
        typer.Option(
            metavar=options.HOOKS_FORM,
            help="Such as resid_pre,attn_out,mlp_out; default: post_block.",
            **CELLS,
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="all (default), 3, 0-5, or 0-5,9,-1.", **CELLS)
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            help="Of the patched prompt: all_prompt (default), 0,5,-1, 5:9, or 5: (from 5 on).",
            **CELLS,
        ),
    ] = None,
    axis: Annotated[
        str | None,
        typer.Option(
            help="Columns: position (default), together, head, head_position or neuron.", **CELLS
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="For axis head and head_position: all (default), 3, 0-5, or 0-5,-1.", **CELLS
        ),
    ] = None,
    neurons: Annotated[
        str | None,
        typer.Option(
            metavar="top:1,4,16|each:8|0-3/7",
            help=(
                "For axis neuron: those that differ most, together or one by one; or sets of "
                "dimensions."
            ),
            **CELLS,
        ),
    ] = None,
    sender: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER.HOOK[.HEAD]",
            help="Path patching: the cells are receivers of this site.",
            **CELLS,
        ),
    ] = None,
    receivers: Annotated[
        str | None,
        typer.Option(
            metavar="logits|LAYER.HOOK[.HEAD],…",
            help="Path patching: the cells are senders to these sites.",
            **CELLS,
        ),
    ] = None,
    frozen: Annotated[
        str | None,
        typer.Option(
            help="Path patching: branches held fixed on the way: attn,mlp (default), or one.",
            **CELLS,
        ),
    ] = None,
    span: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT[|TEXT]",
            help="Tokens patched together: in both prompts, or clean|corrupt; repeatable.",
            **CELLS,
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS[xPOSITIONS]",
            help="Layers and positions patched together around a cell.",
            **CELLS,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="recovered (default, except with --ablation), logit_diff, logprob or kl.", **CELLS
        ),
    ] = None,
    direction: Annotated[
        str | None,
        typer.Option(
            help="denoise (default): clean rows into corrupt; noise: the reverse.", **CELLS
        ),
    ] = None,
    ablation: Annotated[
        str | None, typer.Option(help="zeros or mean, instead of rows of --corrupt.", **CELLS)
    ] = None,
    alignment: Annotated[
        str | None, typer.Option(help="auto (default), left or right.", **CELLS)
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Fraction of a row that is replaced; default: 1.", **CELLS)
    ] = None,
    mask: Annotated[
        str | None, typer.Option(help="Replace only these dimensions of a row: 0-63,100.", **CELLS)
    ] = None,
    noise: Annotated[
        int | None,
        typer.Option(
            help="Number of no-op patches that measure the noise floor; default: 8.", **CELLS
        ),
    ] = None,
) -> Asked:
    """Convert the options for prompts and cells, which are its parameters."""
    return Asked(
        body,
        pairs,
        {"clean": clean, "corrupt": corrupt, "answer": answer, "foil": foil},
        span or [],
        {
            "model": model,
            **options.sweep_sites(hooks, layers),
            "positions": positions and options.parse_positions(positions),
            "window": window and parse_window(window),
            "axis": axis,
            "heads": heads and options.parse_layers(heads),
            "neurons": neurons and parse_neurons(neurons),
            "path": parse_path(sender, receivers, frozen),
            "metric": metric,
            "direction": direction,
            "ablation": ablation,
            "alignment": alignment,
            "alpha": alpha,
            "mask": mask and options.parse_layers(mask),
            "noise": noise,
        },
    )


#: The options of `cells`, those of `midstream attribute`, and what both commands have as well.
_CELLS = inspect.signature(cells).parameters
_ESTIMATED = {name: item for name, item in _CELLS.items() if name not in _PATH}
Pair = Annotated[
    int | None, typer.Option(help="Show this pair; default: the mean of all.", **RESULT)
]
JobId = Annotated[
    str | None,
    typer.Option(help="Show this job (waiting for it) instead of submitting one.", **RESULT),
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait/--no-wait", help="Wait for the result, or print the id and exit.", **RESULT
    ),
]


@options.with_options("asked", _CELLS, lambda values: cells(**values))
@options.with_handling
def sweep(
    *,
    asked: Asked,
    handling: dict[str, Any],  # the options of `with_handling`
    heatmap: Annotated[
        Path | None,
        typer.Option(help="Draw a heatmap: out.png, out.pdf or out.svg (matplotlib).", **RESULT),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Save as JSON, for PatchStudy.load.", **RESULT)
    ] = None,
    pair: Pair = None,
    top: Annotated[int, typer.Option(help="Number of strongest cells to list.", **RESULT)] = 5,
    job: JobId = None,
    wait: Wait = True,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Causal tracing: patch rows of one prompt into another, cell by cell, and measure how far each
    patch recovers the answer.
    """
    if job is not None and save is not None:
        raise invalid("--save", "also saves the request, so it is not valid with --job")
    if heatmap is not None:
        check(heatmap, "heatmap")
    if save is not None and not save.absolute().parent.is_dir():
        raise invalid("--save", f"{save}: no such folder")
    with connect(url) as client:
        request = None
        if job is None:
            request = _request(client, asked, handling, pair, SweepRequest)
            job = _submitted(client.sweeps.submit(request), wait, json_)
            if job is None:
                return
        with bar() as progress:
            result = client.sweeps.result(job, progress, cancel=request is not None)
    if save is not None and request is not None:
        PatchStudy.of(job, request, result).save(save)
    if not print_json(result, json_):
        out.print(show_sweeps.report(result, pair, top))
    draw = None if heatmap is None else partial(figures.heatmap, result, pair=pair)
    _finish(job, heatmap, draw, json_)
    if not result.summary.cells:  # exit non-zero, so that a script stops
        raise MidstreamError(
            "intervention_failed",
            "; ".join(["no cell has a value", *show_sweeps.without_value(result)[:1]]),
        )


def _estimate(kind: Any, help: str, **settings: Any) -> Any:
    return options.optional(kind, help, rich_help_panel="Estimates", **settings)


#: The fields of an attribution that a sweep lacks.
ESTIMATE = {
    "method": _estimate(str, "attribution (default), integrated, edges or adaptive."),
    "steps": _estimate(
        int,
        "Points between the prompts at which gradients are taken; default: 1, and 8 for "
        "integrated.",
    ),
    "sae": _estimate(str, "Estimate the features of this sparse autoencoder, and its error."),
    "keep": _estimate(int, "Edges or features to keep; default: 1000."),
    "verify": _estimate(
        str,
        "Compute cells exactly: the largest estimates, random ones, and those where the "
        "method is known to fail.",
        metavar=VERIFY_FORM,
    ),
    "seed": _estimate(int, "Of the random cells."),
}


def _estimated(values: dict[str, Any]) -> dict[str, Any]:
    verify = values["verify"]
    return values | {"verify": None if verify is None else parse_verify(verify)}


@options.with_options("asked", _ESTIMATED, lambda values: cells(**values))
@options.with_options("chosen", options.parameters(ESTIMATE), _estimated)
@options.with_handling
def attribute(
    *,
    asked: Asked,
    chosen: dict[str, Any],
    handling: dict[str, Any],
    png: Annotated[
        Path | None,
        typer.Option(
            help="Draw estimates beside exact values: out.png, out.pdf or out.svg (matplotlib).",
            **RESULT,
        ),
    ] = None,
    pair: Pair = None,
    top: Annotated[
        int, typer.Option(help="Number of cells, edges or features to list.", **RESULT)
    ] = 10,
    job: JobId = None,
    wait: Wait = True,
    json_: AsJson = False,
    url: Url = None,
) -> None:
    """Attribution: estimate the cells of a sweep by gradients, and compute some of them exactly to
    see how far the estimates can be trusted.
    """
    if png is not None:
        check(png, "png")
    with connect(url) as client:
        request = None
        if job is None:
            request = _request(client, asked, chosen | handling, pair, AttributionRequest)
            job = _submitted(client.attributions.submit(request), wait, json_)
            if job is None:
                return
        with bar("attribution") as progress:
            found = client.attributions.result(job, progress, cancel=request is not None)
    shown = found if pair is None else found.of(pair)
    if not print_json(found.result, json_):
        out.print(show_attributions.report(shown, top))
    _finish(job, png, None if png is None else shown.plot, json_)


def _submitted(view: JobView, wait: bool, as_json: bool) -> str | None:
    """Return the id of a job to wait for; without `wait`, print it and return None."""
    if wait:
        return view.id
    print(to_json(view).decode() if as_json else view.id)
    return None


def _finish(job: str, path: Path | None, draw: Callable[..., Any] | None, as_json: bool) -> None:
    """Draw the figure, if there is one, and print where things are."""
    if not as_json:
        out.print(f"job: {job}", style="dim", markup=False, soft_wrap=True)
    if draw is not None:
        draw(path)
        if not as_json:
            out.print(f"drawn: {path}", markup=False, soft_wrap=True)


def _request(
    client: Client, asked: Asked, other: dict[str, Any], shown: int | None, kind: type[R]
) -> R:
    """Build the request from the options. `other`: further fields; `shown`: the pair of `--pair`.
    Raises MidstreamError naming the option or the field.
    """
    given = {**asked.fields, **other}
    fields = {name: value for name, value in given.items() if value is not None}
    prompts = {name: value for name, value in asked.pair.items() if value is not None}
    pairs = asked.pairs
    if asked.body is not None:
        if fields or prompts or asked.spans or pairs:
            raise invalid(
                "--body", "is the whole request: not valid with options for prompts or cells"
            )
        request: R = options.read_json(asked.body, kind, "--body")
    else:
        if pairs is not None and prompts:
            raise invalid(
                f"--{next(iter(prompts))}", "is not valid with --pairs, whose file contains it"
            )
        if pairs is None and "clean" not in prompts:
            raise invalid("--clean", "is required unless --pairs, --body or --job is given")
        listed: list[dict[str, Any]] = (
            options.read_json(pairs, list[dict[str, Any]], "--pairs") if pairs else [prompts]
        )
        if asked.spans:
            columns = [parse_span(text) for text in asked.spans]
            listed = [{**item, "spans": columns} for item in listed]
        model = fields.pop("model", None) or jobs.only_model(client)
        request = sweep_request(None, {"model": model, "pairs": listed, **fields}, kind)
    if shown is not None and not 0 <= shown < len(request.pairs):
        raise invalid("--pair", f"no pair {shown}", allowed=f"0 to {len(request.pairs) - 1}")
    return request


def parse_verify(text: str) -> dict[str, float]:
    """Parse `top=20,random=20,tolerance=0.05`, the fields of `Verify`; `defaults` has none. Raises
    MidstreamError naming `--verify`.
    """
    try:
        parts = [] if text == "defaults" else [part.split("=") for part in text.split(",")]
        return {name: float(value) if "." in value else int(value) for name, value in parts}
    except ValueError:
        raise invalid(
            "--verify",
            f"{text!r} is not valid",
            allowed=f"defaults, or NAME=NUMBER with {', '.join(Verify.__struct_fields__)}",
        ) from None


def parse_window(text: str) -> dict[str, int]:
    """Parse `3` (layers) or `3x2` (layers and positions). Raises MidstreamError naming
    `--window`.
    """
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise invalid(
            "--window",
            f"{text!r} is not valid",
            allowed="a number of layers, or LAYERSxPOSITIONS such as 3x1",
        )
    return dict(zip(("layers", "positions"), map(int, parts), strict=False))


def parse_neurons(text: str) -> dict[str, Any]:
    """Parse `top:1,4,16`, `each:8`, or sets such as `0-3/7`; return the fields of `Neurons`.

    Raises MidstreamError naming `--neurons`.
    """
    kind, colon, numbers = text.partition(":")
    if not colon:
        return {"sets": text.split("/")}
    if (kind == "top" and all(part.isdecimal() for part in numbers.split(","))) or (
        kind == "each" and numbers.isdecimal()
    ):
        return (
            {"top": [int(part) for part in numbers.split(",")]}
            if kind == "top"
            else {"each": int(numbers)}
        )
    raise invalid(
        "--neurons",
        f"{text!r} is not valid",
        allowed="top:1,4,16, each:8, or sets of dimensions such as 0-3/7",
    )


def parse_path(
    sender: str | None, receivers: str | None, frozen: str | None
) -> dict[str, Any] | None:
    """Return the fields of `SweepPath`, or None. Raises MidstreamError naming the option."""
    if sender is None and receivers is None:
        if frozen is not None:
            raise invalid(
                "--frozen", "is valid for path patching only: add --sender or --receivers"
            )
        return None
    branches = {} if frozen is None else {"frozen": frozen.split(",")}
    ends: dict[str, Any] = {} if sender is None else {"sender": _end("--sender", sender)}
    if receivers is not None:
        ends["receivers"] = (
            receivers
            if receivers == "logits"
            else [_end("--receivers", item) for item in receivers.split(",")]
        )
    return ends | branches


def _end(option: str, text: str) -> dict[str, Any]:
    layer, *rest = text.split(".")
    if (
        len(rest) not in (1, 2)
        or not layer.removeprefix("-").isdecimal()
        or not all(head.isdecimal() for head in rest[1:])
    ):
        raise invalid(
            option,
            f"{text!r} is not valid",
            allowed="LAYER.HOOK or LAYER.HOOK.HEAD, such as 20.z.3",
        )
    return {"layer": int(layer), "hook": rest[0], **({"head": int(rest[1])} if rest[1:] else {})}


def parse_span(text: str) -> dict[str, Any]:
    """Parse `subject=Eiffel Tower|Colosseum`: a column's name, its text in the clean prompt and, if
    that differs, in the corrupt prompt.

    Each text has the form of `--span` of `midstream submit`, or is positions such as `1:4`. Raises
    MidstreamError naming `--span`.
    """
    name, equals, places = text.partition("=")
    parts = places.split("|")
    if not (equals and name and all(parts)) or len(parts) > 2:
        raise invalid(
            "--span",
            f"{text!r} is not valid",
            allowed="NAME=TEXT or NAME=TEXT|TEXT, such as subject=Paris|Rome",
        )
    return {"name": name} | dict(zip(("clean", "corrupt"), map(_place, parts), strict=False))


def _place(text: str) -> Any:
    positions = options.parse_positions(text)
    return options.parse_span(text) if isinstance(positions, str) else positions
