"""The routes between text and token ids agree with what a job stores, and refuse what is no text or
token of the model.
"""

from typing import Any

import pytest
from edge import MODEL, WORDS, Api, Hand, refused

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


def test_special_tokens_can_be_left_out(api: Api, hand: Hand) -> None:
    hand.serve()
    body = {"model": MODEL, "prompt": "hello there", "add_special_tokens": False}
    assert api.http.post("/v1/tokenize", json=body).json()["tokens"] == [2, 3]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("tokenize", {"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
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
