"""The logit lens through API, ledger and worker, by every way of asking.

The engine alone is a fake.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
from midstream_fake_engine.model import NUM_LAYERS, VOCABULARY
from up_kit import Up

from midstream.client import AsyncClient, Client
from midstream.client.render import readings
from midstream.schemas.base.errors import MidstreamError

LENS = {"layers": [0, 3], "positions": "all_prompt", "top_k": 3, "tokens": ["e", 7]}


@pytest.fixture
def http(up: Up) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=up.ready(), timeout=60) as client:
        yield client


def check(readings: list[dict[str, Any]], lengths: list[int]) -> None:
    assert [(reading["request"], len(reading["positions"])) for reading in readings] == list(
        enumerate(lengths)
    )
    for reading in readings:
        assert (reading["hook"], reading["layers"]) == ("post_block", [0, 3])
        token = reading["token_ids"][0]
        assert reading["top_tokens"][1][0] == [
            (token + 4 + place) % VOCABULARY for place in range(3)
        ]
        assert reading["top_logprobs"][0][0] == [0.0, -1.0, -2.0]
        assert reading["named_tokens"][1] == 7
        assert reading["named_ranks"][0][0] == [4, 4]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs", {"prompts": ["hello", "you"], "sampling": {"max_tokens": 2}}),
        ("/v1/completions", {"prompt": ["hello", "you"], "max_tokens": 2}),
        ("/v1/completions", {"prompt": ["hello", "you"], "max_tokens": 2, "stream": True}),
    ],
)
def test_every_way_of_asking_answers_with_the_lens(
    http: httpx2.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json={"model": "fake", "lens": LENS} | body)
    assert answer.status_code in (200, 202), answer.text
    if body.get("stream"):
        chunks = [
            json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
        ]
        check(next(chunk["lens"] for chunk in chunks if "lens" in chunk), [5, 3])
    elif path == "/v1/completions":
        check(answer.json()["lens"], [5, 3])
        assert "capture_results" not in answer.json()
    view = http.get(f"/v1/jobs/{answer.headers['x-midstream-job']}", params={"wait": 50}).json()
    result = http.get(f"/v1/jobs/{view['id']}/result").json()
    check(result["lens"], [5, 3])
    assert (result["capture_results"]["files"], result["capture_results"]["consumers"]) == ([], [])


def test_a_lens_that_a_model_or_request_cannot_have_is_refused(http: httpx2.Client) -> None:
    for lens, field in (
        ({"layers": 4}, "lens.layers"),
        ({"tokens": ["no"]}, "lens.tokens[0]"),
        ({"tokens": [999]}, "lens.tokens[0]"),
    ):
        answer = http.post("/v1/jobs", json={"model": "fake", "prompts": ["hello"], "lens": lens})
        assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text


def test_clients_give_arrays_and_tables(up: Up) -> None:
    with Client(up.ready()) as client:
        found = client.lens("hello", top_k=3, tokens=["e"])
        assert found.tokens.shape == found.logprobs.shape == (NUM_LAYERS, 5, 3)
        assert (found.positions, found.layers) == (list(range(5)), list(range(NUM_LAYERS)))
        np.testing.assert_array_equal(found.logprobs[2, 4], [0, -1, -2])
        assert [found.word(token) for token in found.token_ids] == list("hello")
        assert (found.ranks.shape, found.named_logprobs.shape) == (
            (NUM_LAYERS, 5, 1),
            (NUM_LAYERS, 5, 1),
        )
        assert "rank 4" in found._repr_html_()
        assert found.plot().get_axes()
        assert readings.lens_table(found).row_count == NUM_LAYERS
        assert readings.named_table(found).row_count == NUM_LAYERS
        with pytest.raises(MidstreamError, match="layer 9"):
            client.lens("hello", layers=9)

    async def awaited() -> Any:
        async with AsyncClient(up.ready()) as client:
            return await client.lens("hello", layers=[1], positions="last_prompt")

    assert asyncio.run(awaited()).tokens.shape == (1, 1, 5)


def test_the_command_shows_and_draws_it(up: Up, tmp_path: Any) -> None:
    up.ready()
    shown = up.midstream(
        "lens", "hello", "--layers", "0-2", "--token", "e", "--figure", str(tmp_path / "lens.png")
    )
    assert shown.returncode == 0, shown.stderr
    assert "top next token at post_block" in shown.stdout
    assert "rank 4" in shown.stdout
    job = up.midstream("submit", "hello", "world", "--lens", "0-2:3")
    assert job.returncode == 0, job.stderr
    assert "top next token at post_block, prompt 1" in job.stdout
    assert (tmp_path / "lens.png").read_bytes().startswith(b"\x89PNG")
