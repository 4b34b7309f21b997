"""Is every bad input a problem document that names the field, before anything reaches ledger, queue
or engine?
"""

import base64
import json
import re
import socket
import struct
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import redis
from edge import HIDDEN, LAYERS, LONGEST, MODEL, WORDS, Api, Hand, refused
from litestar.routes import HTTPRoute

import midstream
from midstream.api.app import make_app
from midstream.schemas.base.limits import MAX_ENTRIES, MAX_JSON_VALUES, MAX_PROMPTS, MAX_TEXT
from midstream.schemas.requests.specs import CaptureSpec

BODY: dict[str, Any] = {"model": MODEL, "prompts": ["hello there"]}
JSON = {"Content-Type": "application/json"}


def vector(
    values: list[float], dtype: str = "float32", shape: list[int] | None = None
) -> dict[str, Any]:
    raw = struct.pack(f"<{len(values)}{'f' if dtype == 'float32' else 'e'}", *values)
    return {
        "dtype": dtype,
        "shape": [len(values)] if shape is None else shape,
        "data": base64.b64encode(raw).decode(),
    }


def steering(**changes: Any) -> dict[str, Any]:
    return {"steering": [{"layers": [1], "vector": vector([1.0] * HIDDEN)} | changes]}


MATRICES = {
    "rotation": vector([1.0] * 16, shape=[2, 8]),
    "weight": vector([1.0] * 16, shape=[2, 8]),
    "bias": vector([0.0] * 2),
}


def capture(**changes: Any) -> dict[str, Any]:
    return {"capture": changes}


def patch(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "patch": [{"layers": 1, "positions": [0], "source": {"zeros": True}} | changes] * number
    }


def sampling(**changes: Any) -> dict[str, Any]:
    return {"sampling": changes}


