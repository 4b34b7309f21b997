"""Requests give tensors as numbers or in base64; records hold tensors, and show them briefly."""

import msgspec
import numpy as np
import pytest

from midstream.schemas.artifacts.probes import ProbeRequest
from midstream.schemas.base.tensors import Tensor, from_numpy, to_numpy
from midstream.schemas.jobs.openai import ChatRequest
from midstream.schemas.requests.specs import PatchSource, SteeringSpec


def test_lists_of_numbers_are_tensors_wherever_requests_take_one() -> None:
    chat = msgspec.json.decode(
        b'{"model": "m", "messages": [{"role": "user", "content": "a"}],'
        b' "steering": [{"layers": 1, "vector": [0, 0.5]}]}',
        type=ChatRequest,
    )
    source = msgspec.json.decode(b'{"vector": [0, 0.5]}', type=PatchSource)
    probe = msgspec.json.decode(b'{"layer": 1, "weight": [[0, 0.5]]}', type=ProbeRequest)
    expected = from_numpy(np.array([0, 0.5], dtype=np.float32))
    assert chat.steering[0].vector == source.vector == expected
    np.testing.assert_array_equal(to_numpy(probe.weight), [[0, 0.5]])
    assert msgspec.json.decode(msgspec.json.encode(source), type=PatchSource) == source


@pytest.mark.parametrize(
    ("vector", "wrong"),
    [
        ("[[1, 2], [1]]", "vector has rows of different lengths"),
        ('["a"]', r"Expected `float \| array`, got `str` - at `\$.vector\[0\]`"),
        ("[]", "length >= 1"),
    ],
)
def test_other_lists_are_refused_by_name(vector: str, wrong: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=wrong):
        msgspec.json.decode(f'{{"layers": 1, "vector": {vector}}}', type=SteeringSpec)


def test_records_show_neither_bytes_nor_defaults() -> None:
    entry = SteeringSpec(layers=1, vector=Tensor(dtype="float32", shape=[1], data=bytes(4)))
    assert repr(entry) == "SteeringSpec(layers=1, vector=Tensor(float32, [1]))"
