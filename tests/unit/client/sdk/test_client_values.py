"""Does the client convert Python values to request bodies, and name those that it cannot
convert?
"""

import enum
import traceback
from typing import Any

import msgspec
import numpy as np
import pytest
from http_kit import reply, server
from refusal_kit import refuses
from sweep_kit import VIEW

from midstream import (
    CaptureSpec,
    Client,
    PatchSource,
    PatchSpec,
    ServerUnreachable,
    Span,
    SteeringSpec,
    UnknownArgument,
)
from midstream.client import values
from midstream.client.sdk import registered, wire
from midstream.client.sdk.service import key_request
from midstream.schemas.base.records import to_json
from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.jobs.jobs import JobRequest, SamplingRequest, State
from midstream.schemas.jobs.openai import CompletionRequest
from midstream.schemas.jobs.sweeps import SweepRequest

VECTOR = np.arange(4, dtype=np.float64)


def job(**fields: Any) -> JobRequest:
    return values.request(None, {"model": "m", "prompts": ["x"], **fields}, JobRequest)


def sweep(**fields: Any) -> SweepRequest:
    return values.request(
        None,
        {"model": "m", "pairs": [{"clean": "a", "corrupt": "b", "answer": "c"}], **fields},
        SweepRequest,
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"layers": range(3)}, [0, 1, 2]),
        ({"layers": np.int64(3)}, 3),
        ({"layers": np.arange(2)}, [0, 1]),
        ({"layers": (1, np.int32(2))}, [1, 2]),
        ({"layers": {5, 2}}, [2, 5]),
        ({"layers": np.str_("0-3")}, "0-3"),
    ],
)
def test_layers_may_be_numpy_ranges_and_sets(given: dict[str, Any], found: Any) -> None:
    assert job(capture=given).capture == CaptureSpec(layers=found)
    assert job(steering={**given, "vector": VECTOR}).steering[0].layers == found
    assert job(patch={**given, "positions": 0, "source": {"zeros": True}}).patch[0].layers == found
    assert sweep(**given).layers == found


def test_texts_may_be_of_classes_of_their_own() -> None:
    class Layers(str, enum.Enum):  # noqa: UP042  # written for a Python without StrEnum
        ALL = "all"

    class Text(str):
        __slots__ = ()

    asked = job(capture={"layers": Layers.ALL}, prompts=[Text("x"), "y"])
    assert (asked.capture, asked.prompts) == (CaptureSpec(layers="all"), ["x", "y"])
    assert b'"prompts":["x","y"]' in to_json(asked)


@pytest.mark.parametrize("position", [4, np.int64(4), [4], np.array([4]), (4,), range(4, 5)])
def test_one_position_needs_no_list(position: Any) -> None:
    assert job(capture={"positions": position}).capture == CaptureSpec(positions=[4])
    assert job(patch=[{"layers": 0, "positions": position, "source": VECTOR}]).patch[
        0
    ].positions == [4]
    assert sweep(positions=position).positions == [4]


def test_numbers_may_be_numpy_scalars_anywhere() -> None:
    (spec,) = job(
        steering=[
            {
                "layers": [np.int64(1)],
                "vector": VECTOR,
                "scale": np.float64(2.5),
                "norm_match": np.bool_(True),
            }
        ]
    ).steering
    assert (spec.layers, spec.scale, spec.norm_match) == ([1], 2.5, True)
    assert job(
        sampling={"max_tokens": np.int64(4), "temperature": np.float32(0.5)}
    ).sampling == SamplingRequest(max_tokens=4, temperature=0.5)
    assert job(expires_in=np.float64(3)).expires_in == 3.0
    asked = sweep(
        alpha=np.float64(0.5), window={"layers": np.int64(3)}, noise=np.int8(2), mask=range(4)
    )
    assert (asked.alpha, asked.window.layers, asked.noise, asked.mask) == (0.5, 3, 2, [0, 1, 2, 3])


def test_lengths_of_time_may_be_texts() -> None:
    assert [job(expires_in=given).expires_in for given in ("20d", "1.5h", "30m", "45", 45)] == [
        20 * 86400.0,
        5400.0,
        1800.0,
        45.0,
        45.0,
    ]
    assert sweep(expires_in="10m").expires_in == 600.0
    assert (
        wire.openai_body(CompletionRequest, {"model": "m", "prompt": "a", "expires_in": "1m"})[
            "expires_in"
        ]
        == 60.0
    )
    assert key_request("k", "default", "read", "90d") == key_request(
        "k", "default", ["read"], 90 * 86400.0
    )
    with refuses("'soon' is not a duration (allowed: such as 90d", field="expires_in"):
        job(expires_in="soon")


