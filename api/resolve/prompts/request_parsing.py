"""Parsing of the three request body shapes into one `ParsedRequest`; of a chat, also its tools, how
to use them, and how the chat template renders the conversation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ....schemas.access.handling import Handling, handling_of
from ....schemas.artifacts.probes import ProbeUse
from ....schemas.base.errors import Excluded, check_excluded, invalid
from ....schemas.base.limits import MAX_PROMPTS, MAX_TEMPLATE_OPTIONS, MAX_TOOLS_BYTES, MAX_UNSERVED
from ....schemas.base.records import JsonObject, to_json
from ....schemas.jobs.jobs import JobRequest, Sampling
from ....schemas.jobs.openai import ONLY, ChatRequest, CompletionRequest, OpenAIRequest
from ....schemas.prompts.chat import (
    PLAIN,
    ChatMessage,
    ImagePart,
    NamedTool,
    PlainMessage,
    Rendering,
    TextPart,
    Tool,
    ToolCall,
    ToolUse,
)
from ....schemas.readings.readings import READINGS
from ....schemas.requests.specs import CaptureSpec, PatchSpec, SteeringSpec
from .formats import bounded_json, format_of, structured
from .images import read_image

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
        if choice not in (None, "none", "auto"):
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


def described_tools(tools: Sequence[Tool]) -> list[JsonObject]:
    """Return the tools as chat templates get them, with every member that vLLM's server gives
    them.
    """
    return [
        {"type": tool.type, "function": _function(tool, f"tools[{index}]")}
        for index, tool in enumerate(tools)
    ]


def _function(tool: Tool, at: str) -> JsonObject:
    function = tool.function
    schema = None
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
    effort = body.reasoning_effort
    if effort is not None:
        thinks = effort != "none"
        options = {"enable_thinking": thinks, **options, "reasoning_effort": effort}
    return Rendering(
        tools=described_tools(body.tools) if body.tools else None,
        options=options,
        opened=body.add_generation_prompt,
        continued=body.continue_final_message,
    )


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt before tokenisation: text, token ids or a conversation; `field` is where the user
    wrote it.
    """

    field: str
    value: str | list[int] | Sequence[ChatMessage]
    images: Sequence[bytes] = ()  # of a conversation, in its order
    rendering: Rendering = PLAIN  # of a conversation
    special_tokens: bool = True  # whether the tokenizer adds its own to a text

    @property
    def is_conversation(self) -> bool:
        return (
            not isinstance(self.value, str)
            and bool(self.value)
            and isinstance(self.value[0], ChatMessage)
        )

    @property
    def messages(self) -> list[ChatMessage]:
        return [message for message in self.value if isinstance(message, ChatMessage)]


@dataclass(frozen=True)
class ParsedRequest:
    """A body with defaults filled in, before anything is known of the model.

    `sampling_at` prefixes sampling's field names.
    """

    kind: str
    model: str
    prompts: list[ParsedPrompt]
    sampling: Sampling
    sampling_at: str = ""
    fill_max_tokens: bool = False  # generate as long as the model's length allows
    n: int = 1  # outputs of each prompt
    tools: ToolUse | None = None
    echo: bool = False  # outputs come with their prompts
    capture: CaptureSpec | None = None
    steering: list[SteeringSpec] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # of a dose: each multiplies all of steering
    patch: list[PatchSpec] = field(default_factory=list)
    readings: dict[str, Any] = field(default_factory=dict)  # field → the spec, or the list of specs
    stream: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    handling: Handling = field(default_factory=Handling)
    lora: str | None = None
    probes: list[str | ProbeUse] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    conversation: str | None = None
    # field of ours → where the request has it instead
    written: dict[str, str] = field(default_factory=dict)


def parse_job(body: JobRequest) -> ParsedRequest:
    """Return what the body of `POST /v1/jobs` asks for.

    Raises a 400 naming `prompts` when there is nothing to run, or both kinds of prompts.
    """
    if (body.prompts is None) == (body.messages is None):
        raise invalid(
            "prompts",
            "prompts and messages are both given" if body.prompts else "no prompt given",
            allowed=(
                "either prompts (texts or lists of token ids) or messages (lists of chat messages)"
            ),
        )
    prompts = [
        ParsedPrompt(f"prompts[{index}]", prompt, special_tokens=body.add_special_tokens)
        for index, prompt in enumerate(body.prompts or [])
    ]
    chats = [
        parse_conversation(f"messages[{index}]", messages)
        for index, messages in enumerate(body.messages or [])
    ]
    return _parsed(
        body,
        kind="gradient" if of_gradients(body) else "generate",
        prompts=prompts or chats,
        sampling=msgspec.structs.replace(
            body.sampling,
            structured_outputs=structured(
                body.sampling.structured_outputs, "sampling.structured_outputs"
            ),
        ),
        sampling_at="sampling.",
    )


