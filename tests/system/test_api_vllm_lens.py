"""Are vllm-lens' requests answered as its clients expect, and modules in a URL applied?

With workers of two stages behind.

The bodies are as vllm-lens 1.3's `VLLMLensClient` and its Inspect provider send them.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
import safetensors.numpy
import zstandard
from edge import refused
from midstream_fake_engine.model import residual_rows
from ports import free_port
from stack import Stack

from midstream.client import Client
from midstream.schemas.base import from_numpy, to_json

MODEL, HIDDEN, LAYERS = "fake-model", 8, 4
PROMPT = "The weather today is"
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "temperature": 0.0}
CHAT = {name: value for name, value in BODY.items() if name != "prompt"} | {
    "messages": [{"role": "user", "content": PROMPT}]
}
ROWS, VECTORS = "output_residual_stream", "apply_steering_vectors"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("lens"),
        api=True,
        callbacks=False,
        **{"engine.pipeline_parallel_size": 2},
        lease_s=60.0,
        **{"tuning.vllm_lens_mib": 1},
    ) as running:
        joy = {
            "steering": [
                {
                    "layers": "1-2",
                    "vector": json.loads(to_json(from_numpy(vector(1)[0]))),
                    "scale": 2.0,
                }
            ]
        }
        assert (
            httpx2.put(f"{running.url}/v1/artifacts/modules/joy", json=joy, timeout=60).status_code
            == 201
        )
        yield running


def vector(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(*(shape or (1,)), HIDDEN)).astype(np.float32)


def in_json(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    """As `serialize_tensor` writes it."""
    data = base64.b64encode(zstandard.ZstdCompressor(level=1).compress(array.tobytes())).decode()
    return {
        "data": data,
        "dtype": "float32",
        "original_dtype": "torch.float32",
        "shape": list(array.shape),
        "compression": "zstd",
    } | changes


def steering(array: np.ndarray, layers: list[int], **fields: Any) -> dict[str, Any]:
    """As `SteeringVector.model_dump()` writes it."""
    given = {"scale": 1.0, "norm_match": False, "position_indices": None} | fields
    return {"activations": in_json(array), "layer_indices": layers, **given}


def claiming(**changes: Any) -> list[dict[str, Any]]:
    """A vector whose tensor is not what it says."""
    return [steering(vector(1), [1]) | {"activations": in_json(vector(1), **changes)}]


def decoded(answer: dict[str, Any]) -> np.ndarray:
    """As `tensor_from_bytes` reads it: `[layers, positions, hidden_size]`."""
    given = answer["activations"]["residual_stream"]
    raw = base64.b64decode(given["data"])
    if given.get("compression") == "zstd":
        raw = zstandard.ZstdDecompressor().decompress(raw)
    return np.frombuffer(raw, np.dtype(given["dtype"])).reshape(given["shape"])


def answered(http: httpx2.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=(CHAT if "chat" in path else BODY) | body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def captured(http: httpx2.Client, job: str, layers: list[int]) -> np.ndarray:
    """The rows of a job's capture, by the route of captures."""
    tensors = safetensors.numpy.load(http.get(f"/v1/captures/{job}/safetensors").content)
    return np.stack([tensors[f"post_block.{layer}"] for layer in layers])