#: What is wrong → (what replaces the good body's fields, status, field named).
BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown model": ({"model": "nobody"}, 404, "model"),
    "model missing": ({"model": None}, 400, "model"),
    "unknown field": ({"promts": []}, 400, "promts"),
    "unknown field inside": (capture(layer=3), 400, "capture.layer"),
    "no prompts": ({"prompts": []}, 400, "prompts"),
    "empty text": ({"prompts": ["hello", ""]}, 400, "prompts[1]"),
    "empty token ids": ({"prompts": [[]]}, 400, "prompts[0]"),
    "token id outside the vocabulary": (
        {"prompts": ["hello", [1, len(WORDS)]]},
        400,
        "prompts[1][1]",
    ),
    "negative token id": ({"prompts": [[-1]]}, 400, "prompts[0][0]"),
    "token id of another type": ({"prompts": [[1, "2"]]}, 400, "prompts[0][1]"),
    "prompt longer than the model": ({"prompts": ["a " * LONGEST]}, 400, "prompts[0]"),
    "prompt and output longer than the model": (
        sampling(max_tokens=LONGEST),
        400,
        "sampling.max_tokens",
    ),
    "number as text": (sampling(max_tokens="4"), 400, "sampling.max_tokens"),
    "nothing to generate": (sampling(max_tokens=0), 400, "sampling.max_tokens"),
    "temperature below zero": (sampling(temperature=-1), 400, "sampling.temperature"),
    "seed beyond 64 bits": (sampling(seed=2**64), 400, "sampling.seed"),
    "empty stop": (sampling(stop=["a", ""]), 400, "sampling.stop[1]"),
    "stop token outside the vocabulary": (
        sampling(stop_token_ids=[10**30]),
        400,
        "sampling.stop_token_ids[0]",
    ),
    "top_k beyond the vocabulary": (sampling(top_k=10**9), 400, "sampling.top_k"),
    "metadata too long": ({"metadata": {"a": "x" * 1000}}, 400, "metadata[...]"),
    "key of metadata too long": ({"metadata": {"a" * 65: "x"}}, 400, "metadata"),
    "name of a model too long": ({"model": "m" * 201}, 400, "model"),
    "prompt longer than any": ({"prompts": ["a" * (MAX_TEXT + 1)]}, 400, "prompts[0]"),
    "more prompts than a job has": ({"prompts": ["a"] * (MAX_PROMPTS + 1)}, 400, "prompts"),
    "token id beyond 64 bits": ({"prompts": [[2**64]]}, 400, "prompts[0][0]"),
    "max_tokens beyond 64 bits": (sampling(max_tokens=2**64), 400, "sampling.max_tokens"),
    "more stops than are looked for": (sampling(stop=["x"] * 33), 400, "sampling.stop"),
    "stop that is too long": (sampling(stop=["x" * 257]), 400, "sampling.stop[0]"),
    "more stop tokens than are looked for": (
        sampling(stop_token_ids=[1] * 257),
        400,
        "sampling.stop_token_ids",
    ),
    "every_n beyond 64 bits": (capture(every_n=2**64), 400, "capture.every_n"),
    "layer beyond 64 bits": (capture(layers=[2**64]), 400, "capture.layers[0]"),
    "layers as a long text": (capture(layers="0," * 500_000), 400, "capture.layers"),
    "layers as a long list": (capture(layers=[0] * 1025), 400, "capture.layers"),
    "mask as a long text": (patch(mask="0," * 40_000), 400, "patch[0].mask"),
    "mask as a long list": (patch(mask=[0] * 65_537), 400, "patch[0].mask"),
    "position beyond 64 bits": (capture(positions=[2**64]), 400, "capture.positions[0]"),
    "row of a prompt beyond 64 bits": (
        patch(source={"run": "a", "prompt": 2**64}),
        400,
        "patch[0].source.prompt",
    ),
    "more edits than a job has": ({"steering": [{}] * (MAX_ENTRIES + 1)}, 400, "steering"),
    "more patches than a job has": (patch(4097), 400, "patch"),
    "span longer than any": (
        capture(positions=[{"text": "a" * 65_537}]),
        400,
        "capture.positions[0].text",
    ),
    "shape of many dimensions": (
        steering(vector=vector([1.0] * 8, shape=[2, 2, 2])),
        400,
        "steering[0].vector.shape",
    ),
    "shape beyond 64 bits": (
        steering(vector=vector([1.0] * 8, shape=[2**64])),
        400,
        "steering[0].vector.shape[0]",
    ),
    "more parts of layers than can be resolved": (
        {"patch": patch(1030, layers=",".join("0" * 512), mask=[0])["patch"]},
        400,
        "patch[0].layers",
    ),
    "name of a field that is too long": ({"x" * 1000: 1}, 400, "x" * 199 + "…"),
    "layer out of range": (capture(layers=[0, LAYERS]), 400, "capture.layers"),
    "layer out of range from the end": (capture(layers=-LAYERS - 1), 400, "capture.layers"),
    "range of layers out of range": (capture(layers=f"0-{LAYERS}"), 400, "capture.layers"),
    "layers backwards": (capture(layers="3-1"), 400, "capture.layers"),
    "layers by no known name": (capture(layers="middle"), 400, "capture.layers"),
    "no layer": (capture(layers=[]), 400, "capture.layers"),
    "layer as text": (capture(layers=["1"]), 400, "capture.layers[0]"),
    "position beyond the prompt": (capture(positions=[0, 3]), 400, "capture.positions[1]"),
    "span that is not in the prompt": (
        capture(positions=[0, {"text": "world"}]),
        400,
        "capture.positions[1].text",
    ),
    "span that does not occur so often": (
        capture(positions={"text": "there", "occurrence": 1}),
        400,
        "capture.positions.occurrence",
    ),
    "span without text": (capture(positions=[{"text": ""}]), 400, "capture.positions[0]"),
    "span with another field": (
        capture(positions=[{"text": "a", "nth": 1}]),
        400,
        "capture.positions[0].nth",
    ),
    "occurrence that is no number": (
        capture(positions=[{"text": "a", "occurrence": "1"}]),
        400,
        "capture.positions[0].occurrence",
    ),
    "span that is not in the text of token ids": (
        {"prompts": [[2, 3]], **capture(positions={"text": "a"})},
        400,
        "capture.positions.text",
    ),
    "more positions than a list holds": (capture(positions=[0] * 65_537), 400, "capture.positions"),
    "more positions than can be resolved for so many prompts": (
        {"prompts": ["a"] * 100, **capture(positions=[0] * 60_000)},
        400,
        "capture.positions",
    ),
    "position by no known name": (capture(positions="first"), 400, "capture.positions"),
    "no position": (capture(positions=[]), 400, "capture.positions"),
    "unknown hook": (capture(hook="pre_mlp"), 400, "capture.hook"),
    "hook that the model lacks": (capture(hook="post_attn"), 400, "capture.hook"),
    "hook that the model lacks, by TransformerLens' name": (
        capture(hook="hook_resid_mid"),
        400,
        "capture.hook",
    ),
    "unknown hook among several": (capture(hooks={"pre_mlp": "all"}), 400, "capture.hooks"),
    "layers of another type for a hook": (
        capture(hooks={"pre_attn": {}}),
        400,
        "capture.hooks[...]",
    ),
    "layer out of range for a hook": (
        capture(hooks={"pre_attn": "0-4"}),
        400,
        "capture.hooks.pre_attn",
    ),
    "the same hook under two names": (
        capture(hooks={"pre_attn": 0, "resid_pre": 1}),
        400,
        "capture.hooks.resid_pre",
    ),
    "hooks and layers": (capture(hooks={"pre_attn": 0}, layers=[1]), 400, "capture"),
    "no hook": (capture(hooks={}), 400, "capture"),
    "every zeroth token": (capture(every_n=0), 400, "capture.every_n"),
    "neither before nor after": (capture(at="during"), 400, "capture.at"),
    "unknown dtype of rows": (capture(dtype="float64"), 400, "capture.dtype"),
    "unknown layout": (capture(layout="zip"), 400, "capture.layout"),
    "unknown consumer": (capture(consumers=["filesystem", "s3"]), 400, "capture.consumers[1]"),
    "no consumer": (capture(consumers=[]), 400, "capture.consumers"),
    "more rows than a response carries": (
        capture(
            hooks={"pre_attn": "all", "attn_out": "all", "mlp_out": "all"},
            positions="all_prompt",
            consumers=["memory"],
        ),
        400,
        "capture.consumers",
    ),
    "more rows at one token than a step holds": (
        capture(hooks=dict.fromkeys(("pre_attn", "attn_out", "mlp_out", "post_block"), "all")),
        400,
        "capture",
    ),
    "tag that leaves the root": (capture(tag="../x"), 400, "capture.tag"),
    "tag with a folder": (capture(tag="a/b"), 400, "capture.tag"),
    "tag with a line break": (capture(tag="a\n"), 400, "capture.tag"),
    "empty tag": (capture(tag=""), 400, "capture.tag"),
    "steered layer out of range": (steering(layers="all-"), 400, "steering[0].layers"),
    "steered position beyond the prompt": (
        steering(positions=[-4]),
        400,
        "steering[0].positions[0]",
    ),
    "steered span that is not in the prompt": (
        steering(positions={"text": "world"}),
        400,
        "steering[0].positions.text",
    ),
    "more steered positions than a list holds": (
        steering(positions=[0] * 65_537),
        400,
        "steering[0].positions",
    ),
    "steered hook that the model lacks": (steering(hook="mlp_in"), 400, "steering[0].hook"),
    "unknown operation": (steering(op="multiply"), 400, "steering[0].op"),
    "alpha of an addition": (steering(alpha=0.5), 400, "steering[0].alpha"),
    "alpha above one": (steering(op="replace", alpha=1.5), 400, "steering[0].alpha"),
    "vector too wide": (steering(vector=vector([1.0] * 9)), 400, "steering[0].vector.shape"),
    "vector of two dimensions": (
        steering(vector=vector([1.0] * 8, shape=[2, 4])),
        400,
        "steering[0].vector.shape",
    ),
    "vector shorter than its shape": (
        steering(vector=vector([1.0] * 7, shape=[8])),
        400,
        "steering[0].vector",
    ),
    "NaN in the vector": (
        steering(vector=vector([0.0] * 7 + [float("nan")])),
        400,
        "steering[0].vector.data",
    ),
    "infinity in the vector": (
        steering(vector=vector([float("inf")] + [0.0] * 7, "float16")),
        400,
        "steering[0].vector.data",
    ),
    "scale that overflows": (steering(scale=1e39), 400, "steering[0].scale"),
    "vector of an unknown dtype": (
        steering(vector={"dtype": "int8", "shape": [8], "data": ""}),
        400,
        "steering[0].vector.dtype",
    ),
    "vector given as a path": (steering(vector="/etc/passwd"), 400, "steering[0].vector"),
    "vector that is not base64": (
        steering(vector={"dtype": "float32", "shape": [8], "data": "*"}),
        400,
        "steering[0].vector.data",
    ),
    "steering that is no list": ({"steering": {}}, 400, "steering"),
    "steering without a vector": (steering(vector=None), 400, "steering[0].vector"),
    "ablating along nothing": (
        steering(op="ablate", vector=vector([0.0] * 8)),
        400,
        "steering[0].vector.data",
    ),
    "clamp without a limit": (steering(op="clamp"), 400, "steering[0].low"),
    "clamp with crossed limits": (steering(op="clamp", low=1, high=0), 400, "steering[0].high"),
    "clamp to text": (steering(op="clamp", low="a"), 400, "steering[0].low"),
    "norm of a branch": (steering(hook="attn_out", norm_match=True), 400, "steering[0].norm_match"),
    "strength of an addition": (steering(strength=1), 400, "steering[0].strength"),
    "lowrank without its matrices": (
        steering(op="lowrank", vector=None),
        400,
        "steering[0].rotation",
    ),
    "lowrank with a vector": (steering(op="lowrank", **MATRICES), 400, "steering[0].vector"),
    "lowrank of two ranks": (
        steering(op="lowrank", vector=None, **MATRICES | {"bias": vector([0.0] * 3)}),
        400,
        "steering[0].bias.shape",
    ),
    "more interventions than a token takes": (
        {"steering": steering(op="ablate")["steering"] * 5},
        400,
        "steering",
    ),
}


