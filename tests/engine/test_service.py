"""The whole service on the real engine: what users send over HTTP arrives in the forward pass, and
what goes wrong there comes back.
"""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from host import relative_error
from stack import Stack
from tolerances import BF16_BATCH, LOGPROB_MOVED

from midstream.client import Client, returned_rows
from midstream.schemas.jobs.jobs import CaptureResults


@pytest.fixture(scope="module")
def service(demo_stack: Stack) -> Stack:
    return demo_stack


@pytest.fixture(scope="module")
def vector(service: Stack) -> np.ndarray:
    """A push that changes what the demo model says."""
    return (60 * np.random.default_rng(3).normal(size=576) / 24).astype(np.float32)


def packed(values: np.ndarray) -> dict:
    return {
        "dtype": "float32",
        "shape": list(values.shape),
        "data": base64.b64encode(values.astype("<f4").tobytes()).decode(),
    }


def ask(service: Stack, path: str, **body: Any) -> tuple[np.ndarray, dict[str, float]]:
    """The last layer's rows at the prompts' last tokens `[prompts, hidden]`, and how likely the
    next tokens are, where asked.
    """
    body = {
        "model": "demo",
        "temperature": 0,
        "max_tokens": 2,
        "capture": {"layers": [-1], "positions": "last_prompt", "consumers": ["memory"]},
        "capture_wait": True,
    } | body
    response = httpx2.post(f"{service.url}/v1/{path}", json=body, timeout=60).raise_for_status()
    parts = [
        json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")
    ] or [response.json()]
    results = next(
        part["capture_results"] for part in reversed(parts) if part.get("capture_results")
    )
    assert parts[-1].get("determinism", {}).get("consistent", True) is True
    reader = returned_rows(msgspec.convert(results, CaptureResults))
    rows = np.concatenate([reader.array(29, request=request) for request in reader.requests()])
    logprobs = parts[0]["choices"][0].get("logprobs")
    if logprobs is None:
        return rows, {}
    if "content" in logprobs:
        return rows, {
            each["token"]: each["logprob"] for each in logprobs["content"][0]["top_logprobs"]
        }
    return rows, logprobs["top_logprobs"][0]


# field case 11, field case 12
@pytest.mark.slow("a real model with 30 layers answers nine requests on one thread")
def test_every_endpoint_is_steered_on_the_real_engine(service: Stack, vector: np.ndarray) -> None:
    """Every way of asking gives the steered stream of the same prompt, and not the plain one: rows
    are compared, not tokens.
    """
    steering, prompts = (
        [{"layers": [10], "vector": packed(vector)}],
        ["The sky is", "My favourite food is"],
    )
    for path, asked in (
        ("chat/completions", [{"messages": [{"role": "user", "content": "Name a colour."}]}]),
        ("completions", [{"prompt": prompt} for prompt in prompts]),
    ):
        top: dict[str, Any] = (
            {"logprobs": True, "top_logprobs": 20} if path.startswith("chat") else {"logprobs": 20}
        )
        plain = [ask(service, path, **each, **top) for each in asked]
        alone = [ask(service, path, **each, steering=steering, **top) for each in asked]
        for (rows, logprobs), (steered, others) in zip(plain, alone, strict=True):
            assert relative_error(steered, rows) > 10 * BF16_BATCH
            moved = [
                abs(others[token] - logprobs[token]) for token in others.keys() & logprobs.keys()
            ]
            assert max(moved, default=np.inf) > LOGPROB_MOVED
        wanted = np.concatenate([rows for rows, _ in alone])
        together = {"prompt": prompts} if path == "completions" else asked[0]
        for ways in ({}, {"stream": True}):
            rows, _ = ask(service, path, **together, steering=steering, **ways)
            assert relative_error(rows, wanted) <= BF16_BATCH, (path, ways)


def test_a_streamed_capture_ends_with_its_results(service: Stack) -> None:
    body = {
        "model": "demo", "prompt": "The sky is", "max_tokens": 6, "temperature": 0, "stream": True,
        "capture": {"layers": [3], "positions": "all"}, "capture_wait": True,
    }  # fmt: skip
    with httpx2.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as response:
        events = [
            json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")
        ]
    results = next(
        event["capture_results"] for event in reversed(events) if event.get("capture_results")
    )
    assert results["status"] == "ok"
    assert all((Path(results["root"]) / file["path"]).is_file() for file in results["files"])


