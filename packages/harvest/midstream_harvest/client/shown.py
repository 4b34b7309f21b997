"""Tables, figures and data frames of harvests and surveys."""

from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from midstream.client.render import records
from midstream.client.render.drawing import side_by_side
from midstream.client.render.forms import Form, Shown
from midstream.client.sdk.readings import Words

from ..files.shards import Harvest
from ..files.surveys import Surveyed
from ..records.harvests import FeatureFigures, HarvestView, SurveyView

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def survey_tables(view: SurveyView, words: Words) -> list[Table | Text]:
    """Return a survey's features and examples, a line each; the token itself is bold. `words`:
    token id → text.
    """
    drawn: list[Table | Text] = (
        [records.listed(view.features, FeatureFigures)] if view.features else []
    )
    if view.survey.mean_kl is not None:
        drawn.append(Text(f"mean KL divergence: {view.survey.mean_kl:.4g} nats"))
    for one in view.examples:
        parts = [
            (words[token].replace("\n", "⏎"), "bold" if position == one.position else "")
            for token, position in zip(one.token_ids, one.positions, strict=True)
        ]
        drawn.append(Text.assemble(f"{one.value:8.2f}  {one.document}:{one.position}  ", *parts))
    return drawn


def _left(view: HarvestView) -> str:
    """Return how long a harvest takes until its end."""
    return "" if view.left_s is None else f"about {timedelta(seconds=int(view.left_s))}"


def harvest_figure(harvest: Harvest, count: int = 10_000) -> "Figure":
    """Draw the distribution of the norms of the first `count` rows, for each site."""
    figure, (axis,) = side_by_side()
    for site, norms in _norms(harvest, count).items():
        axis.hist(norms, bins=60, histtype="step", label=site)
    axis.set(xlabel="norm", ylabel="rows", title=f"first {min(count, len(harvest)):,} rows")
    axis.legend()
    return figure


def _norms(harvest: Harvest, count: int) -> dict[str, np.ndarray]:
    return {
        f"{hook} {layer}": np.linalg.norm(harvest.rows(slice(count), layer, hook), axis=-1)
        for hook, layer in harvest.sites
    }


def _harvest(harvest: Harvest, *, count: int = 10_000) -> dict[str, np.ndarray]:
    origins = zip(("document", "position", "token_id"), harvest.keys(slice(count)), strict=True)
    norms = _norms(harvest, count)
    return dict(origins) | {f"norm {site}": values for site, values in norms.items()}


def _survey(survey: Surveyed) -> dict[str, np.ndarray]:
    figures = {"density": survey.density, "mean": survey.array("mean")}
    return {"feature": np.arange(len(figures["mean"]))} | {
        f"{name}{harvest}": column
        for name, array in figures.items()
        for harvest, column in zip(("", " against"), array.T, strict=False)
    }


# when it was created is below the harvest's id: the columns need the room
_HARVEST = Shown(
    "Harvests",
    {
        "id": "{id}\n{created:minute}",
        "state": "{state}",
        "done": "{share:.0%}",
        "rows": "{rows:,}",
        "size": "{bytes:size}",
    },
    {
        "harvest": "{id}",
        "state": lambda view: view.state + (f": {escape(view.reason)}" if view.reason else ""),
        "computed": lambda view: f"the first {view.layers} layers" if view.layers else "",
        "read": "{documents:,} documents, {tokens:,} tokens",
        "written": "{rows:,} rows, {bytes:size} in {shards:,} shards",
        "acknowledged": lambda view: ", ".join(
            f"{escape(name)}: {units:,} units" for name, units in view.acknowledged.items()
        ),
        "done": lambda view: (
            f"{view.units_done:,} of {view.units:,} units ({view.share:.1%}), "
            f"{view.tokens_s:,.0f} tokens/s"
            if view.units
            else ""
        ),
        "left": _left,
        "error": lambda view: f"[red]{escape(view.error.detail)}[/]" if view.error else "",
        "files": "{uri}",
    },
)
_FEATURES = Shown(
    columns={
        "feature": "{feature}",
        "density": lambda each: " → ".join(f"{share:.2%}" for share in each.density),
        "mean activation": lambda each: " → ".join(f"{mean:.2f}" for mean in each.mean),
    }
)
#: Class → its form.
FORMS: dict[type, Form] = {
    FeatureFigures: Form(shown=_FEATURES),
    Harvest: Form(plot=harvest_figure, lines=_harvest),
    HarvestView: Form(shown=_HARVEST),
    Surveyed: Form(lines=_survey),
}
