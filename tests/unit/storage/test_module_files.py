"""Is what stands in a safetensors file what a module then does?

And is what cannot be right refused by its key?
"""

from typing import get_args

import msgspec
import numpy as np
import pytest
import safetensors
from hypothesis import given, strategies as st
from safetensors.numpy import save

from midstream.schemas.base.dtypes import ITEM_BYTES, DType
from midstream.schemas.base.tensors import Tensor, from_numpy
from midstream.schemas.requests.interventions import FAMILY, INSTALLED, STEERING_FIELDS
from midstream.schemas.requests.specs import SteeringSpec
from midstream.schemas.requests.steering import SteeringEntries
from midstream.storage.formats import module_files
from midstream.storage.formats.module_files import (
    MAX_ENTRIES,
    SHAPES,
    SHARED,
    of_sites,
    specs_of,
    to_bytes,
)

JOY = np.arange(4, dtype=np.float32)


def file(tensors: dict[str, np.ndarray], **metadata: str) -> bytes:
    """As another program writes it, with the library."""
    return bytes(save(tensors, metadata or None))


# --- The simple form ---


def test_tensors_named_by_site_become_one_entry_each_in_the_order_of_a_forward() -> None:
    specs = specs_of(
        file(
            {
                "post_block.10": JOY,
                "mlp_out.3": JOY + 1,
                "blocks.2.hook_resid_post": JOY + 4,
                "resid_post.1": JOY + 2,
                "hook_resid_pre.-1": JOY + 3,
            }
        )
    )
    assert [(spec.hook, spec.layers) for spec in specs] == [
        ("pre_attn", -1),
        ("mlp_out", 3),
        ("post_block", 1),
        ("post_block", 2),
        ("post_block", 10),
    ]
    assert [spec.vector for spec in specs] == [from_numpy(JOY + add) for add in (3, 1, 2, 4, 0)]
    # add, 1, all
    assert {(spec.op, spec.scale, spec.positions) for spec in specs} == {(None, None, None)}


def test_the_metadata_of_a_simple_file_holds_for_all_of_its_sites() -> None:
    raw = file(
        {"post_block.1": JOY, "post_block.2": JOY},
        op="clamp",
        low="-1.5",
        strength="0.5",
        positions='[0, {"text": "joy"}]',
        format="pt",
    )
    spec, other = specs_of(raw)
    assert spec.op == "clamp"
    assert spec.low == -1.5
    assert spec.high is None
    assert spec.strength == 0.5
    assert msgspec.to_builtins(spec.positions)[0] == 0
    assert other == msgspec.structs.replace(spec, layers=2)


def test_names_in_the_metadata_may_be_bare_or_quoted() -> None:
    bare = specs_of(file({"post_block.1": JOY}, op="ablate", positions="all_generated"))
    assert bare == specs_of(file({"post_block.1": JOY}, op='"ablate"', positions='"all_generated"'))
    assert bare[0].op == "ablate"
    assert bare[0].positions == "all_generated"


def test_the_matrices_of_a_low_rank_intervention_lie_beside_each_other() -> None:
    matrix = np.arange(8, dtype=np.float16).reshape(2, 4)
    tensors = {
        "post_block.3.rotation": matrix,
        "post_block.3.weight": matrix + 1,
        "post_block.3.bias": np.ones(2, np.float32),
    }
    (spec,) = specs_of(file(tensors, strength="2"))
    assert spec.op == "lowrank"
    assert spec.layers == 3
    assert spec.strength == 2.0
    assert spec.rotation == from_numpy(matrix)
    assert spec.weight == from_numpy(matrix + 1)
    assert spec.bias == from_numpy(np.ones(2, np.float32))


# --- The general form ---

_FINITE = st.floats(-1e6, 1e6)
_OPTIONS = {
    "scale": _FINITE,
    "strength": _FINITE,
    "low": _FINITE,
    "high": _FINITE,
    "alpha": st.floats(0, 1),
    "norm_match": st.booleans(),
}
_POSITIONS = st.sampled_from(["all", "all_prompt", "all_generated", "last_prompt"]) | st.lists(
    st.integers(-9, 9), min_size=1, max_size=4
)
_LAYERS = (
    st.just("all")
    | st.integers(-3, 30)
    | st.lists(st.integers(0, 30), min_size=1, max_size=3)
    | st.just("0-3,-1")
)


