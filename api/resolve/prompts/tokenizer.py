"""Tokenises texts and conversations exactly as the worker's engine does, without torch or
transformers.

The worker publishes its tokenizer as a bundle; `tokenizers` reads it. Chat templates come with the
model (from the operator, never from a client) and run in jinja2's sandbox with the environment that
transformers gives them.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import accumulate, chain, count, groupby, zip_longest
from typing import NamedTuple

import anyio.to_thread
import numpy as np
from tokenizers import Encoding, Tokenizer

from ....broker.prompts.chat_templates import ChatTemplate
from ....broker.prompts.text_spans import TextMap, untrimmed
from ....broker.prompts.turn_maps import turn_map
from ....broker.prompts.turns import Turns
from ....schemas.base.errors import MidstreamError, Translated, invalid
from ....schemas.base.limits import MAX_FOUND_POSITIONS
from ....schemas.base.records import Wire
from ....schemas.jobs.models import ModelInfo, TokenizerBundle
from ....schemas.prompts.chat import PLAIN, PlainMessage, Rendering, characters_of
from ....schemas.prompts.selectors import SelectorError, Span, SpanFinder, no_text
from ....schemas.prompts.sight import NO_TURNS, TurnMap

#: Above this many characters, or messages, tokenisation leaves the event loop; below, the hop costs
#: more than the work.
INLINE_CHARACTERS = 4096
INLINE_MESSAGES = 64
#: A text of up to this many characters is tokenised, whatever the model's length: the tokenizer's
#: normaliser may drop most of it.
SHORT_CHARACTERS = 64 * 1024
#: Used where the model has no limit.
ANY_LENGTH = 2**31 - 1
#: Characters, and texts or conversations, of one question; a single one may have more characters.
GROUP_CHARACTERS = 256 * 1024
GROUP_ITEMS = 512


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


class ChatInput(Wire):
    """A conversation as its chat template gets it."""

    messages: list[PlainMessage]
    rendering: Rendering = PLAIN
    roles: list[str] = []  # of the messages as they were sent, which spans name

    @property
    def characters(self) -> int:
        """The number of characters of all texts that are rendered."""
        return characters_of(
            [*self.messages, {"tools": self.rendering.tools}, self.rendering.options]
        )


class SearchedPrompt(Wire):
    """A prompt in which spans are to be found."""

    ids: bytes  # int32
    text: str | None  # that has these tokens; None: what they decode to
    chat: ChatInput | None = None  # the conversation that was rendered as the text
    images: list[int] = []  # positions of its images


class FoundSpan(Wire):
    """Says where a span is in a prompt, or why it is not there."""

    ids: bytes = b""  # ascending positions, int32
    refusal: tuple[str, str] | None = None  # text of a SelectorError, and its place in the span

    def __len__(self) -> int:
        return len(self.ids) // 4

    def positions(self) -> list[int]:
        """Return the positions; raises SelectorError."""
        if self.refusal is not None:
            raise SelectorError(*self.refusal)
        return array("i", self.ids).tolist()


class CodecQuestion(Wire):
    """Asks a codec to encode texts or conversations, or to find spans or turns in prompts."""

    items: list[str | ChatInput] = []
    special_tokens: bool = False  # of texts: templates write them
    limit: int = ANY_LENGTH  # tokens; a longer text or conversation is refused
    offsets: bool = False  # whether the answer includes offsets
    searched: list[SearchedPrompt] = []
    spans: list[Span] = []
    mapped: list[SearchedPrompt] = []  # conversations whose turns are to be found


class CodecAnswer(Wire):
    ids: list[bytes] = []  # int32, of each text or conversation
    texts: list[str] = []  # of each conversation, as rendered
    offsets: list[bytes] = []  # int32 pairs, of each text
    found: list[list[FoundSpan]] = []  # of each prompt that was searched, by span
    turns: list[TurnMap] = []  # of each conversation


class Codec(ChatTemplate):
    """One model's tokenizer and chat template.

    Immutable after construction; safe to share between threads.
    """

    def __init__(
        self,
        bundle: TokenizerBundle,
        limit: int = ANY_LENGTH,
        helpers: Callable[[CodecQuestion], Awaitable[CodecAnswer]] | None = None,
    ):
        """`limit`: tokens that the model takes; `helpers`: answers long questions (see
        `tokenizer_pool.Helpers`), by default a thread does.
        """
        super().__init__(bundle)
        self._limit = limit
        self._helpers = helpers
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

        Raises TooLong for a text that exceeds the model's length.
        """
        found = await self._encoded(texts, special_tokens, offsets=False)
        compact = {text: array("i", ids) for text, (ids, _) in found.items()}
        return [compact[text] for text in texts]

    async def encodings(
        self, texts: Sequence[str], *, special_tokens: bool, offsets: bool = False
    ) -> list[Encoded]:
        """Encode like `encode`, into arrays, with `offsets` if requested."""
        found = await self._encoded(texts, special_tokens, offsets)
        made = {
            text: Encoded(
                np.frombuffer(ids, np.int32),
                np.frombuffer(places, np.int32).reshape(-1, 2) if offsets else None,
            )
            for text, (ids, places) in found.items()
        }
        return [made[text] for text in texts]

    async def _encoded(
        self, texts: Sequence[str], special_tokens: bool, offsets: bool
    ) -> dict[str, tuple[bytes, bytes]]:
        """Return text → token ids and offsets; repeated texts are tokenised once."""
        distinct = [*dict.fromkeys(texts)]
        with Translated(
            TooLong,
            lambda error: TooLong(texts.index(distinct[error.index]), error.tokens, error.detail),
            hidden=True,
        ):
            answers = await self._ask_each(distinct, special_tokens, offsets)
        found = chain.from_iterable(
            zip_longest(answer.ids, answer.offsets, fillvalue=b"") for answer in answers
        )
        return dict(zip(distinct, found, strict=True))

    async def _ask_each(
        self, items: Sequence[str | ChatInput], special_tokens: bool = False, offsets: bool = False
    ) -> list[CodecAnswer]:
        """Encode all texts, or all conversations, in groups that helpers answer soon. Raises
        TooLong.
        """
        parts = sum(1 if isinstance(item, str) else len(item.messages) for item in items)
        sizes = (
            await anyio.to_thread.run_sync(_sizes, items)
            if parts > INLINE_MESSAGES
            else _sizes(items)
        )
        for index, characters in enumerate(sizes):
            self._check_characters(index, characters)
        apart = sum(sizes) > INLINE_CHARACTERS or parts > INLINE_MESSAGES
        answers: list[CodecAnswer] = []
        first = 0
        for group in _groups(items, sizes):
            try:
                question = CodecQuestion(group, special_tokens, self._limit, offsets)
                answers.append(await self._ask(question, apart))
            except TooLong as error:
                raise TooLong(first + error.index, error.tokens) from None
            first += len(group)
        return answers

    async def _ask(self, question: CodecQuestion, apart: bool) -> CodecAnswer:
        """Answer the question; `apart`: outside of the event loop."""
        if not apart:
            return self.answer(question)
        if self._helpers is None:
            return await anyio.to_thread.run_sync(self.answer, question)
        return await self._helpers(question)

    def answer(self, question: CodecQuestion) -> CodecAnswer:
        """Answer the question in this thread. Raises TooLong, and a 400 for a conversation that
        the chat template rejects or for more than `MAX_FOUND_POSITIONS` positions.
        """
        if question.searched:
            return CodecAnswer(found=self._locate(question.searched, question.spans))
        if question.mapped:
            return CodecAnswer(turns=[self._turns(prompt) for prompt in question.mapped])
        rendered = [
            self.render(item.messages, item.rendering)
            for item in question.items
            if isinstance(item, ChatInput)
        ]
        plain = [item for item in question.items if isinstance(item, str)]
        made = self.encode_here(rendered or plain, question.special_tokens, question.offsets)
        for index, each in enumerate(made):
            if len(each.ids) > question.limit:
                raise TooLong(index, len(each.ids))
        return CodecAnswer(
            ids=[each.ids.tobytes() for each in made],
            texts=rendered,
            offsets=[each.offsets.tobytes() for each in made if each.offsets is not None],
        )

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
        found: list[int] = self._numbers[ids].tolist()
        return found

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
        (encoded,) = self.encode_here([text], special_tokens, offsets=True)
        return found_map(text, encoded, ids)

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

    async def encode_chats(self, chats: Sequence[ChatInput]) -> list[tuple[Sequence[int], str]]:
        """Return token ids and text of each conversation. Raises like `encode`, and a 400 naming
        `messages` when the model has no chat template or its template refuses a conversation.
        """
        answers = await self._ask_each(chats)
        return [
            (array("i", ids), text)
            for answer in answers
            for ids, text in zip(answer.ids, answer.texts, strict=True)
        ]

    async def locate(
        self, prompts: Sequence[SearchedPrompt], spans: Sequence[Span], apart: bool
    ) -> list[list[FoundSpan]]:
        """Return where each span is in each prompt; `apart`: outside of the event loop.

        Raises a 400 when they have more than `MAX_FOUND_POSITIONS` positions.
        """
        return (await self._ask(CodecQuestion(searched=[*prompts], spans=[*spans]), apart)).found

    def _locate(
        self, prompts: Sequence[SearchedPrompt], spans: Sequence[Span]
    ) -> list[list[FoundSpan]]:
        result: list[list[FoundSpan]] = []
        room = MAX_FOUND_POSITIONS
        for prompt in prompts:
            find = self._finder(prompt)
            of_prompt = []
            for span in spans:
                found = _found(find, span)
                of_prompt.append(found)
                room -= len(found)
                if room < 0:
                    raise too_many_positions("positions")
            result.append(of_prompt)
        return result

    def _finder(self, prompt: SearchedPrompt) -> SpanFinder:
        """Return what finds spans in a prompt."""
        chat = prompt.chat
        where = self._map(prompt)
        if where is None:
            return no_text
        if chat is None:
            return where.find
        return Turns(self, chat.roles, chat.messages, chat.rendering, where).find

    def _map(self, prompt: SearchedPrompt) -> TextMap | None:
        ids = array("i", prompt.ids)
        if prompt.text is None:
            return self.map_ids(ids)
        return self.map_text(prompt.text, ids, special_tokens=prompt.chat is None)

    async def turn_maps(self, chats: Sequence[SearchedPrompt]) -> list[TurnMap]:
        """Return what the sender of each conversation wrote in its prompt."""
        maps: list[TurnMap] = []
        for chat in chats:
            apart = len(chat.text or "") > INLINE_CHARACTERS
            maps += (await self._ask(CodecQuestion(mapped=[chat]), apart)).turns
            await asyncio.sleep(0)
        return maps

    def _turns(self, prompt: SearchedPrompt) -> TurnMap:
        chat = prompt.chat
        if chat is None:
            return TurnMap(unknown=NO_TURNS)
        where = self._map(prompt)
        return turn_map(self, chat.roles, chat.messages, chat.rendering, where, prompt.images)


