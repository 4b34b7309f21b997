"""Finds the parts of a conversation in the text that its chat template rendered.

Nothing is known of the template. The conversation is rendered again with marks around its contents,
which must leave the rest of the text as it was, and rendered in part. What a template drops,
repeats, rewrites or moves is refused.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.base.records import by_key
from ...schemas.prompts.chat import PlainMessage, Rendering
from ...schemas.prompts.selectors import Part, SelectorError, Span
from .chat_templates import ChatTemplate
from .text_spans import TextMap

#: How often a conversation is rendered for one of its parts.
RENDERS = 8
#: Roles that an error shows.
SHOWN_ROLES = 16
#: Characters that a piece for tools may end with and stand before it as well, at most.
EDGE = 64
#: A range of characters, `[start, stop)`.
CharRange = tuple[int, int]
#: A mark, by its number: characters of a private use area, which no template strips.
MARK = re.compile("\ue000([0-9]+)\ue001")
#: Numbers of marks of one message.
OWN = 4
#: Field of a plain message → the number of its first mark among the message's own; the next one is
#: at its end. Templates read either name of the reasoning.
MARKED = {"content": 0, "reasoning": 2, "reasoning_content": 2}
#: Shows how a template begins and ends messages.
_SAMPLE: list[PlainMessage] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "xx"},
    {"role": "user", "content": "xxx"},
]


def renders(span: Span) -> tuple[int, int]:
    """Return how often a conversation is rendered to find a span, at most, and how often more for
    each of its messages.
    """
    of_each = span.turn is None and span.part in ("tool_calls", "header", "all")
    return RENDERS, 2 if of_each else 0


class _Layout(NamedTuple):
    """A conversation with marks around its contents."""

    messages: list[PlainMessage]
    places: dict[int, list[int]]  # mark → its places in the text; the marks in the text's order


class _Manner(NamedTuple):
    """Has what a template writes around contents."""

    before: str  # before a first message
    closing: str  # after a message
    headers: dict[str, str]  # role → before the content of a later message


class NoTurn(SelectorError):
    """The conversation has no such message, or no token of it."""


class Turns:
    """A conversation and its rendered text."""

    def __init__(
        self,
        template: ChatTemplate,
        roles: Sequence[str],
        messages: Sequence[PlainMessage],
        rendering: Rendering,
        where: TextMap,
    ):
        """`roles`: of the messages, as they were sent. `where`: of the text as it was rendered."""
        self._template = template
        self._rendering = rendering
        self._where = where
        self._roles = roles
        self._plain = messages
        self._alone = msgspec.structs.replace(rendering, opened=False, continued=False)

    def find(self, span: Span) -> list[int]:
        """Return the positions of the prompt tokens that overlap the span. Raises NoTurn, and
        SelectorError for what the template drops, repeats, rewrites or moves.
        """
        if not span.is_turn:
            return self._where.find(span)
        part = span.part or "content"
        chosen = [0] if part == "tools" else self._chosen(span)
        sent = [
            number for number in chosen if part in _ADDED or str(self._sent(number, part)).strip()
        ]
        without = NoTurn(f"{part} of message {chosen[0]} is empty: it has no token")
        with Translated(MidstreamError, lambda error: SelectorError(error.detail), hidden=True):
            pieces = [_FIND[part](self, number, part) for number in sent]
        # a header may be empty, in the middle of a token
        ranges = [piece for piece in pieces if piece[0] < piece[1]]
        starts, stops = np.array(ranges, int).reshape(-1, 2).T
        return self._where.covering(starts, stops, without)

    def _sent(self, number: int, part: str) -> Any:
        """Return a part of a message as it was sent; empty without it."""
        message = self._plain[number]
        sent = message.get(part)
        if not sent and part == "reasoning":
            sent = message.get("reasoning_content")
        return sent or ""

    def _chosen(self, span: Span) -> list[int]:
        """Return the numbers of the messages that the span selects."""
        numbers = [number for number, role in enumerate(self._roles) if span.role in (None, role)]
        if span.turn is None:
            if numbers:
                return numbers
        elif -len(numbers) <= span.turn < len(numbers):
            return [numbers[span.turn]]
        turn = "turn" if span.turn is None else f"turn {span.turn}"
        role = f" with role {span.role!r}" if span.role else ""
        raise NoTurn(
            f"there is no {turn}{role}: the conversation has "
            f"{', '.join(self._roles[:SHOWN_ROLES])} (a system prompt that the chat template adds "
            "is no turn)",
            ".role" if span.turn is None else ".turn",
        )

    # --- Contents

    def marked(self, number: int, part: str) -> CharRange:
        """Return the content or the reasoning of a message."""
        places = self._layout.places
        first = OWN * number + MARKED[part]
        starts = places.get(first, [])
        stops = places.get(first + 1, [])
        if not starts or not stops:
            raise self._refused(number, part, "drops it, or a part of it")
        if len(starts) > 1 or len(stops) > 1:
            raise self._refused(number, part, "repeats it")
        text = self._where.text[starts[0] : stops[0]]
        sent = self._sent(number, part)
        if isinstance(sent, str) and text.strip() != sent.strip():
            raise self._refused(number, part, "rewrites it")
        earlier = takewhile(lambda mark: mark != first, places)
        if max(earlier, default=0) > first + 3:
            raise self._refused(number, part, "puts it behind a later message")
        return starts[0], stops[0]

    @cached_property
    def _layout(self) -> _Layout:
        # marks stand inside of the white space around contents if the template trims it
        for inside in (False, True):
            messages = [
                with_marks(number, message, inside) for number, message in enumerate(self._plain)
            ]
            pieces = MARK.split(self._template.render(messages, self._rendering))
            texts = pieces[::2]
            marks = pieces[1::2]
            if "".join(texts) == self._where.text:
                ends = accumulate(map(len, texts))  # of the text before each mark, and of the last
                places = zip(map(int, marks), ends, strict=False)
                return _Layout(messages, by_key(places))
        raise SelectorError(
            "the chat template renders this conversation differently if its contents change, so "
            "that they cannot be told from its own text: give spans of text"
        )

    # --- Messages, and what the template writes around contents

    def apart(self, number: int, part: str, stop: int) -> CharRange:
        """Return the piece from the message's start, which must have no other message's content."""
        start = self.end(number - 1, self._manner.headers) if number else self._start()
        for mark, places in self._layout.places.items():
            # marks at ends: the message before may end where this one starts
            if message_of(mark) == number or is_at_end(mark):
                continue
            if any(start <= place < stop for place in places):
                raise self._refused(number, part, f"puts message {message_of(mark)} there as well")
        return start, stop

    def header(self, number: int, part: str) -> CharRange:
        """Return what the template writes before the content of a message."""
        return self.apart(number, part, self.begin(number))

    def whole(self, number: int, part: str) -> CharRange:
        """Return a message with all that the template writes around its contents."""
        return self.apart(number, part, self.end(number, self._manner.headers))

    def begin(self, number: int) -> int:
        """Return where the content of a message begins, or its reasoning."""
        own = [(places[0], mark) for mark, places in self._marks_of(number)]
        begin, mark = min(own, default=(0, None))
        if mark is None or is_at_end(mark):
            raise self._refused(number, "header", "writes no content after it, or a part of it")
        return begin

    def _marks_of(self, number: int) -> list[tuple[int, list[int]]]:
        """Return the marks of a message that the template kept, with their places."""
        return [item for item in self._layout.places.items() if message_of(item[0]) == number]

    def _start(self) -> int:
        """Return where the first message starts."""
        if self._roles[0] in ("system", "developer"):
            return self._start_of_system()
        headers = self._manner.headers
        header = headers.get(self._roles[0], headers["user"])
        start = self.begin(0) - len(header)
        if not self._where.text.startswith(header, start):
            raise self._refused(0, "header", "writes another one than before later messages")
        return start

    def _start_of_system(self) -> int:
        """Return where the first message starts, which is the system's: what the template writes
        before it by itself, such as a system prompt, is no part of it.
        """
        text = self._where.text
        bos = self._template.special_token("bos_token")
        before, closing, headers = self._manner
        contents = [places[0] for _, places in self._marks_of(0)]
        first = min(contents) if contents else self.end(0, headers)
        asks = headers["user"].strip()
        if asks and text[:first].rstrip().endswith(asks):
            raise self._refused(0, "header", "writes it within a message of the user")
        shared = before[: shared_length(before, text[:first])]
        if shared == before and (before in ("", bos) or len(before) < first):
            return len(before)
        # in place of the message, it writes another one: are there messages before them both?
        inside = headers["user"].count(closing)
        ends = shared.count(closing)
        if not closing or ends > inside > 0 or shared == before:
            raise self._refused(0, "header", "may have written a part of it by itself")
        if ends > inside:
            return shared.rfind(closing) + len(closing)
        # some begin every message with BOS
        begins_all = headers["user"].startswith(bos)
        return len(bos) if text.startswith(bos) and not begins_all else 0

    @cached_property
    def _manner(self) -> _Manner:
        """Return how the template begins and ends messages, as a short conversation shows."""
        text = self._rendered(_SAMPLE, opened=False)
        roles = [each["role"] for each in _SAMPLE]
        nowhere = TextMap(text, np.empty((0, 2)))
        sample = Turns(self._template, roles, _SAMPLE, self._alone, nowhere)
        with Translated(
            SelectorError,
            lambda _: SelectorError(
                "where messages end is unknown: the chat template opens an answer unasked"
            ),
            hidden=True,
        ):
            asked, answered, asked_again = map(sample.begin, range(3))
            end_of_question, end_of_answer = map(sample.end, range(2))
        headers: dict[str, str] = {
            "user": text[end_of_answer:asked_again],
            "assistant": text[end_of_question:answered],
        }
        return _Manner(
            before=text[:asked].removesuffix(headers["user"]),
            closing=text[asked + 1 : end_of_question],  # its content is one character
            headers=headers,
        )

    def end(self, number: int, headers: dict[str, str] | None = None) -> int:
        """Return where a message ends, by what the template ends a conversation with there, or by
        these headers of later messages.
        """
        if number + 1 == len(self._plain) and self._rendering.continued:
            return len(self._where.text)
        end = self._end_as_last(number)
        if end is None:
            end = self._end_before_next(number, headers or {})
        if end is None:
            raise SelectorError(
                f"where message {number} ends is unknown: the chat template ends it differently if "
                "other messages follow"
            )
        return end

    def _end_as_last(self, number: int) -> int | None:
        """Return where a message ends if the template ends it as it ends a conversation."""
        messages, places = self._layout
        with suppress(MidstreamError):  # a template may refuse to end there
            for opened in (False, True):
                ended = self._rendered(messages[: number + 1], opened)
                mark, tail = _after_last_mark(ended)
                if self._drops(number, mark, ended, opened):
                    return None
                if mark is None:
                    last = 0
                elif mark in places:
                    last = places[mark][-1]
                else:  # of a content that the template drops if messages follow
                    continue
                end = tail.removesuffix(self._opening) if opened else tail
                if self._where.text.startswith(end, last):
                    return last + len(end)
        return None

    def _end_before_next(self, number: int, headers: dict[str, str]) -> int | None:
        """Return where a message ends if the header of the next one stands before its content."""
        following = number + 1
        if following == len(self._roles):
            return None
        header = headers.get(self._roles[following], "")
        content = self._layout.places.get(OWN * following, [0])[0]
        end = content - len(header)
        is_there = header and end > 0 and self._where.text.startswith(header, end)
        return end if is_there else None

    def _drops(self, number: int, mark: int | None, ended: str, opened: bool) -> bool:
        """Return whether the template leaves out a message, without a content, that a conversation
        ends with. `mark`: the last in this rendering.
        """
        if number == 0 or (mark is not None and message_of(mark) == number):
            return False
        return self._rendered(self._layout.messages[:number], opened) == ended

    @cached_property
    def _opening(self) -> str:
        """Return what the template opens an answer with."""
        asked = _SAMPLE[:1]
        closed = self._rendered(asked, opened=False)
        opened = self._rendered(asked, opened=True)
        if not opened.startswith(closed):
            # some end a text that awaits no answer with EOS
            closed = closed.removesuffix(self._template.special_token("eos_token"))
        return opened.removeprefix(closed)

    def _rendered(self, messages: list[PlainMessage], opened: bool) -> str:
        return self._template.render(messages, msgspec.structs.replace(self._alone, opened=opened))

    # --- What a template writes only for tools

    def tools(self, number: int, part: str) -> CharRange:
        """Return the definitions of tools, or a message's calls of tools, with the template's text
        around them.
        """
        sent = self._plain
        toolless = msgspec.structs.replace(self._alone, tools=None)
        names = self._tool_names(number, part)
        without = {name: value for name, value in sent[number].items() if name != part}
        # A template may refuse the answer of a tool without the call of it, and write the
        # definitions of tools before the last question.
        for end, rendering in (
            (len(sent), self._rendering),
            (number + 1, self._alone),
            (number + 1, toolless),
        ):
            rest = msgspec.structs.replace(rendering, tools=None) if part == "tools" else rendering
            with suppress(MidstreamError):
                text = self._template.render(sent[:end], rendering)
                others = [*sent[:number], without, *sent[number + 1 : end]]
                piece = self._added(text, self._template.render(others, rest), names)
                if piece and self._where.text.startswith(text[: piece[1]]):
                    return piece
        raise SelectorError(
            f"{part} of message {number} cannot be told from the rest of the prompt: there are "
            "none, or the chat template drops them or writes other text with them"
        )

    def _tool_names(self, number: int, part: str) -> list[str]:
        defined = self._rendering.tools or []
        with Translated(
            (AttributeError, KeyError, TypeError),
            lambda error: SelectorError(f"{part} of message {number} have no function's name"),
        ):
            tools = defined if part == "tools" else self._plain[number].get(part, [])
            return [str(tool.get("function", tool)["name"]) for tool in tools]

    def _added(self, text: str, rest: str, names: Sequence[str]) -> CharRange | None:
        """Return where a text has more than the rest, but for white space in its place; None unless
        that is one piece with all these names.
        """
        after = shared_length(text[::-1], rest[::-1])
        stop = len(text) - after
        kept = len(rest) - after
        start = shared_length(text[:stop], rest[:kept])
        # what the piece ends with may stand before it as well
        room = shared_length(text[start:], text[stop:][:EDGE]) if start == kept else 0
        moved = [(start + by, stop + by) for by in range(room + 1)]
        piece = min(moved, key=self._roughness)
        added = text[piece[0] : piece[1]]
        if rest[start:kept].strip():
            return None
        return piece if names and all(name in added for name in names) else None

    def _roughness(self, piece: CharRange) -> tuple[bool, ...]:
        """Return whether a piece cuts tokens, begins within a message, begins with white space."""
        eos = self._template.special_token("eos_token")
        return (
            not np.isin(piece, self._where.offsets).all(),
            not self._where.text.endswith((eos, f"{eos}\n"), 0, piece[0]),
            self._where.text[piece[0] : piece[0] + 1].isspace(),
        )

    def _refused(self, number: int, part: str, why: str) -> SelectorError:
        return SelectorError(
            f"{part} of message {number} is not in the rendered prompt as it was sent: the chat "
            f"template {why}"
        )


#: Parts that messages do not have as they are sent.
_ADDED = ("tools", "header", "all")
_FIND: dict[Part, Callable[[Turns, int, str], CharRange]] = {
    "content": Turns.marked,
    "reasoning": Turns.marked,
    "tool_calls": Turns.tools,
    "tools": Turns.tools,
    "header": Turns.header,
    "all": Turns.whole,
}


def message_of(mark: int) -> int:
    return mark // OWN


def is_at_end(mark: int) -> bool:
    """Return whether a mark is at the end of a content, not at its beginning."""
    return mark % 2 == 1


def mark_of(number: int) -> str:
    return f"\ue000{number}\ue001"


def _after_last_mark(text: str) -> tuple[int | None, str]:
    """Return the last mark of a text, and what follows it; None and the whole text without one."""
    pieces = MARK.split(text)
    mark = int(pieces[-2]) if len(pieces) > 1 else None
    return mark, pieces[-1]


def shared_length(text: str, other: str) -> int:
    """Return the length of what both texts begin with. Compares slices, not characters: texts have
    millions.
    """
    same = 0
    length = min(len(text), len(other))
    while same < length:
        middle = (same + length + 1) // 2
        if text[same:middle] == other[same:middle]:
            same = middle
        else:
            length = middle - 1
    return same


def with_marks(number: int, message: PlainMessage, inside: bool) -> PlainMessage:
    """Return a message with marks around its contents; `inside`: inside the white space around
    them.
    """
    changed: PlainMessage = {}
    for name, first in MARKED.items():
        before = mark_of(OWN * number + first)
        after = mark_of(OWN * number + first + 1)
        sent = message.get(name) or ""
        if isinstance(sent, list):  # parts, such as images
            changed[name] = [text_part(before), *sent, text_part(after)]
        elif isinstance(sent, str) and sent.strip():
            text = sent.strip()
            changed[name] = (
                sent.replace(text, f"{before}{text}{after}") if inside else f"{before}{sent}{after}"
            )
    return message | changed


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
