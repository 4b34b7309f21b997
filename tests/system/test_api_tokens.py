"""The routes between text and token ids agree with what a job stores, and refuse what is no text or
token of the model.
"""

from typing import Any

import pytest
from edge import MODEL, WORDS, Api, Hand, refused

from midstream.schemas.prompts.selectors import select

CHAT = [{"role": "user", "content": "hello there"}]


@pytest.mark.parametrize(
    ("given", "of_job"),
    [({"prompt": "hello there"}, {"prompts": ["hello there"]}), ({"messages": CHAT}, None)],
)
def test_the_tokens_endpoint_matches_the_tokens_of_a_job(
    api: Api, hand: Hand, given: dict[str, Any], of_job: dict[str, Any] | None
) -> None:
    answer = api.http.post("/v1/tokenize", json={"model": MODEL, **given})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    job = hand.job(api.submit(**(of_job or {"prompts": None, "messages": [CHAT]})))
    assert found["tokens"] == job.prompts[0].token_ids
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    back = api.http.post("/v1/detokenize", json={"model": MODEL, "tokens": found["tokens"]}).json()
    assert [word.strip() for word in back["token_strs"]] == [
        WORDS[token] for token in found["tokens"]
    ]


@pytest.mark.parametrize(
    ("name", "value", "positions", "wanted"),
    [
        ("prompt", "hello there world", [{"text": "there"}, -1], [2, 3]),
        ("prompt", [1, 2, 3], {"start": 1, "stop": 9}, [1, 2]),
        ("messages", [*CHAT, {"role": "assistant", "content": "a b"}], {"turn": -1}, [7, 8]),
        ("messages", CHAT, {"role": "user", "part": "all"}, [1, 2, 3, 4]),
    ],
)
def test_positions_are_those_of_a_capture(
    api: Api, hand: Hand, name: str, value: Any, positions: Any, wanted: list[int]
) -> None:
    hand.serve()
    found = api.http.post("/v1/tokenize", json={name: value, "positions": positions}).json()
    assert found["positions"] == wanted
    assert found.get("generated", False) == ("stop" in str(positions))
    body = {"prompts": None, f"{name.removesuffix('s')}s": [value]}
    sampling = {"max_tokens": 8}
    job = hand.job(api.submit(**body, capture={"positions": positions}, sampling=sampling))
    count = found["count"]
    assert [*select(job.captures[0][0].positions, 0, count, count)] == wanted


def test_special_tokens_can_be_left_out(api: Api, hand: Hand) -> None:
    hand.serve()
    body = {"model": MODEL, "prompt": "hello there", "add_special_tokens": False}
    assert api.http.post("/v1/tokenize", json=body).json()["tokens"] == [2, 3]
    body["positions"] = {"text": "there"}
    assert api.http.post("/v1/tokenize", json=body).json()["positions"] == [1]


@pytest.mark.parametrize(
    ("changes", "tokens", "at"),
    [
        ({}, [2, 3], [1]),
        ({"prompts": [[1, 2, 3]]}, [1, 2, 3], [2]),
        ({"prompts": None, "messages": [CHAT]}, None, None),
    ],
)
def test_special_tokens_can_be_left_out_of_a_jobs_texts(
    api: Api, hand: Hand, changes: dict[str, Any], tokens: list[int] | None, at: list[int] | None
) -> None:
    """And of nothing else. Spans of text are found in what is left."""
    body = {"prompts": ["hello there"], "capture": {"positions": {"text": "there"}}, **changes}
    job = hand.job(api.submit(**body, add_special_tokens=False))
    as_usual = hand.job(api.submit(**body))
    assert job.prompts[0].token_ids == (tokens or as_usual.prompts[0].token_ids)
    assert job.captures[0][0].positions == (at or as_usual.captures[0][0].positions)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("tokenize", {"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        ("tokenize", {"prompt": "a", "positions": [0, 9]}, "positions[1]"),
        ("tokenize", {"prompt": "a", "positions": {"turn": 0}}, "positions"),
        ("tokenize", {"messages": CHAT, "positions": {"turn": 4}}, "positions.turn"),
        ("tokenize", {"prompt": [len(WORDS)]}, "prompt[0]"),
        ("detokenize", {"tokens": [1, len(WORDS)]}, "tokens[1]"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_invalid_text_or_token_ids_are_refused_by_field(
    api: Api, hand: Hand, path: str, body: dict[str, Any], field: str
) -> None:
    hand.serve()
    refused(api.http.post(f"/v1/{path}", json={"model": MODEL, **body}), 400, field)


@pytest.mark.parametrize("changes", [{"prompts": None}, {"messages": [CHAT]}])
def test_a_job_takes_prompts_or_conversations_and_not_both_or_none(
    api: Api, hand: Hand, changes: dict[str, Any]
) -> None:
    hand.serve()
    refused(
        api.http.post("/v1/jobs", json={"model": MODEL, "prompts": ["hello"], **changes}),
        400,
        "prompts",
    )
