"""Every field of every submission of the core has an effect, or is refused by its name.

How that is found: `field_kit.py`. A new field fails until it is listed here.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from edge import MODEL, Api, Hand
from field_kit import (
    HANDLING,
    STEERING,
    Outcome,
    Submission,
    With,
    cases,
    check,
    check_same,
    job_of,
    named,
    plain,
    plainly,
)
from wait_kit import wait_until

from midstream.schemas.jobs.jobs import JobRequest, SamplingRequest
from midstream.schemas.jobs.openai import ChatRequest, CompletionRequest

DEADLINE_S = 60.0
PATCH = [{"layers": 1, "positions": [0], "source": {"zeros": True}}]
TOOL = {"type": "function", "function": {"name": "f"}}
OBSERVED: dict[str, Any] = HANDLING | {
    "model": "nobody",
    "lora": "nobody",
    "capture": {"layers": [1]},
    "steering": STEERING,
    "patch": PATCH,
    "probes": ["nobody"],
    "policies": ["nobody"],
    "conversation": "talk",
    "lens": {"layers": [99]},
    "features": [{"sae": "nobody"}],
    "readers": [{"reader": "nobody"}],
    "metadata": {"who": "me"},
}
SAMPLING: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 3,
    "stop": ["a"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "min_tokens": 2,
    "min_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 2.0,
    "logit_bias": {"3": 1.0},
    "allowed_token_ids": [3],
    "bad_words": ["a"],
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "structured_outputs": {"regex": "a"},
}
OPENAI: dict[str, Any] = (
    OBSERVED
    | SAMPLING
    | {
        "stream": True,
        "stream_options": With({"include_usage": True}, {"stream": True}),
        "capture_wait": With(True, {"capture": {"layers": [1]}}),
        "n": With(2, {"temperature": 1}),
        "response_format": {"type": "json_object"},
        "return_token_ids": True,
        "return_tokens_as_token_ids": With(True, {"logprobs": 1}),
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "me",
        "prompt_cache_retention": "24h",
        "service_tier": "flex",
        "store": True,
        "use_beam_search": True,
        "truncate_prompt_tokens": 2,
        "logprob_token_ids": [3],
        "kv_transfer_params": {"a": 1},
    }
)
SUBMISSIONS: dict[type[msgspec.Struct], Submission] = {
    JobRequest: Submission(
        "/v1/jobs",
        {"model": MODEL, "prompts": ["hello there"]},
        OBSERVED
        | {
            "prompts": ["hello"],
            "messages": With([[{"role": "user", "content": "a"}]], {"prompts": None}),
            "add_special_tokens": False,
            "sampling": {"max_tokens": 3},
        },
    ),
    CompletionRequest: Submission(
        "/v1/completions",
        {"model": MODEL, "prompt": "hello there", "max_tokens": 4},
        OPENAI
        | {
            "prompt": "hello",
            "echo": True,
            "add_special_tokens": False,
            "best_of": 2,
            "suffix": "a",
        },
    ),
    ChatRequest: Submission(
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        OPENAI
        | {
            "messages": [{"role": "user", "content": "a"}],
            "max_completion_tokens": 3,
            "logprobs": True,
            "top_logprobs": With(2, {"logprobs": True}),
            "return_tokens_as_token_ids": With(True, {"logprobs": True}),
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": With(False, {"tools": [TOOL]}),
            "add_generation_prompt": False,
            "continue_final_message": With(True, {"add_generation_prompt": False}),
            "chat_template_kwargs": {"bos_token": "a"},
            "reasoning_effort": "much",
            "functions": [1],
            "function_call": "auto",
            "chat_template": "a",
            "documents": [1],
            "add_special_tokens": True,
            "include_reasoning": False,
            "verbosity": "low",
            "modalities": ["audio"],
            "audio": {"a": 1},
            "prediction": {"a": 1},
            "web_search_options": {"a": 1},
        },
    ),
}


@pytest.fixture
def hand(api: Api) -> Iterator[Hand]:
    """A worker by hand that parses tools."""
    with Hand(api.settings, tool_parser="hermes") as worker:
        yield worker


@pytest.fixture
def outcome(api: Api, hand: Hand, pool: ThreadPoolExecutor) -> Outcome:
    """Returns the field that a refusal names; else the job that is stored, with the answer of an
    OpenAI-style endpoint.
    """

    def found(path: str, body: dict[str, Any]) -> Any:
        if "completions" not in path:
            return job_of(api, hand, path, body)
        asked = pool.submit(api.http.post, path, json=body)
        wait_until(lambda: asked.done() or is_queued(hand), DEADLINE_S)
        if asked.done():
            return named(asked.result())
        claim, answer = hand.answered(asked, receipts=True)
        said = answer.text.replace(claim.job.id, "ID")
        return plain(claim.job), said.replace(str(int(claim.job.created)), "TIME")

    return found


def is_queued(hand: Hand) -> bool:
    return any(job.state == "queued" for job in hand.do(hand.ledger.list(limit=1)).jobs)


@pytest.mark.parametrize("kind", SUBMISSIONS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_submission_is_sent(kind: type[msgspec.Struct]) -> None:
    assert SUBMISSIONS[kind].values.keys() == set(kind.__struct_fields__)


def test_every_field_of_sampling_is_sent() -> None:
    assert SAMPLING.keys() == set(SamplingRequest.__struct_fields__)


@pytest.mark.parametrize(("kind", "field"), cases(SUBMISSIONS))
def test_a_field_has_an_effect_or_is_refused(
    outcome: Outcome, kind: type[msgspec.Struct], field: str
) -> None:
    check(SUBMISSIONS[kind], field, outcome)


@pytest.mark.parametrize("kind", SUBMISSIONS, ids=lambda kind: kind.__name__)
def test_the_same_submission_has_the_same_outcome(
    outcome: Outcome, kind: type[msgspec.Struct]
) -> None:
    check_same(SUBMISSIONS[kind], outcome)


@pytest.mark.parametrize("field", SAMPLING)
def test_a_field_of_sampling_is_kept(outcome: Outcome, field: str) -> None:
    path, body, _ = SUBMISSIONS[JobRequest]
    found = outcome(path, {**body, "sampling": {field: SAMPLING[field]}})
    assert found != plainly(path, body, outcome)
