"""Columns of other axes than tokens: what they write of a row, how they are called, and which
fields they refuse.
"""

from typing import Any

import pytest
from test_sweep_plan import HIDDEN, ablated, model, pair, plan, refusal

from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.specs import dims_name, dims_named


def columns(**fields: Any) -> list[tuple[str, int, str, tuple[int, int] | None]]:
    (stored,) = plan(**fields).sweep.pairs
    return [
        (column.label, len(column.places), column.dims, column.ranks) for column in stored.columns
    ]


def test_positions_together_are_one_column_with_all_their_places() -> None:
    assert columns(axis="together", positions=[-1, -2]) == [("all positions", 2, "", None)]


def test_tokens_without_a_counterpart_are_left_out_with_a_note() -> None:
    (stored,) = plan(axis="together").sweep.pairs
    assert stored.notes
    alone = len(stored.base) - len(stored.columns[0].places)
    assert any(
        f"stay as they are in the corrupt prompt (count: {alone})" in note for note in stored.notes
    )
    assert not any("stay as they are" in note for note in plan().sweep.pairs[0].notes)


def test_neurons_are_columns_by_set_by_rank_or_by_the_first_ranks() -> None:
    everywhere = len(plan(axis="together").sweep.pairs[0].columns[0].places)
    assert columns(axis="neuron", neurons={"sets": ["0-1,5", 7]}) == [
        ("neurons 0-1, 5", everywhere, "0-1, 5", None), ("neuron 7", everywhere, "7", None),
    ]  # fmt: skip
    assert columns(axis="neuron", neurons={"top": [1, 4]}) == [
        ("top 1", everywhere, "", (0, 1)),
        ("top 4", everywhere, "", (0, 4)),
    ]
    assert columns(axis="neuron", neurons={"each": 2}) == [
        ("neuron #1", everywhere, "", (0, 1)),
        ("neuron #2", everywhere, "", (1, 2)),
    ]


#: Of four elements each, over one key head.
INSIDE = model(
    hooks=["pre_attn", "q", "k", "z"],
    inside={
        **dict.fromkeys(("q", "z"), RowShape(heads=3, width=4)),
        "k": RowShape(heads=1, width=4),
    },
)


def test_heads_are_columns_with_their_dimensions_and_at_each_token() -> None:
    everywhere = len(plan(axis="together").sweep.pairs[0].columns[0].places)
    asked: dict[str, Any] = {"info": INSIDE, "hooks": ["hook_z", "q"]}
    assert columns(axis="head", **asked) == [
        ("head 0", everywhere, "0-3", None),
        ("head 1", everywhere, "4-7", None),
        ("head 2", everywhere, "8-11", None),
    ]
    (stored,) = plan(axis="head_position", heads="0,-1", positions=[1, -1], **asked).sweep.pairs
    found = [
        (column.head, column.dims, [to for to, _ in column.places]) for column in stored.columns
    ]
    last = len(stored.base) - 1
    assert found == [(0, "0-3", [1]), (0, "0-3", [last]), (2, "8-11", [1]), (2, "8-11", [last])]
    assert [column.label.rpartition(" ")[2] for column in stored.columns] == ["1", str(last)] * 2
    refused = refusal(pair(), info=INSIDE, hooks=["z", "k"], axis="head")
    assert (refused.field, "k has 1 heads of 4, but z has 3 of 4" in refused.detail) == (
        "hooks[1]",
        True,
    )


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"axis": "neuron"}, "neurons", "is required"),
        ({"neurons": {"each": 1}}, "neurons", "not valid with axis 'position'"),
        ({"heads": 0}, "heads", "not valid with axis 'position'"),
        ({"axis": "neuron", "neurons": {"sets": [[HIDDEN]]}}, "neurons.sets[0]", "out of range"),
        ({"axis": "neuron", "neurons": {"sets": [[]]}}, "neurons.sets[0]", "no neuron given"),
        (
            {"axis": "neuron", "neurons": {"top": [1, HIDDEN + 1]}},
            "neurons.top[1]",
            "exceeds the dimensions",
        ),
        (
            {"axis": "neuron", "neurons": {"each": HIDDEN + 1}},
            "neurons.each",
            "exceeds the dimensions",
        ),
        ({"axis": "neuron", "neurons": {"each": 1}, "mask": "0-1"}, "mask", "not valid with axis"),
        (
            {"axis": "neuron", "neurons": {"each": 1}, "window": {"layers": 2}},
            "window.layers",
            "not valid with axis",
        ),
        (
            {"axis": "together", "window": {"positions": 2}},
            "window.positions",
            "not valid with axis",
        ),
        ({"axis": "head"}, "hooks[0]", "has no heads"),
    ],
)
def test_a_field_that_the_axis_does_not_take_is_refused(
    fields: dict[str, Any], field: str, words: str
) -> None:
    refused = refusal(pair(), **fields)
    assert refused.field == field
    assert words in refused.detail


def test_neurons_by_rank_need_two_prompts() -> None:
    refused = refusal(
        ablated(), ablation="zeros", metric="logprob", axis="neuron", neurons={"each": 1}
    )
    assert (refused.field, "only one" in refused.detail) == ("neurons.each", True)


def test_the_name_of_a_mask_lists_its_dimensions() -> None:
    assert dims_named(dims_name("0-2, 5")) == [range(3), range(5, 6)]
