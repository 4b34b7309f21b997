"""Does a study ask what was meant, find the strongest cells, look closer at the right tokens, and
survive on disk?
"""

import asyncio
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from http_kit import Reply, reply, server
from refusal_kit import refuses
from sweep_kit import CORRUPT, FAILED, LAYERS, PEAK, VIEW, grid, over, pair, result

from midstream import AsyncClient, AsyncPatchStudy, Client, PatchStudy
from midstream.schemas.base.records import from_json, to_json
from midstream_lab.client.grid import Effect, grid_of
from midstream_lab.client.patch_study import Region
from midstream_lab.client.progress import bar
from midstream_lab.records.sweeps import (
    PairSpan,
    Skipped,
    SweepCell,
    SweepPair,
    SweepRequest,
    SweepResult,
    SweepStart,
    SweepSummary,
)
from midstream_lab.show import notebook

PROMPTS = ("The Eiffel Tower is in", "The Colosseum is in", " Paris", " Rome")
START = SweepStart(
    metric="recovered",
    direction="denoise",
    ablation=None,
    hooks=["pre_attn"],
    layers=[0, 1],
    labels=[["a"]],
    total=2,
    skipped=[Skipped(pair=0, hook="pre_attn", layers=[0], column=0, reason="same")],
    notes=[[]],
)
CELL = SweepCell(pair=0, hook="pre_attn", layer=1, column=0, label="a", value=0.5)


def stream(*events: tuple[str, Any]) -> Reply:
    parts = [
        b"id: %d-0\nevent: %b\ndata: %b\n\n" % (place, name.encode(), to_json(data))
        for place, (name, data) in enumerate(events, 1)
    ]
    return 200, {"content-type": "text/event-stream"}, b"".join(parts)


def swept(sweep: SweepResult | None = None, asked: SweepRequest | None = None) -> PatchStudy:
    """A study as after a sweep."""
    study = PatchStudy(*PROMPTS)
    request = SweepRequest(model="m", pairs=study._pairs, hooks=["resid_pre", "mlp_out"])
    return study._keep("job_1", asked or request, sweep or result())


def asked_by(study: PatchStudy, call: str, *arguments: Any, **fields: Any) -> SweepRequest:
    """What the server is asked when the study makes this call."""
    with (
        server(reply(VIEW, 202), reply(VIEW), over(result())) as (url, seen),
        Client(url) as client,
    ):
        study._client = client
        getattr(study, call)(*arguments, progress=False, **fields)
        assert seen[0].startswith("POST /v1/sweeps")
        return from_json(seen.bodies[0], SweepRequest)


def test_sweep_arguments_send_only_what_was_given() -> None:
    study = PatchStudy(*PROMPTS, model="m")
    asked = asked_by(
        study,
        "sweep",
        hooks=["attn_out"],
        layers=range(3),
        positions=np.array([1, 2]),
        window={"layers": np.int64(3)},
    )
    assert asked.pairs == [
        SweepPair(clean=PROMPTS[0], corrupt=PROMPTS[1], answer=" Paris", foil=" Rome")
    ]
    assert asked.hooks == ["attn_out"]
    assert asked.layers == [0, 1, 2]
    assert asked.positions == [1, 2]
    assert asked.window.layers == 3
    assert asked.metric == "recovered"
    assert study.result == result()


def test_several_pairs_share_their_spans_and_ablations_need_no_corrupt_prompt() -> None:
    study = PatchStudy.pairs(
        [("a b", "c d", " e", " f"), {"clean": "g h", "answer": " i"}], model="m"
    )
    asked = asked_by(
        study, "sweep", spans=[{"name": "first", "clean": [0]}], ablation="zeros", metric="logprob"
    )
    assert [each.spans for each in asked.pairs] == [[PairSpan(name="first", clean=[0])]] * 2
    assert asked.pairs[1].corrupt is None
    assert asked.ablation == "zeros"