@st.composite
def entries(draw: st.DrawFn) -> SteeringSpec:
    op = draw(st.sampled_from(list(STEERING_FIELDS)))
    shapes = {"vector": [3], "rotation": [2, 3], "weight": [2, 3], "bias": [2]}
    tensors = {}
    for name in STEERING_FIELDS[op].tensors:
        dtype = draw(st.sampled_from(get_args(DType)))
        size = int(np.prod(shapes[name])) * ITEM_BYTES[dtype]
        tensors[name] = Tensor(
            dtype=dtype, shape=shapes[name], data=draw(st.binary(min_size=size, max_size=size))
        )
    options = {
        name: draw(_OPTIONS[name]) for name in STEERING_FIELDS[op].options if draw(st.booleans())
    }
    return SteeringSpec(
        op=op,
        hook=draw(st.sampled_from([None, "pre_attn", "resid_mid", "hook_mlp_out"])),
        layers=draw(_LAYERS),
        positions=draw(st.none() | _POSITIONS),
        **options,
        **tensors,
    )


@given(st.lists(entries(), min_size=1, max_size=5))
def test_entries_round_trip_through_files(specs: list[SteeringSpec]) -> None:
    raw = to_bytes(specs)
    assert specs_of(raw) == specs
    assert {name for name, _ in safetensors.deserialize(raw)} == {
        f"{index}.{name}"
        for index, spec in enumerate(specs)
        for name in SHAPES
        if getattr(spec, name) is not None
    }


def test_each_tensor_of_a_file_lies_at_a_multiple_of_its_elements_size() -> None:
    narrow = Tensor(dtype="bfloat16", shape=[1], data=b"\0\0")
    wide = from_numpy(JOY)
    raw = to_bytes([SteeringSpec(layers=1, vector=narrow), SteeringSpec(layers=2, vector=wide)])
    start = 8 + int.from_bytes(raw[:8], "little")
    header = msgspec.json.decode(raw[8:start])
    assert [
        (start + header[name]["data_offsets"][0]) % size
        for name, size in (("0.vector", 2), ("1.vector", 4))
    ] == [0, 0]


def test_the_file_format_covers_every_entry_field() -> None:
    named = {
        "layers",
        "hook",
        "module",
        *SHARED,
        *SHAPES,
        *FAMILY["feature"].fields,
        *INSTALLED.fields,
        *("jacobian", "token", "swap", "limit", "trigger"),
    }  # a file has its vectors, and names nothing
    assert named == set(SteeringSpec.__struct_fields__)
    assert next(found.max_length for found in SteeringEntries.__metadata__) == MAX_ENTRIES


# --- What cannot be right ---


