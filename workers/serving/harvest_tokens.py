"""Documents as token ids: texts in bounded slices, conversations through the chat template, token
ids once they are checked.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from ...broker.artifacts.chat_templates import in_parts, template_environment
from ...schemas.base.errors import MidstreamError
from ...schemas.base.limits import MAX_DOCUMENT_BYTES, MAX_INT64
from ...schemas.jobs.harvests import StoredHarvest
from ...schemas.jobs.models import TokenizerBundle
from .harvest_cut import Document, fed, within

#: Characters that are tokenised in one call, of one text or of several: the tokenizer takes some
#: 200 bytes of memory for each.
SLICE = 1 << 18
#: Characters in which two slices of a text overlap; none of the first and last `MARGIN` of them is
#: a seam.
OVERLAP, MARGIN = 1 << 12, 1 << 9
#: Tokens behind a seam that are equal in both slices.
AGREED = 8

#: Number of a document, its value in the source, and how an error names it.
Value = tuple[int, Any, str]


class Tokens:
    """The tokenizer of a harvest's model."""

    def __init__(self, harvest: StoredHarvest, bundle: TokenizerBundle, vocabulary: int) -> None:
        """`vocabulary`: tokens of the model."""
        self._harvest, self._bundle, self._vocabulary = harvest, bundle, vocabulary
        #: A template writes special tokens itself.
        self._special = harvest.cut.special_tokens and harvest.source.kind != "chat"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._bundle.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def special(self, name: str) -> int | None:
        """The id of the model's token of this name (`bos_token`, `eos_token`); None where it has
        none.
        """
        text = self._bundle.special_tokens.get(name)
        token: int | None = None if text is None else self.tokenizer.token_to_id(text)
        return token

    def documents(self, values: Iterable[Value], tokens: int = -1) -> Iterator[Document]:
        """The documents, the last cut short, whose sequences have `tokens` tokens (-1: all); no
        value is read once they are full.

        Raises MidstreamError naming the document.
        """
        rest = tokens if tokens >= 0 else MAX_INT64

        def remaining() -> int:
            return rest

        for number, ids in self._encoded(values, remaining):
            document = Document(number, ids)
            yield from within([document], self._harvest, rest)
            rest -= fed(document, self._harvest)
            if rest <= 0:
                return

    def _encoded(
        self, values: Iterable[Value], remaining: Callable[[], int]
    ) -> Iterator[tuple[int, np.ndarray]]:
        texts: list[tuple[int, str]] = []
        size = 0
        for number, value, where in values:
            made = self._prepared(value, where)
            if isinstance(made, str) and size + len(made) <= SLICE:
                texts.append((number, made))
                size += len(made)
                continue
            yield from self._together(texts)
            texts, size = [], 0
            if not isinstance(made, str):
                yield number, made
            elif len(made) <= SLICE:
                texts, size = [(number, made)], len(made)
            else:
                yield number, self._sliced(made, min(remaining(), self._longest))
        yield from self._together(texts)

    @property
    def _longest(self) -> int:
        """Tokens of a document that are read at most."""
        return self._harvest.max_length if self._harvest.cut.fit == "truncate" else MAX_INT64

    def _together(self, texts: list[tuple[int, str]]) -> Iterator[tuple[int, np.ndarray]]:
        encodings = (
            self.tokenizer.encode_batch_fast(
                [text for _, text in texts], add_special_tokens=self._special
            )
            if texts
            else []
        )
        for (number, _), encoding in zip(texts, encodings, strict=True):
            yield number, np.array(encoding.ids[: self._longest], np.int32)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        encoding = self.tokenizer.encode("a", add_special_tokens=self._special)
        own = [
            place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None
        ]
        return (encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]) if own else ([], [])

    def _sliced(self, text: str, most: int) -> np.ndarray:
        """The first `most` tokens of a long text, as if it were tokenised as a whole.

        Slices overlap: the second takes over where both have the same tokens. Where there is no
        such place, because a tokenizer sees no end of a word in all of the overlap, it begins where
        the first is cut.
        """
        before, after = self._around
        parts, count = [np.array(before, np.int32)], len(before)
        size = min(SLICE, max(4 * OVERLAP, 8 * most))
        start, piece = 0, self._slice(text, 0, size)
        while count < most:
            end = start + size
            if end >= len(text):
                parts += [piece.ids, np.array(after, np.int32)]
                break
            following = self._slice(text, end - OVERLAP, size)
            if (seam := _seam(piece, following, end - OVERLAP + MARGIN, end - MARGIN)) is not None:
                own, other = seam
                start, rest = end - OVERLAP, following.after(other)
            else:
                own = int(np.searchsorted(piece.ends, end - MARGIN))
                start = int(piece.ends[own - 1])
                rest = self._slice(text, start, size)
            parts.append(piece.ids[:own])
            count += own
            piece = rest
        return np.concatenate(parts)[:most]

    def _slice(self, text: str, start: int, size: int) -> "_Slice":
        return _Slice.of(
            self.tokenizer.encode(text[start : start + size], add_special_tokens=False), start
        )

    def _prepared(self, value: Any, where: str) -> str | np.ndarray:
        """The text that is tokenised, or token ids."""
        kind = self._harvest.source.kind
        if kind == "tokens" or (isinstance(value, list) and self._harvest.source.lines is not None):
            return self._checked_ids(value, where)
        if kind == "chat":
            text = self._rendered(value, where)
            if len(text) > MAX_DOCUMENT_BYTES:
                raise MidstreamError(
                    "invalid_request",
                    f"{where} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB as text",
                    field="source",
                )
            return text
        if value is None:
            return ""
        if not isinstance(value, str):
            raise MidstreamError(
                "invalid_request",
                f"{where} is not a text",
                field="source.kind",
                allowed="text, chat, tokens",
            )
        return value

    def _checked_ids(self, value: Any, where: str) -> np.ndarray:
        """Integers alone: not what numpy would turn into some, such as 1.7, true or "12"."""
        ids = [] if value is None else value
        if not isinstance(ids, list) or not all(
            type(token) is int and 0 <= token < self._vocabulary for token in ids
        ):
            raise MidstreamError(
                "invalid_request",
                f"{where} is not a list of the model's token ids",
                field="source.kind",
                allowed=f"integers from 0 to {self._vocabulary - 1}",
            )
        return np.array(ids, np.int32)

    @cached_property
    def _template(self) -> Any:
        if self._bundle.chat_template is None:
            raise MidstreamError(
                "invalid_request",
                "the model has no chat template",
                field="source.kind",
                allowed="text, tokens",
            )
        return template_environment().from_string(self._bundle.chat_template)

    def _rendered(self, messages: Any, where: str) -> str:
        try:
            if self._bundle.parts:
                messages = [
                    {**message, "content": in_parts(message["content"])} for message in messages
                ]
            text = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=self._harvest.generate is not None,
                **self._bundle.special_tokens,
            )
            return str(text)
        except MidstreamError:
            raise
        except Exception as error:
            # a template may raise any exception to reject a conversation
            raise MidstreamError(
                "invalid_request",
                f"{where}: the model's chat template rejects it: {error}",
                field="source.kind",
            ) from error


