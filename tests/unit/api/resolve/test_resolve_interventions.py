"""What does steering come to on a model, and which of it is refused, by which field?"""

import math
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from model_kit import HIDDEN, bounds
from refusal_kit import refuses

from midstream.api.resolve.edits.interventions import GIVEN, OPTIONS
from midstream.api.resolve.edits.steering import resolve_edits
from midstream.schemas.base.dtypes import DTYPES
from midstream.schemas.base.records import from_msgpack, to_json, to_msgpack
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy, to_numpy
from midstream.schemas.prompts.selectors import HOOKS, STREAM_HOOKS
from midstream.schemas.requests.interventions import (
    EVERY,
    FAMILIES,
    MAX_RANK,
    NO_LIMIT,
    STEERING_FIELDS,
    VARIANTS,
    OpFamily,
    SteeringOp,
)
from midstream.schemas.requests.specs import SteeringSpec, StoredSteering

ROOT = Path(__file__).resolve().parents[4]
RANDOM = np.random.default_rng(0)


def tensor(*shape: int, fill: float | None = None) -> Tensor:
    return from_numpy(
        (RANDOM.normal(size=shape) if fill is None else np.full(shape, fill)).astype(np.float32)
    )


VECTOR = tensor(HIDDEN, fill=1.0)
LOW_RANK = {
    "op": "lowrank",
    "rotation": tensor(3, HIDDEN),
    "weight": tensor(3, HIDDEN),
    "bias": tensor(3),
}
#: Op → the least that it takes.
LEAST: dict[str, dict[str, Any]] = {
    **{op: {"op": op, "vector": VECTOR} for op in STEERING_FIELDS},
    "lowrank": LOW_RANK,
    "clamp": {"op": "clamp", "vector": VECTOR, "low": -1.0, "high": 2.0},
}


def resolved(*specs: dict[str, Any], **changes: Any) -> list[StoredSteering]:
    """Of one prompt."""
    (entries,), _ = resolve_edits(
        [], [SteeringSpec(**({"layers": 0} | spec)) for spec in specs], bounds(**changes)
    )
    return entries


def test_steering_is_stored_per_prompt_by_hook_name_and_tensor_hash() -> None:
    spec = SteeringSpec(
        layers="1,-1",
        vector=VECTOR,
        hook="hook_resid_pre",
        op="replace",
        alpha=0.25,
        scale=2.0,
        positions=[-1],
    )
    ((entry,), (other,)), blobs = resolve_edits([], [spec], bounds(6, 3))
    assert entry == StoredSteering(
        layers=[1, 3],
        hook="pre_attn",
        positions=[5],
        family="replace",
        tensors=[content_hash(VECTOR)],
        scale=2.0,
        numbers=[0.25],
    )
    assert other.positions == [2]
    assert (
        [content_hash(from_msgpack(blob, Tensor)) for blob in blobs.values()]
        == list(blobs)
        == entry.tensors
    )


@pytest.mark.parametrize(
    ("spec", "family", "numbers", "scale"),
    [
        (LEAST["add"] | {"scale": 3.0}, "add", [], 3.0),
        (LEAST["add"] | {"norm_match": False}, "add", [], 1.0),
        (LEAST["add"] | {"scale": 0.1, "norm_match": True}, "add_matched", [0.1], 1.0),
        (LEAST["add"] | {"norm_match": True}, "add_matched", [1.0], 1.0),
        (LEAST["replace"], "replace", [1.0], 1.0),
        (LEAST["ablate"], "ablate", [1.0], 1.0),
        (LEAST["ablate"] | {"strength": -2.0}, "ablate", [-2.0], 1.0),
        (LEAST["clamp"] | {"strength": 0.5}, "clamp", [0.5, -1.0, 2.0], 1.0),
        (LEAST["ablate"] | {"op": "clamp", "low": 4.0}, "clamp", [1.0, 4.0, NO_LIMIT], 1.0),
        (LEAST["ablate"] | {"op": "clamp", "high": 4.0}, "clamp", [1.0, -NO_LIMIT, 4.0], 1.0),
        (LEAST["ablate"] | {"op": "clamp", "low": 4.0, "high": 4.0}, "clamp", [1.0, 4.0, 4.0], 1.0),
        (LOW_RANK | {"strength": 0.5}, "lowrank", [0.5], 1.0),
    ],
)
def test_each_op_becomes_a_family_with_its_numbers(
    spec: dict[str, Any], family: str, numbers: list[float], scale: float
) -> None:
    (entry,) = resolved(spec)
    assert entry.family == family
    assert entry.numbers == numbers
    assert entry.scale == scale
    assert from_msgpack(to_msgpack(entry), StoredSteering) == entry
    assert b"null" not in to_json(entry), "JSON has a place for every number"


