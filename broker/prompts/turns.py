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
from typing import Any

import msgspec
import numpy as np

from ...schemas.base import MidstreamError, Translated, by_key
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
_MARK = re.compile("\ue000([0-9]+)\ue001")
#: Field of a plain message → the number of its first mark among the message's four; the next one is
#: at its end. Templates read either name of the reasoning.
_MARKED = {"content": 0, "reasoning": 2, "reasoning_content": 2}
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
        self._template, self._rendering, self._where = template, rendering, where
        self._roles, self._plain = roles, messages
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
        return message.get(part) or (part == "reasoning" and message.get("reasoning_content")) or ""

    def _chosen(self, span: Span) -> list[int]:
        """Return the numbers of the messages that the span selects."""
        numbers = [number for number, role in enumerate(self._roles) if span.role in (None, role)]
        if span.turn is None and numbers:
            return numbers
        with Translated(
            IndexError,
            lambda error: NoTurn(
                f"there is no turn{'' if span.turn is None else f' {span.turn}'}"
                + (f" with role {span.role!r}" if span.role else "")
                + f": the conversation has {', '.join(self._roles[:SHOWN_ROLES])} (a system prompt "
                "that the chat template adds is no turn)",
                ".role" if span.turn is None else ".turn",
            ),
        ):
            return [numbers[span.turn or 0]]

    # --- Contents

    def marked(self, number: int, part: str) -> CharRange:
        """Return the content or the reasoning of a message."""
        places, first = self._layout[1], 4 * number + _MARKED[part]
        starts, stops = places.get(first, []), places.get(first + 1, [])
        text, sent = self._where.text[sum(starts) : sum(stops)], self._sent(number, part)
        faults = {
            "drops it, or a part of it": not starts or not stops,
            "repeats it": len(starts + stops) > 2,
            "rewrites it": isinstance(sent, str) and text.strip() != sent.strip(),
            "puts it behind a later message": first + 3
            < max(takewhile(lambda mark: mark != first, places), default=0),
        }
        for why, is_so in faults.items():
            if is_so:
                raise self._refused(number, part, why)
        return starts[0], stops[0]

    @cached_property
    def _layout(self) -> tuple[list[PlainMessage], dict[int, list[int]]]:
        """The messages with marks, and mark → its places in the text, in order."""
        # marks stand inside of the white space around contents if the template trims it
        for inside in (False, True):
            messages = [_with_marks(*item, inside) for item in enumerate(self._plain)]
            texts = _MARK.split(self._template.render(messages, self._rendering))
            if "".join(texts[::2]) == self._where.text:
                places = zip(texts[1::2], accumulate(map(len, texts[::2])), strict=False)
                return messages, by_key((int(mark), place) for mark, place in places)
        raise SelectorError(
            "the chat template renders this conversation differently if its contents change, so "
            "that they cannot be told from its own text: give spans of text"
        )

    # --- Messages, and what the template writes around contents

    def apart(self, number: int, part: str, stop: int) -> CharRange:
        """Return the piece from the message's start, which must have no other message's content."""
        start = self.end(number - 1, self._manner[2]) if number else self._start()
        for mark, places in self._layout[1].items():
            # marks at ends: the message before may end where this one starts
            if mark // 4 != number and mark % 2 == 0 and any(start <= at < stop for at in places):
                raise self._refused(number, part, f"puts message {mark // 4} there as well")
        return start, stop

    def begin(self, number: int) -> int:
        """Return where the content of a message begins, or its reasoning."""
        own = [(at[0], mark) for mark, at in self._layout[1].items() if mark // 4 == number]
        if not own or min(own)[1] % 2:
            raise self._refused(number, "header", "writes no content after it, or a part of it")
        return min(own)[0]

    def _start(self) -> int:
        """Return where the first message starts."""
        text, bos = self._where.text, self._template.special_token("bos_token")
        before, closing, headers = self._manner
        if self._roles[0] not in ("system", "developer"):
            start = self.begin(0) - len(header := headers.get(self._roles[0], headers["user"]))
            if not text.startswith(header, start):
                raise self._refused(0, "header", "writes another one than before later messages")
            return start
        # what the template writes before it by itself, such as a system prompt, is no part of it
        first = min(
            [at[0] for mark, at in self._layout[1].items() if mark < 4] or [self.end(0, headers)]
        )
        if (asks := headers["user"].strip()) and text[:first].rstrip().endswith(asks):
            raise self._refused(0, "header", "writes it within a message of the user")
        shared = before[: _same(before, text[:first])]
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
        return len(bos) if text.startswith(bos) and not headers["user"].startswith(bos) else 0

    @cached_property
    def _manner(self) -> tuple[str, str, dict[str, str]]:
        """Return what the template writes before a first message, after it, and before the contents
        of later ones, as a short conversation shows.
        """
        text = self._rendered(_SAMPLE, opened=False)
        roles, nowhere = [each["role"] for each in _SAMPLE], TextMap(text, np.empty((0, 2)))
        sample = Turns(self._template, roles, _SAMPLE, self._alone, nowhere)
        with Translated(
            SelectorError,
            lambda _: SelectorError(
                "where messages end is unknown: the chat template opens an answer unasked"
            ),
            hidden=True,
        ):
            first, answer, last = map(sample.begin, range(3))
            end, again = map(sample.end, range(2))
        headers: dict[str, str] = {"user": text[again:last], "assistant": text[end:answer]}
        return text[:first].removesuffix(headers["user"]), text[first + 1 : end], headers

    def end(self, number: int, headers: dict[str, str] | None = None) -> int:
        """Return where a message ends, by what the template ends a conversation with there, or by
        these headers of later messages.
        """
        if number + 1 == len(self._plain) and self._rendering.continued:
            return len(self._where.text)
        messages, places = self._layout
        nowhere = len(self._where.text) + 1  # a content that the template drops if messages follow
        with suppress(MidstreamError):  # a template may refuse to end there
            for opened in (False, True):
                ended = self._rendered(messages[: number + 1], opened)
                *_, mark, tail = ["-1", *_MARK.split(ended)]
                if self._drops(number, int(mark), ended, opened):
                    break
                last = ({-1: [0]} | places).get(int(mark), [nowhere])[-1]
                end = tail.removesuffix(self._opening) if opened else tail
                if self._where.text.startswith(end, last):
                    return last + len(end)
        for role in self._roles[number + 1 : number + 2]:
            header = (headers or {}).get(role, "")
            end = places.get(4 * number + 4, [0])[0] - len(header)
            if header and end > 0 and self._where.text.startswith(header, end):
                return end
        raise SelectorError(
            f"where message {number} ends is unknown: the chat template ends it differently if "
            "other messages follow"
        )

    def _drops(self, number: int, mark: int, ended: str, opened: bool) -> bool:
        """Return whether the template leaves out a message, without a content, that a conversation
        ends with. `mark`: the last in this rendering.
        """
        if number == 0 or mark // 4 == number:
            return False
        return self._rendered(self._layout[0][:number], opened) == ended

    @cached_property
    def _opening(self) -> str:
        """Return what the template opens an answer with."""
        asked = _SAMPLE[:1]
        closed, opened = (self._rendered(asked, each) for each in (False, True))
        return opened.removeprefix(
            closed
            if opened.startswith(closed)
            # some end a text that awaits no answer with EOS
            else closed.removesuffix(self._template.special_token("eos_token"))
        )

    def _rendered(self, messages: list[PlainMessage], opened: bool) -> str:
        return self._template.render(messages, msgspec.structs.replace(self._alone, opened=opened))

    # --- What a template writes only for tools

    def tools(self, number: int, part: str) -> CharRange:
        """Return the definitions of tools, or a message's calls of tools, with the template's text
        around them.
        """
        sent, toolless = self._plain, msgspec.structs.replace(self._alone, tools=None)
        with Translated(
            (AttributeError, KeyError, TypeError),
            lambda error: SelectorError(f"{part} of message {number} have no function's name"),
        ):
            tools = self._rendering.tools or [] if part == "tools" else sent[number].get(part, [])
            names = [str(tool.get("function", tool)["name"]) for tool in tools]
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

    def _added(self, text: str, rest: str, names: Sequence[str]) -> CharRange | None:
        """Return where a text has more than the rest, but for white space in its place; None unless
        that is one piece with all these names.
        """
        after = _same(text[::-1], rest[::-1])
        stop, kept = len(text) - after, len(rest) - after
        start = _same(text[:stop], rest[:kept])
        # what the piece ends with may stand before it as well
        by = _same(text[start:], text[stop:][:EDGE]) if start == kept else 0
        start, stop = min([(start + n, stop + n) for n in range(by + 1)], key=self._roughness)
        named = all(name in text[start:stop] for name in names)
        return (start, stop) if names and named and not rest[start:kept].strip() else None

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
    "header": lambda turns, number, part: turns.apart(number, part, turns.begin(number)),
    "all": lambda turns, number, part: turns.apart(
        number, part, turns.end(number, turns._manner[2])
    ),
}


def _same(text: str, other: str) -> int:
    """Return the length of what both texts begin with. Compares slices, not characters: texts have
    millions.
    """
    same, length = 0, min(len(text), len(other))
    while same < length:
        middle = (same + length + 1) // 2
        if text[same:middle] == other[same:middle]:
            same = middle
        else:
            length = middle - 1
    return same


def _with_marks(number: int, message: PlainMessage, inside: bool) -> PlainMessage:
    """Return a message with marks around its contents; `inside`: inside the white space around
    them.
    """
    changed: PlainMessage = {}
    for name, first in _MARKED.items():
        before, after = (f"\ue000{4 * number + first + end}\ue001" for end in (0, 1))
        sent = message.get(name) or ""
        if isinstance(sent, list):  # parts, such as images
            ends = [{"type": "text", "text": mark} for mark in (before, after)]
            changed[name] = [ends[0], *sent, ends[1]]
        elif isinstance(sent, str) and (text := sent.strip()):
            changed[name] = (
                sent.replace(text, f"{before}{text}{after}") if inside else f"{before}{sent}{after}"
            )
    return message | changed