# field case 27
def test_a_bad_job_is_refused_by_the_field_at_fault_and_leaves_nothing_behind(
    api: Api, hand: Hand
) -> None:
    told: dict[str, tuple[int, str]] = {}
    for what, (changes, _, _) in BAD.items():
        body = {name: value for name, value in {**BODY, **changes}.items() if value is not None}
        answer = api.http.post("/v1/jobs", json=body)
        assert answer.headers["content-type"] == "application/problem+json", what
        problem = answer.json()
        assert problem["status"] == answer.status_code, what
        assert len(problem["detail"]) > 8, what
        told[what] = (answer.status_code, problem["field"])
    assert told == {what: (status, field) for what, (_, status, field) in BAD.items()}
    with redis.Redis.from_url(api.settings.redis_url) as client:
        assert client.keys("ms:job:*") == []


# field case 40
def test_the_operators_tag_cannot_be_taken(api: Api, hand: Hand) -> None:
    hand.serve(global_captures=[CaptureSpec(tag="ops")])
    refused(api.http.post("/v1/jobs", json={**BODY, **capture(tag="ops")}), 400, "capture.tag")
    assert hand.count_jobs() == 0


def test_an_unknown_model_is_answered_with_those_that_are_served(api: Api, hand: Hand) -> None:
    assert api.http.post("/v1/jobs", json={**BODY, "model": "gpt"}).json()["allowed"] == MODEL


