"""Progress of a streaming client on one choice, compared with the job's record.

A job that is restarted on another worker continues where the client is; what turns out different is
an error and not a silent splice.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import CallDelta, Event, Prompted, Said, TokenLogprob
from .openai_shapes import News, Wanted, prompt_texts, shown

Part = TypeVar("Part", str, list[Any])


@dataclass
class Sent:
    """How much of one choice the client has received, and how far the current attempt is."""

    has: News = field(default_factory=News)
    seen: News = field(default_factory=News)
    opened: bool = False

    def begin_anew(self) -> None:
        """Another attempt says everything again."""
        self.seen = News()

    def news(self, event: Event, needed: Wanted) -> News:
        """Return what of a `token` event the client does not have yet.

        Raises MidstreamError when it contradicts what it has.
        """
        statement, visited = event.data.get("delta"), self.seen
        text = event.data.get("text")
        if statement is not None:
            part = msgspec.convert(statement, Said)
            text = part.content
            for call in part.calls:
                _note(visited.calls, call)
        visited.text += text if isinstance(text, str) else ""
        if needed.tokens:
            visited.ids += msgspec.convert(event.data.get("token_ids", []), list[int])
            visited.logprobs += msgspec.convert(event.data.get("logprobs", []), list[TokenLogprob])
        if (prompt := event.data.get("prompt")) is not None:
            visited.prompt = msgspec.convert(prompt, Prompted)
        return self.upto(visited, needed)

    def upto(self, news: News, needed: Wanted) -> News:
        """Return what is missing up to `news`; raises as `news` does."""
        has = self.has
        missing = News(
            text=_rest(has.text, news.text),
            calls=_rest_of_calls(has.calls, news.calls),
            offset=has.offset,
        )
        if needed.tokens:
            missing.ids = _rest(has.ids, news.ids)
            # of the same tokens; other batches may round them otherwise
            missing.logprobs = news.logprobs[len(has.logprobs) :]
        if has.prompt is None and news.prompt is not None:
            missing.prompt = news.prompt
        self._has_got(missing, needed)
        return missing

    def _has_got(self, news: News, needed: Wanted) -> None:
        has = self.has
        has.text += news.text
        for call in news.calls:
            _note(has.calls, call)
        has.ids += news.ids
        has.logprobs += news.logprobs
        has.prompt = has.prompt or news.prompt
        before = prompt_texts(news.prompt, needed) if needed.echo and news.prompt else []
        has.offset += sum(map(len, [*before, *(shown(token, needed) for token in news.logprobs)]))


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


def _rest(has: Part, part: Part) -> Part:
    """Return what follows in `part`. Empty if the client has as much or more."""
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
