"""Does the client convert Python values to request bodies, and name those that it cannot
convert?
"""

import enum
import traceback
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from http_kit import reply, server
from job_kit import job_result
from refusal_kit import refuses
from safetensors.numpy import save_file
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
from midstream.schemas.access.keys import KeyId
from midstream.schemas.base.records import to_json
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.jobs import JobRequest, SamplingRequest, State
from midstream.schemas.jobs.openai import CompletionRequest
from midstream_lab.records.sweeps import SweepRequest

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
    assert asked.capture == CaptureSpec(layers="all")
    assert asked.prompts == ["x", "y"]
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
    assert spec.layers == [1]
    assert spec.scale == 2.5
    assert spec.norm_match
    assert job(
        sampling={"max_tokens": np.int64(4), "temperature": np.float32(0.5)}
    ).sampling == SamplingRequest(max_tokens=4, temperature=0.5)
    assert job(expires_in=np.float64(3)).expires_in == 3.0
    asked = sweep(
        alpha=np.float64(0.5), window={"layers": np.int64(3)}, noise=np.int8(2), mask=range(4)
    )
    assert asked.alpha == 0.5
    assert asked.window.layers == 3
    assert asked.noise == 2
    assert asked.mask == [0, 1, 2, 3]


def test_lengths_of_time_may_be_texts() -> None:
    assert [job(expires_in=given).expires_in for given in ("20d", "1.5h", "30m", "45", 45)] == [
        20 * 86400.0,
        5400.0,
        1800.0,
        45.0,
        45.0,
    ]
    assert sweep(expires_in="10m").expires_in == 600.0
    fields = {"model": "m", "prompt": "a", "expires_in": "1m"}
    assert wire.openai_body(CompletionRequest, fields)["expires_in"] == 60.0
    assert key_request("k", "default", "read", "7300d") == key_request(
        "k", "default", ["read"], 20 * 365 * 86400.0
    )


def test_entries_sites_and_a_file_are_equivalent(tmp_path: Path) -> None:
    vector = VECTOR.astype(np.float32)
    save_file({"resid_post.3": vector}, tmp_path / "joy.safetensors")
    wanted = [SteeringSpec(layers=3, hook="post_block", vector=from_numpy(vector))]
    for given in (
        wanted,
        [{"layers": 3, "hook": "post_block", "vector": vector}],
        {"post_block.3": vector},
        tmp_path / "joy.safetensors",
        str(tmp_path / "joy.safetensors"),
    ):
        assert registered.entries_of(given) == wanted  # type: ignore[arg-type]
    (tmp_path / "joy.safetensors").write_bytes(b"PK")
    with refuses("joy.safetensors: its format is unknown"):
        registered.entries_of(tmp_path / "joy.safetensors")


def test_one_entry_stands_for_a_list_of_one() -> None:
    entry = {"layers": 3, "vector": VECTOR}
    assert job(steering=entry).steering == job(steering=[entry]).steering
    assert job(steering=SteeringSpec(module="joy")).steering == [SteeringSpec(module="joy")]
    done: Any = job_result(id="run1")
    for source in ("run1", done, {"run": done}, PatchSource(run=done)):
        assert job(patch={"layers": 3, "positions": "all", "source": source}).patch == [
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


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"positions": {"text": "Tower"}}, {"positions": Span(text="Tower")}),
        (
            {"positions": [{"text": "Tower"}, np.int64(-1)]},
            {"positions": [Span(text="Tower"), -1]},
        ),
        (
            {"hooks": ["resid_pre", "mlp_out"], "layers": range(2)},
            {"hooks": {"resid_pre": [0, 1], "mlp_out": [0, 1]}},
        ),
        ({"hooks": "mlp_out"}, {"hooks": {"mlp_out": "all"}}),
        ({"hooks": {"mlp_out": range(2)}}, {"hooks": {"mlp_out": [0, 1]}}),
    ],
)
def test_spans_and_hooks_may_stand_alone_or_in_a_list(
    given: dict[str, Any], meant: dict[str, Any]
) -> None:
    assert job(capture=given).capture == CaptureSpec(**meant)


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
    assert cells.hooks == ["mlp_out", "attn_out"]
    assert cells.layers == [1]
    end = {"hook": "blocks.4.attn.hook_z", "head": 1}
    assert sweep(path={"sender": end}).path.sender.layer == 4


CLOSED = Client("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("dtype", "kept"), [("float64", "float32"), ("float32", "float32"), ("float16", "float16")]
)
def test_vectors_come_from_numpy_lists_and_torch(dtype: str, kept: str) -> None:
    torch = pytest.importorskip("torch")
    of_torch = torch.arange(4, dtype=getattr(torch, dtype), requires_grad=True)
    wanted = from_numpy(VECTOR.astype(kept))
    for vector in (VECTOR.astype(dtype), of_torch):
        (entry,) = job(steering={"layers": 0, "vector": vector}).steering
        (patch,) = job(patch={"layers": 0, "positions": 0, "source": vector}).patch
        assert entry.vector == wanted
        assert patch.source.vector == wanted
    for vector in (VECTOR.tolist(), tuple(VECTOR), of_torch.bfloat16()):
        (entry,) = job(steering={"layers": 0, "vector": vector}).steering
        assert entry.vector == from_numpy(VECTOR)
    assert job(
        capture={"layers": torch.tensor([1, 2]), "positions": torch.tensor(3)}
    ).capture == CaptureSpec(layers=[1, 2], positions=[3])


