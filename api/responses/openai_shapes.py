"""Formats job results as OpenAI's completions or chats, whole or in chunks: each has an
`AnswerShape`.

Where OpenAI's API leaves something open, answers follow stock vLLM's server:
`docs/coming-from.md` compares them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...schemas.artifacts.probes import ProbeResult
from ...schemas.base.records import by_key
from ...schemas.jobs.jobs import (
    CallDelta,
    Output,
    Prompted,
    TokenLogprob,
)
from ...schemas.jobs.openai import (
    AnswerMessage,
    CachedTokens,
    CallPart,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    PolicyVerdict,
    PromptLogprob,
    PromptLogprobs,
    TokenUsage,
)
from ...schemas.jobs.results import JobResult
from ...schemas.prompts.chat import Role


@dataclass(frozen=True)
class WantedParts:
    """Parts of the answer that a request asks for."""

    n: int = 1
    logprobs: int | None = None  # alternatives of each token; None: no log-probabilities
    echo: bool = False  # the text begins with the prompt
    prompt_alone: bool = False  # the text is the prompt alone
    token_ids: bool = False
    tokens_as_ids: bool = False  # log-probabilities name a token `token_id:N`, not by its text
    role: Role = "assistant"  # of a chat's message

    @property
    def tokens(self) -> bool:
        """Return whether chunks carry tokens' ids or log-probabilities in addition to the text."""
        return self.token_ids or self.logprobs is not None


def wanted_of(body: CompletionRequest | ChatRequest) -> WantedParts:
    as_ids = bool(body.return_tokens_as_token_ids)
    ids = bool(body.return_token_ids)
    n = body.n or 1
    if isinstance(body, ChatRequest):
        role: Role = "assistant" if body.add_generation_prompt else body.messages[-1].role
        return WantedParts(
            n,
            (body.top_logprobs or 0) if body.logprobs else None,
            token_ids=ids,
            tokens_as_ids=as_ids,
            role=role,
        )
    echo = bool(body.echo)
    return WantedParts(n, body.logprobs, echo, echo and body.max_tokens == 0, ids, as_ids)


@dataclass
class ChoicePart:
    """A part of what was generated for one choice, or all of it."""

    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # only in the first part, if the answer includes the prompt
    prompt: Prompted | None = None
    offset: int = 0  # of its first token: characters in the names of all tokens before it

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.ids or self.logprobs or self.prompt)


def whole_part(output: Output) -> ChoicePart:
    """Return a whole output as one part."""
    message = output.message
    prompt = output.prompt
    given = ChoicePart(
        output.text,
        [],
        output.token_ids,
        output.logprobs or [],
        None if isinstance(prompt, UnsetType) else prompt,
    )
    if isinstance(message, UnsetType):
        return given
    given.text = message.content or ""
    given.calls = [
        CallDelta(
            index=index, id=call.id, name=call.function.name, arguments=call.function.arguments
        )
        for index, call in enumerate(message.tool_calls)
    ]
    return given


@dataclass(frozen=True)
class AnswerShape:
    """Formats one endpoint's answers. `choice` formats a whole output; `opening`, `delta` and
    `finish` format the choices of chunks.
    """

    answer: Callable[..., Any]
    answer_object: str
    choice: Callable[[Output, WantedParts], Any]
    about_prompt: Callable[[Output, WantedParts], dict[str, Any]]  # fields next to `choices`
    chunk: Callable[..., Any]
    chunk_object: str
    opening: Callable[[int, WantedParts], Any] | None  # sent once per choice before its first text
    delta: Callable[[int, ChoicePart, WantedParts], Any]
    finish: Callable[[Output, WantedParts], Any]


def usage(outputs: Sequence[Output], n: int = 1) -> TokenUsage:
    """Return the token usage of outputs in order, `n` per prompt; each prompt counts once."""
    prompt = sum(output.prompt_tokens for output in outputs[::n])
    generated = sum(len(output.token_ids) for output in outputs)
    cached = CachedTokens(cached_tokens=sum(output.cached_tokens for output in outputs[::n]))
    return TokenUsage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=cached,
    )


