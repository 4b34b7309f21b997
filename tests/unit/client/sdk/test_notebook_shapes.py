"""What notebooks show and convert: HTML of every kind of result, escaped; pandas and xarray;
and what is said without them.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_kit import finished, values, write
from job_kit import job_result, job_view, listed_job
from refusal_kit import refuses
from sweep_kit import FAILED, LAYERS, PEAK, pair, result

from midstream import CaptureReader, Mapped
from midstream.client.notebook import Listing
from midstream.client.render.notebook import html
from midstream.client.sdk.readings import Lens
from midstream.schemas.base import records as base
from midstream.schemas.base.edit_sizes import EditSizes
from midstream.schemas.base.errors import Problem
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.jobs import CaptureResults, JobPage
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.prompts.selectors import ALIASES
from midstream.schemas.prompts.sites import asked_names, renamed
from midstream.schemas.requests.specs import CaptureSpec, SteeringSpec
from midstream.schemas.requests.steering import EntryView, GlobalView, ModuleView
from midstream_lab.client.grid import Grid, grid_of
from midstream_lab.records.doses import DoseCell, DoseEffect, DoseResult, StoredDose

#: Markup of HTML, of attributes and of rich; a link of rich would become one of HTML.
HOSTILE = "<script>alert(1)</script>\"' onload=x &amp; [link=javascript:alert(1)]x[/link] [bold]"


class Tags(HTMLParser):
    """The tags and attributes that a browser would see."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.names: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def module(name: str, description: str = "") -> ModuleView:
    entry = EntryView(
        op="add",
        hook="post_block",
        layers=[1],
        positions="all",
        tensors=["ab"],
        scale=1.0,
        numbers=[],
    )
    return ModuleView(
        name=name,
        model="m",
        digest="d" * 64,
        entries=[entry],
        bytes=10,
        created=0.0,
        description=description,
    )


def reader(folder: Path) -> CaptureReader:
    write(folder, finished(sites={"post_block": [2, 3]}, positions=[0, 1, 2]))
    return CaptureReader(folder / "tag" / "job_x")


def lens(word: str) -> Lens:
    tokens = np.arange(4).reshape(2, 1, 2)
    logprobs = np.log(np.full((2, 1, 2), 0.25, np.float32))
    empty = np.zeros((2, 1, 0))
    return Lens(
        job="job_x",
        hook="post_block",
        layers=[0, 1],
        positions=[5],
        token_ids=[7],
        top_ids=tokens,
        logprobs=logprobs,
        named=[],
        ranks=empty,
        named_logprobs=empty,
        words={7: word, 0: word, 1: "b"},
    )


def hostile_grid() -> Grid:
    labels = [HOSTILE, *(f" {letter}" for letter in "abcde")]
    return grid_of(result(pair(labels=labels, base_tokens=labels)))


# --- HTML ---


def test_everything_that_calls_return_has_html(tmp_path: Path) -> None:
    pages = {
        "job": job_view()._repr_html_(),
        "page of jobs": JobPage(jobs=[listed_job()])._repr_html_(),
        "result": job_result("Paris")._repr_html_(),
        "module": module("joy")._repr_html_(),
        "modules": Listing([module("joy"), module("fear")])._repr_html_(),
        "grid": grid_of(result())._repr_html_(),
        "sweep": result()._repr_html_(),
        "capture": reader(tmp_path)._repr_html_(),
        "mapped": Mapped(0, "The", job_result("Paris"), 0, True)._repr_html_(),
        "lens": lens("a")._repr_html_(),
    }
    words = {
        "job": "job_1",
        "page of jobs": "succeeded",
        "result": "Paris",
        "module": "joy",
        "modules": "fear",
        "grid": "Strongest",
    }
    for name, page in pages.items():
        assert page is not None, name
        assert Tags(page).found <= {"pre", "span", "img"}, name
        assert words.get(name, "") in Tags(page).text, name


def test_only_records_with_a_table_are_rendered_and_only_with_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(type="t", title="t", status=400, detail="d")
    assert problem._repr_html_() is None
    assert Listing()._repr_html_() is None
    assert Listing([1])._repr_html_() is None
    assert job_view()._repr_html_()
    monkeypatch.setattr(base, "plotter", None)
    assert job_view()._repr_html_() is None


def test_what_a_server_says_is_escaped() -> None:
    entry = GlobalView(model=HOSTILE, version=1, digest="d", entries=[], changed=0.0)
    problem = Problem(type="t", title="t", status=500, detail=HOSTILE)
    pages = [
        job_view(id=HOSTILE, model=HOSTILE, worker=HOSTILE, error=problem)._repr_html_(),
        JobPage(jobs=[listed_job(id=HOSTILE, model=HOSTILE, prompt=HOSTILE)])._repr_html_(),
        job_result(HOSTILE)._repr_html_(),
        module(HOSTILE, HOSTILE)._repr_html_(),
        Listing([module(HOSTILE, HOSTILE)])._repr_html_(),
        entry._repr_html_(),
        Mapped(0, HOSTILE, job_result(HOSTILE), 0, True)._repr_html_(),
        hostile_grid()._repr_html_(),
        lens(HOSTILE)._repr_html_(),
        html('[link=x"><script>]text[/link]'),
    ]
    for number, page in enumerate(pages):
        assert page is not None
        seen = Tags(page)
        assert seen.found <= {"pre", "span", "img"}, number
        assert seen.names <= {"style", "alt", "src"}, number


