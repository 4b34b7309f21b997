"""Compares what a streaming client has of one choice with the job's record.

When a job restarts on another worker, the stream continues where the client is; if the new attempt
generates something else, it ends with an error instead of a silent splice.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import CallDelta, Event, MessageDelta, Prompted, TokenLogprob
from .openai_shapes import ChoicePart, WantedParts, prompt_texts, shown

SentPart = TypeVar("SentPart", str, list[Any])


@dataclass
class Sent:
    """Has what the client got of one choice, and what the current attempt has generated of it."""

    has: ChoicePart = field(default_factory=ChoicePart)
    generated: ChoicePart = field(default_factory=ChoicePart)
    opened: bool = False

    def restart(self) -> None:
        """Forget what the last attempt generated: another one generates everything again."""
        self.generated = ChoicePart()

    def unsent(self, event: Event, needed: WantedParts) -> ChoicePart:
        """Return the part of a `token` event that the client does not have yet.

        Raises MidstreamError if the event contradicts what the client has.
        """
        delta = event.data.get("delta")
        generated = self.generated
        text = event.data.get("text")
        if delta is not None:
            part = msgspec.convert(delta, MessageDelta)
            text = part.content
            for call in part.calls:
                _note(generated.calls, call)
        generated.text += text if isinstance(text, str) else ""
        if needed.tokens:
            generated.ids += msgspec.convert(event.data.get("token_ids", []), list[int])
            generated.logprobs += msgspec.convert(
                event.data.get("logprobs", []), list[TokenLogprob]
            )
        if (prompt := event.data.get("prompt")) is not None:
            generated.prompt = msgspec.convert(prompt, Prompted)
        return self.upto(generated, needed)

    def upto(self, generated: ChoicePart, needed: WantedParts) -> ChoicePart:
        """Return what the client lacks of `generated`, everything that was generated until now.

        Raises what `unsent` raises.
        """
        has = self.has
        missing = ChoicePart(
            text=_rest(has.text, generated.text),
            calls=_rest_of_calls(has.calls, generated.calls),
            offset=has.offset,
        )
        if needed.tokens:
            missing.ids = _rest(has.ids, generated.ids)
            # not compared: in other batches, those of the same tokens may be rounded differently
            missing.logprobs = generated.logprobs[len(has.logprobs) :]
        if has.prompt is None and generated.prompt is not None:
            missing.prompt = generated.prompt
        self._has_got(missing, needed)
        return missing

    def _has_got(self, part: ChoicePart, needed: WantedParts) -> None:
        has = self.has
        has.text += part.text
        for call in part.calls:
            _note(has.calls, call)
        has.ids += part.ids
        has.logprobs += part.logprobs
        has.prompt = has.prompt or part.prompt
        before = prompt_texts(part.prompt, needed) if needed.echo and part.prompt else []
        has.offset += sum(map(len, [*before, *(shown(token, needed) for token in part.logprobs)]))


def _note(calls: list[CallDelta], new: CallDelta) -> None:
    while len(calls) <= new.index:
        calls.append(CallDelta(index=len(calls)))
    known = calls[new.index]
    calls[new.index] = msgspec.structs.replace(
        known,
        id=known.id or new.id,
        name=known.name + new.name,
        arguments=known.arguments + new.arguments,
    )


def _rest(has: SentPart, part: SentPart) -> SentPart:
    """Return what follows `has` in `part`; empty if the client has as much or more."""
    most = min(len(has), len(part))
    if has[:most] != part[:most]:
        raise MidstreamError(
            "worker_lost",
            (
                "the job restarted on another worker and generated different text; repeat the "
                "request, or set a seed"
            ),
        )
    return part[len(has) :]


def _rest_of_calls(has: list[CallDelta], call_deltas: list[CallDelta]) -> list[CallDelta]:
    result = []
    for call in call_deltas:
        known = has[call.index] if call.index < len(has) else CallDelta(index=call.index)
        new = {
            name: _rest(getattr(known, name), getattr(call, name))
            for name in ("id", "name", "arguments")
        }
        if any(new.values()):
            result.append(CallDelta(index=call.index, **new))
    return result