@pytest.mark.parametrize("wish", ["[3, 1, 1]", [3, 1]])
@pytest.mark.parametrize("name", ["vllm_xargs", "extra_args"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_activations_are_the_rows_of_every_position(
    http: httpx2.Client, path: str, name: str, wish: Any
) -> None:
    answer = answered(http, path, **{name: {ROWS: wish, "skip_reading_prefix_cache": True}})
    tokens = safetensors.numpy.load(http.get(f"/v1/captures/{answer['id']}/safetensors").content)[
        "token_ids"
    ]
    assert len(tokens) == answer["usage"]["total_tokens"] - 1, (
        "the last sampled token is never fed back to the model"
    )
    rows = decoded(answer)
    assert rows.shape == (2, len(tokens), HIDDEN)
    for row, layer in zip(rows, (1, 3), strict=True):
        np.testing.assert_array_equal(row, residual_rows(layer, np.arange(len(tokens)), tokens))
    manifest = http.get(f"/v1/captures/{answer['id']}").json()
    assert {(file["at"], file["path"].partition("/")[0]) for file in manifest["files"]} == {
        ("after", "vllm-lens")
    }


@pytest.mark.parametrize("wish", [True, "true", "[0, 1, 2, 3]"])
def test_all_layers_come_for_true(http: httpx2.Client, wish: Any) -> None:
    assert decoded(answered(http, vllm_xargs={ROWS: wish})).shape[0] == LAYERS


@pytest.mark.parametrize(
    ("lens", "ours"),
    [
        (steering(vector(1), [2], scale=3.0), [{"layers": 2, "scale": 3.0}]),
        (
            steering(vector(1), [2], scale=0.5, norm_match=True),
            [{"layers": 2, "scale": 0.5, "norm_match": True}],
        ),
        (steering(vector(1)[None], [2], position_indices=[3]), [{"layers": 2, "positions": [3]}]),
        (steering(vector(1)[None], [2]), [{"layers": 2, "positions": [0]}]),
        (steering(np.repeat(vector(1), 2, 0), [2, 3]), [{"layers": 2}, {"layers": 3}]),
    ],
)
@pytest.mark.parametrize("text", [True, False])
def test_steering_vectors_do_what_our_entries_do(
    http: httpx2.Client, lens: dict[str, Any], ours: list[Any], text: bool
) -> None:
    theirs = json.dumps([lens]) if text else [lens]
    answer = answered(http, vllm_xargs={VECTORS: theirs, ROWS: "[0, 1, 2, 3]"})
    value = json.loads(to_json(from_numpy(vector(1)[0])))
    same = answered(
        http,
        steering=[{"vector": value, **entry} for entry in ours],
        capture={"layers": "all", "positions": "all", "at": "after"},
    )
    plain = answered(http)
    assert answer["choices"] == same["choices"] != plain["choices"]
    assert answer["determinism"]["consistent"]
    np.testing.assert_array_equal(decoded(answer), captured(http, same["id"], [0, 1, 2, 3]))


BOMB = base64.b64encode(zstandard.ZstdCompressor().compress(bytes(1 << 26))).decode()


@pytest.mark.parametrize(
    ("args", "field", "says"),
    [
        ({ROWS: [4]}, ROWS, "4"),
        ({ROWS: [-1]}, f"{ROWS}[0]", ""),
        ({ROWS: "[-1]"}, f"{ROWS}[0]", ""),
        ({ROWS: "[1"}, ROWS, "JSON"),
        ({ROWS: "[" * 1000}, ROWS, ""),
        ({ROWS: []}, ROWS, "no layer"),
        ({ROWS: False}, ROWS, "no layer"),
        ({ROWS: [1], "activations_transport": "binary"}, "activations_transport", "binary"),
        ({"apply_hooks": "[]"}, "apply_hooks", "not supported"),
        ({"output_qk": [1]}, "output_qk", "not supported"),
        ({"other": 1}, "other", "unknown field"),
        ({VECTORS: [steering(vector(1), [4])]}, f"{VECTORS}[0]", "4"),
        (
            {VECTORS: [steering(vector(1), [0]), steering(vector(1), [1], scale=1e308)]},
            f"{VECTORS}[1]",
            "",
        ),
        ({VECTORS: json.dumps([steering(vector(1), [1], scale=1e39)])}, f"{VECTORS}[0]", ""),
        ({VECTORS: json.dumps([{"scale": 1}])}, f"{VECTORS}[0].activations", "required"),
        ({VECTORS: "[" + "[]," * 300_000 + "[]]"}, VECTORS, "more than"),
        ({VECTORS: [steering(vector(1)[:, :4], [1])]}, f"{VECTORS}[0]", "4"),
        ({VECTORS: [steering(vector(1), [1, 2])]}, f"{VECTORS}[0].activations", "2 layers"),
        (
            {VECTORS: [steering(vector(1), [1], position_indices=[0])]},
            f"{VECTORS}[0].position_indices",
            "",
        ),
        ({VECTORS: claiming(shape=[1, 9])}, f"{VECTORS}[0].activations.data", "9"),
        ({VECTORS: claiming(data=BOMB)}, f"{VECTORS}[0].activations.data", "at least"),
        ({VECTORS: claiming(data="?")}, f"{VECTORS}[0].activations.data", ""),
        ({VECTORS: claiming(shape=[1, 1 << 20, 1])}, f"{VECTORS}[0].activations", ""),
        ({VECTORS: claiming(shape=[1, 1 << 24])}, VECTORS, "at most"),
    ],
)
def test_what_cannot_be_expressed_is_a_400_naming_the_field(
    http: httpx2.Client, args: dict[str, Any], field: str, says: str
) -> None:
    answer = http.post("/v1/completions", json=BODY | {"vllm_xargs": args})
    problem = answer.json()
    assert answer.status_code == 400, problem
    assert problem["field"].startswith(f"vllm_xargs.{field}"), problem
    assert says in f"{problem['detail']} {problem.get('allowed', '')}", problem


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True},
        {"n": 2, "temperature": 1.0},
        {"prompt": ["a", "b"]},
        {"capture": {"layers": 1}},
    ],
)
def test_rows_are_for_one_whole_answer(http: httpx2.Client, body: dict[str, Any]) -> None:
    refused(
        http.post("/v1/completions", json=BODY | {"vllm_xargs": {ROWS: True}} | body),
        400,
        f"vllm_xargs.{ROWS}",
    )