def _sizes(items: Sequence[str | ChatInput]) -> list[int]:
    return [len(item) if isinstance(item, str) else item.characters for item in items]


def _groups(
    items: Sequence[str | ChatInput], sizes: Sequence[int]
) -> Iterator[list[str | ChatInput]]:
    """Yield the items in groups of `GROUP_ITEMS` and about `GROUP_CHARACTERS` at most."""
    numbered = zip(items, accumulate(sizes), count())
    by_place = groupby(numbered, lambda each: (each[1] // GROUP_CHARACTERS, each[2] // GROUP_ITEMS))
    for _, group in by_place:
        yield [item for item, *_ in group]


def too_many_positions(field: str) -> MidstreamError:
    """Return the 400 for a selector of more positions than a request may have."""
    return invalid(
        field,
        "selects too many positions over all prompts",
        hint="use fewer positions or spans, or fewer prompts in one job",
    )


def _found(find: SpanFinder, span: Span) -> FoundSpan:
    try:
        return FoundSpan(array("i", find(span)).tobytes())
    except SelectorError as error:
        return FoundSpan(refusal=(str(error), error.at))


def found_map(text: str, encoded: Encoded, ids: Sequence[int]) -> TextMap | None:
    """Return the range of each of `ids` in `text`, tokenised as `encoded`; None if `ids` differ."""
    if encoded.offsets is None or not np.array_equal(encoded.ids, np.asarray(ids)):
        return None
    return TextMap(text, encoded.offsets)


def _offsets(encoding: Encoding) -> np.ndarray:
    return np.array(encoding.offsets, np.int32).reshape(-1, 2)