def test_matrices_and_sources_come_from_arrays_and_names() -> None:
    (entry,) = job(
        steering={
            "layers": 0,
            "op": "lowrank",
            "rotation": [VECTOR],
            "weight": VECTOR[None],
            "bias": [0.5],
        }
    ).steering
    assert entry.rotation == entry.weight == from_numpy(VECTOR[None])
    assert entry.bias == from_numpy(np.array([0.5]))
    both = {"run": "clean", "position": [1, 2]}
    for given, wanted in (
        ("clean", PatchSource(run="clean")),
        (both, PatchSource(**both)),
        (VIEW, PatchSource(run="job_1")),
        (both | {"run": VIEW}, PatchSource(**both | {"run": "job_1"})),
        (both | {"run": job_result()}, PatchSource(**both | {"run": "job_1"})),
        (PatchSource(zeros=True), PatchSource(zeros=True)),
    ):
        assert job(patch={"layers": 3, "positions": [5], "source": given}).patch[0].source == wanted


def test_structs_take_arrays_as_vectors_too() -> None:
    steering = SteeringSpec(layers=0, vector=VECTOR.tolist())
    patch = PatchSpec(layers=0, positions=[0], source=PatchSource(vector=VECTOR))  # type: ignore[arg-type]
    given = JobRequest(model="m", prompts=["x"], steering=[steering], patch=[patch])
    for body in (job(steering=steering, patch=[patch]), values.request(given, {}, JobRequest)):
        assert body.steering[0].vector == body.patch[0].source.vector == from_numpy(VECTOR)