@pytest.mark.parametrize(
    ("tensors", "metadata", "says"),
    [
        (
            {"12": JOY},
            {},
            (
                r"'12' is not a site: write \{hook\}.\{layer\}, such as post_block.12, with "
                r"hooks pre_attn"
            ),
        ),
        ({"post_blok.12": JOY}, {}, "'post_blok.12' is not a site"),
        ({"post_block.twelve": JOY}, {}, "'post_block.twelve' is not a site"),
        (
            {"resid_post.3": JOY, "post_block.3": JOY},
            {},
            r"'(resid_post|post_block).3' is the same as '(resid_post|post_block).3'",
        ),
        ({"post_block.3": JOY, "post_block.3.vector": JOY}, {}, "is the same as"),
        (
            {"post_block.3": JOY[None]},
            {},
            r"'post_block.3' has shape \[1, 4\]: a vector must be \[hidden_size\]",
        ),
        (
            {"post_block.3": JOY, "post_block.4": JOY[:3]},
            {},
            (
                r"'post_block.[34]' has width [34], but 'post_block.[34]' has [34]: all must "
                r"have the same width"
            ),
        ),
        (
            {"post_block.3.matrix": JOY},
            {},
            "unknown tensor 'matrix'; valid: vector, rotation, weight, bias",
        ),
        (
            {"post_block.3": JOY.astype(np.float64)},
            {},
            "post_block.3 is F64; valid: F32, F16, BF16",
        ),
        ({"post_block.3": JOY}, {"sclae": "2"}, "unknown metadata 'sclae': use op, positions"),
        ({"post_block.3": JOY}, {"scale": "a lot"}, "metadata scale has the invalid value 'a lot'"),
        (
            {"post_block.3": JOY},
            {"scale": "Infinity"},
            "metadata scale has the invalid value 'Infinity'",
        ),
        ({"post_block.3": JOY}, {"op": "subtract"}, "metadata op has the invalid value 'subtract'"),
        (
            {"post_block.3": JOY},
            {"positions": '["all"]'},
            "metadata positions has the invalid value",
        ),
        ({"post_block.3": JOY}, {"layers": "3"}, "unknown metadata 'layers'"),
        ({}, {}, "it has no tensors"),
        ({"0.vector": JOY}, {"midstream": "{}"}, "metadata midstream is not a list of entries"),
        (
            {"0.vector": JOY},
            {"midstream": '[{"layer": 3}]'},
            r"unknown field `layer` - at `\$\[0\]`",
        ),
        (
            {"0.vector": JOY},
            {"midstream": "[" * 100_000},
            "metadata midstream is not a list of entries",
        ),
        ({"1.vector": JOY}, {"midstream": '[{"layers": 3}]'}, "'1.vector' belongs to no entry"),
        (
            {"0.vector": JOY},
            {"midstream": '[{"layers": 3}, {"layers": 4}]'},
            "entry 1 has no tensor, such as 1.vector",
        ),
        ({"0.vektor": JOY}, {"midstream": '[{"layers": 3}]'}, "unknown tensor 'vektor'"),
        (
            {"0.vector": JOY},
            {"midstream": '[{"module": "joy"}]'},
            "entry 0 refers to module 'joy': a file contains vectors, not names",
        ),
        (
            {"0.vector": JOY},
            {
                "midstream": (
                    '[{"layers": 3, "vector": {"dtype": "float32", "shape": [1], "data": '
                    '"AAAAAA=="}}]'
                )
            },
            "entry 0 contains its vector inline: make it the tensor 0.vector",
        ),
    ],
)
def test_a_wrong_key_is_named(
    tensors: dict[str, np.ndarray], metadata: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        specs_of(file(tensors, **metadata))


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_file_that_is_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="it is truncated"):
        specs_of(file({"post_block.3": JOY})[:cut])


def test_more_entries_than_a_request_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_files, "MAX_ENTRIES", 2)
    with pytest.raises(ValueError, match="3 entries: at most 2"):
        specs_of(file({f"post_block.{layer}": JOY for layer in range(3)}))


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        ("MAX_FILE_TENSORS", 2, "has 3 tensors: at most 2"),
        ("MAX_FILE_HEADER", 100, r"header is \d+ bytes: at most 100"),
    ],
)
def test_a_header_beyond_its_limits_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int, words: str
) -> None:
    raw = file({f"post_block.{layer}": JOY for layer in range(3)})
    monkeypatch.setattr(safetensors, "deserialize", None)
    monkeypatch.setattr(module_files, limit, most)
    with pytest.raises(ValueError, match=words):
        specs_of(raw)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([SteeringSpec(module="joy")], "entry 0 refers to module 'joy'"),
        ([], "give at least one"),
    ],
)
def test_names_and_absent_fields_are_not_written(entries: list[SteeringSpec], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        to_bytes(entries)


def test_a_header_without_metadata_has_no_defaults() -> None:
    raw = file({"post_block.3": JOY})
    header = b'{"__metadata__":null,' + raw[9 : 8 + int.from_bytes(raw[:8], "little")]
    assert specs_of(len(header).to_bytes(8, "little") + header + JOY.tobytes()) == specs_of(raw)


def test_sites_without_a_file_make_the_same_entries() -> None:
    assert of_sites({"post_block.3": from_numpy(JOY)}) == specs_of(file({"post_block.3": JOY}))
