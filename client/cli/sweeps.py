"""The commands `midstream sweep`, `attribute` and `dose`: submit, follow, draw and save."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.jobs.attributions import AttributionRequest
from ...schemas.jobs.doses import DoseRequest
from ...schemas.jobs.sweeps import SweepRequest
from ...schemas.requests.attributions import Verify
from ..render import attributions as show_attributions, figures, sweeps as show_sweeps
from ..render.figures import check
from ..sdk.answers.progress import bar
from ..sdk.client import Client
from ..sdk.sweeps import sweep_request
from ..study.patch_study import PatchStudy
from . import jobs, options
from .jobs import AsJson, Url, connect, detach, out, print_json, print_result, with_client

#: The groups of options in `--help`.
_prompts, _cells, _estimates = (
    partial(options.optional, rich_help_panel=panel) for panel in ("Prompts", "Cells", "Estimates")
)
RESULT: dict[str, Any] = {"rich_help_panel": "Result"}
#: What `parse_verify` reads.
VERIFY_FORM = "defaults|NAME=NUMBER,…"
R = TypeVar("R", bound=SweepRequest)

#: The options for prompts and cells.
CELLS: dict[str, Any] = {
    "clean": _prompts(str, "The prompt with the right answer."),
    "corrupt": _prompts(str, "A prompt with a different answer."),
    "answer": _prompts(str, "The answer to --clean, usually with a leading space."),
    "foil": _prompts(str, "The answer to --corrupt, usually with a leading space."),
    "pairs": _prompts(
        Path, "File with several pairs: a JSON list of objects with the fields of one pair."
    ),
    "body": _prompts(Path, "The whole body of the request as JSON, instead of the options."),
    "model": _prompts(str, "Default: the first model served."),
    "hooks": _cells(
        str,
        "Such as resid_pre,attn_out,mlp_out; default: post_block.",
        metavar=options.HOOKS_FORM,
    ),
    "layers": _cells(str, "all (default), 3, 0-5, or 0-5,9,-1."),
    "positions": _cells(
        str, "Of the patched prompt: all_prompt (default), 0,5,-1, 5:9, or 5: (from 5 on)."
    ),
    "axis": _cells(str, "Columns: position (default), together, head, head_position or neuron."),
    "heads": _cells(str, "For axis head and head_position: all (default), 3, 0-5, or 0-5,-1."),
    "neurons": _cells(
        str,
        "For axis neuron: those that differ most, together or one by one; or sets of dimensions.",
        metavar="top:1,4,16|each:8|0-3/7",
    ),
    "sender": _cells(
        str, "Path patching: the cells are receivers of this site.", metavar="LAYER.HOOK[.HEAD]"
    ),
    "receivers": _cells(
        str,
        "Path patching: the cells are senders to these sites.",
        metavar="logits|LAYER.HOOK[.HEAD],…",
    ),
    "frozen": _cells(
        str, "Path patching: branches held fixed on the way: attn,mlp (default), or one."
    ),
    "span": _cells(
        list[str],
        "Tokens patched together: in both prompts, or clean|corrupt; repeatable.",
        metavar="NAME=TEXT[|TEXT]",
    ),
    "window": _cells(
        str,
        "Layers and positions patched together around a cell.",
        metavar="LAYERS[xPOSITIONS]",
    ),
    "metric": _cells(
        str, "recovered (default, except with --ablation), logit_diff, logprob or kl."
    ),
    "direction": _cells(str, "denoise (default): clean rows into corrupt; noise: the reverse."),
    "ablation": _cells(str, "zeros or mean, instead of rows of --corrupt."),
    "alignment": _cells(str, "auto (default), left or right."),
    "alpha": _cells(float, "Fraction of a row that is replaced; default: 1."),
    "mask": _cells(str, "Replace only these dimensions of a row: 0-63,100."),
    "noise": _cells(int, "Number of no-op patches that measure the noise floor; default: 8."),
}
#: The options that are fields of the only pair, and those of path patching.
_PAIR, _PATH = ("clean", "corrupt", "answer", "foil"), ("sender", "receivers", "frozen")
#: The options of attributions: without path patching, and with how cells are estimated.
ESTIMATED: dict[str, Any] = {name: CELLS[name] for name in CELLS if name not in _PATH} | {
    "method": _estimates(str, "attribution (default), integrated, edges or adaptive."),
    "steps": _estimates(
        int,
        "Points between the prompts at which gradients are taken; default: 1, and 8 for "
        "integrated.",
    ),
    "sae": _estimates(str, "Estimate the features of this sparse autoencoder, and its error."),
    "keep": _estimates(int, "Edges or features to keep; default: 1000."),
    "verify": _estimates(
        str,
        "Compute cells exactly: the largest estimates, random ones, and those where the "
        "method is known to fail.",
        metavar=VERIFY_FORM,
    ),
    "seed": _estimates(int, "Of the random cells."),
}


def register(app: typer.Typer) -> None:
    """Add this module's commands to `midstream`."""
    app.command()(sweep)
    app.command()(attribute)
    app.command()(dose)


