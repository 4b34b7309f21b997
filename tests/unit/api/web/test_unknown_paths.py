"""Tests what a client of ours or of OpenAI's reads at a path or method that does not exist."""

import asyncio
from typing import Any

import httpx2
import pytest

from midstream.api.app import make_app
from midstream.api.web.problems import nearest
from midstream.schemas.base.settings import Settings


@pytest.fixture(scope="module")
def app() -> Any:
    return make_app(Settings(redis_url="redis://127.0.0.1:1/0"))


def ask(app: Any, method: str, path: str) -> httpx2.Response:
    async def call() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path)

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v1/chat/completion", "did you mean '/v1/chat/completions'?"),
        ("POST", "/v1/v1/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("POST", "/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("GET", "/v1/job", "did you mean '/v1/jobs'?"),
        ("GET", "/v1/jobs/job_1/reslt", "did you mean '/v1/jobs/job_1/result'?"),
        ("POST", "/v1/responses", "use /v1/chat/completions or /v1/completions"),
        ("POST", "/v1/embeddings", "capture rows: POST /v1/jobs with the field capture"),
        ("POST", "/embeddings", "the paths are listed at /schema"),
        ("POST", "/v1/audio/speech", "the paths are listed at /schema"),
        ("POST", "/v1/rerank", "the paths are listed at /schema"),
        ("GET", "/" + "x" * 5000, "the paths are listed at /schema"),
    ],
)
def test_an_unknown_path_has_both_shapes_and_the_nearest_path(
    app: Any, method: str, path: str, hint: str
) -> None:
    answer = ask(app, method, path)
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (404, "urn:midstream:not_found")
    assert (problem["hint"], "allowed" in problem) == (hint, False)
    assert problem["error"] == {
        "message": f"{problem['detail']}; {hint}",
        "type": "not_found",
        "code": "not_found",
        "param": None,
    }
    assert len(answer.content) < 1500


def test_a_wrong_method_has_both_shapes_and_the_right_methods(app: Any) -> None:
    answer = ask(app, "GET", "/v1/chat/completions")
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (405, "urn:midstream:method_not_allowed")
    assert set(problem["allowed"].split(", ")) == {"POST", "OPTIONS"}
    assert problem["error"]["message"] == (
        f"GET is not supported at /v1/chat/completions (allowed: {problem['allowed']})"
    )


def test_a_parameter_stands_for_any_segment() -> None:
    served = ["/v1/jobs/{job_id}/result", "/v1/keys/{key_id}"]
    assert nearest("/v1/jobs/x/rslt", served) == "did you mean '/v1/jobs/x/result'?"
    assert nearest("/a", served) == "the paths are listed at /schema"
