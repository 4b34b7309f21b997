"""Turns documents into token ids: texts in bounded slices, conversations through the chat template,
and checked token ids as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tokenizers import Encoding, Tokenizer

from midstream.broker.prompts.chat_templates import ChatTemplate
from midstream.broker.prompts.text_spans import TextMap, untrimmed
from midstream.broker.prompts.turns import NoTurn, Turns, renders
from midstream.schemas.base.errors import MidstreamError, Translated, invalid
from midstream.schemas.base.limits import MAX_DOCUMENT_BYTES, MAX_INT64, MAX_RENDERED_MESSAGES
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.prompts.chat import PlainMessage, Rendering
from midstream.schemas.prompts.selectors import SelectorError

from ..records.harvests import StoredHarvest
from .cut import CutDocument, fed

#: Characters, of one or several texts, that are tokenised in one call: the tokenizer needs about
#: 200 bytes of memory per character.
SLICE = 1 << 18
#: Characters in which two slices of a text overlap.
OVERLAP = 1 << 12
#: A seam is in none of so many of them at either end.
MARGIN = 1 << 9
#: Characters of a conversation that take as long to render as a message.
MESSAGE_CHARACTERS = 1 << 12
#: Tokens after a seam that must be equal in both slices.
AGREED = 8

_NONE = np.zeros(0, np.int64)
#: Number of a document, its value in the source, and how an error names it.
SourceValue = tuple[int, Any, str]


class _Slice(NamedTuple):
    """Tokens of a part of a text."""

    ids: np.ndarray  # int32 `[tokens]`
    starts: np.ndarray  # first and end character in the text, int64 `[tokens]` each
    ends: np.ndarray

    @classmethod
    def of(cls, encoding: Encoding, start: int) -> "_Slice":
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T + start
        return cls(np.array(encoding.ids, np.int32), starts, ends)

    def between(self, start: int, stop: int | None = None) -> "_Slice":
        return _Slice(*(column[start:stop] for column in self))


class HarvestTokenizer:
    """The tokenizer of a harvest's model."""

    def __init__(self, harvest: StoredHarvest, bundle: TokenizerBundle, vocabulary: int) -> None:
        """`vocabulary`: the size of the model's vocabulary."""
        self._harvest = harvest
        self._bundle = bundle
        self._vocabulary = vocabulary
        self._template = ChatTemplate(bundle)
        self._rendering = Rendering(opened=harvest.generate is not None)
        self._spans = harvest.positions.spans or []
        #: A chat template writes special tokens itself.
        self._special = harvest.cut.special_tokens and harvest.source.kind != "chat"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(untrimmed(self._bundle.tokenizer_json)[0])
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def special(self, name: str) -> int | None:
        """Return the id of the model's special token `name` (`bos_token`, `eos_token`), or None."""
        text = self._bundle.special_tokens.get(name)
        return None if text is None else self.tokenizer.token_to_id(text)

    def documents(self, values: Iterable[SourceValue], tokens: int = -1) -> Iterator[CutDocument]:
        """Yield the documents that hold the first `tokens` tokens of the sequences (-1: all); the
        last of them is cut short, and no value after it is read.

        Raises MidstreamError naming the document.
        """
        rest = tokens if tokens >= 0 else MAX_INT64

        def remaining() -> int:
            return rest

        for document in self._encoded(values, remaining):
            size = fed(document, self._harvest)
            yield document.first(min(rest, size))
            rest -= size
            if rest <= 0:
                return

    def _encoded(
        self, values: Iterable[SourceValue], remaining: Callable[[], int]
    ) -> Iterator[CutDocument]:
        texts: list[tuple[SourceValue, str]] = []
        size = 0
        for value in values:
            number, content, where = value
            prepared = self._prepared(content, where)
            if isinstance(prepared, str) and size + len(prepared) <= SLICE:
                texts.append((value, prepared))
                size += len(prepared)
                continue
            yield from self._together(texts)
            texts = []
            size = 0
            if not isinstance(prepared, str):
                yield CutDocument(number, prepared)
            elif len(prepared) <= SLICE:
                texts = [(value, prepared)]
                size = len(prepared)
            else:
                tokens = self._sliced(prepared, min(remaining(), self._longest))
                yield self._document(value, prepared, tokens)
        yield from self._together(texts)

    def _document(self, value: SourceValue, text: str, tokens: _Slice) -> CutDocument:
        number, messages, where = value
        with Translated(
            (msgspec.ValidationError, SelectorError),
            lambda error: invalid("positions.spans", f"{where}: {error}"),
        ):
            in_spans = self._in_spans(messages, text, tokens) if self._spans else None
        return CutDocument(number, tokens.ids, in_spans)

    def _in_spans(self, messages: Any, text: str, tokens: _Slice) -> np.ndarray:
        """Return which tokens are in the harvest's spans, bool `[tokens]`. Raises ValidationError
        and SelectorError.
        """
        plain = msgspec.convert(messages, list[PlainMessage])
        size = len(plain) + len(text) // MESSAGE_CHARACTERS
        times = sum(once + each * len(plain) for once, each in map(renders, self._spans))
        if size * times > MAX_RENDERED_MESSAGES:
            raise SelectorError(
                f"finding spans in {len(plain)} messages of {len(text)} characters takes too long"
            )
        roles = [str(message.get("role")) for message in plain]
        where = TextMap(text, np.stack([tokens.starts, tokens.ends], axis=1))
        turns = Turns(self._template, roles, plain, self._rendering, where)
        result = np.zeros(len(tokens.ids), bool)
        for span in self._spans:
            with suppress(NoTurn):
                result[turns.find(span)] = True
        return result

    @property
    def _longest(self) -> int:
        """The most tokens of a document that are kept."""
        return self._harvest.max_length if self._harvest.cut.fit == "truncate" else MAX_INT64

    def _together(self, texts: list[tuple[SourceValue, str]]) -> Iterator[CutDocument]:
        encode = (
            self.tokenizer.encode_batch if self._spans else self.tokenizer.encode_batch_fast
        )  # without offsets
        encodings = (
            encode([text for _, text in texts], add_special_tokens=self._special) if texts else []
        )
        for (value, text), encoding in zip(texts, encodings, strict=True):
            tokens = (
                _Slice.of(encoding, 0)
                if self._spans
                else _Slice(np.array(encoding.ids, np.int32), _NONE, _NONE)
            )
            yield self._document(value, text, tokens.between(0, self._longest))

    @cached_property
    def _around(self) -> tuple[_Slice, _Slice]:
        """The special tokens before and after a text."""
        encoding = self.tokenizer.encode("a", add_special_tokens=self._special)
        text = [
            place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None
        ]
        whole = _Slice.of(encoding, 0)
        first, last = (text[0], text[-1] + 1) if text else (0, len(encoding.ids))
        return whole.between(0, first), whole.between(last)

    def _sliced(self, text: str, most: int) -> _Slice:
        """Return the first `most` tokens of a long text, as if it were tokenised as a whole.

        Slices overlap: the second takes over at a seam, where both have the same tokens. If there
        is no seam, because the tokenizer sees no word boundary in the whole overlap, the first is
        cut after a token and the second begins there.
        """
        before, after = self._around
        parts = [before]
        count = len(before.ids)
        size = min(SLICE, max(4 * OVERLAP, 8 * most))
        start = 0
        piece = self._slice(text, 0, size)
        while count < most:
            end = start + size
            if end >= len(text):
                parts += [piece, after]
                break
            following = self._slice(text, end - OVERLAP, size)
            if (seam := _seam(piece, following, end - OVERLAP + MARGIN, end - MARGIN)) is not None:
                taken, skipped = seam
                start = end - OVERLAP
                rest = following.between(skipped)
            else:
                taken = int(np.searchsorted(piece.ends, end - MARGIN))
                start = int(piece.ends[taken - 1])
                rest = self._slice(text, start, size)
            parts.append(piece.between(0, taken))
            count += taken
            piece = rest
        return _Slice(*(np.concatenate(column)[:most] for column in zip(*parts, strict=True)))

    def _slice(self, text: str, start: int, size: int) -> _Slice:
        return _Slice.of(
            self.tokenizer.encode(text[start : start + size], add_special_tokens=False), start
        )

    def _prepared(self, value: Any, where: str) -> str | np.ndarray:
        """Return the text to tokenise, or checked token ids."""
        kind = self._harvest.source.kind
        if kind == "tokens" or (isinstance(value, list) and self._harvest.source.lines is not None):
            return self._checked_ids(value, where)
        if kind == "chat":
            with Translated(
                MidstreamError,
                lambda error: invalid(
                    "source.kind",
                    f"{where}: {error.detail}",
                    allowed="text, tokens" if error.hint else None,  # without a usable template
                ),
            ):
                text = self._template.render(value, self._rendering)
            if len(text) > MAX_DOCUMENT_BYTES:
                raise invalid(
                    "source", f"{where} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB as text"
                )
            return text
        if value is None:
            return ""
        if not isinstance(value, str):
            raise invalid("source.kind", f"{where} is not a text", allowed="text, chat, tokens")
        return value

    def _checked_ids(self, value: Any, where: str) -> np.ndarray:
        """Return `value` as int32 token ids. Only integers pass: numpy would convert 1.7, true and
        "12" as well.
        """
        ids = [] if value is None else value
        if not isinstance(ids, list) or not all(
            type(token) is int and 0 <= token < self._vocabulary for token in ids
        ):
            raise invalid(
                "source.kind",
                f"{where} is not a list of the model's token ids",
                allowed=f"integers from 0 to {self._vocabulary - 1}",
            )
        return np.array(ids, np.int32)


def _seam(first: _Slice, second: _Slice, low: int, high: int) -> tuple[int, int] | None:
    """Returns the index of a token in `first` and in `second` from which on both have the same
    `AGREED` tokens, within characters `[low, high)` of the text; None if there is no such token.
    """
    begin, stop = np.searchsorted(first.starts, [low, high])
    for at in range(int(begin), int(stop) - AGREED):
        other = int(np.searchsorted(second.starts, first.starts[at]))
        in_first = slice(at, at + AGREED)
        in_second = slice(other, other + AGREED)
        if (
            (at == 0 or first.ends[at - 1] <= first.starts[at])
            and np.array_equal(first.starts[in_first], second.starts[in_second])
            and np.array_equal(first.ids[in_first], second.ids[in_second])
        ):
            return at, other
    return None