# --- pandas, xarray ---


def test_captures_become_data_frames_and_labelled_arrays(tmp_path: Path) -> None:
    pytest.importorskip("xarray")
    opened = reader(tmp_path)
    frame = opened.to_pandas()
    assert frame.index.names == ["request", "layer", "position"]
    assert list(frame.columns[:2]) == ["token", "token_id"]
    np.testing.assert_array_equal(
        frame.loc[(0, 3, 1)][2:].to_numpy(np.float32), values("post_block", 3, [1])[0]
    )
    array = opened.to_xarray()
    assert array.dims == ("layer", "position", "dim")
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array.sel(layer=2), values("post_block", 2, [0, 1, 2]))
    assert list(array.token.values) == [str(token) for token in opened.token_ids()]
    assert array.attrs["job"] == "job_x"


def test_grids_become_data_frames_and_labelled_arrays() -> None:
    pytest.importorskip("xarray")
    grid = grid_of(result())
    frame = grid.to_pandas()
    assert len(frame) == sum(1 for _ in grid.cells())
    top = frame.loc[frame.effect.abs().idxmax()]
    assert (top.layer, top.column) == PEAK
    dataset = grid.to_xarray()
    assert dataset.value.shape == (2, len(LAYERS), len(grid.labels))
    cell = dataset.effect.sel(hook="pre_attn", layer=PEAK[0], column=PEAK[1])
    assert float(cell) == grid.effects["pre_attn"][PEAK]
    assert np.isnan(dataset.value.sel(hook="pre_attn", layer=FAILED[0], column=FAILED[1]))
    assert dataset.attrs["metric"] == "recovered"


def test_a_lens_and_a_dose_become_data_frames() -> None:
    read = lens("a").to_pandas()
    assert read[read["rank"] == 0].token.tolist() == ["a", "#2"]
    assert read.iloc[3].to_dict() == {
        "layer": 1, "position": 5, "rank": 1, "token_id": 3, "token": "#3",
        "logprob": pytest.approx(np.log(0.25)),
    }  # fmt: skip
    kept: dict[str, Any] = {"loss": 1.0, "repetition": 0.0, "safe": True, "text": "x"}
    cells = [DoseCell(layer=None, scale=scale, effect=scale / 2, **kept) for scale in (0.0, 2.0)]
    dose = StoredDose(
        cells=[], effect=DoseEffect(target=" a"), prompts=1, requests=1, target_tokens=[1],
        max_loss=1, max_repetition=1,
    )  # fmt: skip
    frame = DoseResult(dose=dose, unsteered=cells[0], cells=cells[1:]).to_pandas()
    assert frame[["scale", "effect", "safe"]].values.tolist() == [[0, 0, True], [2, 1, True]]


def test_answers_name_hooks_as_the_request_first_did_and_know_both_names() -> None:
    spec = CaptureSpec(hooks={"resid_pre": "all", "z": 1})
    steering = [SteeringSpec(hook=hook) for hook in ("hook_resid_pre", "hook_z", "rot_q")]
    names = asked_names(None, spec, *steering)
    assert names == {"pre_attn": "resid_pre", "q": "rot_q"}
    captures = CaptureResults(status="not_requested", job="job_1", hook_names=names)
    sizes = EditSizes(request=0, hook="q", layer=1, rows=1, median=0.0, largest=0.0)
    made = job_result("pre_attn", sweep=result(), edits=[sizes], capture_results=captures)
    plain: Any = from_json(to_json(made), JobResult)
    for answer, first, edited in (
        (plain, "pre_attn", "q"),
        (plain.as_asked(), "resid_pre", "rot_q"),
    ):
        grid = grid_of(answer.sweep)
        pair = answer.sweep.pairs[0]
        for named in (grid.values, grid.effects, answer.sweep.mean, pair.grids):
            assert list(named) == [first, "mlp_out"]
            assert named["resid_pre"] is named["pre_attn"] is named.get("hook_resid_pre")
            assert "hook_mlp_out" in named
            assert "resid_post" not in named
            with pytest.raises(KeyError, match="post_block"):
                named["resid_post"]
        assert {each.hook for each in answer.sweep.skipped} <= {*grid.hooks}
        assert grid.top(1)[0].hook == first
        assert answer.edits[0].hook == edited
        assert answer.outputs == made.outputs
        assert pair.labels == result().pairs[0].labels
        assert renamed(answer, ALIASES) == made


@pytest.mark.parametrize(("package", "call"), [("pandas", "to_pandas"), ("xarray", "to_xarray")])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, call: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for each in (grid_of(result()), reader(tmp_path)):
        with refuses(match=rf"{package}.*pip install 'midstream\[notebook\]'", kind="unavailable"):
            getattr(each, call)()