@pytest.mark.parametrize(
    ("pair", "metric"),
    [(("a", None, " b", " c"), "logit_diff"), (("a", None, " b"), "logprob"), (("a",), "kl")],
)
def test_an_ablation_defaults_to_a_metric_of_its_pair(
    pair: tuple[str | None, ...], metric: str
) -> None:
    study = PatchStudy(*pair, model="m")  # type: ignore[arg-type]
    assert asked_by(study, "sweep", ablation="mean").metric == metric
    assert asked_by(study, "sweep", ablation="mean", metric="kl").metric == "kl"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"hooks": ["nowhere"]}, "hooks[0]"),
        ({"widow": 3}, "widow"),
        ({"alpha": 2}, "alpha"),
        ({"layers": object()}, "layers"),
    ],
)
def test_a_mistake_is_named_before_anything_is_sent(fields: dict[str, Any], field: str) -> None:
    with refuses() as caught:
        PatchStudy(*PROMPTS, client=Client("http://127.0.0.1:1"), model="m").sweep(
            progress=False, **fields
        )
    assert field in f"{caught.value.field} {caught.value.detail}"


def test_top_gives_the_strongest_cells_with_token_position_layer_and_hook() -> None:
    first, second = swept().top(2)
    assert first.hook == "resid_pre"
    assert first.layer == PEAK[0]
    assert first.label == "um"
    assert first.positions == [3]
    assert first.value == 0.95
    assert first.effect == 0.95
    assert second.effect == 0.475
    lower = pair(grids={"pre_attn": grid(-8.0), "mlp_out": grid(-30.0)})
    best = swept(result(lower, metric="logprob")).top(1)[0]
    assert best.hook == "mlp_out"
    assert best.value == -30.0
    assert best.effect == -21.0  # the base is −9


def test_a_cell_is_shown_in_few_digits() -> None:
    share = 0.8724349610999258
    cell = Effect("attn_out", 21, 9, " of", [9], value=share, effect=share)
    assert repr(cell) == "Effect(' of', attn_out 21, value=0.8724)"
    other = cell._replace(effect=-0.25, head=3, neurons=(4, 7))
    assert repr(other) == (
        "Effect(' of', attn_out 21, head 3, neurons 4, 7, value=0.8724, effect=-0.25)"
    )


def test_the_mean_over_pairs_leaves_out_the_cells_that_have_no_value() -> None:
    holes: dict[Any, Any] = {"pre_attn": [[None] * 6 for _ in LAYERS], "mlp_out": grid(0.4)}
    both = result(pair(), pair(grids=holes, labels=["The", " Taj", " Mahal", "x", " is", " in"]))
    mean = grid_of(both)
    assert mean.values["pre_attn"][PEAK] == 0.95
    assert mean.values["mlp_out"][PEAK] == pytest.approx(0.1)
    assert mean.labels == ["The", "Col/Taj", "osse/Mahal", "um/x", " is", " in"]
    with refuses("no pair 2"):
        grid_of(both, 2)


def test_records_have_every_cell_and_the_reason_of_those_without_a_value() -> None:
    study = swept()
    records = study.to_records()
    frame = study.to_pandas()
    assert len(records) == len(frame) == 2 * len(LAYERS) * len(CORRUPT)
    by_place = {(each["hook"], each["layer"], each["column"]): each for each in records}
    assert by_place["resid_pre", *PEAK]["value"] == 0.95
    failed = by_place["mlp_out", *FAILED]
    assert failed["value"] is None
    assert failed["effect"] is None
    assert failed["reason"] == "the run is gone"
    assert all((each["value"] is None) == bool(each["reason"]) for each in records)
    assert list(frame.columns) == list(records[0])
    assert frame["value"].isna().sum() == sum(each["value"] is None for each in records)


