"""Do tensors, specs and jobs mean what they say, and do they cross our wires unchanged?"""

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from midstream.schemas.base.dtypes import bfloat16_to_float32
from midstream.schemas.base.records import Published, from_json, from_msgpack, to_json, to_msgpack
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy, to_numpy
from midstream.schemas.jobs import jobs
from midstream.schemas.jobs.jobs import TERMINAL, TRANSITIONS, JobRequest, State
from midstream.schemas.requests import specs
from midstream.schemas.requests.specs import CaptureSpec


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=16))
# field case 47
def test_a_tensor_crosses_both_wires_bit_for_bit(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    tensor = from_numpy(array)
    for copy in (from_json(to_json(tensor), Tensor), from_msgpack(to_msgpack(tensor), Tensor)):
        assert to_numpy(copy).tobytes() == array.tobytes()
        assert content_hash(copy) == content_hash(tensor)


# field case 15, 45
def test_a_tensor_is_named_by_its_content_and_nothing_else() -> None:
    base = np.arange(6, dtype=np.float32)
    assert content_hash(from_numpy(base)) == content_hash(from_numpy(base.copy()))
    others = [base + 1, base.reshape(2, 3), base.astype(np.float16)]
    assert len({content_hash(from_numpy(array)) for array in [base, *others]}) == 4


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"dtype": "float32", "shape": [4], "data": "AAAA"}', "needs 16"),
        (b'{"dtype": "float32", "shape": [-1, -1], "data": "AAAAAA=="}', ">= 0"),
    ],
)
def test_a_tensor_whose_bytes_do_not_fill_its_shape_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        from_json(raw, Tensor)


def test_bfloat16_is_widened_exactly() -> None:
    # 1, -2, the smallest subnormal, infinity
    bits = np.array([0x3F80, 0xC000, 0x0001, 0x7F80], dtype=np.uint16)
    assert bfloat16_to_float32(bits).tolist() == [1.0, -2.0, 2.0**-133, float("inf")]


@pytest.mark.parametrize(
    ("raw", "kind", "path"),
    [
        *(
            (body, JobRequest, path)
            for body, path in (
                (b'{"model": "m", "prompts": ["a"], "no_such": 1}', "no_such"),
                (b'{"model": "m", "prompts": []}', r"\$\.prompts"),
                (
                    b'{"model": "m", "prompts": ["a"], "capture": {"tag": "../x"}}',
                    r"\$\.capture\.tag",
                ),
                (
                    b'{"model": "m", "prompts": ["a"], "capture": {"hook": "nowhere"}}',
                    r"\$\.capture\.hook",
                ),
                (
                    b'{"model": "m", "prompts": ["a"], "sampling": {"temperature": -1}}',
                    r"\$\.sampling\.temperature",
                ),
            )
        ),
        # a tag that is not a plain folder name
        *(
            (to_json({"tag": tag}), CaptureSpec, r"\$\.tag")
            for tag in ("..", "../x", "a/b", "", ".hidden", "a" * 65, "a\n")
        ),
    ],
)
# field case 27, 40
def test_a_wrong_field_is_refused_with_its_path(raw: bytes, kind: type, path: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=path):
        from_json(raw, kind)


def test_every_state_has_a_row_of_successors_and_the_terminal_ones_have_none() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {State.SUCCEEDED, State.FAILED, State.CANCELLED, State.ABORTED} <= TERMINAL
    assert all(not TRANSITIONS[state] for state in TERMINAL)
    assert set().union(*TRANSITIONS.values()) >= TERMINAL - {State.EXPIRED}


def test_every_record_of_the_vocabulary_refuses_unknown_fields() -> None:
    records = [
        kind
        for module in (jobs, specs)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        # what ranks get: one of another version is refused by its version, not by its fields
        and not issubclass(kind, Published)
    ]
    assert records
    assert [
        kind.__name__ for kind in records if not kind.__struct_config__.forbid_unknown_fields
    ] == []