def test_without_a_folder_no_adapter_is_taken(api: Api, hand: Hand) -> None:
    for method, path, body in (
        ("PUT", "/v1/artifacts/loras/a", {"path": "a"}),
        ("POST", "/v1/jobs", BODY | {"lora": "a"}),
    ):
        refused(api.http.request(method, path, json=body), 400, "lora", "engine.max_loras is 0")


def test_submitting_before_any_worker_is_a_retryable_503(api: Api) -> None:
    answer = api.http.post("/v1/jobs", json=BODY)
    assert answer.status_code == 503
    assert answer.json()["field"] == "model"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"model":"\\ud800"}',
        b'{"model":"tiny"} x',
        b"[" * 100_000,
        b'{"model": "\xff"}',
        b'{"model": "a", "tools": ' + b"[" * 30_000,
        b'{"x": [' + b"0," * MAX_JSON_VALUES + b"0]}",
    ],
)
def test_a_body_that_is_not_a_json_object_is_400(api: Api, hand: Hand, body: bytes) -> None:
    refused(api.http.post("/v1/jobs", content=body, headers=JSON), kind="invalid_request")


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/msgpack",
        "application/octet-stream",
    ],
)
def test_another_content_type_is_415(api: Api, hand: Hand, kind: str) -> None:
    answer = api.http.post("/v1/jobs", content=json.dumps(BODY), headers={"Content-Type": kind})
    assert refused(answer, 415, "Content-Type")["allowed"] == "application/json"


def test_json_with_a_charset_is_json(api: Api, hand: Hand) -> None:
    answer = api.http.post(
        "/v1/jobs",
        content=json.dumps(BODY),
        headers={"Content-Type": "application/json; charset=utf-8"},
    )
    assert answer.status_code == 202


def test_a_wrong_method_is_405_and_names_the_right_ones(api: Api, hand: Hand) -> None:
    answer = api.http.put("/v1/jobs", json=BODY)
    refused(answer, 405)
    assert "POST" in answer.headers["allow"]


