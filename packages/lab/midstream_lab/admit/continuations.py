"""Tokenises answers after their prompts; the tokens may differ from those of the answer alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from midstream.api.resolve.admission.admission import tokenise
from midstream.api.resolve.prompts.request_parsing import ParsedPrompt
from midstream.api.resolve.prompts.tokenizer import Codec, TooLong
from midstream.broker.prompts.text_spans import TextMap
from midstream.schemas.base.errors import Translated, invalid
from midstream.schemas.base.limits import MAX_ANSWER_TOKENS
from midstream.schemas.jobs.models import ModelInfo

#: Number of tokens that an error shows before the first that differs.
SHOWN_TOKENS = 3
#: Characters of a prompt that a note or reason shows.
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as tokens and as text. `where`: None for token ids that no text is tokenised to."""

    ids: list[int]
    words: list[str]  # how each token reads
    where: TextMap | None = None

    @property
    def text(self) -> str | None:
        return None if self.where is None else self.where.text

    def quoted(self, places: Iterable[int]) -> str:
        text = "".join(self.words[place] for place in places)
        return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")


@dataclass(frozen=True)
class Continuation:
    """An answer, or a foil."""

    field: str
    ids: list[int]
    text: str
    note: str = ""  # a caveat for readers of the result


#: Of a pair without an answer, or without a foil.
NOTHING = Continuation("", [], "")


async def continue_prompts(
    requested: Sequence[tuple[str, str | list[int], Sequence[ReadPrompt]]],
    model: ModelInfo,
    codec: Codec,
) -> list[Continuation]:
    """Return the continuations with their token ids.

    `requested`: (field, text or token ids, prompts that it follows). Text is tokenised after each
    of its prompts.

    Raises a 400 naming the field if there are no tokens, too many, or different ones after each
    prompt, if the text changes the prompt's own tokens, and for token ids outside the vocabulary.
    """
    plain: list[tuple[str, str]] = []  # field, text
    texts_of = {
        field: [prompt.text for prompt in prompts if prompt.text is not None]
        for field, _, prompts in requested
    }
    for field, value, _ in requested:
        if not value:
            raise invalid(field, "is empty: it needs at least one token")
        if isinstance(value, str):
            parts = [part for text in texts_of[field] for part in (text, text + value)]
            plain += [(field, part) for part in parts or [value]]
        else:
            await tokenise([ParsedPrompt(field, value)], model, codec)
    with Translated(
        TooLong,
        lambda error: invalid(
            plain[error.index][0],
            f"together with its prompt, it {error.detail}",
            allowed=f"at most {model.max_model_len} tokens in total",
        ),
        hidden=True,
    ):
        encoded = iter(await codec.encodings([text for _, text in plain], special_tokens=False))
    made = []
    for field, value, _ in requested:
        if isinstance(value, str):
            texts = texts_of[field]
            after_each = [
                added_tokens(field, value, next(encoded).ids, next(encoded).ids, codec)
                for _ in texts
            ]
            after_each = after_each or [codec.as_list(next(encoded).ids)]
            made.append(
                Continuation(
                    field, _agreed(field, after_each, codec), value, _note(field, value, texts)
                )
            )
        else:
            made.append(Continuation(field, value, "".join(codec.words(value, None))))
        if not 0 < len(made[-1].ids) <= MAX_ANSWER_TOKENS:
            raise invalid(
                field, f"has {len(made[-1].ids)} tokens", allowed=f"1 to {MAX_ANSWER_TOKENS} tokens"
            )
    return made


def added_tokens(
    field: str, value: str, prompt: np.ndarray, whole: np.ndarray, codec: Codec
) -> list[int]:
    """Return the tokens that `value` adds to the prompt's. Raises a 400 if it changes these."""
    if np.array_equal(whole[: len(prompt)], prompt):
        return codec.as_list(whole[len(prompt) :])
    both = min(len(prompt), len(whole))
    differ = np.flatnonzero(prompt[:both] != whole[:both])
    first = max(0, (int(differ[0]) if len(differ) else both) - SHOWN_TOKENS)
    before, after = (
        codec.words(codec.as_list(ids[first : first + 2 * SHOWN_TOKENS + 1]), None)
        for ids in (prompt, whole)
    )
    raise invalid(
        field,
        (
            f"{value!r} changes the tokens before it: without it the prompt ends in "
            f"{_shown(before)}, and with it in {_shown(after)}"
        ),
        allowed=(
            "text that begins with a space after a prompt that does not end with one; or token ids"
        ),
    )


def _agreed(field: str, after_each: list[list[int]], codec: Codec) -> list[int]:
    if all(ids == after_each[0] for ids in after_each):
        return after_each[0]
    shown = " and ".join(_shown(codec.words(ids, None)) for ids in after_each)
    raise invalid(
        field,
        f"has different tokens after the clean and the corrupt prompt: {shown}",
        allowed="token ids",
    )


def _note(field: str, value: str, texts: Sequence[str]) -> str:
    """Return a note if `value` continues the prompt's last word, which is rarely intended."""
    if (
        value[0].isascii()
        and value[0].isalnum()
        and any(text[-1:].isascii() and text[-1:].isalnum() for text in texts)
    ):
        name = field.rpartition(".")[2]
        return (
            f"{name} {value!r} continues the prompt's last word: begin it with a space if "
            "it is a separate word"
        )
    return ""


def _shown(words: Sequence[str]) -> str:
    return " ".join(map(repr, words[: 2 * SHOWN_TOKENS])) + (
        " …" if len(words) > 2 * SHOWN_TOKENS else ""
    )