def test_zoom_asks_for_each_token_of_the_named_columns_by_itself() -> None:
    spans = [PairSpan(name="subject", clean=[1, 2, 3]), PairSpan(name="rest", clean=[4, 5])]
    request = SweepRequest(
        model="m",
        pairs=[SweepPair(clean="a", corrupt="b", answer="c", spans=spans)],
        window={"layers": 5},
        metric="logprob",
        alpha=0.5,
    )
    coarse = result(
        pair(
            labels=["subject", "rest"],
            positions=[[1, 2, 3], [4, 5]],
            grids={hook: grid(0.9, columns=2) for hook in ("pre_attn", "mlp_out")},
        ),
        skipped=[],
    )
    asked = asked_by(swept(coarse, request), "zoom", columns=["subject"], layers="8-12")
    assert asked.pairs[0].spans is None
    assert asked.pairs[0].positions == [1, 2, 3]
    assert asked.layers == "8-12"
    assert asked.window.layers == 1
    assert asked.hooks == ["post_block"]
    assert asked.metric == "logprob", "what else was asked is asked again"
    assert asked.alpha == 0.5, "what else was asked is asked again"


def test_zoom_around_a_cell_takes_its_hook_tokens_and_layers_between_neighbours() -> None:
    study = swept(
        result(
            pair(grids={hook: grid(0.9)[::3] for hook in ("pre_attn", "mlp_out")}),
            layers=LAYERS[::3],
            skipped=[],
        )
    )
    cell = next(each for each in study.grid().cells() if each.layer == 12 and each.column == 3)
    asked = asked_by(study, "zoom", cell)
    assert asked.hooks == ["resid_pre"]
    assert asked.layers == list(range(9, 16))
    assert asked.pairs[0].positions == [3]


def test_a_grid_of_heads_is_read_by_head_and_its_zoom_is_over_positions() -> None:
    grids = {hook: grid(0.9, columns=4) for hook in ("pre_attn", "mlp_out")}
    made = pair(
        labels=[f"head {head}" for head in (2, 5, 6, 7)],
        heads=[2, 5, 6, 7],
        positions=[[1, 2, 3]] * 4,
        grids=grids,
    )
    study = swept(result(made, skipped=[], axis="head"))
    assert study.grid().by_head("pre_attn").shape == (len(LAYERS), 4)
    assert study.top(1)[0].head == 7, "of column 3"
    asked = asked_by(study, "zoom", study.top(1)[0])
    assert asked.axis == "head_position"
    assert asked.heads == [7]
    assert asked.pairs[0].positions == [1, 2, 3]
    by_position = {hook: grid(0.9, columns=4) for hook in ("pre_attn", "mlp_out")}
    both = pair(
        labels=list("abcd"), heads=[0, 0, 1, 1], positions=[[1], [2]] * 2, grids=by_position
    )
    assert swept(result(both, skipped=[], axis="head_position")).grid().by_head(
        "mlp_out"
    ).shape == (len(LAYERS), 2, 2)
    with refuses("has no heads"):
        swept(result()).grid().by_head()
    with refuses("cannot be zoomed"):
        asked_by(swept(result(axis="neuron")), "zoom")


# field case 34
def test_zoom_keeps_token_pairs_when_the_patch_direction_is_reversed() -> None:
    # "iffel Tower" of the clean prompt, at 2 and 3, is "um" and what follows it: no alignment but
    # the sweep's own says so.
    spans = [PairSpan(name="subject", clean=[1, 2, 3], corrupt=[3, 4])]
    request = SweepRequest(
        model="m", pairs=[SweepPair(clean="a", corrupt="b", answer="c", spans=spans)]
    )
    coarse = result(
        pair(
            labels=["subject"],
            positions=[[3, 4]],
            sources=[[2, 3]],
            grids={h: grid(0.9, columns=1) for h in ("pre_attn", "mlp_out")},
        ),
        skipped=[],
    )
    (closer,) = asked_by(swept(coarse, request), "zoom").pairs
    assert closer.positions == [3, 4]
    assert closer.alignment == [(2, 3), (3, 4)]
    (turned,) = asked_by(swept(coarse, request), "zoom", direction="noise").pairs
    assert turned.positions == [2, 3]
    assert turned.alignment == [(2, 3), (3, 4)]
    (noised,) = asked_by(
        swept(msgspec.structs.replace(coarse, direction="noise"), request), "zoom"
    ).pairs
    assert noised.positions == [3, 4]
    assert noised.alignment == [(3, 2), (4, 3)]
    (named,) = asked_by(swept(coarse, request), "zoom", alignment="right").pairs
    assert named.alignment is None