def test_an_unknown_path_is_404_as_a_problem(api: Api) -> None:
    assert "error" in refused(api.http.get("/v1/nothing/here"), 404)


@pytest.mark.parametrize("key", ["", "é" * 3, "x" * 300])
def test_an_idempotency_key_that_cannot_be_one_is_refused(api: Api, hand: Hand, key: str) -> None:
    refused(
        api.http.post("/v1/jobs", json=BODY, headers=[(b"Idempotency-Key", key.encode())]),
        400,
        "Idempotency-Key",
    )


#: Path → (its parameters, headers, and the one that is at fault).
BAD_PARAMETERS: list[tuple[str, dict[str, str], dict[str, str], str]] = [
    ("/v1/jobs", {"limit": "9" * 5000}, {}, "limit"),
    ("/v1/jobs", {"limit": "-1"}, {}, "limit"),
    ("/v1/jobs", {"limit": "0"}, {}, "limit"),
    ("/v1/jobs", {"limit": "201"}, {}, "limit"),
    ("/v1/jobs", {"limit": "x"}, {}, "limit"),
    ("/v1/jobs", {"state": "sleeping"}, {}, "state"),
    ("/v1/jobs", {"cursor": "../"}, {}, "cursor"),
    ("/v1/jobs", {"model": "m" * 201}, {}, "model"),
    ("/v1/jobs", {"cursor": "1e999:\0"}, {}, "cursor"),
    ("/v1/jobs", {"cursor": "nan:x"}, {}, "cursor"),
    ("/v1/captures", {"tag": "t" * 65}, {}, "tag"),
    ("/v1/webhooks/deliveries", {"cursor": "x" * 10_000}, {}, "cursor"),
    ("/v1/jobs/JOB", {"wait": "1e300"}, {}, "wait"),
    ("/v1/jobs/JOB", {"wait": "inf"}, {}, "wait"),
    ("/v1/jobs/JOB", {"wait": "soon"}, {}, "wait"),
    ("/v1/jobs/JOB", {"wait": "-1"}, {}, "wait"),
    ("/v1/jobs/JOB/events", {}, {"Last-Event-ID": "x"}, "Last-Event-ID"),
    ("/v1/jobs/JOB/events", {}, {"Last-Event-ID": "1-2-3"}, "Last-Event-ID"),
    ("/v1/jobs/JOB/events", {}, {"Last-Event-ID": "0-0; DROP"}, "Last-Event-ID"),
    ("/v1/jobs/JOB/events", {}, {"Last-Event-ID": f"{2**64}-0"}, "Last-Event-ID"),
    ("/v1/jobs/JOB/events", {}, {"Last-Event-ID": f"0-{2**64}"}, "Last-Event-ID"),
    ("/v1/jobs/JOB/events", {}, {"Last-Event-ID": "1" * 300}, "Last-Event-ID"),
    ("/v1/captures/JOB/safetensors", {"request": str(2**64)}, {}, "request"),
    ("/v1/captures/JOB/safetensors", {"request": "-1"}, {}, "request"),
    ("/v1/captures/JOB/safetensors", {"layers": "0," * 10_000}, {}, "layers"),
    ("/v1/jobs/" + "j" * 201, {}, {}, "job_id"),
]


def test_a_bad_parameter_is_400_with_its_name(api: Api, hand: Hand) -> None:
    job_id = api.submit()
    for path, query, headers, field in BAD_PARAMETERS:
        answer = api.http.get(path.replace("JOB", job_id), params=query, headers=headers)
        assert answer.status_code == 400, (path, query)
        assert answer.json().get("field") == field, (path, query)
        assert len(answer.content) < 2000


def test_an_unknown_query_parameter_is_400_on_every_route(api: Api) -> None:
    """Except at pages (the search of the documentation has its words in the query), and at what
    load balancers and scrapers ask, with parameters of their own.
    """
    served = {
        (method, route.path_format)
        for route in make_app(api.settings).routes
        if isinstance(route, HTTPRoute)
        for method in route.route_handler_map
    }
    pages = re.compile("/(docs|docs/.*|page/.*|schema.*|healthz|readyz|metrics)?")
    assert len(served) > 140
    for method, path in served:
        path = path.replace("{kind}", "probes").replace("{action}", "pause")
        answer = api.http.request(method, re.sub("{.*?}", "x", path), params={"joy": "2"})
        field = answer.json()["field"] if answer.status_code == 400 else None
        free = method == "OPTIONS" or pages.fullmatch(path)
        assert field == (None if free else "joy"), (method, path, answer.status_code)
    for path, name, hint in (
        ("/v1/jobs?state=failed&modle=x", "modle", "did you mean 'model'?"),
        ("/v1/completions?modules=joy", "modules", "did you mean 'module'?"),
        ("/v1/status?v", "v", None),
    ):
        problem = api.http.request("POST" if "comp" in path else "GET", path).json()
        assert problem["field"] == name
        assert problem.get("hint") == hint
    assert problem["allowed"] == "none"


