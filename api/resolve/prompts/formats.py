"""Output formats of a request: tools, JSON schemas and other constraints, bounded and in the form
that a job keeps.

They are compiled by the engine, where a deeply nested schema would take seconds.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UnsetType

from ....schemas.base.errors import invalid
from ....schemas.base.limits import MAX_NESTING, MAX_SCHEMA, MAX_TEMPLATE_OPTIONS, MAX_TOOLS_BYTES
from ....schemas.base.records import to_json
from ....schemas.jobs.jobs import StructuredRequest
from ....schemas.jobs.openai import (
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    OpenAIRequest,
    TextFormat,
)
from ....schemas.prompts.chat import NamedTool, Rendering, Tool, ToolUse

_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)

#: Members of `structured_outputs` of which exactly one is given.
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
#: Variables of a chat template that a request sets elsewhere, or not at all.
_OWN_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)


def bounded_json(raw: msgspec.Raw | bytes, at: str, most: int = MAX_SCHEMA) -> Any:
    """The JSON at `at`, of at most `most` bytes and `MAX_NESTING` levels.

    Raises a 400 that names the field.
    """
    data = bytes(raw)
    if len(data) > most:
        raise invalid(at, f"has {len(data)} bytes", allowed=f"at most {most}")
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        depth += (match[0] in b"{[") - (match[0] in b"}]")
        if depth > MAX_NESTING:
            raise invalid(
                at,
                "is nested too deeply",
                allowed=f"at most {MAX_NESTING} levels of objects and arrays",
            )
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(at, f"is not JSON: {error}") from None


def _schema(raw: msgspec.Raw | bytes, at: str) -> str:
    """A JSON schema as text: as it is written, so that it keeps within its bound."""
    if not isinstance(bounded_json(raw, at), dict):
        raise invalid(at, "is not a JSON schema", allowed="an object")
    return bytes(raw).decode()


def structured(structured_request: StructuredRequest | None, at: str) -> StructuredRequest | None:
    """The constraint at `at`, its JSON schema as text. Raises a 400 unless there is exactly one."""
    if structured_request is None:
        return None
    given = [name for name in CONSTRAINTS if getattr(structured_request, name) is not None]
    if len(given) != 1:
        result = " and ".join(given) if given else "no constraint"
        raise invalid(at, f"has {result}", allowed=f"exactly one of {', '.join(CONSTRAINTS)}")
    if structured_request.structural_tag is not None:
        bounded_json(structured_request.structural_tag.encode(), f"{at}.structural_tag")
    if structured_request.grammar is not None and not structured_request.grammar.strip():
        raise invalid(f"{at}.grammar", "is empty")
    if structured_request.regex is not None and "\0" in structured_request.regex:
        raise invalid(f"{at}.regex", "contains a NUL character")
    schema = structured_request.json
    if schema is None:
        return structured_request
    raw = schema.encode() if isinstance(schema, str) else to_json(schema)
    return msgspec.structs.replace(structured_request, json=_schema(raw, f"{at}.json"))


def format_of(body: OpenAIRequest) -> StructuredRequest | None:
    """The constraint of `response_format` or `structured_outputs`.

    Raises a 400 when both ask for one.
    """
    response_format = body.response_format
    if response_format is None or isinstance(response_format, TextFormat):
        return structured(body.structured_outputs, "structured_outputs")
    if body.structured_outputs is not None:
        raise invalid("structured_outputs", "is given with response_format", allowed="one of them")
    if isinstance(response_format, JsonObjectFormat):
        return StructuredRequest(json_object=True)
    assert isinstance(response_format, JsonSchemaFormat)
    return StructuredRequest(
        json=_schema(response_format.json_schema.schema, "response_format.json_schema.schema")
    )


def tool_use(body: ChatRequest) -> ToolUse | None:
    """The tools of a chat and how they should be used.

    Raises a 400 for a choice without its tool.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise invalid("tool_choice", "needs tools")
        return None
    described = to_json(described_tools(body.tools))
    if len(described) > MAX_TOOLS_BYTES:
        raise invalid(
            "tools",
            f"have {len(described)} bytes as JSON",
            allowed=f"at most {MAX_TOOLS_BYTES} together",
        )
    parallel = body.parallel_tool_calls is not False
    if not isinstance(choice, NamedTool):
        return ToolUse(tools=described, choice=choice or "auto", parallel=parallel)
    names = [tool.function.name for tool in body.tools]
    if choice.function.name not in names:
        raise invalid(
            "tool_choice.function.name",
            f"{choice.function.name!r} is not one of the tools",
            allowed=", ".join(names),
        )
    return ToolUse(tools=described, choice=choice.function.name, named=True, parallel=parallel)


def described_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as a chat template gets them, with every member that vLLM's server gives them."""
    return [
        {"type": tool.type, "function": _function(tool, f"tools[{index}]")}
        for index, tool in enumerate(tools)
    ]


def _function(tool: Tool, at: str) -> dict[str, Any]:
    function, schema = tool.function, None
    if not isinstance(function.parameters, UnsetType):
        schema = bounded_json(function.parameters, f"{at}.function.parameters")
        if schema is not None and not isinstance(schema, dict):
            raise invalid(
                f"{at}.function.parameters", "is not a JSON schema", allowed="an object, or null"
            )
    described = {"name": function.name, "description": function.description, "parameters": schema}
    return described if function.strict is None else {**described, "strict": function.strict}


def rendering_of(body: ChatRequest) -> Rendering:
    """Return how the chat template is to render the conversation.

    Raises a 400 naming the option that it does not take.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message", "needs add_generation_prompt: false")
    options: Any = {}
    if not isinstance(body.chat_template_kwargs, UnsetType):
        options = (
            bounded_json(body.chat_template_kwargs, "chat_template_kwargs", MAX_TEMPLATE_OPTIONS)
            or {}
        )
        if not isinstance(options, dict):
            raise invalid("chat_template_kwargs", "is not an object")
        if taken := [name for name in _OWN_VARIABLES if name in options]:
            raise invalid(
                f"chat_template_kwargs.{taken[0]}",
                "is not a further variable",
                allowed=f"names other than {_OWN_VARIABLES}",
            )
    return Rendering(
        tools=described_tools(body.tools) if body.tools else None,
        options=options,
        opened=body.add_generation_prompt,
        continued=body.continue_final_message,
    )
