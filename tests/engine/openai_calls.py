"""The calls that `tools/pages/openai_page.py` sends to stock vLLM's server and to Midstream: a
name, a path and a body each.

`REFUSED`, `STRICT` and `LENIENT` are differences by design.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MODEL = "demo"
COMPLETION = "completions"
CHAT = "chat/completions"

#: Why an answer differs by design; the page lists the calls under it.
REFUSED = (
    "a field that Midstream does not serve is a 400 that names it; stock serves it, or ignores it"
)
STRICT = "an unknown field is a 400 that names it; stock ignores it"
LENIENT = (
    "an empty `suffix`, and `auto` or an empty list of tools, ask for nothing; stock refuses them"
)


@dataclass(frozen=True)
class Call:
    name: str
    path: str
    body: dict[str, Any]
    differs: str = ""  # by design: why


PROMPTS = (
    "The sky is",
    "The Eiffel Tower is located in the city of",
    "def add(a, b):\n    return",
    "1, 2, 3, 4,",
    "Überraschung: 東京 🙂 is",
)
TALKS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Name a colour."}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    [
        {"role": "user", "content": "Say a number."},
        {"role": "assistant", "content": "Seven."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Another"}, {"type": "text", "text": "one."}],
        },
    ],
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}},
            "required": ["city"],
        },
    },
}
STRICT_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
CALLED = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees."},
]
#: What the model is made to write, so that the parser has calls to read.
ONE_CALL = (
    r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": '
    r'"(Paris|Rome)"\}\}\n</tool_call>'
)
TEXT_AND_CALL = "Let me look\\." + ONE_CALL
BROKEN_CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": </tool_call>'
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOURS = {
    "type": "array",
    "items": {"enum": ["red", "green", "blue"]},
    "minItems": 2,
    "maxItems": 3,
}


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    return schema


#: Fields of both endpoints that change what is sampled, when it ends or what is said of it.
SAMPLING: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 1, "seed": 3},
    "hot": {"temperature": 1.8, "seed": 11},
    "top_p": {"temperature": 1, "top_p": 0.5, "seed": 5},
    "top_k": {"temperature": 1, "top_k": 3, "seed": 5},
    "min_p": {"temperature": 1, "min_p": 0.2, "seed": 5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {"260": 8, "28": -100}},
    "allowed": {"allowed_token_ids": [28, 260, 284, 338], "max_tokens": 5},
    "bad_words": {"bad_words": [" the", " is"]},
    "stop": {"stop": ["a"]},
    "stops": {"stop": [".", ",", "\n"]},
    "stop kept": {"stop": [","], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [260, 28, 30]},
    "min_tokens": {"min_tokens": 7, "stop": [" "]},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 24},
    "special": {"skip_special_tokens": False, "max_tokens": 24},
    "one token": {"max_tokens": 1},
    "n": {"n": 3, "temperature": 1, "seed": 7},
    "n of 1": {"n": 1, "temperature": 0.7, "seed": 7},
    "ids": {"return_token_ids": True},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 20},
    "text": {"response_format": {"type": "text"}},
    "schema": {"response_format": _schema(PERSON), "max_tokens": 40},
    "array": {"response_format": _schema(COLOURS), "max_tokens": 30},
    "nested schema": {"response_format": _schema(nested(20)), "max_tokens": 12},
    "regex": {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}},
    "choice": {"structured_outputs": {"choice": ["red", "green", "blue"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c") "d"'}},
    "structured json": {"structured_outputs": {"json": PERSON}, "max_tokens": 40},
    "json text": {
        "structured_outputs": {"json": '{"type": "integer", "minimum": 5, "maximum": 7}'}
    },
    "compact": {
        "structured_outputs": {"json": COLOURS, "disable_any_whitespace": True},
        "max_tokens": 30,
    },
    "choice, n": {
        "structured_outputs": {"choice": ["red", "green", "blue"]},
        "n": 4,
        "temperature": 1.5,
        "seed": 2,
    },
}
ALTERNATIVES: dict[str, dict[str, Any]] = {
    "logprobs 0": {"logprobs": 0},
    "logprobs 1": {"logprobs": 1},
    "logprobs 20": {"logprobs": 20, "max_tokens": 4},
    "logprobs sampled": {"logprobs": 2, "temperature": 1.8, "seed": 4},
    "logprobs as ids": {"logprobs": 2, "return_tokens_as_token_ids": True},
    "logprobs, n": {"logprobs": 1, "n": 2, "temperature": 1, "seed": 9},
    "logprobs, stop": {"logprobs": 1, "stop": [","]},
    "echo": {"echo": True},
    "echo, logprobs": {"echo": True, "logprobs": 2},
    "echo, ids": {"echo": True, "return_token_ids": True},
    "echo, as ids": {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True},
    "echo alone": {"echo": True, "max_tokens": 0},
    "echo alone, logprobs": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "echo, n": {"echo": True, "n": 2, "temperature": 1, "seed": 1},
}
CHAT_ALTERNATIVES: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True},
    "top_logprobs 3": {"logprobs": True, "top_logprobs": 3},
    "top_logprobs 20": {"logprobs": True, "top_logprobs": 20, "max_tokens": 4},
    "top_logprobs sampled": {"logprobs": True, "top_logprobs": 2, "temperature": 1.8, "seed": 4},
    "top_logprobs as ids": {
        "logprobs": True,
        "top_logprobs": 2,
        "return_tokens_as_token_ids": True,
    },
    "top_logprobs, n": {"logprobs": True, "top_logprobs": 1, "n": 2, "temperature": 1, "seed": 9},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "continued": {"continue_final_message": True, "add_generation_prompt": False},
    "not opened": {"add_generation_prompt": False},
    "template options": {"chat_template_kwargs": {"enable_thinking": False}},
}
TOOLS: dict[str, dict[str, Any]] = {
    "auto": {"tools": [WEATHER]},
    "none": {"tools": [WEATHER], "tool_choice": "none"},
    "required": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60},
    "required of two": {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": 60},
    "required, strict": {"tools": [STRICT_WEATHER], "tool_choice": "required", "max_tokens": 60},
    "required, one": {
        "tools": [STRICT_WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 60,
    },
    "required, cut": {"tools": [STRICT_WEATHER], "tool_choice": "required", "max_tokens": 12},
    "named": {"tools": [STRICT_WEATHER, CLOCK], "tool_choice": NAMED, "max_tokens": 60},
    "auto, strict": {"tools": [STRICT_WEATHER], "max_tokens": 30},
    "auto, a call": {
        "tools": [WEATHER],
        "structured_outputs": {"regex": ONE_CALL},
        "max_tokens": 60,
    },
    "auto, text and a call": {
        "tools": [WEATHER],
        "structured_outputs": {"regex": TEXT_AND_CALL},
        "max_tokens": 60,
    },
    "auto, two calls": {
        "tools": [WEATHER],
        "structured_outputs": {"regex": ONE_CALL + r"\n" + ONE_CALL},
        "max_tokens": 100,
    },
    "auto, broken call": {
        "tools": [WEATHER],
        "structured_outputs": {"regex": BROKEN_CALL},
        "max_tokens": 60,
    },
    "none, a call": {
        "tools": [WEATHER],
        "tool_choice": "none",
        "structured_outputs": {"regex": ONE_CALL},
        "max_tokens": 60,
    },
    "call, logprobs": {
        "tools": [WEATHER],
        "structured_outputs": {"regex": ONE_CALL},
        "max_tokens": 60,
        "logprobs": True,
    },
    "required, n": {
        "tools": [STRICT_WEATHER],
        "tool_choice": "required",
        "max_tokens": 60,
        "n": 2,
        "temperature": 1,
        "seed": 3,
    },
    "answered": {"messages": CALLED, "tools": [WEATHER]},
}
#: What both refuse, with the same status.
BAD: dict[str, dict[str, Any]] = {
    "n 0": {"n": 0},
    "n greedy": {"n": 2},
    "n text": {"n": "two"},
    "temperature": {"temperature": -1},
    "very hot": {"temperature": 5},
    "top_p 0": {"top_p": 0},
    "top_p": {"top_p": 1.5},
    "min_p": {"min_p": 2},
    "repetition": {"repetition_penalty": 0},
    "presence": {"presence_penalty": 3},
    "frequency": {"frequency_penalty": -3},
    "max_tokens": {"max_tokens": 5000},
    "negative": {"max_tokens": -1},
    "min_tokens": {"min_tokens": 9, "max_tokens": 8},
    "bias": {"logit_bias": {"99999999": 1}},
    "bias key": {"logit_bias": {"a": 1}},
    "allowed none": {"allowed_token_ids": []},
    "allowed": {"allowed_token_ids": [99999999]},
    "stop": {"stop": [""]},
    "stream_options": {"stream_options": {"include_usage": True}},
    "format": {"response_format": {"type": "xml"}},
    "no schema": {"response_format": {"type": "json_schema"}},
    "bad schema": {"response_format": _schema({"type": "nonsense"})},
    "deep schema": {"response_format": _schema(nested(80))},
    "bad regex": {"structured_outputs": {"regex": "[("}},
    "bad grammar": {"structured_outputs": {"grammar": "root ::= nothing"}},
    "no choice": {"structured_outputs": {"choice": []}},
    "two constraints": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "no constraint": {"structured_outputs": {}},
    "model": {"model": "nobody"},
    "prompt_logprobs": {"prompt_logprobs": 1, "stream": True},
    "seed": {"seed": 1 << 64},
}
BAD_COMPLETION: dict[str, dict[str, Any]] = {
    "no prompt": {"prompt": None},
    "empty": {"prompt": ""},
    "ids": {"prompt": [99999999]},
    "mixed": {"prompt": [1, "a"]},
    "long": {"prompt": "word " * 1100},
    "logprobs": {"logprobs": 21},
    "logprobs -2": {"logprobs": -2},
    "max_tokens 0": {"max_tokens": 0},
    "suffix": {"suffix": "end"},
}
BAD_CHAT: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "role": {"messages": [{"role": 7, "content": "a"}]},
    "top_logprobs": {"top_logprobs": 2},
    "top_logprobs 21": {"logprobs": True, "top_logprobs": 21},
    "no tools": {"tool_choice": "required"},
    "other tool": {"tools": [CLOCK], "tool_choice": NAMED},
    "tool": {"tools": [{"type": "function"}]},
    "continued": {"continue_final_message": True, "add_generation_prompt": True},
    "choice": {"tools": [WEATHER], "tool_choice": "always"},
}
BY_DESIGN: dict[str, tuple[dict[str, Any], str]] = {
    "beam search": ({"use_beam_search": True, "n": 2}, REFUSED),
    "truncated": ({"truncate_prompt_tokens": 2}, REFUSED),
    "unknown field": ({"colour": "red"}, STRICT),
    "unknown option": ({"stream": True, "stream_options": {"colour": True}}, STRICT),
}


def calls() -> list[Call]:
    """All calls, in an order that both servers get."""
    return [*_completions(), *_chats(), *_refused()]


def _completions() -> Iterator[Call]:
    def call(name: str, differs: str = "", **body: Any) -> Iterator[Call]:
        body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 10, "temperature": 0, **body}
        yield Call(f"completion: {name}", COMPLETION, body, differs)
        if "prompt_logprobs" not in body:
            yield Call(
                f"completion, streamed: {name}", COMPLETION, {**body, "stream": True}, differs
            )

    for prompt in PROMPTS:
        yield from call(f"{prompt!r}", prompt=prompt)
    yield from call("several prompts", prompt=list(PROMPTS[:3]))
    yield from call("several prompts, n", prompt=list(PROMPTS[:2]), n=2, temperature=1, seed=6)
    yield from call("token ids", prompt=[504, 2644, 314])
    yield from call("lists of token ids", prompt=[[504, 2644, 314], [33]])
    yield from call("prompt_logprobs", prompt_logprobs=2)
    yield from call("echo of token ids", prompt=[504, 2644, 314], echo=True, logprobs=1)
    yield from call("echo of several", prompt=list(PROMPTS[:2]), echo=True, logprobs=1)
    yield from call("suffix", LENIENT, suffix="")
    for name, body in {**SAMPLING, **ALTERNATIVES}.items():
        yield from call(name, **body)
    yield from call("with usage", stream=True, stream_options={"include_usage": True})


def _chats() -> Iterator[Call]:
    def call(name: str, differs: str = "", **body: Any) -> Iterator[Call]:
        body = {"model": MODEL, "messages": TALKS[0], "max_tokens": 10, "temperature": 0, **body}
        yield Call(f"chat: {name}", CHAT, body, differs)
        if "prompt_logprobs" not in body:
            yield Call(f"chat, streamed: {name}", CHAT, {**body, "stream": True}, differs)

    for number, talk in enumerate(TALKS):
        yield from call(f"conversation {number}", messages=talk)
    yield from call("prompt_logprobs", prompt_logprobs=1)
    yield from call("reasoning_effort", reasoning_effort="low")
    for name, body in {**SAMPLING, **CHAT_ALTERNATIVES}.items():
        yield from call(
            name,
            **(
                {"messages": [*TALKS[0], {"role": "assistant", "content": "Colours like"}]}
                if name == "continued"
                else {}
            ),
            **body,
        )
    for name, body in TOOLS.items():
        yield from call(f"tools, {name}", **{"messages": ASK, **body})
    yield from call("with usage", stream=True, stream_options={"include_usage": True})


def _refused() -> Iterator[Call]:
    plain = {
        COMPLETION: {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0},
        CHAT: {"model": MODEL, "messages": TALKS[0], "max_tokens": 8, "temperature": 0},
    }
    for path, bad in ((COMPLETION, {**BAD, **BAD_COMPLETION}), (CHAT, {**BAD, **BAD_CHAT})):
        for name, body in bad.items():
            yield Call(f"{path}, refused: {name}", path, {**plain[path], **body})
        for name, (body, why) in BY_DESIGN.items():
            yield Call(f"{path}, by design: {name}", path, {**plain[path], **body}, why)
    for name, body in {"no tools": {"tools": []}, "auto": {"tool_choice": "auto"}}.items():
        yield Call(f"{CHAT}, by design: {name}", CHAT, {**plain[CHAT], **body}, LENIENT)
