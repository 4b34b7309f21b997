"""Where the parts of a conversation stand in the text that its chat template rendered.

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
#: A range of characters, `[start, stop)`.
CharRange = tuple[int, int]
#: A mark, by its number: characters of a private use area, which no template strips.
_MARK = re.compile("\ue000([0-9]+)\ue001")
#: Field of a plain message → the number of its first mark among the message's four; the next one is
#: at its end. Templates read either name of the reasoning.
_MARKED = {"content": 0, "reasoning": 2, "reasoning_content": 2}


def renders(span: Span, messages: int) -> int:
    """Return how often a conversation is rendered to find a span, at most."""
    each = span.turn is None and span.part in ("tool_calls", "header", "all")
    return RENDERS + 2 * messages * each


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
        if not sent:
            raise without
        with Translated(MidstreamError, lambda error: SelectorError(error.detail), hidden=True):
            pieces = [_FIND[part](self, number, part) for number in sent]
        starts, stops = np.array(pieces).T
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
        start = self.end(number - 1) if number else self._start()
        for mark, places in self._layout[1].items():
            # marks at ends: the message before may end where this one starts
            if mark // 4 != number and mark % 2 == 0 and any(start <= at < stop for at in places):
                raise self._refused(number, part, f"puts message {mark // 4} there as well")
        return start, stop

    def begin(self, number: int) -> int:
        """Return where the content of a message begins, or its reasoning."""
        own = [at[0] for mark, at in self._layout[1].items() if mark // 4 == number]
        if not own:
            raise self._refused(number, "header", "writes no content after it")
        return own[0]

    def _start(self) -> int:
        """Return where the first message starts."""
        role, text, bos = (
            self._roles[0],
            self._where.text,
            self._template.special_token("bos_token"),
        )
        if role in ("system", "developer"):
            own = text.startswith(bos, self.end(0))  # some begin every message with it
            return len(bos) if text.startswith(bos) and not own else 0
        # Before it the template may write a system prompt of its own: the message has what stands
        # before another one with its role.
        roles = [role, "user" if role == "assistant" else "assistant", role]
        again = [{"role": each, "content": "x" * n} for n, each in enumerate(roles, 1)]
        other = self._template.render(again, self._alone)
        nowhere = TextMap(other, np.empty((0, 2)))
        turns = Turns(self._template, roles, again, self._alone, nowhere)
        header = other[turns.end(1) : turns.begin(2)]
        if not text.endswith(header, 0, self.begin(0)):
            raise self._refused(0, "header", "writes another one than before later messages")
        return self.begin(0) - len(header)

    def end(self, number: int) -> int:
        """Return where a message ends."""
        if number + 1 == len(self._plain) and self._rendering.continued:
            return len(self._where.text)
        # what follows the last content if the conversation ends here
        messages, places = self._layout
        *_, mark, tail = [
            "-1",
            *_MARK.split(self._template.render(messages[: number + 1], self._alone)),
        ]
        nowhere = len(self._where.text) + 1  # a content that the template drops if messages follow
        last = ({-1: [0]} | places).get(int(mark), [nowhere])[-1]
        # some end a text that awaits no answer with this
        for end in (tail, tail.removesuffix(self._template.special_token("eos_token"))):
            if self._where.text.startswith(end, last):
                return last + len(end)
        raise SelectorError(
            f"where message {number} ends is unknown: the chat template ends it differently if "
            "other messages follow"
        )

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
                piece = _added(text, self._template.render(others, rest), names)
                if piece and self._where.text.startswith(text[: piece[1]]):
                    return piece
        raise SelectorError(
            f"{part} of message {number} cannot be told from the rest of the prompt: there are "
            "none, or the chat template drops them or writes other text with them"
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
    "all": lambda turns, number, part: turns.apart(number, part, turns.end(number)),
}


def _added(text: str, rest: str, names: Sequence[str]) -> CharRange | None:
    """Return where a text has more than the rest, but for white space in its place; None unless
    that is one piece with the names of all these tools.
    """
    after = _same(text[::-1], rest[::-1])
    stop = len(text) - after
    start = _same(text[:stop], rest[: len(rest) - after])
    named = all(name in text[start:stop] for name in names)
    one = names and named and not rest[start : len(rest) - after].strip()
    return (start, stop) if one else None


def _same(text: str, other: str) -> int:
    """Return the length of what both texts begin with."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))])


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