def test_a_lowrank_keeps_its_rank_and_three_tensors_in_order() -> None:
    spec = SteeringSpec(layers="all", **LOW_RANK)
    ((entry, _),), blobs = resolve_edits([], [spec, spec], bounds())
    assert entry.tensors == [
        content_hash(LOW_RANK[name]) for name in ("rotation", "weight", "bias")
    ]
    assert entry.rank == 3
    assert entry.num_vectors == 6
    assert sorted(blobs) == sorted(entry.tensors)
    assert [
        list(to_numpy(from_msgpack(blobs[name], Tensor)).shape) for name in entry.tensors
    ] == entry.shapes(HIDDEN)


@pytest.mark.parametrize("op", get_args(SteeringOp))
# field case 27
def test_a_field_invalid_for_an_op_and_a_missing_field_are_refused_by_name(op: SteeringOp) -> None:
    takes = STEERING_FIELDS[op]
    values: dict[str, Any] = {"vector": VECTOR, "norm_match": False} | {
        name: LOW_RANK[name] for name in ("rotation", "weight", "bias")
    }
    for field in (*GIVEN, *OPTIONS):
        if field not in (*takes.tensors, *takes.options):
            with refuses(
                f"is not valid for op {op!r}; valid fields:", field=f"steering[0].{field}"
            ):
                resolved(LEAST[op] | {field: values.get(field, 1.0)})
        if field in takes.tensors:
            with refuses("is required", field=f"steering[0].{field}", status=400):
                resolved({name: value for name, value in LEAST[op].items() if name != field})


@pytest.mark.parametrize("hook", HOOKS)
def test_norm_match_is_valid_only_at_stream_hooks(hook: str) -> None:
    """A branch is as long as it happens to be: matched to it, the same scale would be another dose
    at every hook.
    """
    spec = LEAST["add"] | {"hook": hook, "norm_match": True}  # field case 10
    if hook in STREAM_HOOKS:
        assert resolved(spec)[0].family == "add_matched"
        return
    words = f"{hook} is a branch", "steer at pre_attn, post_attn, post_block"
    with refuses(*words, field="steering[0].norm_match", status=400):
        resolved(spec)
    assert resolved(spec | {"norm_match": False})[0].family == "add"


WIDE = tensor(HIDDEN + 1)
NOT_FINITE = tensor(HIDDEN, fill=math.inf)
ZERO = tensor(HIDDEN, fill=0.0)


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (LEAST["add"] | {"layers": 4}, "layers", "layer 4"),
        (LEAST["add"] | {"positions": [6]}, "positions[0]", "out of range: the prompt has"),
        (LEAST["ablate"] | {"vector": WIDE}, "vector.shape", r"has shape \[9\]: it must be \[8\]"),
        (LEAST["clamp"] | {"vector": tensor(1, HIDDEN)}, "vector.shape", r"has shape \[1, 8\]"),
        (
            LEAST["replace"] | {"vector": NOT_FINITE},
            "vector.data",
            r"element 0 is not finite \(non-finite elements: 8 of 8\)",
        ),
        (LEAST["ablate"] | {"vector": ZERO}, "vector.data", "all zeros: ablate needs a direction"),
        (LEAST["clamp"] | {"vector": ZERO}, "vector.data", "clamp needs a direction"),
        (
            LEAST["add"] | {"vector": ZERO, "norm_match": True},
            "vector.data",
            "norm_match needs a direction",
        ),
        (
            LEAST["add"] | {"scale": 1e5},
            "scale",
            "scale times vector has an element of magnitude 1e",
        ),
        (LEAST["add"] | {"scale": 1e39, "norm_match": True}, "scale", "out of range for op"),
        (LEAST["ablate"] | {"strength": -1e39}, "strength", "out of range for op"),
        (LEAST["clamp"] | {"low": 3.0}, "high", "2 is less than low, 3"),
        (LEAST["clamp"] | {"low": None, "high": None}, "low", "is required unless high is"),
        (LEAST["clamp"] | {"high": 1e39}, "high", "out of range for op"),
        (
            LOW_RANK | {"rotation": tensor(HIDDEN)},
            "rotation.shape",
            r"has shape \[8\]: it must be \[rank, 8\] with rank 1 to 64",
        ),
        (
            LOW_RANK | {"rotation": tensor(0, HIDDEN)},
            "rotation.shape",
            r"has shape \[0, 8\]: it must be \[rank, 8\]",
        ),
        (LOW_RANK | {"rotation": tensor(MAX_RANK + 1, HIDDEN)}, "rotation.shape", "rank 1 to 64"),
        (
            LOW_RANK | {"weight": tensor(2, HIDDEN)},
            "weight.shape",
            r"has shape \[2, 8\]: it must be \[3, 8\], because rotation is \[3, 8\]",
        ),
        (LOW_RANK | {"bias": tensor(3, 1)}, "bias.shape", r"has shape \[3, 1\]: it must be \[3\]"),
        (LOW_RANK | {"bias": tensor(3, fill=math.nan)}, "bias.data", "not finite"),
        (
            LOW_RANK | {"weight": tensor(3, HIDDEN, fill=1e6)},
            "weight.data",
            "has an element of magnitude 1e.06: float16 allows at most 6.55e.04",
        ),
    ],
)
# field case 27
def test_steering_that_the_model_cannot_take_is_refused_by_field(
    spec: dict[str, Any], field: str, words: str
) -> None:
    with refuses(match=words, status=400, field=f"steering[0].{field}"):
        resolved(spec)