def test_a_new_sweep_of_a_zoomed_study_may_ask_for_other_positions() -> None:
    study = PatchStudy.pairs(
        [SweepPair(clean="a", corrupt="b", answer="c", positions=[3])], model="m"
    )
    assert asked_by(study, "sweep", positions="all_prompt").pairs[0].positions is None
    study._pairs, study._unzoomed = (
        [SweepPair(clean="a", alignment=[(3, 3)], positions=[3])],
        study._pairs,
    )
    assert asked_by(study, "sweep", positions="all_prompt").pairs[0].alignment is None


def test_a_saved_study_is_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    study = swept()
    study.save(tmp_path / "study.json")
    assert '"hooks":["pre_attn","mlp_out"]' in (tmp_path / "study.json").read_text()
    loaded = PatchStudy.load(tmp_path / "study.json")
    assert study.grid().hooks == ["resid_pre", "mlp_out"]
    assert study.top(1)[0].hook == "resid_pre"
    assert loaded.request == study.request
    assert loaded.result == study.result
    assert loaded.job == study.job
    assert loaded.top(1) == study.top(1)
    assert (
        repr(loaded)
        == repr(study)
        == (
            "PatchStudy('The Eiffel Tower is in', 'The Colosseum is in'): recovered of 298 "
            "cells, 62 skipped; .show() prints the notes (1)"
        )
    )
    with refuses("call sweep"):
        PatchStudy(*PROMPTS).top()


@pytest.mark.parametrize(
    ("change", "kind", "detail"),
    [
        ({"version": 2}, "version_mismatch", "in format 2"),
        ({"format": "notes"}, "invalid_request", "not a saved study"),
        ({"result": {}}, "invalid_request", "result.hooks: is required"),
    ],
)
def test_a_file_that_is_no_study_of_this_version_is_refused(
    tmp_path: Path, change: dict[str, Any], kind: str, detail: str
) -> None:
    swept().save(tmp_path / "study.json")
    document = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps(document | change))
    with refuses(match=detail, kind=kind):
        PatchStudy.load(tmp_path / "study.json")


EVENTS = (
    stream(
        ("state", {"state": "running", "attempt": 1}),
        ("start", {**json.loads(to_json(START)), "attempt": 1}),
    ),
    stream(
        ("cell", {**json.loads(to_json(CELL)), "attempt": 1}),
        ("done", {"state": "succeeded", "attempt": 1}),
    ),
)


def test_progress_is_told_of_every_cell_also_after_a_lost_connection() -> None:
    show: list[SweepStart | SweepCell | SweepSummary] = []
    with (
        server(reply(VIEW, 202), *EVENTS, reply(VIEW), over(result())) as (url, seen),
        Client(url) as client,
    ):
        assert (
            client.sweep(model="m", pairs=[SweepPair(clean="a")], progress=show.append) == result()
        )
    assert show == [START, CELL]
    assert [line for line in seen if "events" in line] == [
        "GET /v1/jobs/job_1/events",
        "GET /v1/jobs/job_1/events 2-0",
    ]


async def test_the_async_study_does_the_same() -> None:
    show: list[Any] = []
    with server(reply(VIEW, 202), *EVENTS, reply(VIEW), over(result())) as (url, seen):
        async with AsyncClient(url) as client:
            study = await AsyncPatchStudy(*PROMPTS, client=client, model="m").sweep(
                hooks=["resid_pre"], progress=show.append
            )
    assert study.result.hooks == ["resid_pre", "mlp_out"]
    assert show == [START, CELL]
    assert from_json(seen.bodies[0], SweepRequest).hooks == ["resid_pre"]


