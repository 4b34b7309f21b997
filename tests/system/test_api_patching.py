"""Do patches and source runs do over HTTP what they say, with a worker, its relay and Redis behind?

The engine alone is a fake.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest
from edge import refused
from stack import Stack
from wait_kit import wait_until

from midstream.client import Client
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.openai import Completion
from midstream.schemas.requests.source_runs import ZEROS, RunPage, RunView

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

MODEL = "fake-model"
HIDDEN = 8
LAYERS = 4
CLEAN = "The Eiffel Tower is in"  # a token for each byte: 22
CORRUPT = "The Colosseum is in"  # and 19
TOKENS = len(CLEAN)
VECTOR = from_numpy(np.arange(HIDDEN, dtype=np.float32))
INLINE: dict[str, Any] = json.loads(to_json(VECTOR))
PATIENCE_S = 50.0


@pytest.fixture(scope="module")
def clean(http: httpx2.Client) -> str:
    """The job whose captures have the name `clean`: every layer at two hooks, all prompt positions
    of two prompts.
    """
    return capture(http, "clean", [CLEAN, CORRUPT], hooks={"pre_attn": "all", "post_block": "0-2"})


def submit(http: httpx2.Client, prompts: list[str], **body: Any) -> str:
    answer = http.post(
        "/v1/jobs", json={"model": MODEL, "prompts": prompts, "sampling": {"max_tokens": 4}} | body
    )
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def over(http: httpx2.Client, job: str) -> dict[str, Any]:
    view = dict(http.get(f"/v1/jobs/{job}", params={"wait": PATIENCE_S}).json())
    assert view["state"] == "succeeded", view
    return view


def capture(http: httpx2.Client, run: str, prompts: list[str], **spec: Any) -> str:
    job = submit(http, prompts, capture={"positions": "all_prompt", "run": run} | spec)
    assert over(http, job)["run"] == run
    return job


def patch(source: Any, positions: Any = (3,), **fields: Any) -> dict[str, Any]:
    given = {"run": source} if isinstance(source, str) else source
    return {
        "layers": 1,
        "hook": "resid_pre",
        "positions": list(positions) if isinstance(positions, tuple) else positions,
        "source": given,
    } | fields


def complete(
    http: httpx2.Client, *patches: dict[str, Any], prompt: Any = CORRUPT, **body: Any
) -> Completion:
    answer = http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 12, "patch": patches} | body,
    )
    assert answer.status_code == 200, answer.text
    return from_json(answer.content, Completion)


def applied(answer: Completion) -> list[int]:
    """How many rows of each prompt the rank says that it wrote."""
    assert answer.determinism, "a patched answer is held for the ranks' reports"
    assert answer.determinism.consistent
    return [rank.applied for rank in answer.determinism.stages[0].ranks if rank.tp == 0]


def stored(stack: Stack, job: str) -> Job:
    return stack.do(lambda ledger: ledger.job(job))


# --- From a capture to a patch
# -----------------------------------------------------------------------------------------------


def test_a_named_capture_is_a_source_run_listing_its_sites(http: httpx2.Client, clean: str) -> None:
    view = from_json(http.get("/v1/runs/clean").content, RunView)
    assert view.name == "clean"
    assert view.model == MODEL
    assert view.job == clean
    assert view.tag == "default"
    assert view.state == "ready"
    assert view.prompts is not None
    assert [(prompt.request, prompt.tokens, prompt.hidden_size) for prompt in view.prompts] == [
        (0, TOKENS, HIDDEN),
        (1, 19, HIDDEN),
    ]
    assert view.prompts[0].sites == {"pre_attn": [0, 1, 2, 3], "post_block": [0, 1, 2]}
    assert view.prompts[0].positions == list(range(TOKENS))
    by_job = from_json(http.get(f"/v1/runs/{clean}").content, RunView)
    assert by_job.job == clean
    assert by_job.prompts == view.prompts


def test_a_row_is_patched_by_the_runs_name_or_its_jobs_id_alike(
    http: httpx2.Client, stack: Stack, clean: str
) -> None:
    plain = http.post(
        "/v1/completions", json={"model": MODEL, "prompt": CORRUPT, "max_tokens": 12}
    ).json()
    wished = [patch(name, layers="1-2", hook="post_block") for name in ("clean", clean)]
    by_name, by_job = (complete(http, wish) for wish in wished)
    assert by_name.choices[0].text == by_job.choices[0].text != plain["choices"][0]["text"]
    assert applied(by_name) == applied(by_job) == [2]
    job = stored(stack, by_name.id)
    assert job.runs == {"clean": clean}
    assert stored(stack, by_job.id).runs == {clean: clean}
    assert [entry.tensors for entry in job.steering[0]] == [
        [f"run:{clean}.0.default:post_block:{layer}:3"] for layer in (1, 2)
    ]
    assert over(http, by_name.id)["runs"] == {"clean": clean}


def test_every_prompt_of_a_job_is_patched_at_positions_of_its_own(
    http: httpx2.Client, stack: Stack, clean: str
) -> None:
    wished = [
        patch({"run": "clean", "position": -1}, [-1]),
        patch(
            {"run": "clean", "prompt": 1, "position": [0, 1]}, [{"text": "is"}], hook="post_block"
        ),
    ]
    job = submit(http, [CORRUPT, CLEAN], patch=wished)
    over(http, job)
    steering = stored(stack, job).steering
    assert [[entry.positions for entry in entries] for entries in steering] == [
        [[18], [14], [15]],
        [[21], [17], [18]],
    ]
    assert {entry.tensors[0] for entries in steering for entry in entries} == {
        f"run:{clean}.{row}"
        for row in (
            "0.default:pre_attn:1:21",
            "1.default:post_block:1:0",
            "1.default:post_block:1:1",
        )
    }
    assert applied(complete(http, *wished, prompt=[CORRUPT, CLEAN])) == [3, 3]


def test_a_chat_is_patched_streamed_or_whole(http: httpx2.Client, clean: str) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    plain = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    body["patch"] = [patch("clean", [{"text": "hello"}])]
    answer = http.post("/v1/chat/completions", json=body).json()
    patched = answer["choices"][0]["message"]["content"]
    assert answer["determinism"]["stages"][0]["ranks"][0]["applied"] == 5
    assert patched != plain
    with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as streamed:
        lines = [
            line.removeprefix("data: ")
            for line in streamed.iter_lines()
            if line.startswith("data: ")
        ]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert (
        "".join(
            choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]
        )
        == patched
    )
    assert chunks[-1]["determinism"]["stages"][0]["ranks"][0]["applied"] == 5


def test_every_kind_of_source_and_the_requests_steering_go_together(
    http: httpx2.Client, stack: Stack, clean: str
) -> None:
    module = {"steering": [{"layers": 0, "op": "replace", "vector": INLINE, "scale": 2.0}]}
    assert http.put("/v1/artifacts/modules/row", json=module).status_code == 201
    wished = [
        patch(
            {"run": "clean", "mean": True, "positions": {"start": 4, "stop": 11}}, "all_generated"
        ),
        patch({"vector": INLINE}, (0,), mask="0-3"),
        patch({"module": "row"}, (1,), alpha=0.5),
        patch({"zeros": True}, (2,)),
        patch("clean", (2,), alpha=0.25),
    ]
    answer = complete(http, *wished, steering=[{"layers": 3, "vector": INLINE, "positions": [0]}])
    entries = stored(stack, answer.id).steering[0]
    assert [(entry.family, entry.tensors[0], entry.scale, entry.numbers) for entry in entries] == [
        ("replace", f"run:{clean}.0.default:pre_attn:1:mean 4-10", 1.0, [1.0]),
        ("replace_masked", content_hash(VECTOR), 1.0, [1.0]),
        ("replace", content_hash(VECTOR), 2.0, [0.5]),
        ("replace", ZEROS, 1.0, [1.0]),
        ("replace", f"run:{clean}.0.default:pre_attn:1:2", 1.0, [0.25]),
        ("add", content_hash(VECTOR), 1.0, []),
    ]
    assert stored(stack, answer.id).modules.keys() == {"row"}
    (rows,) = applied(answer)
    assert rows == 11 + 5, (
        "eleven generated tokens that were fed back; positions 0 to 2, two rows of 0 "
        "and none joined"
    )
    assert http.delete("/v1/artifacts/modules/row").status_code == 204


# --- What becomes of runs
# --------------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_and_a_name_means_the_last_that_took_it(
    http: httpx2.Client, clean: str
) -> None:
    first, second = (capture(http, "again", [CLEAN], layers=layer) for layer in (0, 3))
    page = from_json(http.get("/v1/runs", params={"limit": 1}).content, RunPage)
    assert [run.name for run in page.runs] == ["again"]
    assert page.runs[0].job == second
    rest = from_json(
        http.get("/v1/runs", params={"cursor": page.next, "model": MODEL}).content, RunPage
    )
    assert [run.name for run in rest.runs] == ["clean"]
    assert rest.next is None
    assert (
        refused(
            http.post(
                "/v1/completions",
                json={
                    "model": MODEL,
                    "prompt": CORRUPT,
                    "patch": [patch("again", layers=0, hook="post_block")],
                },
            )
        )["field"]
        == "patch[0].layers"
    )
    complete(http, patch(first, layers=0, hook="post_block"))
    assert http.delete("/v1/runs/again").status_code == 204
    assert http.get(f"/v1/captures/{second}").status_code == 410
    assert http.get(f"/v1/captures/{first}").status_code == 200


def test_a_deleted_run_is_refused_by_name_and_by_its_jobs_id(
    http: httpx2.Client, clean: str
) -> None:
    job = capture(http, "short", [CLEAN], layers=1)
    body = {"model": MODEL, "prompts": [CORRUPT], "patch": [patch("short", hook="post_block")]}
    kept = http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "kept"}).json()["id"]
    over(http, kept)
    assert http.delete("/v1/runs/short").status_code == 204
    problem = refused(http.get("/v1/runs/short"), 404)
    assert problem["field"] == "name"
    assert problem["detail"] == f"unknown source run 'short' of model {MODEL!r}"
    assert problem["allowed"] == "clean"
    refused(http.delete("/v1/runs/short"), 404)
    field = "patch[0].source.run"
    assert "clean" in refused(http.post("/v1/jobs", json=body), 400, field, "'short'")["allowed"]
    by_job = body | {"patch": [patch(job, hook="post_block")]}
    refused(http.post("/v1/jobs", json=by_job), 400, field, "is deleted")
    again = http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "kept"})
    assert again.status_code == 202
    assert again.json()["id"] == kept, "a repeated submission is the same job"


def test_a_source_run_is_pending_until_its_job_succeeds(http: httpx2.Client, stack: Stack) -> None:
    job = submit(http, [CLEAN], capture={"layers": 1, "run": "slow"}, sampling={"max_tokens": 4000})
    body = {"model": MODEL, "prompts": [CORRUPT], "patch": [patch("slow", hook="post_block")]}
    field = "patch[0].source.run"
    says = f"run 'slow' of job {job} is pending"
    problem = refused(http.post("/v1/jobs", json=body), 400, field, says)
    assert f"GET /v1/jobs/{job}?wait=30" in problem["hint"]
    assert from_json(http.get("/v1/runs/slow").content, RunView).state == "pending"
    refused(http.delete("/v1/runs/slow"), 409)
    stack.wait_running(job)
    assert http.post(f"/v1/jobs/{job}/cancel").status_code == 202
    assert http.get(f"/v1/jobs/{job}", params={"wait": PATIENCE_S}).json()["state"] == "cancelled"
    refused(http.post("/v1/jobs", json=body), 400, field, "is failed")
    assert http.delete("/v1/runs/slow").status_code == 204


# --- What is refused
# --------------------------------------------------------------------------------------------------


# field cases 21, 27, 34
# field cases 21, 27, 34
def test_an_invalid_patch_is_a_400_naming_the_field(http: httpx2.Client, clean: str) -> None:
    good = patch({"vector": INLINE}, (0,))
    for wish, field in BAD:
        for path, asked in (
            ("/v1/jobs", {"prompts": [CORRUPT]}),
            ("/v1/completions", {"prompt": CORRUPT}),
        ):
            answer = http.post(path, json={"model": MODEL, "patch": [wish, good]} | asked)
            assert refused(answer)["field"] == field


#: A patch → the field that is named; what else is wrong with one is in `test_resolve_patches.py`.
BAD = [
    (patch("clean", [19]), "patch[0].positions[0]"),
    (patch({"run": "clean", "position": TOKENS}), "patch[0].source.position"),
    (patch({"run": "clean", "prompt": 2}), "patch[0].source.prompt"),
    (patch({"run": "gone"}), "patch[0].source.run"),
    (patch("clean", layers=3, hook="resid_post"), "patch[0].layers"),
    (patch("clean", hook="mlp"), "patch[0].hook"),
    (patch("clean", mask="8"), "patch[0].mask"),
    (patch({"run": "clean", "zeros": True}), "patch[0].source"),
    (patch({"vector": INLINE | {"shape": [7]}}), "patch[0].source.vector"),
    (patch({"module": "gone"}), "patch[0].source.module"),
    (patch("clean", [0, 2**64]), "patch[0].positions[1]"),
]


# --- From Python and from the command line
# -------------------------------------------------------------------------------------


def test_the_client_and_the_command_line_capture_patch_and_delete(
    client: Client, midstream: Callable[..., str], clean: str
) -> None:
    named = ["--layers", "all", "--positions", "all_prompt", "--set", "capture.run=typed"]
    made = json.loads(midstream("submit", CLEAN, *named, "--json"))
    assert "typed" in midstream("list", "runs")
    assert "post_block" in midstream("get", "run", "typed")
    row = {"layers": 1, "positions": {"text": "Colosseum"}}
    source = {"run": "typed", "position": 4}
    zeros = {"layers": 2, "positions": [-1], "source": {"zeros": True}}
    typed = [
        word
        for patch in (row | {"hook": "resid_post", "source": source}, zeros)
        for word in ("--set", f"patch={json.dumps(patch)}")
    ]
    by_hand = json.loads(midstream("submit", CORRUPT, *typed, "--max-tokens", "12", "--json"))
    assert by_hand["determinism"]["stages"][0]["ranks"][0]["applied"] == 10
    assert client.jobs.get(by_hand["id"]).runs == {"typed": made["id"]}
    source = {"run": made["id"], "position": 4}
    patches = [
        {"layers": 1, "positions": {"text": "Colosseum"}, "source": source},
        {"layers": 2, "positions": [-1], "source": np.zeros(HIDDEN, np.float32)},
    ]
    result = client.run(prompts=[CORRUPT], patch=patches, max_tokens=12)
    assert {rank.applied for rank in result.determinism.stages[0].ranks} == {10}
    wait_until(  # the worker says so with its heartbeat
        lambda: not (view := client.source_runs.get("typed")).in_use and view.held_by == ["w1"],
        PATIENCE_S,
        why=lambda: client.source_runs.get("typed"),
    )
    assert midstream("delete", "run", "typed") == "typed deleted\n"
    assert "typed" not in midstream("list", "runs")