def test_one_entry_stands_for_a_list_of_one() -> None:
    entry = {"layers": 3, "vector": VECTOR}
    assert job(steering=entry).steering == job(steering=[entry]).steering
    assert job(steering=SteeringSpec(module="joy")).steering == [SteeringSpec(module="joy")]
    assert job(patch={"layers": 3, "positions": "all", "source": "run1"}).patch == [
        msgspec.convert({"layers": 3, "positions": "all", "source": {"run": "run1"}}, PatchSpec)
    ]
    assert sweep(hooks="resid_pre").hooks == ["resid_pre"]
    assert sweep(pairs={"clean": "a", "spans": {"name": "s", "clean": 1}}).pairs[0].spans[
        0
    ].clean == [1]  # type: ignore[index]
    assert job(sampling={"stop": "end"}).sampling.stop == ["end"]
    assert registered.entries_of({"module": "joy", "scale": np.float64(2)}) == [
        SteeringSpec(module="joy", scale=2.0)
    ]
    assert [entry.layers for entry in registered.entries_of({"post_block.3": VECTOR})] == [3]


def test_a_span_is_not_taken_for_an_entry_of_a_list() -> None:
    assert job(capture={"positions": {"text": "Tower"}}).capture == CaptureSpec(
        positions=Span(text="Tower")
    )
    assert job(capture={"positions": [{"text": "Tower"}, np.int64(-1)]}).capture == CaptureSpec(
        positions=[Span(text="Tower"), -1]
    )


def test_hooks_of_a_capture_may_be_a_list_as_those_of_a_sweep() -> None:
    assert job(
        capture={"hooks": ["resid_pre", "mlp_out"], "layers": range(2)}
    ).capture == CaptureSpec(hooks={"resid_pre": [0, 1], "mlp_out": [0, 1]})
    assert job(capture={"hooks": "mlp_out"}).capture == CaptureSpec(hooks={"mlp_out": "all"})
    assert job(capture={"hooks": {"mlp_out": range(2)}}).capture == CaptureSpec(
        hooks={"mlp_out": [0, 1]}
    )


def test_a_full_name_of_transformer_lens_stands_for_a_hook_and_its_layer() -> None:
    names = ["blocks.3.hook_resid_post", "blocks.5.hook_resid_post", "blocks.3.attn.hook_z"]
    vector = np.ones(2, np.float32)
    made = job(
        capture={"hooks": names},
        steering={"hook": names[0], "vector": vector},
        patch={"hook": names[2], "positions": 0, "source": vector},
        lens={"hook": names[1]},
    )
    assert made.capture == CaptureSpec(hooks={"post_block": [3, 5], "z": [3]})
    assert [(each.hook, each.layers) for each in (*made.steering, *made.patch, made.lens)] == [
        ("post_block", 3),
        ("z", 3),
        ("post_block", 5),
    ]
    cells = sweep(hooks=["blocks.1.hook_mlp_out", "blocks.1.hook_attn_out"])
    assert (cells.hooks, cells.layers) == (["mlp_out", "attn_out"], [1])
    end = {"hook": "blocks.4.attn.hook_z", "head": 1}
    assert sweep(path={"sender": end}).path.sender.layer == 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: job(capture={"hook": "blocks.3.hook_resid_post", "layers": 4}),
            "capture.hook: a full name has its layer: give only full names, and no `layers`",
        ),
        (
            lambda: job(capture={"hooks": ["blocks.3.hook_resid_post", "mlp_out"]}),
            "capture.hooks: a full name has its layer",
        ),
        (
            lambda: sweep(hooks=["blocks.1.hook_mlp_out", "blocks.2.hook_attn_out"]),
            "hooks: every hook must be named at the same layers",
        ),
        (lambda: job(capture={"hook": "blocks.3.attn.hook_pattern"}), "capture.hook: Invalid"),
    ],
)
def test_full_names_that_do_not_fit_are_refused(make: Any, words: str) -> None:
    with refuses(words):
        make()


def test_vectors_come_from_numpy_lists_and_torch() -> None:
    torch = pytest.importorskip("torch")
    for vector in (VECTOR, VECTOR.tolist(), tuple(VECTOR), torch.arange(4, dtype=torch.bfloat16)):
        (entry,) = job(steering={"layers": 0, "vector": vector}).steering
        (patch,) = job(patch={"layers": 0, "positions": 0, "source": vector}).patch
        assert entry.vector is not None
        assert patch.source.vector == entry.vector
        np.testing.assert_array_equal(to_numpy(entry.vector), VECTOR)
    assert job(
        capture={"layers": torch.tensor([1, 2]), "positions": torch.tensor(3)}
    ).capture == CaptureSpec(layers=[1, 2], positions=[3])