def test_a_result_of_another_job_kind_is_refused() -> None:
    with (
        server(reply(VIEW), over(None)) as (url, _),
        Client(url) as client,
        refuses("job_1 is not a sweep"),
    ):
        client.sweeps.result("job_1")


def test_interrupting_the_wait_cancels_the_sweep() -> None:
    def stop(show: object) -> None:
        raise KeyboardInterrupt

    with (
        server(reply(VIEW, 202), EVENTS[0], reply(VIEW)) as (url, seen),
        Client(url) as client,
        pytest.raises(KeyboardInterrupt) as caught,
    ):
        client.sweep(model="m", pairs=[SweepPair(clean="a")], progress=stop)
    assert seen[-1] == "POST /v1/jobs/job_1/cancel"
    assert caught.value.__notes__ == ["sweep job_1 was cancelled"]


async def test_cancelling_the_async_sweep_cancels_it_on_the_server() -> None:
    with server(reply(VIEW, 202), EVENTS[0], reply(VIEW)) as (url, seen):
        async with AsyncClient(url) as client:
            waiting = asyncio.create_task(
                client.sweep(
                    model="m", pairs=[SweepPair(clean="a")], progress=lambda show: waiting.cancel()
                )
            )
            with pytest.raises(asyncio.CancelledError):
                await waiting
    assert "POST /v1/jobs/job_1/cancel" in seen


def test_the_bar_counts_each_cell_once_and_is_not_drawn_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    with bar() as show:
        assert show is None
    assert screen.getvalue() == ""
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    with bar("sweep") as show:
        assert show is not None
        for each in (START, CELL, CELL, CELL, START):
            show(each)
        assert show._drawn.n == 2
        assert show._drawn.total == 2  # type: ignore[attr-defined]
    assert "sweep: 100%" in screen.getvalue()


def test_ipython_renders_reports() -> None:
    formatters = pytest.importorskip(
        "IPython.core.formatters", reason="ipykernel is not installed (extra `dev`)"
    )
    shell = SimpleNamespace(display_formatter=formatters.DisplayFormatter())
    data, _ = shell.display_formatter.format(result())
    assert data["image/png"]
    assert "Strongest cells" in data["text/html"]
    assert "job_1" in shell.display_formatter.format(VIEW)[0]["text/html"]


def test_a_study_a_figure_and_a_result_render_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study = PatchStudy("a", client=Client("http://127.0.0.1:1"))
    assert study._repr_png_() is None
    assert study._repr_html_() is None
    request = SweepRequest(model="m", pairs=[SweepPair(clean="a")])
    study = PatchStudy.of("job_1", request, result(), study._client)
    for drawn in (study._repr_png_(), study.plot()._repr_png_(), notebook.sweep_png(result())):  # type: ignore[attr-defined]
        assert (drawn or b"").startswith(b"\x89PNG")
    page = study._repr_html_() or ""
    assert "data:image/png;base64," in page
    assert "Strongest cells" in page
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert study._repr_png_() is None
    assert "█" in (study._repr_html_() or ""), "as the terminal draws it"


def test_a_region_that_cannot_be_zoomed_into_is_refused() -> None:
    for region, detail in (
        (Region(columns=["Louvre"]), "0 columns are called 'Louvre'"),
        (Region(columns=[9]), "no column 9"),
        (Region(columns=[0]), "no column could be patched"),  # it was skipped
    ):
        with refuses(detail, field="columns"):
            swept().zoom(region)
    two = pair(
        labels=["a", "b"],
        positions=[[3], [3]],
        sources=[[2], [1]],
        grids={h: grid(0.9, columns=2) for h in ("pre_attn", "mlp_out")},
    )
    study = swept(result(two, skipped=[]))
    with refuses("position 3 gets rows of both positions 2 and 1"):
        study.zoom()
    assert asked_by(study, "zoom", columns=["b"]).pairs[0].alignment == [(1, 3)]
