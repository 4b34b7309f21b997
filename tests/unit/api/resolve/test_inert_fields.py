"""A field that asks for nothing is accepted, and changes nothing; what has an effect is kept."""

from typing import Any

import msgspec
import pytest
from refusal_kit import refuses

from midstream.api.resolve.prompts.request_parsing import (
    parse_chat,
    parse_completion,
    parse_job,
    plain_messages,
)
from midstream.broker.prompts.chat_templates import ChatTemplate
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.jobs import JobRequest
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.jobs.openai import ChatRequest, CompletionRequest
from midstream.schemas.prompts.chat import ChatMessage, Rendering

HELLO = {"role": "user", "content": "hello"}


def chat(**changes: Any) -> Any:
    body = {"model": "m", "messages": [HELLO], **changes}
    return parse_chat(from_json(to_json(body), ChatRequest))


def completion(**changes: Any) -> Any:
    body = {"model": "m", "prompt": "hello", **changes}
    return parse_completion(from_json(to_json(body), CompletionRequest))


def job(**sampling: Any) -> Any:
    body = {"model": "m", "prompts": ["hello"], "sampling": sampling}
    return parse_job(from_json(to_json(body), JobRequest))


@pytest.mark.parametrize(
    "field",
    [
        {"tools": []},
        {"tools": None},
        {"tool_choice": "auto"},
        {"tools": [], "tool_choice": "auto"},
        {"top_k": -1},
        {"priority": 0},
        {"add_special_tokens": False},
        {"kv_transfer_params": None},
        {"prompt_cache_retention": "24h"},
        {"reasoning_effort": None},
    ],
)
def test_a_field_of_a_chat_that_asks_for_nothing_changes_nothing(field: dict[str, Any]) -> None:
    assert chat(**field) == chat()


@pytest.mark.parametrize("field", [{"top_k": -1}, {"priority": 0}, {"kv_transfer_params": None}])
def test_a_field_of_a_completion_that_asks_for_nothing_changes_nothing(
    field: dict[str, Any],
) -> None:
    assert completion(**field) == completion()


def test_vllms_word_for_all_tokens_is_that_of_a_job() -> None:
    assert job(top_k=-1) == job(top_k=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("top_k", -2),
        ("priority", 1),
        ("add_special_tokens", True),
        ("kv_transfer_params", {"remote": 1}),
        ("reasoning_effort", "much"),
    ],
)
def test_a_value_that_would_have_an_effect_is_refused(field: str, value: Any) -> None:
    with pytest.raises((MidstreamError, msgspec.ValidationError), match=field):
        chat(**{field: value})


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), ("max", True)])
def test_the_effort_is_set_in_the_template_as_vllm_sets_it(effort: str, thinks: bool) -> None:
    (prompt,) = chat(reasoning_effort=effort).prompts
    assert prompt.rendering.options == {"reasoning_effort": effort, "enable_thinking": thinks}


def test_a_variable_that_is_named_is_not_replaced_by_the_effort() -> None:
    named = {"enable_thinking": True}
    (prompt,) = chat(reasoning_effort="none", chat_template_kwargs=named).prompts
    assert prompt.rendering.options["enable_thinking"] is True


def test_a_variable_replaces_a_special_token_as_in_transformers() -> None:
    bundle = TokenizerBundle(
        tokenizer_json="",
        chat_template="{{ bos_token }}{{ messages[0].content }}",
        special_tokens={"bos_token": "<s>"},
        eos_token_ids=[],
    )
    rendering = Rendering(options={"bos_token": "<a>"})
    assert ChatTemplate(bundle).render([HELLO], rendering) == "<a>hello"


def test_a_cache_hint_of_a_part_is_not_rendered() -> None:
    part = {"type": "text", "text": "hello"}
    hinted = {"role": "user", "content": [part | {"cache_control": {"type": "ephemeral"}}]}
    messages = from_json(to_json([hinted, HELLO]), list[ChatMessage])
    assert plain_messages(messages[:1]) == plain_messages(messages[1:])


@pytest.mark.parametrize("value", [0, 2])
def test_log_probabilities_of_prompts_come_with_the_prompts_of_a_job(value: int) -> None:
    assert job(prompt_logprobs=value).echo


def test_a_job_without_them_comes_without_its_prompts() -> None:
    assert not job().echo


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_that_is_sent_back_is_read_under_either_name(name: str) -> None:
    answer = {"role": "assistant", "content": "5", name: "2 + 3"}
    (message,) = plain_messages(from_json(to_json([answer]), list[ChatMessage]))
    assert message["reasoning_content"] == "2 + 3"


def test_two_different_texts_of_reasoning_are_refused() -> None:
    answer = {"role": "assistant", "content": "5", "reasoning": "a", "reasoning_content": "b"}
    with refuses(field="messages[1].reasoning_content"):
        chat(messages=[HELLO, answer])
