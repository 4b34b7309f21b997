"""Tool-call parsers by the markers in a model's chat template. Data, and what reads it.

A template tells the model how to write its calls, so that unmistakable markers name
vLLM's parser. Imports no vLLM: a test compares the names with vLLM's registry.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFamily:
    """A parser of vLLM, and what a chat template must have for it to be chosen."""

    parser: str
    markers: tuple[str, ...]  # all of these
    others: tuple[str, ...] = ()  # none of these: other parsers share the markers


#: Families whose templates are unmistakable.
FAMILIES: tuple[ToolFamily, ...] = (
    # Qwen2.5, Qwen3, Hermes 2 and 3
    ToolFamily(
        "hermes",
        markers=("<tool_call>", '{"name": <function-name>, "arguments": <args-'),
        others=("<function=", "<arg_key>"),
    ),
    # Llama 3.1 to 3.3; Llama 4 writes other headers
    ToolFamily(
        "llama3_json",
        markers=(
            "<|start_header_id|>",
            "<|eot_id|>",
            'Respond in the format {"name": function name, "parameters": dictionary of argument',
        ),
    ),
    ToolFamily("mistral", markers=("[AVAILABLE_TOOLS]", "[TOOL_CALLS]")),
)
#: Marker in a chat template → parsers that may fit, of which the operator chooses.
CANDIDATES: dict[str, tuple[str, ...]] = {
    "<function=": ("qwen3_coder", "qwen3_xml"),
    "<arg_key>": ("glm45", "glm47"),
    "<tool_call>": ("hermes",),
    "[TOOL_CALLS]": ("mistral",),
    "<|python_tag|>": ("llama3_json",),
    "<|header_start|>": ("llama4_pythonic", "llama4_json"),
    "<|tool_call|>": ("granite", "phi4_mini_json"),
    "<|tool_calls_section_begin|>": ("kimi_k2",),
    "<｜tool▁calls▁begin｜>": ("deepseek_v3", "deepseek_v31"),
    "<|channel|>": ("openai",),
    "<minimax:tool_call>": ("minimax_m2",),
    "<seed:tool_call>": ("seed_oss",),
}


def parser_for(template: str | None) -> str:
    """Return the parser that a chat template calls for; empty unless exactly one family fits."""
    text = _plain(template)
    fitting = [
        family.parser
        for family in FAMILIES
        if all(marker in text for marker in family.markers)
        and not any(other in text for other in family.others)
    ]
    return fitting[0] if len(fitting) == 1 else ""


def candidates(template: str | None) -> Sequence[str]:
    """Return the parsers that may fit a chat template, the likeliest first."""
    text = _plain(template)
    found = [name for marker, names in CANDIDATES.items() if marker in text for name in names]
    return list(dict.fromkeys(found))


def _plain(template: str | None) -> str:
    """Return a template without the backslashes of quotes in its strings."""
    return (template or "").replace('\\"', '"')
