"""Do modules, global steering and the ranks' reports do over HTTP what they say, with workers,
relay and Redis behind?
"""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest
from edge import refused
from ports import free_port
from stack import Stack, stack_with

from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.requests.specs import SteeringSpec
from midstream.schemas.requests.steering import Dynamic, GlobalView, ModuleView
from midstream.storage.formats.module_files import to_bytes

MODEL = "fake-model"
HIDDEN = 8
PROMPT = "The weather today is"
CHAT = [{"role": "user", "content": PROMPT}]
#: Of an API that does not wait long for a worker which does not answer.
HASTY_PORT = free_port()


def tensor(values: np.ndarray) -> dict[str, Any]:
    return dict(json.loads(to_json(from_numpy(values))))


def vector(seed: int) -> dict[str, Any]:
    return tensor(np.random.default_rng(seed).normal(size=HIDDEN).astype(np.float32))


JOY = {"layers": "1-2", "vector": vector(1), "scale": 2.0}
CALM = {"layers": 3, "op": "ablate", "vector": vector(2), "positions": "all_generated"}


stack = stack_with(
    {"api-2": {"api_port": HASTY_PORT, "steering_wait_s": 2.0}},
    api=True,
    callbacks=False,
    workers=2,
    **{"engine.tensor_parallel_size": 2},
    lease_s=60.0,
    **{"tuning.visibility_timeout_s": 60},
    steering_wait_s=40.0,
    fault="",
)


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx2.Client]:
    """Nothing is named and nobody is steered before and after."""
    with httpx2.Client(base_url=stack.url, timeout=60) as client:
        yield client
        for module in client.get("/v1/artifacts/modules").json()["modules"]:
            assert client.delete(f"/v1/artifacts/modules/{module['name']}").status_code == 204
        assert client.delete("/v1/steering/global").status_code == 200


def register(
    http: httpx2.Client, name: str, *entries: dict[str, Any], status: int = 201
) -> ModuleView:
    answer = http.put(f"/v1/artifacts/modules/{name}", json={"steering": list(entries)})
    assert answer.status_code == status, answer.text
    return from_json(answer.content, ModuleView)


def complete(http: httpx2.Client, prompt: Any = PROMPT, **body: Any) -> Any:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0} | body
    answer = http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(http: httpx2.Client, **body: Any) -> str:
    return str(complete(http, **body)["choices"][0]["text"])


def dynamic(http: httpx2.Client) -> Dynamic:
    """What all workers say: they are asked again where one of them was too busy for the two seconds
    that it is given.
    """
    for _ in range(20):
        answer = http.get("/v1/steering/dynamic", params={"model": MODEL})
        assert answer.status_code == 200, answer.text
        told = from_json(answer.content, Dynamic)
        if "did not answer" not in told.determinism.detail:
            break
    return told


# --- Named modules
# --------------------------------------------------------------------------------------------------


def test_a_module_shows_its_entries_with_their_defaults(http: httpx2.Client) -> None:
    made = register(http, "joy", JOY, CALM)
    assert made.name == "joy"
    assert made.model == MODEL
    assert made.bytes == 2 * 4 * HIDDEN
    assert made.replaced == ""
    assert [
        (entry.op, entry.hook, entry.layers, entry.positions, entry.scale, entry.numbers)
        for entry in made.entries
    ] == [
        ("add", "post_block", [1, 2], "all", 2.0, []),
        ("ablate", "post_block", [3], "all_generated", 1.0, [1.0]),
    ]
    assert register(http, "joy", JOY, CALM, status=200) == made, "the same again is no change"