@with_client
def dose(
    client: Client,
    file: Annotated[Path, typer.Argument(help="The body of `POST /v1/doses` as JSON.")],
    json_: AsJson = False,
) -> None:
    """Weigh the effect of steering against its damage, by layer and scale."""
    result = client.dose(options.read_json(file, DoseRequest, "FILE"))
    if not print_json(result, json_):
        print_result(client, result)


def _read(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are given, as fields of the request where they are such."""
    readers: dict[str, Callable[[str], Any]] = {
        "positions": options.parse_positions,
        "window": parse_window,
        "heads": options.parse_layers,
        "neurons": parse_neurons,
        "mask": options.parse_layers,
        "verify": parse_verify,
    }
    given = {name: value for name, value in values.items() if value not in (None, [])}
    fields = {
        name: readers[name](value) if name in readers else value for name, value in given.items()
    }
    fields["path"] = parse_path(*(fields.pop(name, None) for name in _PATH))
    fields |= options.sweep_sites(fields.pop("hooks", None), fields.pop("layers", None))
    return {name: value for name, value in fields.items() if value is not None}


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


@options.with_options("asked", options.parameters(CELLS), _read)
@options.with_handling
def sweep(
    *,
    asked: dict[str, Any],
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
        request = (
            None if job is not None else _request(client, asked | handling, pair, SweepRequest)
        )
        job, result = _result(client.sweeps, "sweep", request, job, wait, json_)
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


@options.with_options("asked", options.parameters(ESTIMATED), _read)
@options.with_handling
def attribute(
    *,
    asked: dict[str, Any],
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
        request = (
            None
            if job is not None
            else _request(client, asked | handling, pair, AttributionRequest)
        )
        job, found = _result(client.attributions, "attribution", request, job, wait, json_)
    shown = found if pair is None else found.of(pair)
    if not print_json(found.result, json_):
        out.print(show_attributions.report(shown, top))
    _finish(job, png, None if png is None else shown.plot, json_)


def _result(
    calls: Any, kind: str, request: SweepRequest | None, job: str | None, wait: bool, as_json: bool
) -> tuple[str, Any]:
    """Submit `request`, if `job` was not submitted before; return the job's id and its result."""
    if job is None:
        view = calls.submit(request)
        detach(view, wait, as_json)
        job = view.id
    with bar(kind) as progress:
        return job, calls.result(job, progress, cancel=request is not None)


def _finish(job: str, path: Path | None, draw: Callable[..., Any] | None, as_json: bool) -> None:
    """Draw the figure, if there is one, and print where things are."""
    if not as_json:
        out.print(f"job: {job}", style="dim", markup=False, soft_wrap=True)
    if draw is not None:
        draw(path)
        if not as_json:
            out.print(f"drawn: {path}", markup=False, soft_wrap=True)


def _request(client: Client, asked: dict[str, Any], shown: int | None, kind: type[R]) -> R:
    """Build the request from the options, see `_read`. `shown`: the pair of `--pair`. Raises
    MidstreamError naming the option or the field.
    """
    fields = dict(asked)
    body, pairs, spans = (fields.pop(name, None) for name in ("body", "pairs", "span"))
    prompts = {name: fields.pop(name) for name in _PAIR if name in fields}
    if body is not None:
        if fields or prompts or spans or pairs:
            raise invalid(
                "--body", "is the whole request: not valid with options for prompts or cells"
            )
        request: R = options.read_json(body, kind, "--body")
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
        if spans:
            columns = [parse_span(text) for text in spans]
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
    with Translated(
        ValueError,
        lambda error: invalid(
            "--verify",
            f"{text!r} is not valid",
            allowed=f"defaults, or NAME=NUMBER with {', '.join(Verify.__struct_fields__)}",
        ),
        hidden=True,
    ):
        parts = [] if text == "defaults" else [part.split("=") for part in text.split(",")]
        return {name: float(value) if "." in value else int(value) for name, value in parts}


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
