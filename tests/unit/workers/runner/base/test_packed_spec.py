"""The spec of a request in vLLM's sampling parameters."""

from types import SimpleNamespace
from typing import Any

import pytest

from midstream import __version__
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.requests.specs import RankSpec, StoredCapture, StoredSteering, steering_rows
from midstream.workers.runner.base.packed_spec import pack, packed_spec, unpack


# field case 23
def test_rank_specs_survive_the_engine_rpc_unchanged() -> None:
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    spec = RankSpec(
        version=__version__,
        job="job_x",
        request=1,
        attempt=2,
        prompt_tokens=5,
        rows=steering_rows(
            [
                StoredSteering(
                    layers=[3],
                    hook="pre_attn",
                    positions=[0, 4],
                    family="replace",
                    tensors=["ab" * 32],
                    scale=1.5,
                    numbers=[0.5],
                ),
                StoredSteering(
                    layers=[0],
                    hook="mlp_out",
                    positions="all",
                    family="lowrank",
                    tensors=["a", "b", "c"],
                    numbers=[1.0],
                    rank=7,
                ),
            ]
        ),
        requests={"t": 3},
        captures=[
            StoredCapture(
                sites={"pre_attn": [0], "post_block": [1, 2]},
                positions="all",
                tag="t",
                every_n=3,
                at="after",
                dtype="float32",
            ),
            StoredCapture(
                sites={"mlp_out": [2]},
                positions=[1, 4],
                tag="global",
                layout="segment",
                consumers=["memory", "logging"],
            ),
        ],
        digest="cd" * 32,
        first_affected=0,
        lowest_captured=0,
    )
    params = SamplingParams(max_tokens=1, extra_args=pack(spec))
    packed = packed_spec(MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params)))
    assert packed is not None
    assert unpack(packed) == (spec, "")


@pytest.mark.parametrize(
    "params",
    [None, SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={"other": 1})],
)
def test_requests_without_a_part_for_ranks_have_no_spec(params: Any) -> None:
    assert packed_spec(params) is None


def test_unreadable_specs_name_their_request_and_say_why() -> None:
    of_later = {"version": "9", "job": "j2", "request": 3, "attempt": 4, "captures": 3, "new": 1}
    spec, why = unpack(to_msgpack(of_later))
    assert spec.version == "9"
    assert spec.ids == ("j2", 3, 4)
    assert spec.captures == []
    assert why
