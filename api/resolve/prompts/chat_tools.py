"""Resolves a chat's tools, how to use them, and how the chat template renders the conversation."""

from collections.abc import Sequence
from typing import Any

from msgspec import UnsetType

from ....schemas.base.errors import invalid
from ....schemas.base.limits import MAX_TEMPLATE_OPTIONS, MAX_TOOLS_BYTES
from ....schemas.base.records import to_json
from ....schemas.jobs.openai import ChatRequest
from ....schemas.prompts.chat import NamedTool, Rendering, Tool, ToolUse
from .formats import bounded_json

#: Variables of a chat template that `chat_template_kwargs` cannot set.
_OWN_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)


def tool_use(body: ChatRequest) -> ToolUse | None:
    """Return the tools of a chat and how to use them.

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
    """Return the tools as chat templates get them, with every member that vLLM's server gives
    them.
    """
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
    """Return how the chat template should render the conversation.

    Raises a 400 naming the option that is not valid.
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
                "is a variable that the request sets elsewhere, or not at all",
                allowed=f"names other than {', '.join(_OWN_VARIABLES)}",
            )
    return Rendering(
        tools=described_tools(body.tools) if body.tools else None,
        options=options,
        opened=body.add_generation_prompt,
        continued=body.continue_final_message,
    )