def test_ownership_is_checked_before_parameters(api: Api, hand: Hand) -> None:
    unknown = api.http.get("/v1/captures/job_unknown/safetensors", params={"layers": "x"})
    events = api.http.get("/v1/jobs/job_unknown/events", headers={"Last-Event-ID": "x"})
    assert unknown.status_code == 404
    assert events.status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/{}",
        "/v1/captures/{}",
        "/v1/captures/{}/files/{}",
        "/v1/runs/{}",
        "/v1/webhooks/deliveries/{}",
        "/v1/jobs?tenant={}&model={}&cursor={}",
        "/v1/captures?tag={}",
        "/v1/runs?model={}",
    ],
)
def test_no_path_parameter_causes_a_500(api: Api, hand: Hand, path: str) -> None:
    for name in ("\0", "\ud800", "é" * 60, " ", "%00%ff"):
        quoted = quote(name.encode(errors="surrogatepass"), safe="%")
        assert api.http.get(path.replace("{}", quoted)).status_code < 500, name


@pytest.mark.parametrize("field", ["requests_per_minute", "capture_mib", "module_mib", "weight"])
@pytest.mark.parametrize("value", [2**64, -1])
def test_invalid_tenant_limits_are_refused(api: Api, field: str, value: int) -> None:
    refused(api.http.put("/v1/tenants/someone", json={field: value}), 400, field)


# field case 42
def test_a_pickle_is_refused_wherever_it_is_put_and_never_run(
    api: Api, hand: Hand, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    bomb = b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    wrapped = {"dtype": "float32", "shape": [HIDDEN], "data": base64.b64encode(bomb).decode()}
    answers = [
        api.http.post("/v1/jobs", content=bomb, headers=JSON),
        api.http.post(
            "/v1/jobs", content=bomb, headers={"Content-Type": "application/octet-stream"}
        ),
        api.http.post("/v1/jobs", json={**BODY, **steering(vector=wrapped)}),
        api.http.post(
            "/v1/jobs",
            json={**BODY, **steering(vector={"pickle": base64.b64encode(bomb).decode()})},
        ),
    ]
    assert [answer.status_code for answer in answers] == [400, 415, 400, 400]
    assert not mark.exists()


# field case 41, 42
@pytest.mark.parametrize("field", ["webhook", "callback_url", "hooks_fn", "vector_path"])
def test_names_in_a_body_are_never_loaded_or_executed(api: Api, hand: Hand, field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.3)
        target = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        inside = {**BODY, **steering(**{field: target})}
        refused(api.http.post("/v1/jobs", json={**BODY, field: target}), 400, field)
        refused(api.http.post("/v1/jobs", json=inside), 400, f"steering[0].{field}")
        with pytest.raises(TimeoutError):
            trap.accept()


# field case 43
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/healthz"), ("GET", "/nothing"), ("PUT", "/v1/jobs"), ("GET", "/v1/jobs/job_x")],
)
def test_every_answer_names_the_servers_version(api: Api, method: str, path: str) -> None:
    assert api.http.request(method, path).headers["x-midstream-version"] == midstream.__version__


def test_a_template_error_never_shows_a_traceback(api: Api, hand: Hand) -> None:
    mark = api.said
    refused(
        api.http.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "assistant", "content": "hello"}]},
        ),
        400,
        "messages",
        "the user begins",
    )
    assert "Traceback" not in api.log(mark)


def test_an_internal_error_is_a_500_with_an_id_and_no_reason(api: Api, hand: Hand) -> None:
    job_id = api.submit()
    with redis.Redis.from_url(api.settings.redis_url) as client:
        client.hset(f"ms:job:{job_id}", "version", "not a number: secret")
    answer = httpx2.get(f"{api.url}/v1/jobs/{job_id}")
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:midstream:internal"
    assert "secret" not in answer.text
    number = answer.json()["detail"].split()[-1]
    assert f"failure {number}" in api.log()
