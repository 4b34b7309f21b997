"""Are modules that the URL names applied as those of the body, and wrong ones refused by name?"""

import json
from typing import Any

import httpx2
import numpy as np
import pytest
from edge import refused

from midstream.client import Client
from midstream.schemas.base.records import to_json
from midstream.schemas.base.tensors import from_numpy

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

HIDDEN = 8
BODY: dict[str, Any] = {
    "model": "fake-model",
    "prompt": "The weather today is",
    "max_tokens": 5,
    "temperature": 0.0,
}
CHAT = {name: value for name, value in BODY.items() if name != "prompt"} | {
    "messages": [{"role": "user", "content": BODY["prompt"]}]
}


@pytest.fixture(scope="module", autouse=True)
def joy(http: httpx2.Client) -> None:
    """A module."""
    entry = {"layers": "1-2", "vector": vector(1), "scale": 2.0}
    answer = http.put("/v1/artifacts/modules/joy", json={"steering": [entry]})
    assert answer.status_code == 201


def vector(seed: int) -> Any:
    row = np.random.default_rng(seed).normal(size=HIDDEN).astype(np.float32)
    return json.loads(to_json(from_numpy(row)))


def answered(http: httpx2.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=(CHAT if "chat" in path else BODY) | body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


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
    value = vector(2)
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