def test_the_fields_are_refused_where_they_are_turned_off(stack: Stack) -> None:
    port = free_port()
    stack.add("api-2", api_port=port, **{"tuning.vllm_lens_mib": 0})
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        refused(
            client.post("/v1/completions", json=BODY | {"vllm_xargs": {ROWS: True}}),
            400,
            "vllm_xargs",
            "vllm_lens_mib",
        )


def test_both_names_of_the_fields_are_not_taken_together(http: httpx2.Client) -> None:
    refused(
        http.post("/v1/completions", json=BODY | {"vllm_xargs": {ROWS: True}, "extra_args": {}}),
        400,
        "extra_args",
    )


# --- Modules in the URL
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)]
)
@pytest.mark.parametrize(
    ("query", "entries"),
    [
        ("module=joy", [{"module": "joy"}]),
        ("module=joy:2.5", [{"module": "joy", "scale": 2.5}]),
        (
            "module=joy:-1&module=joy%3A.5e1",
            [{"module": "joy", "scale": -1.0}, {"module": "joy", "scale": 5.0}],
        ),
    ],
)
def test_modules_in_the_url_steer_as_modules_in_the_body(
    http: httpx2.Client, path: str, body: dict[str, Any], query: str, entries: list[Any]
) -> None:
    by_url = http.post(f"{path}?{query}", json=body)
    assert by_url.status_code == 200, by_url.text
    assert (
        by_url.json()["choices"]
        == answered(http, path, steering=entries)["choices"]
        != answered(http, path)["choices"]
    )


def test_the_kept_request_of_a_url_with_modules_is_sent_again_alone(http: httpx2.Client) -> None:
    value = json.loads(to_json(from_numpy(vector(2)[0])))
    first = http.post(
        "/v1/completions?module=joy:2", json=BODY | {"steering": [{"layers": 0, "vector": value}]}
    ).json()
    kept = http.get(f"/v1/jobs/{first['id']}/request").json()
    assert kept["path"] == "/v1/completions"
    assert kept["body"]["steering"] == [
        {"layers": 0, "vector": value},
        {"module": "joy", "scale": 2.0},
    ]
    assert http.post(kept["path"], json=kept["body"]).json()["choices"] == first["choices"]
    with Client(str(http.base_url)) as client:
        assert client.completion(**kept["body"]).text == first["choices"][0]["text"]


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("module=gloom", 400, "gloom"),
        ("module=joy:", 400, "scale"),
        ("module=joy:1e999", 400, "scale"),
        ("module=joy:nan", 400, "scale"),
        ("module=joy:1:2", 400, "scale"),
        ("module=joy:1e300", 400, ""),
        ("module=", 400, "name"),
        ("module=:2", 400, "name"),
        ("module=..%2Fx", 400, "name"),
        ("module=" + "a" * 200, 400, ""),
        ("&".join(["module=joy"] * 17), 400, ""),
    ],
)
def test_a_wrong_module_in_the_url_is_a_400_naming_it(
    http: httpx2.Client, query: str, status: int, says: str
) -> None:
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        refused(http.post(f"{path}?{query}", json=body), status, "module", says)


def test_an_idempotency_key_belongs_to_its_url(http: httpx2.Client) -> None:
    def sent(query: str) -> httpx2.Response:
        return http.post(
            f"/v1/completions{query}", json=BODY, headers={"Idempotency-Key": "of-one-url"}
        )

    first = sent("?module=joy")
    assert sent("?module=joy").json()["id"] == first.json()["id"]
    assert [sent(query).status_code for query in ("", "?module=joy:2")] == [422, 422]