def test_a_hook_that_the_model_lacks_is_refused() -> None:
    with refuses("the model has pre_attn, post_block", field="steering[0].hook", status=400):
        resolved(LEAST["add"] | {"hook": "post_attn"}, hooks=["pre_attn", "post_block"])


@pytest.mark.parametrize("name", ["scale", "alpha", "strength", "low", "high"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_refused_at_construction(name: str, value: float) -> None:
    """It would arrive as null, which means "as usual"."""
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SteeringSpec(layers=0, vector=VECTOR, **{name: value})


FIVE = "needs 5 rows of the steering table for one token for prompt 0"
AGAIN = [LEAST["ablate"] | {"vector": tensor(HIDDEN)} for _ in range(5)]


def placed(*positions: Any, op: str = "add", lengths: tuple[int, ...] = (6, 5)) -> Any:
    """Of each prompt, with the same tensors at these positions."""
    specs = [SteeringSpec(layers=0, **LEAST[op] | {"positions": each}) for each in positions]
    return resolve_edits([], specs, bounds(*lengths))[0]


@pytest.mark.parametrize(
    ("resolve", "words"),
    [
        (
            lambda: resolved(*AGAIN),
            [FIVE, "merge directions into one lowrank"],
        ),
        *(
            (
                lambda sets=sets, op=op: placed(*sets, op=op),
                [FIVE, "place entries that replace rows at the same positions next to each other"],
            )
            for sets, op in (
                ([[0], [0, 1], [0], [0, 1], [0]], "replace"),
                ([[0, 1], [0, 2], [0, 3], [0, 4], "all"], "add"),
            )
        ),
        (
            # in a prompt of six tokens [0, -1] is [0, 5]; in one of seven it is a fifth set
            lambda: placed(*([0, place] for place in (1, 2, 3, 5, -1)), lengths=(6, 6, 7)),
            ["needs 5 rows of the steering table for one token for prompt 2"],
        ),
        (
            lambda: resolved(LOW_RANK | {"layers": "all"}, steering_entries=5),
            [
                "needs 6 steering entries for prompt 0",
                "at most 5 (setting tuning.steering_entries)",
            ],
        ),
        (
            lambda: resolved(LEAST["ablate"], LEAST["ablate"], steering_rows=1),
            ["needs 2 steering rows for prompt 0", "at most 1 (setting tuning.steering_rows)"],
        ),
    ],
)
def test_what_the_tables_of_the_worker_cannot_hold_is_refused(
    resolve: Any, words: list[str]
) -> None:
    with refuses(*words, field="steering", status=400):
        resolve()


def test_what_the_tables_of_the_worker_just_hold_is_taken() -> None:
    """Entries that share a row, that lie at other layers, or at tokens of their own."""
    one_row = [LEAST["add"]] * 9 + [LEAST["ablate"], LEAST["clamp"]]
    assert len(resolved(*one_row, LEAST["replace"], LEAST["replace"], LOW_RANK)) == 14
    assert len(resolved(*AGAIN[:4])) == 4
    assert len(resolved(*(spec | {"layers": n % 4} for n, spec in enumerate(AGAIN)))) == 5
    assert resolved(LOW_RANK | {"layers": "all"}, steering_entries=6)
    for sets, op in (
        ([[place] for place in range(5)], "replace"),
        ([[0], [1], [0], [1]], "add"),
        ([[0], [1], [0, 1], [1], [0]], "replace"),  # each token is in three sets
    ):
        assert len(placed(*sets, op=op)) == 2
    assert placed(*([0, place] for place in (1, 2, 3, 5, -1)), lengths=(6, 6))


def test_the_table_has_a_row_for_every_op_and_family() -> None:
    assert [family.name for family in EVERY] == list(get_args(OpFamily))
    assert [variants[0].name for variants in VARIANTS.values()] == list(get_args(SteeringOp))
    assert all(family.flag for variants in VARIANTS.values() for family in variants[1:])
    fields = SteeringSpec.__struct_fields__
    assert all({*takes.tensors, *takes.options} <= {*fields} for takes in STEERING_FIELDS.values())
    assert NO_LIMIT == np.finfo(np.float32).max >= DTYPES["float32"].largest


def test_the_page_on_steering_and_the_table_agree_on_every_formula_and_field() -> None:
    page = (ROOT / "docs" / "steering.md").read_text()
    _, *said = re.findall(
        r"^\| (`.+) \| (.+) \| (.+) \| .+ \|$", page[: page.index("## Limits")], re.MULTILINE
    )
    wanted = [
        (family.written, family.result, set(family.fields) or {*family.tensors, *family.options})
        for family in FAMILIES
        if family.flag != "mask"
    ]
    assert [
        (op.replace("`", ""), result, set(re.findall(r"`(\w+)`", fields)))
        for op, result, fields in said
    ] == wanted
