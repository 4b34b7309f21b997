"""Tokenises texts and conversations exactly as the worker's engine does, without torch or
transformers.

The worker publishes its tokenizer as a bundle; `tokenizers` reads it. Chat templates come with the
model (from the operator, never from a client) and run in jinja2's sandbox with the environment that
transformers gives them.
"""

import asyncio
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import anyio.to_thread
import numpy as np
from tokenizers import Encoding, Tokenizer

from ....broker.prompts.chat_templates import ChatTemplate
from ....broker.prompts.text_spans import TextMap, untrimmed
from ....schemas.base import MidstreamError, Translated, invalid
from ....schemas.jobs.models import ModelInfo, TokenizerBundle
from ....schemas.prompts.chat import PLAIN, PlainMessage, Rendering, characters_of

#: Above this many characters, or messages, tokenisation leaves the event loop; below, the hop costs
#: more than the work.
INLINE_CHARACTERS, INLINE_MESSAGES = 4096, 64
#: A text of up to this many characters is tokenised, whatever the model's length: the tokenizer's
#: normaliser may drop most of it.
SHORT_CHARACTERS = 64 * 1024
#: Used where the model has no limit.
ANY_LENGTH = 2**31 - 1


def check_vocabulary(ids: Sequence[int], at: str, model: ModelInfo) -> None:
    """Raises a 400 naming the first of `ids` outside the model's vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < model.vocab_size):
        return
    for index, token in enumerate(ids):
        if not 0 <= token < model.vocab_size:
            raise invalid(
                f"{at}[{index}]",
                f"token id {token} is outside the vocabulary",
                allowed=f"0 to {model.vocab_size - 1}",
            )


class TooLong(MidstreamError):
    """Text number `index` exceeds the model's length; `tokens` is None if its characters alone show
    it.
    """

    def __init__(self, index: int, tokens: int | None, detail: str = ""):
        super().__init__(
            "invalid_request", detail or f"has {tokens} tokens, more than the model's limit"
        )
        self.index = index
        self.tokens = tokens


class Encoded(NamedTuple):
    """The tokens of a text.

    `ids`: int32 `[tokens]`; `offsets`: as in `TextMap`, None if not requested.
    """

    ids: np.ndarray
    offsets: np.ndarray | None = None


class LongTexts(Protocol):
    """Tokenises a codec's long texts outside of the event loop (see
    `tokenizer_pool.BundleHelpers`).
    """

    async def encode(
        self, texts: Sequence[str], special_tokens: bool, limit: int, offsets: bool
    ) -> list[Encoded]: ...

    async def encode_chat(
        self, messages: Sequence[PlainMessage], rendering: Rendering, limit: int
    ) -> tuple[np.ndarray, str]: ...


class Codec(ChatTemplate):
    """One model's tokenizer and chat template.

    Immutable after construction; safe to share between threads.
    """

    def __init__(
        self, bundle: TokenizerBundle, limit: int = ANY_LENGTH, long_texts: LongTexts | None = None
    ):
        """`limit`: tokens that the model takes; `long_texts`: tokenises long texts, by default a
        thread does.
        """
        super().__init__(bundle)
        self._limit = limit
        self._long_texts = long_texts
        text, longest_token = untrimmed(bundle.tokenizer_json)
        self._most_characters = max(SHORT_CHARACTERS, limit * longest_token)
        self._tokenizer = Tokenizer.from_str(text)
        # A saved tokenizer may carry the truncation of its last caller; a prompt is never cut
        # silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._numbers = np.arange(max(self._tokenizer.get_vocab().values(), default=0) + 1).astype(
            object
        )

    async def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[Sequence[int]]:
        """Return token ids per text; `special_tokens` adds what the model's tokenizer adds around
        plain text, such as BOS.

        Raises TooLong for a text that exceeds the model's length by its characters alone, or, if
        helpers tokenise it, by its tokens. The caller checks all other texts.
        """
        compact: dict[str, Sequence[int]] = {}
        made = (await self.encodings(texts, special_tokens=special_tokens))[::-1]
        for text in texts:
            result = made.pop()  # each encoding is freed once it is converted
            if text not in compact:
                compact[text] = _compact(result.ids)
                await asyncio.sleep(0)
        return [compact[text] for text in texts]

    async def encodings(
        self, texts: Sequence[str], *, special_tokens: bool, offsets: bool = False
    ) -> list[Encoded]:
        """Encode like `encode`, into arrays, with `offsets` if requested.

        Repeated texts are tokenised once.
        """
        for index, text in enumerate(texts):
            self._check_characters(index, len(text))
        distinct = [*dict.fromkeys(texts)]
        with Translated(
            TooLong,
            lambda error: TooLong(texts.index(distinct[error.index]), error.tokens, error.detail),
            hidden=True,
        ):
            made = await self._encodings(distinct, special_tokens, offsets)
        result = dict(zip(distinct, made, strict=True))
        return [result[text] for text in texts]

    async def _encodings(
        self, texts: list[str], special_tokens: bool, offsets: bool
    ) -> list[Encoded]:
        if sum(map(len, texts)) <= INLINE_CHARACTERS and len(texts) <= INLINE_MESSAGES:
            return self.encode_here(texts, special_tokens, offsets)
        if self._long_texts is None:
            return await anyio.to_thread.run_sync(self.encode_here, texts, special_tokens, offsets)
        return await self._long_texts.encode(texts, special_tokens, self._limit, offsets)

    def encode_here(
        self, texts: Sequence[str], special_tokens: bool, offsets: bool = False
    ) -> list[Encoded]:
        """Encode like `encodings`, at any length, in this thread."""
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        return [
            Encoded(np.array(made.ids, np.int32), _offsets(made) if offsets else None)
            for made in encode(list(texts), add_special_tokens=special_tokens)
        ]

    def as_list(self, ids: np.ndarray) -> list[int]:
        """Return the ids as int objects that all lists share: 8 bytes each instead of 36."""
        return self._numbers[ids].tolist()

    def _check_characters(self, index: int, characters: int) -> None:
        if characters > self._most_characters:
            raise TooLong(
                index,
                None,
                f"has {characters} characters, more than can fit in the model's limit of "
                f"{self._limit} tokens",
            )

    def map_text(self, text: str, ids: Sequence[int], *, special_tokens: bool) -> TextMap | None:
        """Return the range of each of `ids` in `text`; None if they are not this text's tokens.

        Slow: ~ 1 µs per character.
        """
        (encoding,) = self._tokenizer.encode_batch(
            [text], add_special_tokens=special_tokens
        )  # `encode` would keep the GIL
        return TextMap(text, _offsets(encoding)) if encoding.ids == list(ids) else None

    def map_ids(self, ids: Sequence[int]) -> TextMap | None:
        """Return the text of `ids`, and the range of each in it; None if that text has other
        tokens.
        """
        return self.map_text(self.text_of(ids), ids, special_tokens=False)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def words(self, ids: Sequence[int], where: TextMap | None) -> list[str]:
        """Return each token as text, with its spaces: its part of the prompt's text, or what it
        decodes to alone. Never empty.
        """
        if where is not None:
            shared: dict[str, str] = {}  # long texts repeat words
            parts = (where.text[start:end] for start, end in where.offsets.tolist())
            return [
                shared.setdefault(part, part) or self._word(token)
                for token, part in zip(ids, parts, strict=True)
            ]
        known = {token: self._word(token) for token in set(ids)}
        return [known[token] for token in ids]

    def _word(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if (
            text and "\N{REPLACEMENT CHARACTER}" not in text
        ):  # otherwise it is not text, or part of a character
            return str(text)
        return self._tokenizer.id_to_token(token) or f"<{token}>"

    async def read(
        self, ids: Sequence[int], text: str | None, *, special_tokens: bool
    ) -> list[str]:
        """Return each of `ids` as text, in the characters of `text` if `ids` are its tokens."""

        where = None
        if text is not None:
            (result,) = await self.encodings([text], special_tokens=special_tokens, offsets=True)
            where = found_map(text, result, ids)
        return await anyio.to_thread.run_sync(self.words, ids, where)

    async def decode(self, ids: Sequence[int]) -> tuple[str, list[str]]:
        """Return the text of `ids`, special tokens included, and the text of each."""

        def work() -> tuple[str, list[str]]:
            return self.text_of(ids), self.words(ids, None)

        return await anyio.to_thread.run_sync(work)

    async def encode_chat(
        self, messages: Sequence[PlainMessage], rendering: Rendering = PLAIN
    ) -> tuple[Sequence[int], str]:
        """Return token ids and text of a conversation, by default opened for the assistant's turn.

        Raises a 400 naming `messages` when the model has no chat template or its template refuses
        the conversation.
        """
        characters = characters_of([*messages, {"tools": rendering.tools}, rendering.options])
        self._check_characters(0, characters)
        helpers = self._long_texts
        if helpers is not None and (
            characters > INLINE_CHARACTERS or len(messages) > INLINE_MESSAGES
        ):
            result, text = await helpers.encode_chat(messages, rendering, self._limit)
            return _compact(result), text
        text = self.render(messages, rendering)
        (ids,) = await self.encode([text], special_tokens=False)  # the template has them
        return ids, text


def _compact(ids: np.ndarray) -> Sequence[int]:
    """Return the ids in 4 bytes each; a list takes 8, and 28 more for each int that is not
    shared.
    """
    return array("i", ids.astype(np.int32, copy=False).tobytes())


def found_map(text: str, encoded: Encoded, ids: Sequence[int]) -> TextMap | None:
    """Return the range of each of `ids` in `text`, tokenised as `encoded`; None if `ids` differ."""
    if encoded.offsets is None or not np.array_equal(encoded.ids, np.asarray(ids)):
        return None
    return TextMap(text, encoded.offsets)


def _offsets(encoding: Encoding) -> np.ndarray:
    return np.array(encoding.offsets, np.int32).reshape(-1, 2)
