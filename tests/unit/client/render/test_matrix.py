"""Rows of several requests and jobs become one matrix, in a known order, or an error says what is
missing; `plot` draws every kind of result.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attribution_kit import attribution, edges, verified_features
from capture_kit import finished, values, write
from job_kit import job_result
from matplotlib.colors import to_rgb
from msgspec.structs import replace
from refusal_kit import refuses
from rich.console import Console
from sweep_kit import result

from midstream import (
    Answer,
    CaptureReader,
    Mapped,
    MidstreamError,
    PatchStudy,
    matrix,
    probes,
    samples,
)
from midstream.client.captures.patterns import Attention
from midstream.client.render.figures import PLOTS
from midstream.client.render.forms import added
from midstream.client.render.lines import LINES
from midstream.client.sdk.readings import Features, lens_of
from midstream.schemas.artifacts.conditions import Condition, Decision, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeResult
from midstream.schemas.base.records import Result
from midstream.schemas.readings.features import FeaturesReading
from midstream.schemas.readings.lens import LensReading
from midstream_harvest.files.surveys import Surveyed
from midstream_harvest.records.harvests import SurveyEntry
from midstream_harvest.records.work import Survey
from midstream_lab.client.attribution import Attribution
from midstream_lab.client.grid import grid_of
from midstream_lab.records.doses import DoseCell, DoseEffect, DoseResult, StoredDose
from midstream_lab.show import doses

POSITIONS = {"job_a": ([0, 1, 2], [0, 1]), "job_b": ([4, 6],)}


@pytest.fixture
def readers(tmp_path: Path) -> list[CaptureReader]:
    for job, requests in POSITIONS.items():
        captures = [
            finished(job=job, request=index, positions=positions)
            for index, positions in enumerate(requests)
        ]
        write(tmp_path, *captures, owner=job)
    return [CaptureReader(tmp_path, job) for job in POSITIONS]


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ("last", [[2], [1], [6]]),
        ("first", [[0], [0], [4]]),
        ("all", [[0, 1, 2], [0, 1], [4, 6]]),
        (-1, [[2], [1], None]),
        (0, [[0], [0], None]),
    ],
)
def test_a_matrix_has_the_chosen_rows_in_the_order_of_its_samples(
    readers: list[CaptureReader], rows: Any, chosen: list[Any]
) -> None:
    places = [("job_a", 0), ("job_a", 1), ("job_b", 0)]
    if None in chosen:  # the other job has no such position
        readers = readers[:1]
        places = places[:2]
        chosen = chosen[:2]
    layer = readers[0].layers()[0]
    expected = np.concatenate([values("post_block", layer, positions) for positions in chosen])
    found = matrix(readers, layer, rows=rows)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32
    wanted = [
        (*place, position)
        for place, positions in zip(places, chosen, strict=True)
        for position in positions
    ]
    assert [tuple(sample) for sample in samples(readers, rows)] == wanted


def test_rows_count_from_the_end_of_the_prompt_or_there_is_no_matrix(tmp_path: Path) -> None:
    write(tmp_path, finished(job="job_a", positions=[4, 6, 9], prompt_tokens=7), owner="job_a")
    reader = CaptureReader(tmp_path, "job_a")
    assert samples(reader, -1) == [("job_a", 0, 6)], (
        "not the last row, and not the third from the first"
    )
    empty = finished(job="job_b", request=1, positions=[])
    write(tmp_path, finished(job="job_b", positions=[0, 1]), empty, owner="job_b")
    reader = CaptureReader(tmp_path, "job_b")
    layer = reader.layers()[0]
    for rows in ("last", "first", "mean"):
        with refuses("request 1 has no captured rows", kind="not_found"):
            matrix(reader, layer, rows=rows)  # type: ignore[arg-type]
    assert matrix(reader, layer, rows="all").shape[0] == 2
    with refuses("no captured rows"):
        matrix([], layer)


@pytest.mark.parametrize(
    ("rows", "positions", "warned"),
    [
        ("first", [6], ["first"]),
        ("last", [0], ["last"]),
        ("last", [2, 3], ["last"]),
        ("first", [0, 6], []),
        ("last", [0, 6], []),
        ("last", [7, 8], []),
        ("all", [3], []),
        (3, [3], []),
        (-4, [3], []),
    ],
)
def test_a_row_that_is_not_at_its_end_of_the_prompt_has_a_warning(
    tmp_path: Path, rows: Any, positions: list[int], warned: list[str]
) -> None:
    write(tmp_path, finished(job="job_a", positions=positions, prompt_tokens=7), owner="job_a")
    reader = CaptureReader(tmp_path, "job_a")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        matrix(reader, reader.layers()[0], rows=rows)
    said = 'rows="{0}" takes the {0} captured row, which is not the prompt\'s {0} token'
    assert [str(each.message) for each in found] == [said.format(end) for end in warned]


def test_a_mean_is_over_the_captured_positions_of_a_request(readers: list[CaptureReader]) -> None:
    layer = readers[0].layers()[0]
    found = matrix(readers[0], layer, rows="mean")
    for row, positions in zip(found, POSITIONS["job_a"], strict=True):
        np.testing.assert_allclose(row, values("post_block", layer, positions).mean(0), rtol=1e-6)
    assert samples(readers[0], "mean")[1] == ("job_a", 1, None)


@pytest.mark.parametrize(
    ("rows", "said"),
    [("lst", "not a selection of rows"), (2, "position 2 of request 1 was not captured")],
)
def test_unavailable_rows_are_refused_with_the_available_ones(
    readers: list[CaptureReader], rows: Any, said: str
) -> None:
    with refuses(match=said, field="rows") as caught:
        matrix(readers, readers[0].layers()[0], rows=rows)
    assert caught.value.allowed


def test_models_of_different_width_make_no_matrix(
    readers: list[CaptureReader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture_kit.HIDDEN", 4)
    write(tmp_path / "other", finished(job="job_c"), owner="job_c")
    with refuses(match=r"different width .*\[4, 5\]"):
        matrix([*readers, CaptureReader(tmp_path / "other", "job_c")], readers[0].layers()[0])


# --- Plot ---


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


def reader(folder: Path) -> CaptureReader:
    write(folder, finished(job="job_x", positions=[4, 5]), owner="job_x")
    return CaptureReader(folder, "job_x")


def fitted(**site: Any) -> probes.Fit:
    rows = np.random.default_rng(0).normal(size=(40, 4)) + np.arange(40)[:, None] % 2
    return probes.fit(rows, np.arange(40) % 2, **site)


def dose() -> DoseResult:
    """Two layers: one is safe up to scale 2, the other nowhere."""
    none = DoseCell(layer=None, scale=0.0, effect=0.1, loss=4.0, repetition=0.1, safe=True, text="")
    near, far, bad = (
        replace(none, layer=layer, scale=scale, loss=loss, safe=loss < 1, text="a\ntext")
        for layer, scale, loss in ((3, 2.0, 0.1), (3, 4.0, 2.0), (7, 2.0, 3.0))
    )
    asked = StoredDose(
        cells=[(None, 0.0)], effect=DoseEffect(words=["joy"]), prompts=1, requests=2,
        target_tokens=[], max_loss=0.3, max_repetition=0.2,
    )  # fmt: skip
    return DoseResult(dose=asked, unsteered=none, cells=[far, near, bad], safe=[near])


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        ({"words": ["joy"]}, "share of texts with the words"),
        ({"target": " [b]sail"}, "log P(“[b]sail”), nats per token"),
        ({"probe": "tone"}, "score of tone"),
    ],
)
def test_a_dose_says_what_its_effect_is_in_which_unit(effect: Any, said: str) -> None:
    found = dose()
    measured = replace(found, dose=replace(found.dose, effect=DoseEffect(**effect)))
    console = Console(width=120)
    with console.capture() as shown:
        console.print(*doses.drawn(measured))
    assert f"Dose: effect is the {said}" in shown.get()


def attention() -> Attention:
    pattern = np.tril(np.ones((2, 3, 3), np.float32))
    return Attention("job_x", [0, 1, 2], [5, 6, 7], ["a", "b", "c"], {4: pattern}, {4: [0, 1]})


RESULTS = {
    "sweep": result,
    "attribution": lambda: Attribution("job_x", attribution()),
    "verified features": lambda: Attribution("job_x", verified_features()),
    "edges": lambda: Attribution("job_x", edges()),
    "attention": attention,
    "dose": dose,
    "job of a dose": lambda: job_result(dose=dose()),
    "grid": lambda: grid_of(result()),
    "lens": lambda: lens_of(LENS),
    "features": lambda: Features("job_x", FEATURES),
    "probe": lambda: SCORED,
    "aggregates": lambda: ProbeResult(
        request=0, probe="tone", digest="d", scores={"joy": 2.0}, positions=2
    ),
    "fit": fitted,
    "job of a sweep": lambda: job_result(sweep=result()),
    "job of a lens": lambda: job_result(lens=[LENS]),
    "job of a probe": lambda: job_result(probes=[SCORED]),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_every_result_is_drawn_and_saved(tmp_path: Path, kind: str) -> None:
    assert RESULTS[kind]().plot(tmp_path / "out.png").get_axes()
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_a_dose_is_drawn_by_layer_with_its_safe_range(tmp_path: Path) -> None:
    axes = dose().plot().get_axes()
    assert [axis.get_title() for axis in axes[:2]] == ["layer 3", "layer 7"]
    effect = axes[0]
    loss = axes[2]
    assert effect.patches[0].get_extents().width > 0 == axes[1].patches[0].get_extents().width
    drawn = {line.get_marker(): line.get_xydata().tolist() for line in loss.lines[2:]}
    assert drawn["None"] == [[0.0, 0.0], [2.0, 0.1], [4.0, 2.0]], "the line, by scale"
    assert drawn["x"] == [[4.0, 2.0]], "not safe"
    assert drawn["o"] == [[2.0, 0.1]], "the largest safe one"
    many = replace(dose(), cells=[replace(dose().cells[0], layer=n) for n in range(9)])
    assert len(many.plot().get_axes()) == 3 * 6


def test_estimates_are_drawn_against_exact_effects_with_a_scale_of_effects() -> None:
    scatter, *maps, bar = Attribution("job_x", attribution()).plot().get_axes()
    diagonal, agree, off = (line.get_xydata().tolist() for line in scatter.lines)
    assert diagonal == [[0.1, 0.1], [0.95, 0.95]]
    assert agree == [[0.95, 0.9]]
    assert off == [[0.1, 0.6]]
    assert scatter.get_title() == "rank correlation 0.50 · recall 75%"
    assert scatter.texts[0].get_text() == "Col 1, pre_attn 2"
    assert {axis.collections[0].get_clim() for axis in maps} == {(-0.95, 0.95)}
    assert bar.get_ylabel().startswith("effect on")


def _luminance(colour: Any) -> float:
    """Return the relative luminance of a colour, as WCAG defines it."""
    parts = np.array(to_rgb(colour))
    linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def test_words_of_a_lens_are_read_on_every_shade() -> None:
    logprobs = np.log(np.linspace(0.01, 1.0, 60))[:, None, None]
    many = dataclasses.replace(
        lens_of(LENS), layers=list(range(60)), positions=[0], token_ids=[5], logprobs=logprobs,
        top_ids=np.zeros((60, 1, 1), int),
    )  # fmt: skip
    axis, _ = many.plot().get_axes()
    mesh = axis.collections[0]
    for text, colour in zip(axis.texts, mesh.to_rgba(mesh.get_array()).reshape(-1, 4), strict=True):
        light, dark = sorted(map(_luminance, (text.get_color(), colour)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_classes_of_a_histogram_mix_to_no_third_colour() -> None:
    bars = fitted().plot().get_axes()[1]
    assert [patch.get_fill() for patch in bars.patches] == [True, False]


def guarded(*decisions: Decision, **fields: Any) -> ProbeResult:
    policy = StoredPolicy(
        name="guard", version=1, digest="d", actions=["flag"], mode="active", acts=True,
        condition=Condition(at_least=1.5),
    )  # fmt: skip
    return replace(SCORED, probe="policy:guard", policy=policy, decisions=list(decisions), **fields)


def test_scores_are_drawn_with_tokens_and_threshold_and_the_first_sets_no_scale() -> None:
    outlier = replace(SCORED, tokens=[[-62.0], [1.0], [2.0]], positions=3)
    (axis,) = outlier.plot(tokens=["<s>", " a", " b", " c"], threshold=3.0).get_axes()
    assert [label.get_text() for label in axis.get_xticklabels()] == ["<s>", "␣a", "␣b"]
    assert axis.lines[0].get_ydata()[0] == 3.0
    assert axis.get_ylim() == (pytest.approx(-0.45), pytest.approx(3.45))
    (axis,) = guarded(tokens=[[0.0], [0.0]]).plot().get_axes()
    assert axis.lines[0].get_ydata()[0] == 1.5


def outlying(positions: list[int]) -> Features:
    reading = replace(
        FEATURES, positions=positions, token_ids=[7, 8, 9], active=[3, 1, 1], errors=[0.1] * 3,
        features=[[5, 9, 2], [2], [3]], activations=[[39.0, 31.0, 20.0], [0.5], [0.3]],
    )  # fmt: skip
    return Features("job_x", reading)


@pytest.mark.parametrize(
    ("first", "rows", "limits"),
    [(0, ["2", "3"], (0.0, 0.5)), (4, ["5", "9"], (0.0, 39.0))],
)
def test_the_first_token_chooses_no_feature_and_sets_no_scale(
    first: int, rows: list[str], limits: tuple[float, float]
) -> None:
    axis, _ = outlying([first, first + 1, first + 2]).plot(count=2).get_axes()
    assert [label.get_text() for label in axis.get_yticklabels()] == rows
    assert axis.collections[0].get_clim() == pytest.approx(limits)
    assert axis.get_ylabel() == "feature"


def test_rows_are_drawn_on_the_scale_of_the_tokens_after_the_first(tmp_path: Path) -> None:
    write(tmp_path, finished(job="job_x", positions=[0, 1, 2]), owner="job_x")
    found = CaptureReader(tmp_path, "job_x")
    axis, _ = found.plot().get_axes()
    others = axis.collections[0].get_array()[:, 1:]
    assert axis.collections[0].get_clim() == (others.min(), others.max())
    assert axis.get_xlabel() == "token; the first sets no scale"


def test_a_jobs_data_frame_has_what_its_policies_decided() -> None:
    decisions = [
        Decision(position=8, event="trigger", score=2.0),
        Decision(position=9, event="release", score=0.0),
    ]
    probes = [guarded(), guarded(*decisions, request=1)]
    frame = job_result(probes=probes).to_pandas()
    assert [*frame] == ["prompt", "policy", "acts", "position", "event", "score"]
    assert frame.prompt.tolist() == [1, 1]
    assert frame.event.tolist() == ["trigger", "release"]
    assert len(probes[1].to_pandas()) == 2
    assert "text" in job_result("a", probes=probes[:1]).to_pandas(), "nothing was decided"
    assert len(job_result(probes=[SCORED, *probes]).to_pandas()) == 2, "the scores of its probe"


DRAWN = {*PLOTS, *(kind for kind, form in added().items() if form.plot)}
WRITTEN = {*LINES, *(kind for kind, form in added().items() if form.lines)}
CLASSES = sorted({*DRAWN, *WRITTEN, PatchStudy}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_of_results_has_a_data_frame_and_a_short_form(kind: Any) -> None:
    assert kind in WRITTEN or kind.to_pandas is not Result.to_pandas
    assert "dataclasses" not in kind.__repr__.__code__.co_filename, "it would print its arrays"


def surveyed(harvests: int = 1) -> Surveyed:
    found = Surveyed(
        None,  # type: ignore[arg-type]
        SurveyEntry(
            job="job_x",
            survey=Survey(uris=[], top=1, context=0),
            rows=8,
            key="k",
            bytes=1,
            crc32=0,
        ),
    )
    figures = {"active": [[1, 2], [4, 8]], "mean": [[0.5, 1.5], [2.0, 3.0]]}
    found.array = lambda name: np.array(figures[name])[:, :harvests]  # type: ignore[method-assign,misc,assignment]
    return found


UNDRAWN = {
    "text": lambda: Answer("job_x", ["a\nb"], ["stop"], None, None, {}),
    "survey": surveyed,
    "mapped": lambda: Mapped(0, [7] * 9999, job_result(dose=dose()), 0, cached=True),
}


@pytest.mark.parametrize("kind", [*RESULTS, *UNDRAWN])
def test_every_result_is_a_data_frame_and_one_short_line(kind: str) -> None:
    found = {**RESULTS, **UNDRAWN}[kind]()
    assert len(found.to_pandas())
    assert repr(found).startswith(f"{type(found).__name__}(")
    assert len(repr(found)) < 200
    assert "\n" not in repr(found)


def test_data_frames_have_a_line_for_each_number_of_a_figure() -> None:
    weights = attention().to_pandas()
    places = ["layer", "head", "query", "key"]
    texts = ["query_token", "key_token"]
    assert len(weights) == 12
    assert list(weights) == [*places, *texts, "weight"]
    bins = fitted().to_pandas()
    assert bins.negative.sum() == 5
    assert bins.positive.sum() == 5
    assert list(fitted().to_pandas(roc=True)) == ["label", "fpr", "tpr"]
    assert surveyed(2).to_pandas().to_dict("list") == {
        "feature": [0, 1],
        "density": [0.125, 0.5],
        "density against": [0.25, 1.0],
        "mean": [0.5, 2.0],
        "mean against": [1.5, 3.0],
    }
    assert lens_of(LENS, words={7: " a", 8: " b"}).tokens == [" a", " b"]
    named = {"named_tokens": [2, 9], "named_ranks": [[[1, 70]] * 2] * 2}
    spot = lens_of(replace(LENS, named_logprobs=[[[-2.0, -9.0]] * 2] * 2, **named)).to_pandas()
    assert spot[(spot.layer == 1) & (spot.position == 4)][["rank", "token_id"]].values.tolist() == [
        *([0, 1], [1, 2], [70, 9])
    ], "a line for each top token, and for each named one that is none of them"
    assert Features("job_x", FEATURES).to_pandas().token.tolist() == ["#7", "#7", "#8"]


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("dose", "DoseResult(cells=3, safe=1)"),
        (
            "lens",
            "Lens(job='', hook='post_block', layers=0-1, positions=4-5, top_k=2)",
        ),
        ("features", "Features(job='job_x', sae='s', positions=4-5)"),
        (
            "probe",
            "ProbeResult(probe='tone', digest='d', scores={'joy': 2.0}, positions=2, "
            "action='none', tokens=2)",
        ),
        (
            "grid",
            "Grid(metric='recovered', hooks=['pre_attn', 'mlp_out'], layers=0-29, columns=6)",
        ),
    ],
)
def test_a_result_of_arrays_is_printed_in_one_line(kind: str, shown: str) -> None:
    assert repr(RESULTS[kind]()) == shown


def test_captured_rows_are_drawn_as_norms_of_layers_by_tokens(tmp_path: Path) -> None:
    rows = reader(tmp_path)
    axes = rows.plot().get_axes()[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*map(str, rows.layers())]
    assert axes.collections[0].get_array().size == 2 * len(rows.layers())


def test_every_kind_is_drawn_by_plot_and_other_names_say_so() -> None:
    with pytest.raises(MidstreamError, match="ask for lens, features or probes"):
        job_result().plot()
    for drawn, name, says in (
        (lens_of(LENS), "heatmap", r"Lens has no attribute 'heatmap': use plot\(\)"),
        (lens_of(LENS), "hook_name", r"no attribute 'hook_name'$"),
    ):
        with pytest.raises(AttributeError, match=says):
            getattr(drawn, name)
    kinds = {kind.__name__ for kind in DRAWN}
    assert {"Attention", "CaptureReader", "Harvest", "Lens", "SweepResult"} <= kinds
    assert all(hasattr(kind, "plot") for kind in [*DRAWN, PatchStudy])


def test_rows_of_a_matrix_know_their_site_and_a_fit_keeps_it(tmp_path: Path) -> None:
    rows = matrix(reader(tmp_path), 2)
    assert rows.layer == 2
    assert rows.hook == "post_block"
    assert rows[:1].layer == 2
    assert rows[:1].hook == "post_block"
    fit = fitted(layer=15, hook="mlp_out")
    known = {"weight": 0, "bias": 0, "thresholds": 0, "held_out": 0}
    assert fit.fields() | known == {**known, "labels": ["1"], "layer": 15, "hook": "mlp_out"}
    assert repr(fit).startswith("Fit(labels=['1'], mlp_out 15, accuracy=")
    assert "layer" not in fitted().fields()


def test_a_fit_has_the_scores_of_its_held_out_rows_in_bounded_form() -> None:
    half = np.random.default_rng(0).normal(size=(2000, 1)) ** 3  # of many bins
    rows = np.concatenate([half - 1, half + 1, [[1e4]]])  # the last is an outlier
    fit = probes.fit(rows, [0] * 2000 + [1] * 2001, held_out=0.5)
    (found,) = fit.held_out
    roc = found.roc
    histogram = found.histogram
    assert roc.auc == fit.metrics.auroc
    assert len(roc.fpr) == 64
    assert len(histogram.negative) == 63
    assert np.trapezoid(roc.tpr, roc.fpr) == pytest.approx(roc.auc, abs=0.01)
    assert sum(histogram.negative) == 1000
    assert sum(histogram.positive) == 1001
    assert max(histogram.edges) < fit.scores(np.array([[100.0]]))
    three = probes.fit(rows, np.arange(len(rows)) % 3)
    assert len(three.held_out) == len(three.plot().axes[0].lines) - 1 == 3


@pytest.mark.parametrize("threshold", [-0.01, 0.0, 0.3, 7.2, 14.0, 14.5])
def test_no_bar_of_a_histogram_straddles_the_threshold(threshold: float) -> None:
    scores = np.append(np.arange(15.0), -30.0)
    bars = probes._held_out(scores, scores > 6, threshold).histogram
    edges = np.array(bars.edges)
    rows = np.add(bars.negative, bars.positive)
    assert sum(rows) == 16
    assert 16 < len(edges) <= 65
    assert edges[0] < threshold < edges[-1]
    assert rows[edges[:-1] >= threshold].sum() == (scores >= threshold).sum()