def parse_completion(body: CompletionRequest) -> ParsedRequest:
    """Return what the body of `POST /v1/completions` asks for.

    Raises a 400 naming the field that we do not serve.
    """
    _refuse_unserved(body)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "is 0", allowed="at least 1; 0 with echo: true")
    # with `echo` alone one token is generated, and not shown
    sampling = _sampling(body, max_tokens or 1, body.logprobs)
    if body.echo and sampling.prompt_logprobs is None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs)
    return _parsed(
        body,
        kind="completion",
        prompts=[
            replace(prompt, special_tokens=body.add_special_tokens)
            for prompt in _completion_prompts(body.prompt)
        ],
        sampling=sampling,
        n=body.n or 1,
        echo=bool(body.echo or body.return_token_ids),
        stream=bool(body.stream),
        written={"sampling.max_tokens": "max_tokens", "sampling.logprobs": "logprobs"},
    )


def parse_chat(body: ChatRequest) -> ParsedRequest:
    """Return what the body of `POST /v1/chat/completions` asks for.

    Raises a 400 naming the field that we do not serve.
    """
    _refuse_unserved(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    named = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, named)
    return _parsed(
        body,
        kind="chat",
        prompts=[
            replace(parse_conversation("messages", body.messages), rendering=rendering_of(body))
        ],
        n=body.n or 1,
        tools=tool_use(body),
        echo=bool(body.return_token_ids),
        sampling=_sampling(
            body, max_tokens or 1, (body.top_logprobs or 0) if body.logprobs else None
        ),
        fill_max_tokens=max_tokens is None,
        stream=bool(body.stream),
        written={
            "max_tokens": named,
            "sampling.max_tokens": named,
            "sampling.logprobs": "top_logprobs",
        },
    )


def of_gradients(body: JobRequest | OpenAIRequest) -> bool:
    """Return whether a body asks for gradient rows, which are a kind of job."""
    return body.capture is not None and body.capture.of == "gradient"


#: Members of a parsed request that every body has under the same name.
_SAME = ("model", "capture", "steering", "patch", "lora", "probes", "policies", "conversation")


def _parsed(
    body: JobRequest | OpenAIRequest, *, sampling: Sampling, echo: bool = False, **own: Any
) -> ParsedRequest:
    """Return the request with the members that all bodies share; `own`: the others.

    Log-probabilities of a prompt are returned with it.
    """
    same = {name: getattr(body, name) for name in _SAME}
    readings = {name: spec for name in READINGS if (spec := getattr(body, name))}
    if of_gradients(body) and own["kind"] != "gradient":
        raise invalid("capture.of", "gradient rows are served by POST /v1/jobs only")
    return ParsedRequest(
        **same,
        sampling=sampling,
        echo=echo or sampling.prompt_logprobs is not None,
        readings=readings,
        metadata=body.metadata or {},
        handling=handling_of(body),
        **own,
    )


def _refuse_unserved(body: OpenAIRequest) -> None:
    for name, harmless in ONLY.items():
        raw = getattr(body, name, UNSET)
        # a form of request may serve what another one does not
        if isinstance(raw, msgspec.Raw) and not _is_one_of(bytes(raw), harmless):
            shown = bytes(raw)[:80].decode(errors="replace")
            raise invalid(
                name,
                f"{shown} is not supported",
                allowed=msgspec.json.encode(harmless[0]).decode(),
                hint="omit it",
            )
    check_excluded(
        [
            Excluded(
                "stream_options",
                body.stream_options is not None and not body.stream,
                "needs stream: true",
            ),
            Excluded(
                "prompt_logprobs",
                body.stream and body.prompt_logprobs is not None,
                "is not valid with stream: true",
                allowed="null, or stream: false",
            ),
        ]
    )


