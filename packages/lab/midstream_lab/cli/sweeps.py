"""The commands `sweep` and `attribute`."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from midstream.client import values
from midstream.client.cli import options
from midstream.client.cli.requests import CellLayers, Figure, finish, of_a_model
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
from midstream.client.render import figures
from midstream.client.sdk.client import Client
from midstream.schemas.base.errors import MidstreamError, invalid

from ..client.patch_study import PatchStudy
from ..client.progress import bar
from ..client.sweeps import sweep_request
from ..records.attributions import AttributionRequest
from ..records.sweeps import TEXTS, SweepRequest
from ..show import attributions as show_attributions, sweeps as show_sweeps

R = TypeVar("R", bound=SweepRequest)
#: The fields of a pair that may be given once for all pairs.
_SHARED = (*TEXTS, "spans")

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
    typed = _typed(
        hooks, layers, clean=clean, corrupt=corrupt, answer=answer, foil=foil, model=model
    )
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
    finish(view.id, figure, lambda path: figures.plot(result, path, pair=pair), json_)
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
    typed = _typed(
        hooks, layers, clean=clean, corrupt=corrupt, answer=answer, foil=foil, model=model
    )
    fields = options.fields(file, set_, typed, "pairs", _SHARED)
    view = client.attributions.submit(_pairs(client, fields, pair, figure, AttributionRequest))
    detach(view, wait, json_)
    with bar("attribution") as progress:
        found = client.attributions.result(view, progress, cancel=True)
    shown = found if pair is None else found.of(pair)
    if not print_json(found.result, json_):
        out.print(show_attributions.report(shown, top))
    finish(view.id, figure, shown.plot, json_)


def _typed(hooks: str | None, layers: str | None, **others: str | None) -> dict[str, Any]:
    """Return the fields that the options of grids give."""
    named = hooks.replace(" ", "").split(",") if hooks else None
    return {**others, "hooks": named, "layers": options.layers(layers)}


def _pairs(
    client: Client, fields: dict[str, Any], shown: int | None, figure: Path | None, kind: type[R]
) -> R:
    """Build the request; fields of a pair among its fields are those of every pair. Raises
    MidstreamError naming the field.
    """
    figures.check(figure, "--figure")
    shared = {name: fields.pop(name) for name in _SHARED if name in fields}
    values.known_keywords(fields, kind)
    pairs = fields.pop("pairs", [{}])
    if twice := [name for pair in pairs for name in shared if name in pair]:
        raise invalid(twice[0], "is also in `pairs`: give it once")
    pairs = [shared | pair for pair in pairs]
    if not all("clean" in pair for pair in pairs):
        raise invalid("--clean", "is required unless --file has the pairs")
    if shown is not None and not 0 <= shown < len(pairs):
        raise invalid("--pair", f"no pair {shown}", allowed=f"0 to {len(pairs) - 1}")
    return sweep_request(None, of_a_model(client, {**fields, "pairs": pairs}), kind)


COMMANDS = (sweep, attribute)