@pytest.mark.parametrize(
    ("make", "field", "words"),
    [
        (
            lambda: job(capture={"hook": "blocks.3.hook_resid_post", "layers": 4}),
            "capture.hook",
            "a full name has its layer: give only full names, and no `layers`",
        ),
        (
            lambda: job(capture={"hooks": ["blocks.3.hook_resid_post", "mlp_out"]}),
            "capture.hooks",
            "a full name has its layer",
        ),
        (
            lambda: sweep(hooks=["blocks.1.hook_mlp_out", "blocks.2.hook_attn_out"]),
            "hooks",
            "every hook must be named at the same layers",
        ),
        (
            lambda: job(capture={"hook": "blocks.3.attn.hook_pattern"}),
            "capture.hook",
            "Invalid",
        ),
        (
            lambda: job(capture={"lyers": 3}),
            "capture.lyers",
            "unknown field; did you mean 'layers'? (allowed: layers, hook, ",
        ),
        (
            lambda: job(capture={"hook": "resid_prr"}),
            "capture.hook",
            "did you mean 'resid_pre'? (allowed: pre_attn, attn_out, ",
        ),
        (
            lambda: job(capture={"hooks": {"mlp_aut": 1}}),
            "capture.hooks",
            "did you mean 'mlp_out'?",
        ),
        (lambda: job(capture={"tag": "../up"}), "capture.tag", "pattern"),
        (
            lambda: job(steering={"layers": 0, "op": "abalte"}),
            "steering[0].op",
            "Invalid enum value 'abalte'; did you mean 'ablate'?",
        ),
        (
            lambda: job(steering={"layers": 1, "vector": ["x"]}),
            "steering[0].vector",
            "must be numeric",
        ),
        (
            lambda: job(steering={"layers": 1, "op": "lowrank", "weight": [[1, 2], [3]]}),
            "steering[0].weight",
            "",
        ),
        (
            lambda: job(steering={"layers": 1, "vector": [1.0], "strength": float("nan")}),
            "steering[0]",
            "strength is nan",
        ),
        (
            lambda: job(steering="@sea:0.5"),
            "steering",
            "expected interventions, got a text; give [{'module': 'sea'}]",
        ),
        (lambda: job(steering=["sea"]), "steering[0]", 'named as [{"module": NAME}]'),
        (lambda: CLOSED.completion("m", "x", steering="sea"), "steering", "[{'module': 'sea'}]"),
        (
            lambda: job(patch={"layers": 3, "positions": [5], "source": {"run": 1.5}}),
            "patch[0].source.run",
            "got `float`",
        ),
        (lambda: job(patch={"positions": [5], "source": "clean"}), "patch[0].layers", "required"),
        (
            lambda: job(
                patch={"layers": 3, "positions": [5], "source": {"run": "clean", "zeros": True}}
            ),
            "patch[0].source",
            "",
        ),
        (
            lambda: job(patch={"layers": 3, "positions": [5], "source": "clean", "alpha": 2}),
            "patch[0].alpha",
            "",
        ),
        (
            lambda: job(patch={"layers": 3, "positions": [5], "source": ["a"]}),
            "patch[0].source.vector",
            "",
        ),
        (lambda: job(prompts=[1, 2, 3]), "prompts[0]", ""),
        (lambda: job(prompts=[]), "prompts", ""),
        (lambda: job(sampling={"max_tokens": -1}), "sampling.max_tokens", ""),
        (lambda: job(expires_in="soon"), "expires_in", "(allowed: such as 90d"),
        (
            lambda: key_request("x", "default", ["read"], 1e18),  # no listing could show it
            "expires_in",
            "",
        ),
        (
            lambda: sweep(pairs=[{"clean": "a", "fiol": "b"}]),
            "pairs[0].fiol",
            "unknown field; did you mean 'foil'?",
        ),
        (
            lambda: sweep(metric="logit_dif"),
            "metric",
            "did you mean 'logit_diff'? (allowed: logprob, logit_diff, recovered, kl)",
        ),
        (lambda: wire.checked("nope", KeyId, "id"), "id", "match the pattern [0-9a-z]{12}"),
        (
            lambda: CLOSED.submit(model="m", prompts=["a"], capture={"layer": 1}),
            "capture.layer",
            "unknown field",
        ),
        (
            lambda: CLOSED.modules.put("joy", {"post_blok.3": VECTOR}),
            "steering",
            "'post_blok.3' is not a site",
        ),
        (
            lambda: CLOSED.modules.put("joy", {"post_block.3": ["x"]}),
            "steering.post_block.3",
            "must be numeric, not an array of <U1; convert it with .astype('float32')",
        ),
        (
            lambda: CLOSED.modules.put("joy", [{"layers": 3, "vector": VECTOR, "sclae": 2}]),
            "steering[0].sclae",
            "unknown field",
        ),
        (lambda: CLOSED.probes.put("p", [1.0]), "fit", "a vector is passed as weight=…"),
        (lambda: CLOSED.capture([]), "job", "list does not identify a job"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_value_is_named_before_anything_is_sent(make: Any, field: Any, words: str) -> None:
    with refuses(words, field=field):
        make()


def test_run_takes_the_names_of_completion() -> None:
    assert job(max_tokens=np.int64(4), temperature=0.5).sampling == SamplingRequest(
        max_tokens=4, temperature=0.5
    )
    assert job(sampling={"seed": 1}, max_tokens=4).sampling == SamplingRequest(max_tokens=4, seed=1)
    assert [
        values.request(None, {"model": "m", "prompt": prompt}, JobRequest).prompts
        for prompt in ("hello", ["a", "b"], [1, 2], np.array([1, 2]), np.array([[1], [2]]))
    ] == [["hello"], ["a", "b"], [[1, 2]], [[1, 2]], [[1], [2]]]
    assert job(capture=None, steering=None).steering == []
    for twice in ({"prompt": "y"}, {"sampling": {"max_tokens": 1}, "max_tokens": 2}):
        with refuses("give"):
            job(**twice)


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


def test_a_job_is_named_by_its_id_or_by_what_a_call_returned() -> None:
    with server(reply(VIEW)) as (url, seen), Client(url) as client:
        for given in ("job_1", VIEW):
            assert client.jobs.get(given).state is State.SUCCEEDED
            assert client.wait(given).state is State.SUCCEEDED
    assert {line.partition("?")[0] for line in seen} == {"GET /v1/jobs/job_1"}


def test_an_address_that_cannot_be_right_says_what_to_change() -> None:
    with server(reply(VIEW)) as (url, _):
        for address, hint in (
            (url.replace("http:", "https:"), "the server speaks http: begin the URL with http://"),
            ("name.invalid", "the URL names no port; the default of a server is 8321"),
        ):
            with pytest.raises(ServerUnreachable) as caught:
                Client(address).jobs.get("job_1")
            assert caught.value.hint == hint


def test_a_server_that_is_down_is_one_error_without_a_chain() -> None:
    for call in (
        CLOSED.models,
        lambda: CLOSED.jobs.get("job_1"),
        lambda: CLOSED.completion("m", "x"),
        lambda: CLOSED.capture("job_1"),
    ):
        with pytest.raises(
            ServerUnreachable, match=r"no Midstream server answers at http://127\.0\.0\.1:1 "
        ) as caught:
            call()
        assert caught.value.kind == "unavailable"
        assert caught.value.hint == (
            "`midstream up` starts one; for one elsewhere, set MIDSTREAM_DATA_DIR or give its URL "
            "(--url; in Python, Client(URL))"
        )
        assert "During handling" not in "".join(traceback.format_exception(caught.value))
        assert "direct cause" not in "".join(traceback.format_exception(caught.value))
        (line,) = caught.value._render_traceback_()
        assert line.startswith("ServerUnreachable: no Midstream server answers")