def _is_one_of(raw: bytes, values: Sequence[Any]) -> bool:
    """Return whether the JSON is one of `values`. JSON longer than all of them is not decoded."""
    try:
        return len(raw) <= MAX_UNSERVED and msgspec.json.decode(raw) in values
    except (msgspec.DecodeError, UnicodeDecodeError):  # it was not checked before
        return False


def _sampling(body: OpenAIRequest, max_tokens: int, logprobs: int | None) -> Sampling:
    """Return the job's sampling parameters: the body's fields of the same names, with `max_tokens`
    and `logprobs` as given here. A null field takes its default.
    """
    given = {
        name: value
        for name in Sampling.__struct_fields__
        if (value := getattr(body, name, None)) is not None
    }
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    given["top_k"] = max(body.top_k, 0)
    given["structured_outputs"] = format_of(body)
    return Sampling(**{"temperature": 1.0, **given, "max_tokens": max_tokens, "logprobs": logprobs})


def _completion_prompts(prompt: str | list[str | int | list[int]]) -> list[ParsedPrompt]:
    """Return the body's prompts: one (text or token ids), or a list of them. Raises a 400 for a
    mixture of token ids and prompts.
    """
    if isinstance(prompt, str):
        return [ParsedPrompt("prompt", prompt)]
    if not prompt:
        raise invalid("prompt", "is empty: give text or token ids")
    if len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise invalid("prompt", f"has {len(prompt)} prompts", allowed=f"at most {MAX_PROMPTS}")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ParsedPrompt("prompt", ids)]
    if ids:
        raise invalid(
            "prompt",
            "mixes token ids and texts",
            allowed="text, a list of texts, token ids, or lists of token ids",
        )
    return [
        ParsedPrompt(f"prompt[{index}]", item)
        for index, item in enumerate(prompt)
        if not isinstance(item, int)
    ]


def parse_conversation(at: str, messages: Sequence[ChatMessage]) -> ParsedPrompt:
    """Return a conversation with its images, which are read here.

    Raises a 400 naming the message or part below `at` that is not valid.
    """
    for number, message in enumerate(messages):
        _check_message(message, f"{at}[{number}]")
    images = [
        read_image(part, f"{at}[{number}].content[{index}]")
        for number, message in enumerate(messages)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]
    return ParsedPrompt(at, messages, images or ())


#: Role → members of a message that belong to no other.
_OF_ROLE = {
    "tool_calls": "assistant",
    "reasoning": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}


def _check_message(message: ChatMessage, at: str) -> None:
    if message.content is None and message.role != "assistant":
        raise invalid(f"{at}.content", f"is required of a message with role {message.role!r}")
    for name, role in _OF_ROLE.items():
        if getattr(message, name) is not None and message.role != role:
            raise invalid(
                f"{at}.{name}", f"is not valid with role {message.role!r}", allowed=f"role {role!r}"
            )
    if len({message.reasoning, message.reasoning_content} - {None}) > 1:
        raise invalid(f"{at}.reasoning_content", "differs from reasoning: give one of them")


def plain_messages(messages: Iterable[ChatMessage]) -> list[PlainMessage]:
    """Return a conversation as chat templates know it, with OpenAI's newer name for the system role
    under its old one.
    """
    return [_message(message) for message in messages]


def last_said(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last message of the user; of the last message, if there is none."""
    *_, last = [message for message in messages if message.role == "user"] or messages
    content = _content(last)
    return (
        content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
    )


def _message(message: ChatMessage) -> PlainMessage:
    plain: PlainMessage = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message),
    }
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        # templates read either
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}
    same = {
        name: value
        for name in ("tool_call_id", "name")
        if (value := getattr(message, name)) is not None
    }
    return {**plain, **same}


def _tool_call(call: ToolCall) -> JsonObject:
    """Return the call as chat templates read it: arguments as an object, `{}` if a model wrote
    something else.
    """
    try:
        arguments = msgspec.json.decode(call.function.arguments)
    except (msgspec.DecodeError, RecursionError):
        arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _content(message: ChatMessage) -> str | list[dict[str, str]]:
    """Return the message's text, or its parts if one of them is an image."""
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    if any(isinstance(part, ImagePart) for part in message.content):
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.content
        ]
    return "\n".join(part.text for part in message.content if isinstance(part, TextPart))
