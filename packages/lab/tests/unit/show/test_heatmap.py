"""Is what a sweep found drawn so that it can be read and believed: where, how much, on which scale,
and what is missing?
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusal_kit import refuses
from rich.console import Console
from sweep_kit import CORRUPT, FAILED, LAYERS, PEAK, grid, pair, result

from midstream.client.render import figures
from midstream_lab.client.grid import described, grid_of
from midstream_lab.records.sweeps import Baseline, Metric, SweepResult
from midstream_lab.show import sweeps


def printed(sweep: SweepResult, width: int = 80, color_system: str | None = None) -> str:
    console = Console(width=width, height=50, color_system=color_system, force_terminal=True)  # type: ignore[arg-type]
    with console.capture() as captured:
        console.print(sweeps.report(sweep))
    return captured.get()


def test_each_hook_has_a_panel_of_tokens_by_layers_with_the_values_in_place() -> None:
    figure = figures.plot(result())
    panels = figure.axes[:2]
    assert [panel.get_title() for panel in panels] == ["pre_attn (resid_pre)", "mlp_out"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [
        "The",
        "Col 1",
        "osse 2",
        "um 3",
        "is 4",
        "in 5",
    ]
    drawn = panels[0].collections[0].get_array().reshape(len(CORRUPT), len(LAYERS))
    assert drawn[PEAK[1], PEAK[0]] == 0.95
    assert panels[0].yaxis_inverted(), "the first token is on top"
    mask = np.ma.getmaskarray(drawn)
    assert mask[0].all()
    assert mask[FAILED[1], FAILED[0]]
    assert panels[0].patch.get_hatch(), "a cell without a value is left to the hatched ground"
    for part in (
        "“The Eiffel Tower is in” patched into “The Colosseum is in”",
        "“Paris”",
        "“Rome”",
        "noise floor 0.004",
        "hatched: no value (62 of 360 cells)",
    ):
        assert part in figure.get_suptitle()


@pytest.mark.parametrize(
    ("metric", "peak", "limits", "middle"),
    [
        ("recovered", 0.95, (-1.0, 1.0), "0"),
        ("recovered", -1.2, (-1.0, 1.0), "0"),
        ("logit_diff", 9.0, (-27.0, 9.0), "-9"),  # 18 nats from the base at −9
    ],
)
def test_colours_diverge_from_the_unpatched_prompt_with_symmetric_limits(
    metric: Metric, peak: float, limits: tuple[float, float], middle: str
) -> None:
    sweep = result(pair(grids={"pre_attn": grid(peak), "mlp_out": grid(peak)}), metric=metric)
    axes = figures.plot(sweep).axes
    meshes = [panel.collections[0] for panel in axes[:2]]
    assert [mesh.get_clim() for mesh in meshes] == [limits, limits]
    assert {mesh.get_cmap().name for mesh in meshes} == {"RdBu_r"}
    assert axes[-1].get_ylabel().endswith(f"; white: unpatched ({middle})")
    beyond = "min" if peak < limits[0] else "neither"
    assert axes[-1]._colorbar.extend == beyond, "values beyond the scale are marked"


def test_a_small_negative_effect_differs_from_none_in_every_rendering() -> None:
    values: list[list[float | None]] = [[-0.1, 0.0, 0.1, -0.9, 0.9, -0.01] for _ in LAYERS]
    places = [[number] for number in range(6)]
    both = pair(grids={"pre_attn": values, "mlp_out": values}, positions=places)
    sweep = result(both, skipped=[])
    mesh = figures.plot(sweep).axes[0].collections[0]
    low, none, high = (mesh.cmap(mesh.norm(value)) for value in (-0.1, 0.0, 0.1))
    assert low[2] > low[0] + 0.05, "blue"
    assert high[0] > high[2] + 0.05, "red"
    assert abs(none[0] - none[2]) < 0.02
    names = ("The 0", "Col 1", "osse 2", "um 3", "is 4", "in 5")
    rows = [line for line in printed(sweep).splitlines() if line.startswith(names)][:6]
    assert [row[7] for row in rows] == ["░", "▁", "▁", "▓", "█", "▁"]
    coloured = printed(sweep, color_system="standard")
    assert "\x1b[34m░" in coloured, "blue"
    assert "\x1b[31m█" in coloured, "red"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"noise_floor": 0.004, "noise_probes": 8}, "noise floor 0.004 (8 probes)"),
        ({"noise_floor": 0.0, "noise_probes": 8}, "noise floor < 7e-08 (8 probes)"),
        ({"noise_floor": 0.0}, "noise floor < 7e-08"),
    ],
)
def test_a_noise_floor_of_zero_reports_its_resolution_and_sample_count(
    given: dict[str, Any], words: str
) -> None:
    # float32 at 9.4 nats: 9.5e-7, of a difference of 13.8
    assert described(result(pair(**given)))[-1].endswith(words)


def test_a_missing_matplotlib_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refuses("midstream[plots]"):
        figures.plot(result())


def test_long_prompts_in_titles_are_cut_in_the_middle() -> None:
    tokens = ["Once", *[" and\n again"] * 60, " in"]
    title = figures.plot(result(pair(base_tokens=tokens))).get_suptitle().replace("\n", " ")
    assert "“Once and again and" in title
    assert "again in”" in title
    assert len(title) < 400


def test_without_colours_the_strongest_cell_is_the_highest_block() -> None:
    text = printed(result())
    wide = printed(result(), width=200)
    row, *_ = [line for line in text.splitlines() if line.startswith("um 3")]
    cells = row.removeprefix("um 3   ")
    assert cells[2 * PEAK[0]] == "█"
    assert cells.count("█") == 2, "one cell of two columns"
    for words in (
        "note: position 3: aligned from the end",
        "60 cells without a value: the first tokens are the same (such as pre_attn at “The”)",
        "2 cells without a value: the run is gone (such as pre_attn at “osse”)",
    ):
        assert words in wide
    assert "a column is" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_of_a_terminal_heatmap_is_wider_than_the_terminal(width: int) -> None:
    wide = result(pair(labels=["a very long name of a span of tokens"] * 6))
    assert max(map(len, printed(wide, width).splitlines())) <= width


def test_what_does_not_fit_the_terminal_is_merged_or_left_out_and_it_is_said() -> None:
    layers = list(range(120))
    deep = pair(grids={"pre_attn": grid(0.95, len(layers)), "mlp_out": grid(-0.2, len(layers))})
    text = printed(result(deep, layers=layers, skipped=[]))
    assert "a column is 2 layers and shows the layer with the strongest effect" in text
    row = next(line for line in text.splitlines() if line.startswith("um 3"))
    assert row.removeprefix("um 3   ")[PEAK[0] // 2] == "█"
    many = 100
    names = [f"t{number}" for number in range(many)]
    grids = {
        hook: [[0.9 if column == 77 else 0.0 for column in range(many)] for _ in LAYERS]
        for hook in ("pre_attn", "mlp_out")
    }
    text = printed(result(pair(labels=names, positions=[], grids=grids), skipped=[]))
    assert "the 48 of 100 rows with the strongest effects" in text
    assert any(line.startswith("t77") for line in text.splitlines())


def test_tokens_that_look_like_markup_are_printed_as_they_are(tmp_path: Path) -> None:
    tokens = ["$x$", "$\\frac", "[bold]", "[/]", "is", "in"]
    sweep = result(pair(labels=tokens, base_tokens=tokens))
    assert "[bold] 2" in printed(sweep)
    figures.plot(sweep, tmp_path / "out.svg")
    assert "$\\frac 1" in (tmp_path / "out.svg").read_text()


@pytest.mark.parametrize(
    ("path", "detail"),
    [("out.xyz", "not a figure format"), ("nowhere/out.png", "no such folder")],
)
def test_a_figure_that_cannot_be_written_is_refused_by_name(
    tmp_path: Path, path: str, detail: str
) -> None:
    with refuses(detail, field="path"):
        figures.plot(result(), tmp_path / path)


def test_a_position_stands_behind_a_token_and_not_behind_the_name_of_a_span() -> None:
    spans = pair(labels=["subject", *CORRUPT[1:]], positions=[[0], [1], [2], [3], [4], [5]])
    assert grid_of(result(spans)).names == ["subject", "Col 1", "osse 2", "um 3", "is 4", "in 5"]
    later = pair(positions=[[], [1], [2], [3], [4], [6]], base_tokens=[*CORRUPT[:5], " up", " in"])
    assert grid_of(result(pair(), later)).names[4:] == ["is 4", "in"], (
        "of pairs that have it in different places"
    )


def test_sweeps_without_values_or_prompts_are_still_drawn() -> None:
    nothing = {hook: [[None] * 6 for _ in LAYERS] for hook in ("pre_attn", "mlp_out")}
    for metric in ("recovered", "kl"):
        sweep = result(pair(grids=nothing, base=None, source=None), metric=metric)
        assert figures.plot(sweep).axes
        assert "Strongest cells" in printed(sweep)
    assert grid_of(result(pair(grids=nothing))).top(3) == []
    values = {hook: [[-3.0] * len(CORRUPT)] * len(LAYERS) for hook in ("pre_attn", "mlp_out")}
    none = {hook: [[None] * len(CORRUPT)] * len(LAYERS) for hook in ("pre_attn", "mlp_out")}
    failed = pair(base=None, grids=none)
    both = result(
        pair(base=Baseline(value=-5.0, logprob=-5.0, foil_logprob=None), grids=values),
        failed,
        metric="logprob",
    )
    assert grid_of(both).limits == (-7.0, -3.0)
    assert "unpatched -5" in described(both)[-1]
    alone = result(failed, metric="logprob")
    assert grid_of(alone).limits == (-1.0, 1.0)
    assert "unpatched" not in described(alone)[-1]
    assert grid_of(result(pair(base=None, grids=values), metric="logprob")).limits == (-4.0, -2.0)
