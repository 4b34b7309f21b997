"""An attribution drawn and printed: estimates beside exact values, marked where they disagree."""

from pathlib import Path

import pytest
from attribution_kit import WRONG, attribution, edges, estimated, features
from rich.console import Console

from midstream.client.render import attributions
from midstream.client.sdk.answers.attribution import Attribution
from midstream.schemas.jobs.attributions import AttributionResult, NotLookedAt


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
    panels = drawn.axes[:4]
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
    assert name in [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert name in printed(result)


def test_the_terminal_shows_values_differences_and_how_both_agree() -> None:
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


def test_the_terminal_names_what_was_not_computed_and_why_nothing_was_estimated() -> None:
    left = NotLookedAt(cells=300, largest=0.01, bound=0.02, last=0.5, settled=True)
    assert "not computed: 300 cells; largest estimated effect 0.010" in printed(
        attribution(estimated(not_looked_at=left))
    )
    assert "no estimates: the gradients are not finite" in printed(
        attribution(estimated(reason="the gradients are not finite"))
    )