@pytest.mark.parametrize(
    "vector", [VECTOR, VECTOR.tolist(), tuple(VECTOR)], ids=["np", "list", "tuple"]
)
def test_structs_take_arrays_as_vectors_too(vector: Any) -> None:
    steering = SteeringSpec(layers=0, vector=vector)
    patch = PatchSpec(layers=0, positions=[0], source=PatchSource(vector=vector))
    given = JobRequest(model="m", prompts=["x"], steering=[steering], patch=[patch])
    for body in (job(steering=steering, patch=[patch]), values.request(given, {}, JobRequest)):
        for tensor in (body.steering[0].vector, body.patch[0].source.vector):
            assert tensor is not None
            np.testing.assert_array_equal(to_numpy(tensor), VECTOR)
    (entry,) = wire.pack_steering(
        {"layers": 0, "op": "lowrank", "rotation": [vector], "weight": [vector], "bias": vector[:1]}
    )
    assert entry.weight is not None
    assert entry.weight.shape == [1, 4]


def test_run_takes_the_names_of_completion() -> None:
    assert job(max_tokens=np.int64(4), temperature=0.5).sampling == SamplingRequest(
        max_tokens=4, temperature=0.5
    )
    assert job(sampling={"seed": 1}, max_tokens=4).sampling == SamplingRequest(max_tokens=4, seed=1)
    prompts = [
        values.request(None, {"model": "m", "prompt": prompt}, JobRequest).prompts
        for prompt in ("hello", ["a", "b"], [1, 2], np.array([1, 2]), np.array([[1], [2]]))
    ]
    assert prompts == [["hello"], ["a", "b"], [[1, 2]], [[1, 2]], [[1], [2]]]
    assert job(capture=None, steering=None).steering == []
    for twice in ({"prompt": "y"}, {"sampling": {"max_tokens": 1}, "max_tokens": 2}):
        with refuses("give"):
            job(**twice)


def test_token_ids_are_not_taken_for_prompts_of_one_token() -> None:
    with refuses(field="prompts[0]"):
        job(prompts=[1, 2, 3])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: job(promts=["x"]), "promts: unknown field; did you mean 'prompts'?"),
        (lambda: job(max_token=3), "did you mean 'max_tokens'?"),
        (
            lambda: sweep(hook="mlp_out"),
            "hook: unknown field; did you mean 'hooks'?",
        ),
        (
            lambda: wire.openai_body(
                CompletionRequest, {"model": "m", "prompt": "x", "temprature": 1}
            ),
            "did you mean 'temperature'?",
        ),
    ],
)
def test_an_unknown_keyword_is_a_type_error_that_names_the_right_one(make: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert isinstance(caught.value, UnknownArgument)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: job(capture={"lyers": 3}),
            "capture.lyers: unknown field; did you mean 'layers'? (allowed: layers, hook, ",
        ),
        (
            lambda: job(capture={"hook": "resid_prr"}),
            "did you mean 'resid_pre'? (allowed: pre_attn, attn_out, ",
        ),
        (
            lambda: job(steering={"layers": 0, "op": "abalte"}),
            "steering[0].op: Invalid enum value 'abalte'; did you mean 'ablate'?",
        ),
        (
            lambda: sweep(pairs=[{"clean": "a", "fiol": "b"}]),
            "pairs[0].fiol: unknown field; did you mean 'foil'?",
        ),
        (
            lambda: sweep(metric="logit_dif"),
            "did you mean 'logit_diff'? (allowed: logprob, logit_diff, recovered, kl)",
        ),
    ],
)
def test_an_error_shows_what_is_allowed_and_what_was_meant(make: Any, words: str) -> None:
    with refuses(words):
        make()


def test_a_module_named_by_a_text_is_shown_as_an_intervention() -> None:
    with refuses() as caught:
        job(steering="@sea:0.5")
    assert str(caught.value) == (
        "steering: expected interventions, got a text; give {'module': 'sea'}"
    )


def test_a_job_is_named_by_its_id_or_by_what_a_call_returned() -> None:
    with server(reply(VIEW)) as (url, seen), Client(url) as client:
        for given in ("job_1", VIEW):
            assert client.jobs.get(given).state is State.SUCCEEDED
            assert client.wait(given).state is State.SUCCEEDED
    assert {line.partition("?")[0] for line in seen} == {"GET /v1/jobs/job_1"}
    with refuses("job: list does not identify a job"):
        client.capture([])  # type: ignore[arg-type]


def test_a_server_that_is_down_is_one_error_without_a_chain() -> None:
    client = Client("http://127.0.0.1:1")
    for call in (
        client.models,
        lambda: client.jobs.get("job_1"),
        lambda: client.completion("m", "x"),
        lambda: client.capture("job_1"),
    ):
        with pytest.raises(
            ServerUnreachable, match=r"no Midstream server answers at http://127\.0\.0\.1:1 "
        ) as caught:
            call()
        assert "During handling" not in "".join(traceback.format_exception(caught.value))
        assert "direct cause" not in "".join(traceback.format_exception(caught.value))
        (line,) = caught.value._render_traceback_()
        assert line.startswith("ServerUnreachable: no Midstream server answers")