@pytest.mark.long
def test_windows_store_the_rows_that_slicing_a_whole_capture_gives(service: Stack) -> None:
    """Over HTTP: the last rows, those around a text wherever it comes, and none around another."""

    def tokens_of(text: str) -> list[int]:
        body = {"model": "demo", "prompt": text, "add_special_tokens": False}
        answer = httpx2.post(f"{service.url}/v1/tokenize", json=body, timeout=60)
        ids: list[int] = answer.raise_for_status().json()["tokens"]
        return ids

    with Client(service.url) as client:

        def rows(positions: Any) -> tuple[list[int], list[int], np.ndarray]:
            done = client.run(
                model="demo",
                prompts=["Paris, Rome, Paris, Rome,"],
                sampling={"max_tokens": 8, "temperature": 0},
                capture={"layers": [3], "positions": positions},
                timeout=60,
            )
            reader = client.capture(done.id)
            return reader.positions(), reader.token_ids(), reader.array(3)

        places, tokens, whole = rows("all")
        sequences = [tokens_of("Paris"), tokens_of(" Paris")]
        hits = {
            at + more
            for sequence in sequences
            for at in places
            if tokens[at : at + len(sequence)] == sequence
            for more in range(len(sequence))
        }
        assert len(hits) >= 2
        wanted = {
            "last": ({"last": 5}, places[-5:]),
            "around": (
                {"around": {"text": "Paris", "before": 1}},
                [at for at in places if {at, at + 1} & hits],
            ),
            "nowhere": ({"around": {"text": "Reykjavik zebra"}}, []),
        }
        for positions, expected in wanted.values():
            found, _, values = rows(positions)
            assert found == expected
            np.testing.assert_allclose(values, whole[expected], atol=1e-4)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"capture": {"layers": [30]}}, "capture.layers"),
        ({"steering": [{"layers": [0], "vector": packed(np.ones(575))}]}, "steering[0].vector"),
        ({"prompt": [5] * 1025}, "prompt"),
    ],
)
def test_bad_input_is_refused_by_field_and_the_engine_never_sees_it(
    service: Stack, change: dict, field: str
) -> None:
    with httpx2.Client(base_url=service.url, timeout=30) as http:  # field case 27
        before = len(http.get("/v1/jobs").json()["jobs"])
        answer = http.post(
            "/v1/completions",
            json={"model": "demo", "prompt": "The sky is", "max_tokens": 1, **change},
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["field"].startswith(field)
        assert len(http.get("/v1/jobs").json()["jobs"]) == before


@pytest.mark.long
def test_engine_load_is_reported_while_generating(service: Stack) -> None:
    body = {"model": "demo", "prompt": "The sky is", "max_tokens": 120, "ignore_eos": True}
    seen: dict[str, Any] = {"running": 0}
    for _ in range(5):  # on a busy machine a request may be over before the worker was asked
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                httpx2.post, f"{service.url}/v1/completions", json=body, timeout=60
            )
            while not answer.done() and not seen["running"]:
                (worker,) = httpx2.get(f"{service.url}/v1/steering/dynamic", timeout=30).json()[
                    "workers"
                ]
                (seen,) = worker["ranks"]
            assert answer.result().status_code == 200
        if seen["running"]:
            break
    assert (seen["running"], seen["queued"]) == (1, 0)
    assert 0 < seen["kv_cache"] < 0.5


def test_ranks_and_engine_log_json_lines_like_the_worker(service: Stack) -> None:
    text = service.log("worker")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    others = [line for line in text.splitlines() if not line.startswith(("{", "worker ready"))]
    assert [line for line in others if "INFO" in line or "WARNING" in line] == []
    assert {line["process"] for line in lines} >= {"worker", "engine", "rank"}
    assert {line["worker"] for line in lines} == {"w1"}
    of_rank = [line for line in lines if line["process"] == "rank"]
    assert {line["rank"] for line in of_rank} == {0}
    assert any(line["logger"].startswith("vllm.") for line in of_rank)
