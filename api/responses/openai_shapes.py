"""Job results in OpenAI's two shapes, whole and in chunks: two `Shape`s that routes use alike."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from ...schemas.jobs import JobResult, Output, TokenLogprob
from ...schemas.openai import (
    AnswerMessage,
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    Delta,
    Usage,
)


@dataclass(frozen=True)
class Shape:
    """One endpoint's answers: `choice` of an output; `opening`, `delta` and `finish` are the choices of its chunks."""

    answer: Callable[..., Any]
    answer_object: str
    choice: Callable[[Output], Any]
    chunk: Callable[..., Any]
    chunk_object: str
    opening: Callable[[int], Any] | None  # said once per choice before its first text
    delta: Callable[[int, str], Any]
    finish: Callable[[int, str], Any]


def usage(outputs: Sequence[Output]) -> Usage:
    prompt = sum(output.prompt_tokens for output in outputs)
    generated = sum(len(output.token_ids) for output in outputs)
    cached = CachedTokens(cached_tokens=sum(output.cached_tokens for output in outputs))
    return Usage(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated, prompt_tokens_details=cached)


def extras(result: JobResult, wanted: bool, settled: bool, readings: Iterable[str] = ()) -> dict[str, Any]:
    """`capture_results` and `determinism` if requested, and `readings` by their fields. Agreement is undecided until all ranks have
    reported."""
    found = {field: getattr(result, field) or [] for field in readings}
    if not wanted:
        return found
    return {**found, "capture_results": result.capture_results, "determinism": result.determinism if settled else None}


def _completion_choice(output: Output) -> CompletionChoice:
    logprobs = None if output.logprobs is None else _completion_logprobs(output.logprobs)
    return CompletionChoice(index=output.index, text=output.text, logprobs=logprobs, finish_reason=output.finish_reason)


def _completion_logprobs(tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token.token)
    return CompletionLogprobs(
        tokens=[token.token for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[{alternative.token: alternative.logprob for alternative in token.top} for token in tokens],
        text_offset=offsets,
    )


def _chat_choice(output: Output) -> ChatChoice:
    logprobs = None if output.logprobs is None else ChatLogprobs(content=[_chat_logprob(token) for token in output.logprobs])
    message = AnswerMessage(role="assistant", content=output.text)
    return ChatChoice(index=output.index, message=message, logprobs=logprobs, finish_reason=output.finish_reason)


def _chat_logprob(token: TokenLogprob) -> ChatLogprob:
    return ChatLogprob(
        token=token.token,
        logprob=token.logprob,
        bytes=list(token.token.encode()),
        top_logprobs=[_chat_logprob(alternative) for alternative in token.top],
    )


COMPLETION = Shape(
    answer=Completion,
    answer_object="text_completion",
    choice=_completion_choice,
    chunk=CompletionChunk,
    chunk_object="text_completion",
    opening=None,
    delta=lambda index, text: CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None),
    finish=lambda index, reason: CompletionChoice(index=index, text="", logprobs=None, finish_reason=reason),
)

CHAT = Shape(
    answer=ChatCompletion,
    answer_object="chat.completion",
    choice=_chat_choice,
    chunk=ChatChunk,
    chunk_object="chat.completion.chunk",
    opening=lambda index: ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""), finish_reason=None),
    delta=lambda index, text: ChatChunkChoice(index=index, delta=Delta(content=text), finish_reason=None),
    finish=lambda index, reason: ChatChunkChoice(index=index, delta=Delta(), finish_reason=reason),
)


def whole(shape: Shape, result: JobResult, created: float, more: dict[str, Any]) -> Any:
    """The answer of a request without `stream`."""
    outputs = sorted(result.outputs, key=lambda output: output.index)
    return shape.answer(
        id=result.id,
        object=shape.answer_object,
        created=int(created),
        model=result.model,
        choices=[shape.choice(output) for output in outputs],
        usage=usage(outputs),
        **more,
    )


def piece(shape: Shape, job_id: str, created: float, model: str, choices: list[Any], *, counted: Any = UNSET, **more: Any) -> Any:
    """One chunk of a stream. `counted`: the usage, if requested; null before the last chunk."""
    return shape.chunk(id=job_id, object=shape.chunk_object, created=int(created), model=model, choices=choices, usage=counted, **more)
