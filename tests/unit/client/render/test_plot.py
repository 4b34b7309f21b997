"""`plot` draws every kind of result, and first guesses for it name it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_kit import finished, write
from sweep_kit import result

from midstream import CaptureReader, MidstreamError, PatchStudy, harvest, matrix, probes
from midstream.client.render.figures import PLOTS
from midstream.client.sdk.answers.grid import grid_of
from midstream.client.sdk.readings import Features, lens_of
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.base.states import State
from midstream.schemas.jobs.jobs import CaptureResults, JobResult
from midstream.schemas.readings.features import FeaturesReading
from midstream.schemas.readings.lens import LensReading

LENS = LensReading(
    request=0,
    hook="post_block",
    layers=[0, 1],
    positions=[4, 5],
    token_ids=[7, 8],
    top_tokens=[[[1, 2], [2, 1]]] * 2,
    top_logprobs=[[[-0.1, -2.0]] * 2] * 2,
    named_tokens=[],
    named_ranks=[[[], []]] * 2,
    named_logprobs=[[[], []]] * 2,
)
FEATURES = FeaturesReading(
    request=0, sae="s", digest="d", hook="post_block", layer=3, positions=[4, 5],
    token_ids=[7, 8], features=[[9, 2], [2]], activations=[[3.0, 1.0], [2.0]], active=[2, 1],
    errors=[0.1, 0.2],
)  # fmt: skip
SCORED = ProbeResult(
    request=0, probe="tone", digest="d", scores={"joy": 2.0}, positions=2, tokens=[[1.0], [2.0]]
)


def job(**computed: Any) -> JobResult:
    captures = CaptureResults(status="not_requested", job="job_x")
    return JobResult(
        id="job_x", model="m", state=State.SUCCEEDED, outputs=[], capture_results=captures,
        determinism=None, attempt=1, **computed,
    )  # fmt: skip


def reader(folder: Path) -> CaptureReader:
    write(folder, finished(job="job_x", positions=[4, 5]), owner="job_x")
    return CaptureReader(folder, "job_x")


def fitted(**site: Any) -> probes.Fit:
    rows = np.random.default_rng(0).normal(size=(40, 4)) + np.arange(40)[:, None] % 2
    return probes.fit(rows, np.arange(40) % 2, **site)


RESULTS = {
    "sweep": result,
    "grid": lambda: grid_of(result()),
    "lens": lambda: lens_of(LENS),
    "features": lambda: Features("job_x", FEATURES),
    "probe": lambda: SCORED,
    "aggregates": lambda: ProbeResult(
        request=0, probe="tone", digest="d", scores={"joy": 2.0}, positions=2
    ),
    "fit": fitted,
    "job of a sweep": lambda: job(sweep=result()),
    "job of a lens": lambda: job(lens=[LENS]),
    "job of a probe": lambda: job(probes=[SCORED]),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_every_result_is_drawn_and_saved(tmp_path: Path, kind: str) -> None:
    assert RESULTS[kind]().plot(tmp_path / "out.png").get_axes()
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_captured_rows_are_drawn_as_norms_of_layers_by_tokens(tmp_path: Path) -> None:
    rows = reader(tmp_path)
    axes = rows.plot().get_axes()[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*map(str, rows.layers())]
    assert axes.collections[0].get_array().size == 2 * len(rows.layers())


def test_a_job_without_anything_to_draw_says_what_to_ask_for() -> None:
    with pytest.raises(MidstreamError, match="ask for lens, features or probes"):
        job().plot()


def test_a_first_guess_names_plot() -> None:
    with pytest.raises(AttributeError, match=r"Lens has no attribute 'heatmap': use plot\(\)"):
        lens_of(LENS).heatmap()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'hook_name'$"):
        lens_of(LENS).hook_name  # type: ignore[attr-defined]  # noqa: B018


def test_every_kind_with_the_verb_has_a_figure() -> None:
    drawn = {kind.__name__ for kind in PLOTS}
    assert {"Attention", "CaptureReader", "Harvest", "Lens", "SweepResult"} <= drawn
    assert all(hasattr(kind, "plot") for kind in [*PLOTS, PatchStudy, harvest.Harvest])


def test_rows_of_a_matrix_know_their_site_and_a_fit_keeps_it(tmp_path: Path) -> None:
    rows = matrix(reader(tmp_path), 2)
    assert (rows.layer, rows.hook) == (2, "post_block")
    assert (rows[:1].layer, rows[:1].hook) == (2, "post_block")
    fit = fitted(layer=15, hook="mlp_out")
    assert {**fit.fields(), "weight": 0, "bias": 0, "thresholds": 0} == {
        "weight": 0, "bias": 0, "thresholds": 0, "labels": ["1"], "layer": 15, "hook": "mlp_out",
    }  # fmt: skip
    assert repr(fit).startswith("Fit(labels=['1'], mlp_out 15, accuracy=")
    assert "layer" not in fitted().fields()
