"""Turns documents into token ids: texts in bounded slices, conversations through the chat template,
and checked token ids as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from ....broker.artifacts.chat_templates import in_parts, template_environment
from ....schemas.base import MidstreamError
from ....schemas.base.limits import MAX_DOCUMENT_BYTES, MAX_INT64
from ....schemas.jobs.harvests import StoredHarvest
from ....schemas.jobs.models import TokenizerBundle
from .cut import CutDocument, fed, within

#: Characters, of one or several texts, that are tokenised in one call: the tokenizer needs about
#: 200 bytes of memory per character.
SLICE = 1 << 18
#: Characters in which two slices of a text overlap; a seam is not in the first and last `MARGIN` of
#: them.
OVERLAP, MARGIN = 1 << 12, 1 << 9
#: Tokens after a seam that must be equal in both slices.
AGREED = 8

#: Number of a document, its value in the source, and how an error names it.
SourceValue = tuple[int, Any, str]


class HarvestTokenizer:
    """The tokenizer of a harvest's model."""

    def __init__(self, harvest: StoredHarvest, bundle: TokenizerBundle, vocabulary: int) -> None:
        """`vocabulary`: the size of the model's vocabulary."""
        self._harvest, self._bundle, self._vocabulary = harvest, bundle, vocabulary
        #: A chat template writes special tokens itself.
        self._special = harvest.cut.special_tokens and harvest.source.kind != "chat"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._bundle.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def special(self, name: str) -> int | None:
        """Return the id of the model's special token `name` (`bos_token`, `eos_token`), or None."""
        text = self._bundle.special_tokens.get(name)
        token: int | None = None if text is None else self.tokenizer.token_to_id(text)
        return token

    def documents(self, values: Iterable[SourceValue], tokens: int = -1) -> Iterator[CutDocument]:
        """Yield the documents that hold the first `tokens` tokens of the sequences (-1: all); the
        last of them is cut short, and no value after it is read.

        Raises MidstreamError naming the document.
        """
        rest = tokens if tokens >= 0 else MAX_INT64

        def remaining() -> int:
            return rest

        for number, ids in self._encoded(values, remaining):
            document = CutDocument(number, ids)
            yield from within([document], self._harvest, rest)
            rest -= fed(document, self._harvest)
            if rest <= 0:
                return

    def _encoded(
        self, values: Iterable[SourceValue], remaining: Callable[[], int]
    ) -> Iterator[tuple[int, np.ndarray]]:
        texts: list[tuple[int, str]] = []
        size = 0
        for number, value, where in values:
            prepared = self._prepared(value, where)
            if isinstance(prepared, str) and size + len(prepared) <= SLICE:
                texts.append((number, prepared))
                size += len(prepared)
                continue
            yield from self._together(texts)
            texts, size = [], 0
            if not isinstance(prepared, str):
                yield number, prepared
            elif len(prepared) <= SLICE:
                texts, size = [(number, prepared)], len(prepared)
            else:
                yield number, self._sliced(prepared, min(remaining(), self._longest))
        yield from self._together(texts)

    @property
    def _longest(self) -> int:
        """The most tokens of a document that are kept."""
        return self._harvest.max_length if self._harvest.cut.fit == "truncate" else MAX_INT64

    def _together(self, texts: list[tuple[int, str]]) -> Iterator[tuple[int, np.ndarray]]:
        encodings = (
            self.tokenizer.encode_batch_fast(
                [text for _, text in texts], add_special_tokens=self._special
            )
            if texts
            else []
        )
        yield from (
            (number, np.array(encoding.ids[: self._longest], np.int32))
            for (number, _), encoding in zip(texts, encodings, strict=True)
        )

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids of the special tokens before and after a text."""
        encoding = self.tokenizer.encode("a", add_special_tokens=self._special)
        text = [
            place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None
        ]
        return (encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]) if text else ([], [])

    def _sliced(self, text: str, most: int) -> np.ndarray:
        """Return the first `most` tokens of a long text, as if it were tokenised as a whole.

        Slices overlap: the second takes over at a seam, where both have the same tokens. If there
        is no seam, because the tokenizer sees no word boundary in the whole overlap, the first is
        cut after a token and the second begins there.
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
                taken, skipped = seam
                start, rest = end - OVERLAP, following.after(skipped)
            else:
                taken = int(np.searchsorted(piece.ends, end - MARGIN))
                start = int(piece.ends[taken - 1])
                rest = self._slice(text, start, size)
            parts.append(piece.ids[:taken])
            count += taken
            piece = rest
        return np.concatenate(parts)[:most]

    def _slice(self, text: str, start: int, size: int) -> "_Slice":
        return _Slice.of(
            self.tokenizer.encode(text[start : start + size], add_special_tokens=False), start
        )

    def _prepared(self, value: Any, where: str) -> str | np.ndarray:
        """Return the text to tokenise, or checked token ids."""
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
        """Return `value` as int32 token ids. Only integers pass: numpy would convert 1.7, true and
        "12" as well.
        """
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
    """Tokens of a part of a text: ids, and first and end character in the text; int `[tokens]`
    each.
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
    """Returns the index of a token in `first` and in `second` from which on both have the same
    `AGREED` tokens, within characters `[low, high)` of the text; None if there is no such token.
    """
    begin, stop = np.searchsorted(first.starts, [low, high])
    for at in range(int(begin), int(stop) - AGREED):
        other = int(np.searchsorted(second.starts, first.starts[at]))
        in_first, in_second = slice(at, at + AGREED), slice(other, other + AGREED)
        if (
            (at == 0 or first.ends[at - 1] <= first.starts[at])
            and np.array_equal(first.starts[in_first], second.starts[in_second])
            and np.array_equal(first.ids[in_first], second.ids[in_second])
        ):
            return at, other
    return None