def test_a_safetensors_file_is_the_same_module_as_its_entries(http: httpx2.Client) -> None:
    by_json = register(http, "joy", JOY, CALM)
    raw = to_bytes([from_json(to_json(entry), SteeringSpec) for entry in (JOY, CALM)])
    for media_type in ("application/vnd.safetensors", "application/octet-stream"):
        answer = http.put(
            "/v1/artifacts/modules/filed",
            content=raw,
            headers={"Content-Type": media_type},
            params={"model": MODEL, "description": "glad"},
        )
        assert answer.status_code in (200, 201), answer.text
        filed = from_json(answer.content, ModuleView)
        assert filed.digest == by_json.digest
        assert filed.description == "glad"
    assert answer.status_code == 200
    broken = http.put(
        "/v1/artifacts/modules/filed",
        content=raw[:-1],
        headers={"Content-Type": "application/octet-stream"},
    )
    refused(broken, 400, None, "it is truncated")
    other = refused(
        http.put(
            "/v1/artifacts/modules/filed", content=raw, headers={"Content-Type": "text/plain"}
        ),
        415,
    )
    assert "application/vnd.safetensors" in other["allowed"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": [PROMPT, "Another one"]}),
        ("/v1/completions", {"prompt": PROMPT, "stream": True}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
    ],
)
def test_a_module_steers_every_endpoint_like_its_entries(
    http: httpx2.Client, path: str, asked: dict[str, Any]
) -> None:
    # field case 11
    register(http, "joy", JOY, CALM)
    inline = [JOY | {"scale": 1.0}, CALM | {"strength": 0.5}]
    named = [{"module": "joy", "scale": 0.5}]
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0} | asked
    plain, steered, by_name = (
        said(http.post(path, json=body | {"steering": steering}))
        for steering in ([], inline, named)
    )
    assert by_name == steered
    assert all(one != other for one, other in zip(plain, steered, strict=True))


