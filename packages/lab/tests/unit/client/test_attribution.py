"""An attribution read from its result: grids of estimates and exact values, the cells that
disagree, edges and features, and how both agree; and as it is drawn and printed.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attribution_kit import (
    FAILED,
    HOOK,
    STRONG,
    WRONG,
    attribution,
    edges,
    estimated,
    features,
    verified_features,
)
from http_kit import reply, server
from job_kit import job_result
from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Console
from sweep_kit import VIEW

from midstream import Client, MidstreamError
from midstream.client.values import UnknownArgument
from midstream_lab.client.attribution import Attribution
from midstream_lab.client.progress import _Cells
from midstream_lab.records.attributions import AttributionResult, EstimatedPair, NotLookedAt
from midstream_lab.records.sweeps import SweepCell
from midstream_lab.show import attributions
from midstream_lab.show.attributions import report


def found(*pairs: Any, **given: Any) -> Attribution:
    return Attribution("job_1", attribution(*pairs, **given))


def test_grids_and_cells_have_estimates_and_exact_values() -> None:
    whole = found()
    assert whole.estimates.values[HOOK][STRONG] == 0.9
    assert whole.exact.values[HOOK][STRONG] == 0.95
    assert np.isnan(whole.exact.values[HOOK]).sum() == whole.exact.values[HOOK].size - 2
    assert [(cell.layer, cell.column) for cell in whole.cells] == [STRONG, WRONG, FAILED]
    assert [(cell.layer, cell.column) for cell in whole.off] == [WRONG]
    assert repr(whole) == "Attribution(job_1, attribution, estimates=298, cells=3, off=1)"


def test_figures_of_agreement_are_over_all_pairs_or_one() -> None:
    other = estimated(random=None, recall=None)
    both = found(estimated(), other)
    assert both.spearman == 0.5
    assert both.spearman_checked == 0.9
    assert both.recall == 0.75
    assert both.of(1).spearman is None
    assert both.of(1).recall is None
    assert len(both.cells) == 6
    assert len(both.of(1).cells) == 3
    with pytest.raises(MidstreamError, match="no pair 2"):
        both.of(2)


def test_edges_and_features_are_named_and_strongest_first() -> None:
    names = [(item.name, item.score) for item in Attribution("job_1", edges()).edges]
    assert names == [("head 3.5 → q 7.2", -0.4), ("embed → mlp 0", 0.1)]
    labelled = [item.name for item in Attribution("job_1", features()).features]
    assert labelled == ["feature 12 at um 3", "error at um 3"]
    assert list(Attribution("job_1", edges()).to_pandas()["score"]) == [-0.4, 0.1]


def test_verified_features_are_listed_with_their_exact_effects() -> None:
    whole = Attribution("job_1", verified_features())
    assert [cell.feature for cell in whole.cells] == [7, 12], "strongest exact effect first"
    assert len(whole.off) == 2
    rows = []
    for row in whole.to_pandas().itertuples(index=False):
        exact = None if np.isnan(row.exact_effect) else row.exact_effect
        rows.append((row.name, row.estimate_effect, exact, row.why, row.off))
    assert rows == [
        ("feature 12 at um 3", 0.3, 0.02, ["top"], True),
        ("error at um 3", 0.1, None, [], None),
        ("feature 7 at um 3", 0.05, -0.06, ["random"], True),
    ]
    text = Console(width=120)
    with text.capture() as shown:
        text.print(report(whole))
    lines = shown.get()
    assert "Effects of features computed exactly" in lines
    assert re.search(r"feature 7 at um 3 .* \+0\.050 +-0\.060 +\+0\.110 +random +off", lines)
    assert "2 of 2 features off by more than" in lines
    assert "over the random features, which stand for all that differ: 0.500" in lines


def test_a_line_has_both_values_and_whether_they_disagree() -> None:
    whole = found()
    table = whole.to_pandas().set_index(["hook", "layer", "column"])
    wrong = table.loc[(HOOK, *WRONG)]
    unknown = table.loc[("mlp_out", *WRONG)]
    assert wrong["exact"] == 0.1
    assert wrong["off"] is True
    assert wrong["why"] == ["top"]
    assert wrong["estimate"] == pytest.approx(0.9 / 14)
    assert wrong["exact_effect"] == pytest.approx(wrong["exact"] - whole.exact.base)
    assert wrong["estimate_effect"] == pytest.approx(wrong["estimate"] - whole.estimates.base)
    assert np.isnan(unknown["exact"])
    assert unknown["off"] is None
    assert unknown["why"] == []
    assert table.loc[(HOOK, *FAILED)]["off"] is None
    assert len(found(estimated(), estimated()).of(1).to_pandas()) == len(table)


def test_a_call_takes_one_pair_by_its_fields_and_returns_the_answer() -> None:
    answers = (reply(VIEW, 202), reply(VIEW), reply(job_result(attribution=attribution())))
    with server(*answers) as (url, seen), Client(url) as client:
        answer = client.attribute(
            model="m", clean="a", corrupt="b", answer=" c", method="integrated", verify={"top": 4}
        )
    assert answer.off[0].exact == 0.1
    sent = json.loads(seen.bodies[0])
    assert sent["method"] == "integrated"
    assert sent["verify"]["top"] == 4
    assert [sent["pairs"][0][name] for name in ("clean", "corrupt", "answer")] == ["a", "b", " c"]
    assert seen[0].startswith("POST /v1/attributions")


def test_a_job_of_another_kind_and_a_wrong_keyword_are_refused() -> None:
    nothing = replace(job_result(attribution=attribution()), attribution=UNSET)
    with server(reply(VIEW), reply(nothing)) as (url, _), Client(url) as client:
        with pytest.raises(MidstreamError, match="job_1 is not an attribution"):
            client.attributions.result("job_1")
        with pytest.raises(UnknownArgument, match="method"):
            client.attribute(methods="edges")  # type: ignore[call-arg]
        with pytest.raises(MidstreamError, match="clean"):
            client.attribute(clean="a", pairs=[{"clean": "b"}])


def test_progress_counts_the_chosen_cells_only() -> None:
    class Bar:
        total = None
        n = 0

        def update(self, more: int) -> None:
            self.n += more

    bar = Bar()
    show = _Cells(bar)
    show(EstimatedPair(pair=0, attribution=estimated()))
    for _ in range(2):  # a cell that is sent again counts once
        show(SweepCell(pair=0, hook="pre_attn", layer=2, column=1, label="x", value=0.1))
    for feature in (3, 4):
        show(
            SweepCell(
                pair=0, hook="pre_attn", layer=2, column=1, label="x", value=0.1, feature=feature
            )
        )
    assert bar.n == 3
    assert bar.total == 3


# --- Attribution figures ---


def printed(result: AttributionResult, most: int = 10) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(attributions.report(Attribution("job_1", result), most))
    return captured.get()


def test_the_figure_has_both_grids_on_one_scale_and_a_cross_on_disagreeing_cells(
    tmp_path: Path,
) -> None:
    drawn = Attribution("job_1", attribution()).plot(tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 10_000
    panels = drawn.axes[1:5]
    assert [panel.get_title() for panel in panels] == [
        "pre_attn (resid_pre): estimate",
        "pre_attn (resid_pre): exact",
        "mlp_out: estimate",
        "mlp_out: exact",
    ]
    assert len({panel.collections[0].get_clim() for panel in panels}) == 1
    crosses = [panel.collections[1].get_offsets().tolist() for panel in panels[:2]]
    assert crosses == [[[WRONG[0] + 0.5, WRONG[1] + 0.5]]] * 2
    assert [len(panel.collections) for panel in panels[2:]] == [1, 1]


def test_without_exact_values_only_estimates_are_drawn() -> None:
    nothing = {hook: [[None] * 6] * 30 for hook in ("pre_attn", "mlp_out")}
    bare = attribution(estimated(checked=[]))
    pairs = [type(pair)(**{**_fields(pair), "grids": nothing}) for pair in bare.pairs]
    drawn = Attribution("job_1", type(bare)(**{**_fields(bare), "pairs": pairs})).plot()
    assert [axes.get_title() for axes in drawn.axes[:2]] == [
        "pre_attn (resid_pre): estimate",
        "mlp_out: estimate",
    ]


def _fields(record: object) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("result", "name"), [(edges(), "head 3.5 → q 7.2"), (features(), "feature 12 at um 3")]
)
def test_edges_and_features_are_bars_and_a_table(result: AttributionResult, name: str) -> None:
    drawn = Attribution("job_1", result).plot()
    assert name in [label.get_text() for label in drawn.axes[-1].get_yticklabels()]
    shown = printed(result)
    assert name in shown
    assert re.search(r"\n what +estimate \n", shown)


def test_a_notebook_shows_the_figure_and_how_both_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = found()._repr_html_()
    assert shown.startswith('<img alt="attribution"')
    for words in ("Effects of cells computed exactly", "1 of 2 cells off by more than"):
        assert words in shown
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "Estimates by gradients" in found()._repr_html_()


def test_the_terminal_calls_estimates_estimates() -> None:
    assert printed(attribution()).startswith("Estimates by gradients\n“")


def test_the_terminal_shows_values_how_both_agree_and_what_was_left_out() -> None:
    shown = printed(attribution())
    row = next(line for line in shown.splitlines() if "0.600" in line)
    assert [part in row for part in ("0.100", "+0.500", "top", "off")] == [True] * 4
    for line in (
        "1 of 2 cells off by more than the noise floor and 0.05",
        "over the random cells, which stand for the grid: 0.500",
        "75% of the 4 strongest computed cells are among the 4 largest estimates",
        "the time of 3.4 forward passes",
    ):
        assert line in shown
    assert "0.600" in printed(attribution(), most=1), "a cell that disagrees is always listed"
    left = NotLookedAt(cells=300, largest=0.01, bound=0.02, last=0.5, sampled=12, settled=True)
    shown = " ".join(printed(attribution(estimated(not_looked_at=left))).split())
    assert "not computed: 300 cells; largest estimated effect 0.010" in shown
    assert re.search("settled, if the estimates .* tested on a random sample of 12 cells", shown)
    assert "no estimates: the gradients are not finite" in printed(
        attribution(estimated(reason="the gradients are not finite"))
    )
