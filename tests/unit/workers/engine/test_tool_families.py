"""The parser of tool calls that a chat template calls for, or parsers that may fit."""

import logging
from typing import Any

import pytest
from vllm.tool_parsers import ToolParserManager

from midstream.schemas.settings.settings import SettingsError
from midstream.workers.engine.prompts.tool_calls import ToolParsers
from midstream.workers.engine.prompts.tool_families import (
    CANDIDATES,
    FAMILIES,
    candidates,
    parser_for,
)

#: What the templates of these models tell about calls, as their files have it.
QWEN = (
    '{{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and '
    'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": '
    '<function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}'
)
QWEN_CODER = "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
GLM = "{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>"
LLAMA_3 = (
    '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}{{- \'Respond in the format '
    '{"name": function name, "parameters": dictionary of argument name and its value}.\' }}'
    '{{- "<|eot_id|>" }}{{- "<|python_tag|>" }}'
)
LLAMA_4 = LLAMA_3.replace("start_header_id", "header_start").replace("eot_id", "eot")
MISTRAL = '{{- "[AVAILABLE_TOOLS] [" }}{{- "[TOOL_CALLS] [" }}'
MISTRAL_1 = "{{- '[INST] ' + message['content'] + ' [/INST]' }}"
TWO = QWEN + MISTRAL


@pytest.mark.parametrize(
    ("template", "parser", "others"),
    [
        (QWEN, "hermes", ["hermes"]),
        (QWEN_CODER, "", ["qwen3_coder", "qwen3_xml", "hermes"]),
        (QWEN + QWEN_CODER, "", ["qwen3_coder", "qwen3_xml", "hermes"]),
        (GLM, "", ["glm45", "glm47", "hermes"]),
        (LLAMA_3, "llama3_json", ["llama3_json"]),
        (LLAMA_4, "", ["llama3_json", "llama4_pythonic", "llama4_json"]),
        (MISTRAL, "mistral", ["mistral"]),
        (MISTRAL_1, "", []),
        (TWO, "", ["hermes", "mistral"]),
        ("", "", []),
        (None, "", []),
    ],
)
def test_an_unmistakable_template_chooses_its_parser(
    template: str | None, parser: str, others: list[str]
) -> None:
    assert parser_for(template) == parser
    assert candidates(template) == others


def test_the_names_are_those_of_vllm() -> None:
    named = {family.parser for family in FAMILIES}
    named |= {name for names in CANDIDATES.values() for name in names}
    assert named - set(ToolParserManager.list_registered()) == set()


def test_a_chosen_parser_that_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The template's author, not the operator, chose it: the model is served without tools."""

    def misfit(self: ToolParsers, name: str, config: Any) -> None:
        raise SettingsError(f"tool_parser={name!r}: no such token")

    monkeypatch.setattr(ToolParsers, "__init__", misfit)
    config: Any = None
    with caplog.at_level(logging.WARNING):
        assert ToolParsers.fitting(LLAMA_3, config) is None
    assert "llama3_json" in caplog.text
    assert ToolParsers.fitting(None, config) is None