def extras(
    result: JobResult,
    needed: bool,
    settled: bool,
    readings: Iterable[str] = (),
    policies: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the results of `readings` by field, with `capture_results` and `determinism` if
    `needed`.

    `policies`: those that the request names. Of others there is nothing but the verdicts of those
    that are told: their thresholds and scores are for keys that may read policies, and results.
    `settled`: all ranks have reported; `determinism` is null before.
    """
    told = {"verdicts": verdicts} if (verdicts := verdicts_of(result.probes)) else {}
    own = [
        each for each in result.probes if (each.policy and each.policy.name) in (None, *policies)
    ]
    results = told | {
        field: own if field == "probes" else getattr(result, field) or [] for field in readings
    }
    if not needed:
        return results
    return {
        **results,
        "capture_results": result.capture_results,
        "determinism": result.determinism if settled else None,
    }


def verdicts_of(probes: Iterable[ProbeResult]) -> list[PolicyVerdict]:
    """Return what is told of the policies among the probes of all choices."""
    told = by_key(
        (found.policy.name, (found, found.policy))
        for found in probes
        if found.policy is not None and found.policy.told
    )
    return [
        PolicyVerdict(
            policy=name,
            triggered=[each.request for each, _ in of_choices if each.triggered],
            acted=[each.request for each, policy in of_choices if each.triggered and policy.acts],
        )
        for name, of_choices in told.items()
    ]


def in_header(verdicts: Iterable[PolicyVerdict]) -> str:
    """Return the verdicts on all choices together: `NAME=clear`, `triggered` or `acted`."""
    return ", ".join(f"{each.policy}={_in_brief(each)}" for each in verdicts)


def _in_brief(verdict: PolicyVerdict) -> str:
    if verdict.acted:
        return "acted"
    return "triggered" if verdict.triggered else "clear"


def _stop_reason(output: Output) -> int | str | None:
    return None if isinstance(output.stop_reason, UnsetType) else output.stop_reason


def shown(token: TokenLogprob, needed: WantedParts) -> str:
    """Return how log-probabilities name a token."""
    return f"token_id:{token.token_id}" if needed.tokens_as_ids else token.token


def prompt_texts(prompt: Prompted, needed: WantedParts) -> list[str]:
    """Return how log-probabilities name a prompt's tokens. The first has no log-probability."""
    first = f"token_id:{prompt.token_ids[0]}" if needed.tokens_as_ids else prompt.first
    return [first if token is None else shown(token, needed) for token in prompt.logprobs or []]


def _in_order(token: TokenLogprob) -> list[TokenLogprob]:
    """Return the generated token, then the most likely others."""
    return [token, *(other for other in token.top if other.token_id != token.token_id)]


# --- Completions


def _completion_choice(output: Output, needed: WantedParts) -> CompletionChoice:
    part = whole_part(output)
    return msgspec.structs.replace(
        _completion_delta(output.index, part, needed),
        finish_reason=output.finish_reason,
        stop_reason=_stop_reason(output),
        prompt_token_ids=part.prompt.token_ids if needed.token_ids and part.prompt else UNSET,
        prompt_logprobs=_prompt_logprobs(part.prompt),
    )


def _completion_delta(index: int, part: ChoicePart, needed: WantedParts) -> CompletionChoice:
    text = part.text
    logprobs = part.logprobs
    prompt = part.prompt
    if needed.prompt_alone:
        text = ""
        logprobs = []
    if needed.echo and prompt is not None and not needed.token_ids:
        text = prompt.text + text
    before = prompt if needed.echo else None
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=None
        if needed.logprobs is None
        else _completion_logprobs(logprobs, needed, before, part.offset),
        finish_reason=None,
        token_ids=part.ids if needed.token_ids else UNSET,
        prompt_token_ids=prompt.token_ids
        if prompt is not None and (needed.token_ids or needed.echo)
        else UNSET,
    )


def _completion_logprobs(
    generated: Sequence[TokenLogprob], needed: WantedParts, before: Prompted | None, at: int
) -> CompletionLogprobs:
    """Return log-probabilities of the prompt's and the generated tokens.

    A prompt's first token has none.
    """
    tokens: list[TokenLogprob | None] = [*((before.logprobs or []) if before else []), *generated]
    texts = [
        *(prompt_texts(before, needed) if before else []),
        *(shown(token, needed) for token in generated),
    ]
    offsets = []
    for text in texts:
        offsets.append(at)
        at += len(text)
    most = (needed.logprobs or 0) + 1
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[None if token is None else token.logprob for token in tokens],
        top_logprobs=[
            None
            if token is None
            else {shown(other, needed): other.logprob for other in _in_order(token)[:most]}
            for token in tokens
        ],
        text_offset=offsets,
    )


def _prompt_logprobs(prompt: Prompted | None) -> PromptLogprobs | UnsetType:
    if prompt is None or prompt.logprobs is None:
        return UNSET
    return [
        None
        if token is None
        else {
            other.token_id: PromptLogprob(
                logprob=other.logprob,
                rank=None if isinstance(other.rank, UnsetType) else other.rank,
                decoded_token=other.token,
            )
            for other in _in_order(token)
        }
        for token in prompt.logprobs
    ]


