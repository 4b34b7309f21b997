"""Finds what the sender of a conversation wrote in its rendered prompt, for policies: whatever is
sent, none of it may pass for the chat template's own text.

The conversation is rendered with marks around its contents, which must leave the text as it was. It
is rendered again without what lies between the marks, and without anything else that a sender can
choose. Only text that stays the same is the template's own. So a text that looks like a turn is the
content that it is in, and a template that moves, repeats or drops a content hides none of it. If
the renderings cannot be compared, nothing is the template's own.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import JsonObject
from ...schemas.jobs.openai import Effort
from ...schemas.prompts.chat import PlainMessage, Rendering
from ...schemas.prompts.selectors import SelectorError, runs_of
from ...schemas.prompts.sight import TurnMap, TurnPiece
from .chat_templates import ChatTemplate
from .text_spans import TextMap
from .turns import MARK, MARKED, OWN, is_at_end, mark_of, message_of, shared_length, with_marks

#: Number of a first mark among its message's own → part of the message.
_PARTS = {first: name for name, first in reversed(MARKED.items())}
#: A schema that says nothing.
_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}


class _Unknown(ValueError):
    """The renderings cannot be compared."""


class _Written(NamedTuple):
    """A range of characters that the sender wrote, see `TurnPiece`."""

    start: int
    stop: int
    part: str
    messages: list[int]


@dataclass
class _Marked:
    """A rendering, cut at its marks."""

    marks: list[int]
    texts: list[str]  # before each mark, and behind the last
    #: Numbers of the texts outside of all contents.
    outside: list[int] = field(default_factory=list)
    #: Numbers of the other texts, with the first marks of the contents that they are in.
    inside: list[tuple[int, list[int]]] = field(default_factory=list)


def turn_map(
    template: ChatTemplate,
    roles: Sequence[str],
    messages: Sequence[PlainMessage],
    rendering: Rendering,
    where: TextMap | None,
    images: Sequence[int] = (),
) -> TurnMap:
    """Return what the sender wrote. `roles`, `where`: see `Turns`; `where` is None if the text is
    not known. `images`: positions of images.
    """
    try:
        pieces = _pieces(template, messages, rendering, where, images)
    except (MidstreamError, SelectorError, _Unknown) as error:
        return TurnMap(roles=[*roles], unknown=f"its turns are not known: {error}")
    return TurnMap(roles=[*roles], pieces=pieces)


def _pieces(
    template: ChatTemplate,
    messages: Sequence[PlainMessage],
    rendering: Rendering,
    where: TextMap | None,
    images: Sequence[int],
) -> list[TurnPiece]:
    if where is None:
        raise _Unknown("the text of the prompt has other tokens")
    whole, marked = _with_all_marks(template, messages, rendering, where.text)
    starts = np.cumsum([0, *map(len, whole.texts)]).tolist()
    written = [
        _Written(
            starts[number],
            starts[number + 1],
            _PARTS[first % OWN],
            [message_of(first)],
        )
        for number, firsts in whole.inside
        for first in firsts
    ]
    callers = [number for number, message in enumerate(messages) if message.get("tool_calls")]
    variants: list[tuple[str, Sequence[PlainMessage], Rendering]] = [
        ("", [*map(_without_text, marked)], _without_options(rendering))
    ]
    if rendering.tools:
        tools = [_blank_tool(tool) for tool in rendering.tools]
        variants.append(("tools", marked, msgspec.structs.replace(rendering, tools=tools)))
    if callers:
        variants.append(("tool_calls", [*map(_without_calls, marked)], rendering))
    for part, changed, changed_rendering in variants:
        other = _cut(template.render(changed, changed_rendering))
        if other.marks != whole.marks:
            raise _Unknown("the chat template orders contents by what they are")
        for number in whole.outside:
            start, stop = _differing(whole.texts[number], other.texts[number])
            if start < stop:
                at = starts[number]
                by = _callers_around(number, whole.marks, callers) if part == "tool_calls" else []
                written.append(_Written(at + start, at + stop, part, by))
    pieces = [piece for each in written for piece in _of_tokens(each, where)]
    contents = [range(piece.start, piece.stop) for piece in pieces]
    alone = (place for place in images if not any(place in content for content in contents))
    pieces += [TurnPiece(start=place, stop=place + 1) for place in alone]
    return sorted(pieces, key=lambda piece: (piece.start, piece.stop))


def _with_all_marks(
    template: ChatTemplate, messages: Sequence[PlainMessage], rendering: Rendering, text: str
) -> tuple[_Marked, list[PlainMessage]]:
    """Return the rendering with marks around contents, and the messages that it is of."""
    for inside in (False, True):  # as `Turns` does
        marked = [with_marks(number, each, inside) for number, each in enumerate(messages)]
        rendered = template.render(marked, rendering)
        if MARK.sub("", rendered) == text:
            return _cut(rendered), marked
    raise _Unknown("the chat template renders the conversation differently if its contents change")


def _cut(rendered: str) -> _Marked:
    """Cut a rendering at its marks, which must be in pairs."""
    pieces = MARK.split(rendered)
    made = _Marked([*map(int, pieces[1::2])], pieces[::2])
    begun: list[int] = []
    for number, mark in enumerate([*made.marks, None]):
        if begun:
            made.inside.append((number, [*begun]))
        else:
            made.outside.append(number)
        if mark is None:
            break
        if not is_at_end(mark):
            begun.append(mark)
        elif mark - 1 in begun:
            begun.remove(mark - 1)
        else:
            raise _cuts(mark)
    if begun:
        raise _cuts(begun[0])
    return made


def _cuts(mark: int) -> _Unknown:
    return _Unknown(f"the chat template drops a part of message {message_of(mark)}")


def _differing(text: str, other: str) -> tuple[int, int]:
    """Return the range of `text` that is not in `other`."""
    if text == other:
        return 0, 0
    start = shared_length(text, other)
    rest = text[start:]
    after = shared_length(rest[::-1], other[start:][::-1])
    return start, len(text) - after


def _callers_around(number: int, marks: Sequence[int], callers: Sequence[int]) -> list[int]:
    """Return the messages with calls that the text before mark `number` may be of."""
    before = message_of(marks[number - 1]) if number else 0
    behind = message_of(marks[number]) if number < len(marks) else max(callers)
    found = [caller for caller in callers if before <= caller <= behind]
    return found or [*callers]


def _of_tokens(written: _Written, where: TextMap) -> list[TurnPiece]:
    """Return the tokens of a range of characters: those that overlap it, and those without a
    character that stand in it or at its edges.
    """
    start, stop, part, messages = written
    places: list[int] = []
    with suppress(SelectorError):
        places = where.covering(np.array([start]), np.array([stop]), SelectorError("no token"))
    empty = where.without_text
    if len(empty):
        at = where.offsets[empty, 0]
        places = sorted({*places, *empty[(at >= start) & (at <= stop)].tolist()})
    return [
        TurnPiece(start=first, stop=last + 1, part=part, messages=messages)
        for first, last in runs_of(places)
    ]


# --- What a sender can choose, without what was chosen


def _without_text(message: PlainMessage) -> PlainMessage:
    """Return a marked message with nothing between its marks, but images, and without names."""
    blank: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(MARKED, _between_marks),
        "name": lambda name: "",
        "tool_call_id": _blank_id,
    }
    return {name: blank.get(name, lambda kept: kept)(value) for name, value in message.items()}


def _between_marks(value: str | list[dict[str, str]]) -> Any:
    if isinstance(value, str):
        return "".join(map(mark_of, map(int, MARK.findall(value))))
    first, *parts, last = value
    return [first, *(part for part in parts if part["type"] != "text"), last]


def _blank_id(text: str) -> str:
    return "0" * len(text)  # some templates demand a length


def _without_options(rendering: Rendering) -> Rendering:
    """Return the rendering without variables whose values may be texts of the sender."""
    kept = {
        name: value
        for name, value in rendering.options.items()
        if value is None or isinstance(value, bool) or value in get_args(Effort)
    }
    return msgspec.structs.replace(rendering, options=kept)


def _blank_tool(tool: JsonObject) -> JsonObject:
    function = tool["function"]
    blank: JsonObject = {"name": "", "description": "", "parameters": _NO_PARAMETERS}
    kept = {name: blank.get(name, value) for name, value in function.items() if value is not None}
    return tool | {"function": function | kept}


def _without_calls(message: PlainMessage) -> PlainMessage:
    """Return the message with calls of nothing in place of its own."""
    if "tool_calls" not in message:
        return message
    nothing = {"name": "", "arguments": {}}
    calls = [
        call | {"id": _blank_id(call["id"]), "function": nothing} for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}