class _Slice:
    """Tokens of a part of a text: ids, and where they begin and end in the text, in characters; int
    `[tokens]` each.
    """

    def __init__(self, ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        self.ids, self.starts, self.ends = ids, starts, ends

    @classmethod
    def of(cls, encoding: Encoding, start: int) -> "_Slice":
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + start
        return cls(np.array(encoding.ids, np.int32), offsets[:, 0], offsets[:, 1])

    def after(self, place: int) -> "_Slice":
        return _Slice(self.ids[place:], self.starts[place:], self.ends[place:])


def _seam(first: _Slice, second: _Slice, low: int, high: int) -> tuple[int, int] | None:
    """Numbers of a token of each, within characters `[low, high)` of the text, from which on both
    have the same tokens.
    """
    begin, stop = np.searchsorted(first.starts, [low, high])
    for own in range(int(begin), int(stop) - AGREED):
        other = int(np.searchsorted(second.starts, first.starts[own]))
        own_values, foreign = slice(own, own + AGREED), slice(other, other + AGREED)
        if (
            (own == 0 or first.ends[own - 1] <= first.starts[own])
            and np.array_equal(first.starts[own_values], second.starts[foreign])
            and np.array_equal(first.ids[own_values], second.ids[foreign])
        ):
            return own, other
    return None
