"""The OpenAI-style endpoints against stock vLLM's server on the same machine, call by call; and
what only Midstream adds to them.
"""

import os
from typing import Any

import httpx2
import numpy as np
import pytest
from openai_answers import ENGINE, TOOL_PARSER, answer, differences, stock_server
from openai_calls import ASK, PERSON, PROMPTS, STRICT_WEATHER, calls
from stack import Stack

from midstream.client import Client

pytestmark = pytest.mark.timeout(1800)
HIDDEN = 576
CAPTURE: dict[str, Any] = {"layers": [10, 29], "positions": "all"}
#: What is served here compiles in a tenth of it, what is refused in more than ten times as long, on
#: a machine of any kind.
COMPILE_S = 2.0


@pytest.fixture(scope="module")
def service(serve) -> Stack:
    own = {"kv_cache_gib": 0.5, "certify": True, "tool_parser": TOOL_PARSER}
    return serve(**{"tuning.format_compile_s": COMPILE_S}, engine_options=ENGINE, **own)


def ask(service: Stack, path: str, **body: Any) -> dict[str, Any]:
    response = httpx2.post(
        f"{service.url}/v1/{path}", json={"model": "demo", "max_tokens": 8, **body}, timeout=300
    )
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.packages  # by hand: two servers, ten minutes
def test_answers_equal_those_of_stock_vllm(
    service: Stack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every sixth call (`OPENAI_CALLS=all`: all): equal in every field, or different for the reason
    that the page names.
    """
    wrong = {}
    with stock_server(tmp_path_factory.mktemp("stock")) as stock:
        for call in calls()[:: 1 if os.environ.get("OPENAI_CALLS") == "all" else 6]:
            found = differences(answer(stock, call), answer(service.url, call))
            if bool(found) != bool(call.differs):
                wrong[call.name] = found
    assert wrong == {}


def test_each_choice_has_receipts_rows_and_a_seed_of_its_own(service: Stack) -> None:
    body: dict[str, Any] = {
        "prompt": list(PROMPTS[:2]),
        "temperature": 1,
        "capture": CAPTURE,
        "capture_wait": True,
    }
    many = ask(service, "completions", **body, n=3, seed=40)
    assert [choice["index"] for choice in many["choices"]] == list(range(6))
    ranks = many["determinism"]["stages"][0]["ranks"]
    assert sorted(each["request"] for each in ranks) == list(range(6))
    single = [ask(service, "completions", **{**body, "seed": 40 + choice}) for choice in range(3)]
    for index, choice in enumerate(many["choices"]):
        prompt, number = divmod(index, 3)
        assert choice["text"] == single[number]["choices"][prompt]["text"], (
            "the seed is the request's, plus the choice"
        )
    with Client(service.url) as client:
        rows = client.capture(many["id"])
        assert rows.requests() == list(range(6))
        for number in range(3):
            alone = client.capture(single[number]["id"])
            for prompt in range(2):
                assert np.allclose(
                    rows.array(29, request=prompt * 3 + number),
                    alone.array(29, request=prompt),
                    rtol=0,
                    atol=1e-2,
                )


def test_tools_and_formats_work_under_steering(service: Stack) -> None:
    """The constraint holds, the ranks report what they applied, and the rows are there."""
    with Client(service.url) as client:
        steering = [
            {"layers": [10], "vector": np.random.default_rng(1).normal(size=576).astype(np.float32)}
        ]
        chosen = client.completion(
            "demo",
            PROMPTS[0],
            steering=steering,
            capture=CAPTURE,
            capture_wait=True,
            structured_outputs={"regex": "(yes|no){3}"},
            temperature=0,
            max_tokens=8,
        )
        assert chosen.text.replace("yes", "").replace("no", "") == ""
        assert chosen.determinism.consistent
        assert chosen.capture_results.status == "ok"
        called = client.chat(
            "demo",
            ASK,
            steering=steering,
            tools=[STRICT_WEATHER],
            tool_choice="required",
            temperature=0,
            max_tokens=60,
        )
        assert called.determinism.consistent


@pytest.mark.parametrize(
    "form",
    [
        {
            "json": {
                "type": "object",
                "properties": {f"p{number}": {"type": "string"} for number in range(2200)},
            }
        },
        {"regex": "(a|b|ab)*" * 200},
        {"regex": "((a{1,100}){1,100}){1,100}"},  # matching "aaa…" never ends
        {"regex": "[("},
        {"grammar": "root ::= nothing"},
    ],
    ids=["many members", "ambiguous", "nested repetitions", "broken expression", "broken grammar"],
)
def test_a_hostile_constraint_is_a_400_and_harms_no_other(
    service: Stack, form: dict[str, Any]
) -> None:
    body = {"model": "demo", "prompt": PROMPTS[0], "structured_outputs": form}
    refused = httpx2.post(f"{service.url}/v1/completions", json=body, timeout=300)
    assert refused.status_code == 400, refused.text
    assert refused.json()["field"] == "structured_outputs", refused.text
    person = ask(
        service,
        "completions",
        prompt=PROMPTS[0],
        structured_outputs={"json": PERSON},
        max_tokens=40,
        temperature=0,
    )
    assert person["choices"][0]["text"].startswith("{")
