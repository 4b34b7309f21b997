"""What requests mean by `heads`, and what they are refused for."""

from typing import Any

import numpy as np
import pytest
from model_kit import bounds
from refusal_kit import refuses

from midstream.api.resolve.edits.steering import resolve_edits
from midstream.api.resolve.positions.captures import resolve_captures
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import Tensor, from_numpy, to_numpy
from midstream.schemas.model.banks import RowShape, asked_hooks
from midstream.schemas.prompts.selectors import HOOKS, INSIDE
from midstream.schemas.requests.specs import CaptureSpec, PatchSource, PatchSpec, SteeringSpec

#: Three query heads of four elements over one key head; four neurons.
SHAPES = {
    **{hook: RowShape(heads=3, width=4) for hook in ("q_proj", "q", "z")},
    **{hook: RowShape(heads=1, width=4) for hook in ("k_proj", "k", "v")},
    "mlp_act": RowShape(heads=1, width=5),
}
FACTS: dict[str, Any] = {"hooks": [*HOOKS, *SHAPES], "inside": SHAPES}
ONE = np.arange(1, 5, dtype=np.float32)


def edited(
    *, patch: list[PatchSpec] | None = None, **spec: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    specs = [SteeringSpec(**({"layers": 0} | spec))] if spec else []
    ((entry,),), blobs = resolve_edits(patch or [], specs, bounds(**FACTS))
    return entry, {name: to_numpy(from_msgpack(raw, Tensor)) for name, raw in blobs.items()}


def test_a_vector_counts_in_the_named_heads_only() -> None:
    entry, tensors = edited(hook="hook_z", vector=from_numpy(ONE), heads="0,2")
    assert entry.hook == "z"
    assert entry.family == "add"
    assert tensors[entry.tensors[0]].tolist() == [*ONE, *np.zeros(4), *ONE]
    entry, tensors = edited(hook="q", vector=from_numpy(np.ones(12, np.float32)), heads=-1)
    assert tensors[entry.tensors[0]].tolist() == [0.0] * 8 + [1.0] * 4


def test_replaced_heads_leave_the_others_as_they_are() -> None:
    entry, tensors = edited(hook="z", op="replace", vector=from_numpy(ONE), heads=[1])
    assert entry.family == "replace_masked"
    assert tensors[entry.tensors[1]].tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 4
    source = PatchSource(vector=from_numpy(ONE))
    patched, also = edited(
        patch=[PatchSpec(layers=0, hook="z", heads=1, positions=[0], source=source)]
    )
    assert [also[name].tolist() for name in patched.tensors] == [
        tensors[name].tolist() for name in entry.tensors
    ]


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        (
            {"hook": "z", "heads": "0-3"},
            "steering[0].heads",
            "head 3 is out of range: the model has heads 0 to 2",
        ),
        (
            {"hook": "v", "heads": 1},
            "steering[0].heads",
            "at v, head 1 is out of range: the model has heads 0 to 0",
        ),
        ({"hook": "mlp_act", "heads": 0}, "steering[0].heads", "mlp_act has no heads"),
        (
            {"heads": 0},
            "steering[0].heads",
            "post_block has no heads: hooks with heads are q_proj, k_proj, q, k, v and z",
        ),
        (
            {"hook": "z", "heads": "0,1", "op": "ablate"},
            "steering[0].heads",
            "give an entry for each of the 2 heads",
        ),
        (
            {"hook": "z", "heads": 0, "vector": from_numpy(np.ones(3, np.float32))},
            "steering[0].vector.shape",
            "must be [12]",
        ),
        ({"hook": "router"}, "steering[0].hook", "`midstream up --set hooks=all,inside`"),
        (
            {"hook": "z", "norm_match": True, "vector": from_numpy(np.ones(12, np.float32))},
            "steering[0].norm_match",
            "is a branch",
        ),
    ],
)
def test_what_heads_cannot_be_is_refused_at_its_field(
    spec: dict[str, Any], field: str, says: str
) -> None:
    with refuses(says, field=field, status=400):
        edited(**({"vector": from_numpy(ONE)} | spec))


@pytest.mark.parametrize(
    ("tp", "hook", "first", "last", "fits"),
    [
        (2, "z", 0, 7, True), (2, "z", 4, 11, False), (2, "z", 8, 15, True),
        (4, "v", 0, 3, True), (4, "v", 0, 7, False), (4, "v", 4, 7, True),
        (2, "mlp_act", 0, 2, True), (2, "mlp_act", 2, 3, False),
    ],
)  # fmt: skip
def test_a_direction_of_a_sum_lies_within_the_columns_of_one_rank(
    tp: int, hook: str, first: int, last: int, fits: bool
) -> None:
    """Four query heads of four elements over two key heads, which pairs of four ranks share; six
    neurons.
    """
    shapes = {
        "z": RowShape(heads=4, width=4),
        "v": RowShape(heads=2, width=4),
        "mlp_act": RowShape(heads=1, width=6),
    }
    vector = np.zeros(shapes[hook].size, np.float32)
    vector[[first, last]] = 1
    asked = SteeringSpec(layers=0, hook=hook, op="ablate", vector=from_numpy(vector))
    known = bounds(hooks=[*HOOKS, *shapes], inside=shapes, tp=tp)
    if fits:
        ((entry,),), _ = resolve_edits([], [asked], known)
        assert entry.family == "ablate"
    else:
        with refuses("spans 2 tensor-parallel ranks"):
            resolve_edits([], [asked], known)


def test_a_capture_is_split_by_width_and_keeps_its_heads() -> None:
    (whole,) = captured_heads(hooks={"q": 0, "k": [1], "post_block": "all"})
    assert [(capture.bank, list(capture.sites), capture.row) for capture in whole] == [
        ("residual", ["post_block"], None),
        ("query", ["q"], SHAPES["q"]),
        ("key", ["k"], SHAPES["k"]),
    ]
    assert whole[1].beside == {"k": [1], "post_block": [0, 1, 2, 3]}
    (alone,) = captured_heads(hook="z", heads="0-1")
    assert alone[0].heads == [0, 1]
    assert alone[0].stored_size(8) == 8
    with refuses("at k, head 1 is out of range", field="capture.heads"):
        captured_heads(hooks={"q": 0, "k": 0}, heads=1)
    with refuses("whole rows"):
        captured_heads(hook="z", heads=1, run="r")


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("all", ([], [])),
        ("all,inside", ([], list(INSIDE))),
        ("pre_attn, post_block, z", (["pre_attn", "post_block"], ["z"])),
    ],
)
def test_the_setting_names_hooks_of_both_kinds(
    setting: str, wanted: tuple[list[str], list[str]]
) -> None:
    assert asked_hooks(setting) == wanted


@pytest.mark.parametrize(
    ("setting", "says"),
    [("z", "no hook point of the residual stream"), ("all,zz", "'zz' is not a hook point")],
)
def test_a_setting_that_cannot_be_is_refused(setting: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        asked_hooks(setting)


def captured_heads(**capture: Any) -> Any:
    return resolve_captures(CaptureSpec(**capture), bounds(**FACTS))