# --- Chats


def _chat_choice(output: Output, needed: WantedParts) -> ChatChoice:
    content: str | None = output.text
    calls: Any = UNSET
    if not isinstance(output.message, UnsetType):
        content = output.message.content
        calls = output.message.tool_calls or UNSET
    return ChatChoice(
        index=output.index,
        message=AnswerMessage(role=needed.role, content=content, tool_calls=calls),
        logprobs=_chat_logprobs(output.logprobs or [], needed),
        finish_reason=output.finish_reason,
        stop_reason=_stop_reason(output),
        token_ids=output.token_ids if needed.token_ids else UNSET,
    )


def _about_chat_prompt(output: Output, needed: WantedParts) -> dict[str, Any]:
    prompt = output.prompt
    if isinstance(prompt, UnsetType):
        return {}
    return {
        "prompt_token_ids": prompt.token_ids if needed.token_ids else UNSET,
        "prompt_logprobs": _prompt_logprobs(prompt),
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob], needed: WantedParts) -> ChatLogprobs | None:
    return (
        None
        if needed.logprobs is None
        else ChatLogprobs(content=[_chat_logprob(token, needed) for token in tokens])
    )


def _chat_logprob(token: TokenLogprob, needed: WantedParts) -> ChatLogprob:
    top = [
        ChatLogprob(
            token=shown(other, needed),
            logprob=other.logprob,
            bytes=list(shown(other, needed).encode()),
        )
        for other in _in_order(token)[: needed.logprobs or 0]
    ]
    return ChatLogprob(
        token=shown(token, needed),
        logprob=token.logprob,
        bytes=list(token.token.encode()),
        top_logprobs=top,
    )


def _chat_delta(index: int, part: ChoicePart, needed: WantedParts) -> ChatChunkChoice:
    calls = [_call_part(call) for call in part.calls]
    return ChatChunkChoice(
        index=index,
        delta=Delta(content=part.text or UNSET, tool_calls=calls or UNSET),
        finish_reason=None,
        logprobs=_chat_logprobs(part.logprobs, needed) if part.logprobs else None,
        token_ids=part.ids if needed.token_ids else UNSET,
    )


def _call_part(call: CallDelta) -> CallPart:
    return CallPart(
        index=call.index,
        function={name: value for name in ("name", "arguments") if (value := getattr(call, name))},
        id=call.id or UNSET,
        type="function" if call.id else UNSET,
    )


COMPLETION = AnswerShape(
    answer=Completion,
    answer_object="text_completion",
    choice=_completion_choice,
    about_prompt=lambda output, wanted: {},
    chunk=CompletionChunk,
    chunk_object="text_completion",
    opening=None,
    delta=_completion_delta,
    finish=lambda output, wanted: CompletionChoice(
        index=output.index,
        text="",
        logprobs=None,
        finish_reason=output.finish_reason,
        stop_reason=_stop_reason(output),
    ),
)

CHAT = AnswerShape(
    answer=ChatCompletion,
    answer_object="chat.completion",
    choice=_chat_choice,
    about_prompt=_about_chat_prompt,
    chunk=ChatChunk,
    chunk_object="chat.completion.chunk",
    opening=lambda index, wanted: ChatChunkChoice(
        index=index, delta=Delta(role=wanted.role, content=""), finish_reason=None
    ),
    delta=_chat_delta,
    finish=lambda output, wanted: ChatChunkChoice(
        index=output.index,
        delta=Delta(),
        finish_reason=output.finish_reason,
        stop_reason=_stop_reason(output),
    ),
)


def whole(
    shape: AnswerShape, result: JobResult, created: float, needed: WantedParts, more: dict[str, Any]
) -> Any:
    """Return the answer to a request without `stream`."""
    outputs = sorted(result.outputs, key=lambda output: output.index)
    return shape.answer(
        id=result.id,
        object=shape.answer_object,
        created=int(created),
        model=result.model,
        choices=[shape.choice(output, needed) for output in outputs],
        usage=usage(outputs, needed.n),
        **shape.about_prompt(outputs[0], needed),
        **more,
    )


def piece(
    shape: AnswerShape,
    job_id: str,
    created: float,
    model: str,
    choices: list[Any],
    *,
    counted: Any = UNSET,
    **more: Any,
) -> Any:
    """Return a chunk of a stream. `counted`: the usage, if requested; null before the last
    chunk.
    """
    return shape.chunk(
        id=job_id,
        object=shape.chunk_object,
        created=int(created),
        model=model,
        choices=choices,
        usage=counted,
        **more,
    )