def said(answer: httpx2.Response) -> list[str]:
    """The texts of an answer or a stream, of completions or of a chat."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("application/json"):
        choices = answer.json()["choices"]
        return [
            choice["text"] if "text" in choice else choice["message"]["content"]
            for choice in choices
        ]
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    return ["".join(part.get("text", part.get("delta", {}).get("content", "")) for part in parts)]


def test_jobs_in_flight_keep_the_module_content_they_resolved(
    http: httpx2.Client, pool: ThreadPoolExecutor
) -> None:
    # field case 15, 26
    expected = {name: text(http, steering=[entry]) for name, entry in (("old", JOY), ("new", CALM))}
    first = register(http, "joy", JOY)
    body = {
        "model": MODEL,
        "prompts": [PROMPT],
        "steering": [{"module": "joy"}],
        "sampling": {"max_tokens": 12},
    }
    accepted = [http.post("/v1/jobs", json=body).json()["id"] for _ in range(8)]
    second = register(http, "joy", CALM, status=200)
    assert pool.submit(text, http, steering=[{"module": "joy"}]).result() == expected["new"]
    accepted.append(http.post("/v1/jobs", json=body).json()["id"])
    assert http.delete("/v1/artifacts/modules/joy").status_code == 204
    for number, job in enumerate(accepted):
        view = http.get(f"/v1/jobs/{job}", params={"wait": 50}).json()
        result = http.get(f"/v1/jobs/{job}/result").json()
        meant, digest = ("old", first.digest) if number < 8 else ("new", second.digest)
        assert view["modules"] == {"joy": digest}
        assert result["outputs"][0]["text"] == expected[meant]
    unknown = "unknown module 'joy' of model 'fake-model'"
    assert refused(http.post("/v1/jobs", json=body), 400, "steering[0].module")["detail"] == unknown


# field case 27
# field case 27
def test_invalid_steering_is_a_400_with_its_field_at_every_endpoint(http: httpx2.Client) -> None:
    before = http.get("/v1/steering/global").json()["version"]
    for entry, field in BAD:
        steering = {"steering": [JOY, entry]}
        for answer in (
            http.put("/v1/artifacts/modules/m", json=steering),
            http.put("/v1/steering/global", json=steering),
            http.post("/v1/jobs", json={"model": MODEL, "prompts": [PROMPT]} | steering),
            http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT} | steering),
        ):
            assert refused(answer)["field"] == field
    assert http.get("/v1/steering/global").json()["version"] == before
    assert http.get("/v1/artifacts/modules").json()["modules"] == []


#: A second entry → the field that is named; what else is wrong with an entry is in
#: `test_resolve_interventions.py`.
BAD: list[tuple[dict[str, Any], str]] = [
    (JOY | {"layers": {"1": vector(1)}}, "steering[1].layers"),
    (JOY | {"vector": vector(1) | {"shape": [7]}}, "steering[1].vector"),
    (JOY | {"vector": tensor(np.full(8, np.inf, np.float32))}, "steering[1].vector.data"),
    (JOY | {"scales": 1.0}, "steering[1].scales"),
    ({"module": "sad"}, "steering[1].module"),
    ({"module": 3}, "steering[1].module"),
    (JOY | {"positions": [0, 2**64]}, "steering[1].positions[1]"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("PUT", "/v1/artifacts/modules/a%20b", {"steering": [JOY]}, 400, "name"),
        ("PUT", "/v1/artifacts/modules/joy%0A", {"steering": [JOY]}, 400, "name"),
        ("PUT", "/v1/artifacts/modules/joy", {"steering": []}, 400, "steering"),
        ("PUT", "/v1/artifacts/modules/joy", {"steering": [JOY], "model": "gpt"}, 404, "model"),
        (
            "PUT",
            "/v1/steering/global",
            {"steering": [JOY | {"positions": [-1]}]},
            400,
            "steering[0].positions[0]",
        ),
        ("PUT", "/v1/steering/global", {"steering": []}, 400, "steering"),
        ("GET", "/v1/steering/dynamic?model=gpt", None, 404, "model"),
    ],
)
def test_steering_conflicts_name_the_field(
    http: httpx2.Client, method: str, path: str, body: Any, status: int, field: str
) -> None:
    assert refused(http.request(method, path, json=body), status)["field"] == field


# --- Global steering
# --------------------------------------------------------------------------------------------------


def put_global(http: httpx2.Client, *entries: dict[str, Any]) -> GlobalView:
    answer = http.put("/v1/steering/global", json={"steering": list(entries)})
    assert answer.status_code == 200, answer.text
    return from_json(answer.content, GlobalView)


def test_requests_after_the_response_run_under_the_new_global_steering(http: httpx2.Client) -> None:
    plain = text(http)
    steered = text(http, steering=[JOY])
    made = put_global(http, JOY)
    answer = complete(http)
    assert answer["choices"][0]["text"] == steered, (
        "a request under global steering is one with those entries"
    )
    assert answer["determinism"]["consistent"]
    assert answer["determinism"]["global_version"] == made.version
    assert put_global(http, JOY).version == made.version, "the same again is no change"
    shown = from_json(http.get("/v1/steering/global").content, GlobalView)
    assert shown == made
    cleared = from_json(http.delete("/v1/steering/global").content, GlobalView)
    assert cleared.digest == ""
    assert cleared.entries == []
    assert cleared.version == made.version + 1
    assert text(http) == plain
    assert "determinism" not in complete(http)
    assert (
        from_json(http.delete("/v1/steering/global").content, GlobalView).version == cleared.version
    )


def test_no_job_starts_under_replaced_global_steering(
    http: httpx2.Client, pool: ThreadPoolExecutor
) -> None:
    expected = [text(http, steering=[JOY]), text(http, steering=[CALM])]
    assert expected[0] != expected[1]
    for turn in range(6):
        waiting = [pool.submit(text, http) for _ in range(3)]
        put_global(http, (JOY, CALM)[turn % 2])
        after = [pool.submit(text, http) for _ in range(6)]
        assert [found.result() for found in after] == [expected[turn % 2]] * 6
        for found in waiting:
            found.result()
    made = list(pool.map(lambda scale: put_global(http, JOY | {"scale": scale}), range(1, 5)))
    assert len({view.version for view in made}) == 4
    last = max(made, key=lambda view: view.version)
    assert from_json(http.get("/v1/steering/global").content, GlobalView).digest == last.digest


def test_global_steering_pins_the_module_content(http: httpx2.Client) -> None:
    expected = text(http, steering=[JOY | {"scale": 1.0}])
    register(http, "joy", JOY)
    made = put_global(http, {"module": "joy", "scale": 0.5})
    assert put_global(http, JOY | {"scale": 1.0}).version == made.version, "the same content"
    register(http, "joy", CALM, status=200)
    assert http.delete("/v1/artifacts/modules/joy").status_code == 204
    assert from_json(http.get("/v1/steering/global").content, GlobalView).digest == made.digest
    assert text(http) == expected


def test_an_unresponsive_worker_blocks_a_global_steering_change(
    stack: Stack, http: httpx2.Client
) -> None:
    made = put_global(http, JOY)
    stack.kill("worker-2", signal.SIGSTOP)
    try:
        hasty = f"http://127.0.0.1:{HASTY_PORT}/v1/steering/global"
        answer = httpx2.put(hasty, json={"steering": [CALM]}, timeout=60)
        refused(answer, 503, None, "(missing: w1-2)", "nothing was changed")
        shown = http.get("/v1/steering/dynamic")
        assert shown.status_code == 200
        told = from_json(shown.content, Dynamic)
        assert not told.determinism.consistent
        assert told.determinism.detail == "worker w1-2 did not answer"
    finally:
        stack.kill("worker-2", signal.SIGCONT)
    shown = http.get("/v1/steering/global").json()
    assert shown["version"] == made.version
    assert shown["digest"] == made.digest
    assert put_global(http, CALM).version == made.version + 1


def test_a_refusing_rank_blocks_the_change(stack: Stack, http: httpx2.Client) -> None:
    made = put_global(http, JOY)
    # the steering in force at its start it takes
    stack.replace("worker-2", fault="check_global:rank=1,after=1")
    answer = http.put("/v1/steering/global", json={"steering": [CALM]})
    refused(answer, 409, None, "worker w1-2", "rank 1")
    shown = from_json(http.get("/v1/steering/global").content, GlobalView)
    assert shown.version == made.version
    assert [worker.state for worker in dynamic(http).workers] == ["serving"] * 2
    stack.replace("worker-2")
    assert put_global(http, CALM).version == made.version + 1


# --- What the ranks say
# ------------------------------------------------------------------------------------------------


def test_rank_reports_show_content_and_agreement(http: httpx2.Client) -> None:
    register(http, "joy", JOY)
    put_global(http, CALM)
    complete(http, steering=[{"module": "joy"}])
    told = dynamic(http)
    assert told.determinism.consistent, told.determinism.detail
    assert [
        (stage.worker, stage.pp, sorted(stage.checksums)) for stage in told.determinism.stages
    ] == [
        ("w1", 0, [0, 1]),
        ("w1-2", 0, [0, 1]),
    ]
    assert all(
        len(set(stage.checksums.values())) == 1 and len(set(stage.actions.values())) == 1
        for stage in told.determinism.stages
    )
    for worker in told.workers:
        assert worker.state == "serving"
        assert abs(worker.at - time.time()) < 60
        assert [(rank.tp, rank.pp) for rank in worker.ranks] == [(0, 0), (1, 0)]


def test_steering_metrics_cover_every_rank(http: httpx2.Client) -> None:
    lines = http.get("/metrics").text.splitlines()
    for wanted in (
        f'midstream_steering_state{{model="{MODEL}",state="serving",worker="w1-2"}} 1.0',
        f'midstream_steering_consistent{{model="{MODEL}",stage="0",worker="w1"}} 1.0',
        f'midstream_steering_waiting{{model="{MODEL}",worker="w1"}} 0.0',
        f'midstream_steering_desyncs{{model="{MODEL}",worker="w1"}} 0.0',
    ):
        assert wanted in lines, [line for line in lines if line.startswith("midstream_steering")]
    for name in ("rows", "rows_used", "entries", "entries_used", "outbox", "actions", "vectors"):
        assert any(
            line.startswith(f'midstream_steering_{name}{{model="{MODEL}",rank="1",worker="w1"}}')
            for line in lines
        ), name


def test_concurrent_scrapes_agree_on_the_worker_count(
    http: httpx2.Client, pool: ThreadPoolExecutor
) -> None:
    def scrape(_: int) -> list[str]:
        return [
            line
            for line in http.get("/metrics").text.splitlines()
            if line.startswith("midstream_workers{")
        ]

    assert (
        list(pool.map(scrape, range(16)))
        == [[f'midstream_workers{{healthy="true",model="{MODEL}"}} 2.0']] * 16
    )
