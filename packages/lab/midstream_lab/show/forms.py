"""How results of each class are drawn, written and printed."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from msgspec.structs import asdict
from rich.markup import escape

from midstream.client.render.forms import Form, Shown
from midstream.client.render.records import effect, one, parts, training
from midstream.client.render.steering import DIGEST
from midstream.schemas.artifacts.probes import Probe

from ..client.attribution import Attribution
from ..client.grid import Grid, records
from ..client.mapping.map import Mapped
from ..client.probes import Fit
from ..records.doses import DoseResult
from ..records.fits import FitResult, LensFitResult
from ..records.sweeps import SweepResult
from . import attributions, doses, notebook, probes, sweeps
from .dose_figure import dose_figure
from .figures import attribution_figure, grid_figure, heatmap


def _lens_fit(result: LensFitResult) -> Iterable[dict[str, Any]]:
    errors = result.lens.fit.errors if result.lens.fit else []
    for layer, error in zip_longest(result.lens.layers, errors):
        yield {"layer": layer, "error": error}


def _registered(result: FitResult) -> str:
    """Return the name of a fitted module, and its digest if it was registered."""
    digest = result.digest[:DIGEST] if result.digest else "not registered"
    return f"{escape(result.name)}, {digest}"


#: Class → its form.
FORMS: dict[type, Form] = {
    Attribution: Form(
        plot=attribution_figure,
        html=notebook.attribution_html,
        printed=lambda attribution: [attributions.report(attribution)],
    ),
    DoseResult: Form(
        plot=dose_figure,
        lines=lambda result: map(asdict, [result.unsteered, *result.cells]),
        html=notebook.dose_html,
        printed=doses.drawn,
    ),
    Fit: Form(plot=probes.training_figure, lines=probes.held_out),
    FitResult: Form(
        lines=lambda result: map(asdict, result.training.sites),
        shown=Shown(
            facts={
                "module": _registered,
                "learned": lambda result: training(result.training),
                "effect": lambda result: effect(result.training),
                "reason": "{reason}",
            }
        ),
        printed=parts,
    ),
    Grid: Form(plot=grid_figure, html=notebook.grid_html),
    LensFitResult: Form(lines=_lens_fit, printed=lambda result: [one(result.lens)]),
    Mapped: Form(
        lines=lambda item, **options: item.result.to_pandas(**options), html=notebook.mapped_html
    ),
    Probe: Form(plot=probes.training_figure, lines=probes.held_out),
    SweepResult: Form(
        plot=heatmap,
        lines=records,
        html=notebook.sweep_html,
        png=notebook.sweep_png,
        printed=lambda result: [sweeps.report(result)],
    ),
}
