"""Tool calls in generated text: vLLM's own parsers find them, in whole texts or during generation.

These parsers take the request type of vLLM's server, which is rebuilt here from what the job keeps.
Their changes to that request (text constrained to calls, special tokens kept) are copied into the
sampling parameters.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager

from ....schemas.base.errors import MidstreamError, Translated, invalid
from ....schemas.jobs.jobs import CallDelta, Message, MessageDelta
from ....schemas.prompts.chat import FunctionCall, ToolCall, ToolUse
from ....schemas.settings.settings import SettingsError
from ..protocol import EngineRequest
from .tool_families import parser_for

logger = logging.getLogger(__name__)


def check_name(name: str) -> None:
    """Raises SettingsError when vLLM has no such parser."""
    if name not in (known := ToolParserManager.list_registered()):
        raise SettingsError(
            f"tool_parser={name!r}: vLLM has no such parser; valid: {', '.join(known)}"
        )


class ToolParsers:
    """Calls one of vLLM's parsers, for one model."""

    def __init__(self, name: str, config: ModelConfig):
        """Raises SettingsError when vLLM has no such parser, or it does not fit the tokenizer."""
        check_name(name)
        self.name = name
        self._config = config
        self._tokenizer = cached_tokenizer_from_config(config)
        with Translated(
            (TypeError, ValueError), lambda error: SettingsError(f"tool_parser={name!r}: {error}")
        ):
            self._parser = ParserManager.get_parser(
                tool_parser_name=name,
                enable_auto_tools=True,
                model_name=config.model,
                is_harmony=config.hf_config.model_type == "gpt_oss",
                tokenizer=self._tokenizer,
            )

    @classmethod
    def fitting(cls, template: str | None, config: ModelConfig) -> "ToolParsers | None":
        """Return the parser that a chat template calls for; None if that is ambiguous, or the
        parser does not fit the tokenizer.
        """
        if not (name := parser_for(template)):
            return None
        try:
            return cls(name, config)
        except SettingsError as error:
            logger.warning("no parser of tool calls: the chat template calls for %s", error)
            return None

    def begin(self, ask: EngineRequest, params: SamplingParams) -> "ToolReader":
        """Return a reader of one output, and change `params` for it.

        Raises a 400 when vLLM refuses the tools.
        """
        tools = ask.tools
        assert tools is not None, "only requests with tools are read"
        choice: Any = (
            {"type": "function", "function": {"name": tools.choice}}
            if tools.named
            else tools.choice
        )
        with Translated(
            (ValidationError, ValueError, TypeError, KeyError),
            lambda error: invalid("tools", f"the parser of tool calls refuses them: {error}"),
        ):
            request = ChatCompletionRequest.model_validate(
                {
                    "messages": [],
                    "tools": msgspec.json.decode(tools.tools),
                    "tool_choice": choice,
                    "stream": ask.stream,
                    "parallel_tool_calls": tools.parallel,
                }
            )
            request.structured_outputs = params.structured_outputs
            parser = self._parser(
                self._tokenizer, request.tools, model_config=self._config, chat_template_kwargs={}
            )
            if request.tool_choice != "none" or parser.always_adjust_request:
                request = parser.adjust_request(request)
        params.skip_special_tokens = params.skip_special_tokens and request.skip_special_tokens
        params.structured_outputs = request.extract_structured_outputs()
        return ToolReader(parser, request, ask, tools)


@dataclass
class ToolReader:
    """Reads the tool calls of one output.

    A call's id is derived from its job, so that every attempt gives the same id.
    """

    _parser: Parser
    _request: ChatCompletionRequest
    _ask: EngineRequest
    _tools: ToolUse
    _content: str | None = None
    _calls: list[CallDelta] = field(default_factory=list)

    def read(self, text: str, token_ids: Sequence[int], finished: bool) -> MessageDelta:
        """Parse the next part of the text; return the new content and parts of calls."""
        parsed = self._checked(
            lambda: self._parser.parse_delta(
                text, list(token_ids), self._request, self._ask.token_ids, finished=finished
            )
        )
        if parsed is None:
            return MessageDelta()
        calls = [
            self._call_delta(call)
            for call in parsed.tool_calls or []
            if self._tools.parallel or call.index == 0
        ]
        if parsed.content:
            self._content = (self._content or "") + parsed.content
        for call in calls:
            self._note(call)
        return MessageDelta(content=parsed.content or "", calls=calls)

    def streamed(self) -> Message:
        """Return the message that all parts given to `read` make up."""
        return Message(
            content=self._content,
            tool_calls=[_call(call.id, call.name, call.arguments) for call in self._calls],
        )

    def whole(self, text: str, token_ids: Sequence[int]) -> Message:
        """Parse a whole text that was not read in parts."""
        self._parser.set_prompt_token_ids(self._ask.token_ids)
        _, content, result = self._checked(
            lambda: self._parser.parse(
                text, self._request, enable_auto_tools=True, model_output_token_ids=list(token_ids)
            )
        )
        calls = [
            _call(self._id(index, call.id), call.name, call.arguments)
            for index, call in enumerate(result or [])
        ]
        forced = self._tools.named or self._tools.choice == "required"
        return Message(
            content=(content or "") if forced else content,
            tool_calls=calls if self._tools.parallel else calls[:1],
        )

    def finish_reason(self, message: Message, reason: str) -> str:
        """Return `tool_calls` in place of `stop` for a text with calls, as OpenAI's API does; after
        a call of a tool that the request names, the reason stays.
        """
        if self._tools.named or self._tools.choice == "none":
            return reason
        if self._ask.stream:
            called = bool(message.tool_calls) and reason == "stop"
        elif self._tools.choice == "auto":
            called = bool(message.tool_calls)
        else:
            called = reason == "stop"
        return "tool_calls" if called else reason

    def _checked(self, parse: Any) -> Any:
        try:
            return parse()
        except Exception as error:
            # a parser may raise any exception for an output that it cannot parse
            logger.warning("the parser of tool calls failed", exc_info=True)
            raise MidstreamError(
                "internal", f"the parser of tool calls failed: {type(error).__name__}: {error}"
            ) from error

    def _call_delta(self, call: Any) -> CallDelta:
        function = call.function
        return CallDelta(
            index=call.index,
            id=self._id(call.index, call.id) if call.id else "",
            name=(function.name if function else None) or "",
            arguments=(function.arguments if function else None) or "",
        )

    def _note(self, new: CallDelta) -> None:
        while len(self._calls) <= new.index:
            self._calls.append(CallDelta(index=len(self._calls)))
        known = self._calls[new.index]
        self._calls[new.index] = CallDelta(
            index=new.index,
            id=known.id or new.id,
            name=known.name + new.name,
            arguments=known.arguments + new.arguments,
        )

    def _id(self, index: int, parsed: str | None) -> str:
        """Return the parser's id of a call, or a derived one where the parser's is random."""
        if parsed and not parsed.startswith("chatcmpl-tool-"):
            return parsed
        place = f"{self._ask.job} {self._ask.request} {index}"
        return f"chatcmpl-tool-{hashlib.sha256(place.encode()).hexdigest()[:16]}"


def _call(call_id: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))
