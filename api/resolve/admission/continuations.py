"""Tokenisation of answers after a prompt; the tokens may differ from those of the answer alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....schemas.base.errors import invalid
from ....schemas.base.limits import MAX_ANSWER_TOKENS
from ....schemas.jobs.models import ModelInfo
from ..prompts.request_parsing import ParsedPrompt
from ..prompts.text_spans import TextMap
from ..prompts.tokenizer import Codec, TooLong
from .admission import tokenise

#: Tokens before the first that differs which an error shows.
SHOWN_TOKENS = 3


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as tokens and as text. `where`: None for token ids that no text has."""

    ids: list[int]
    words: list[str]  # how each token reads
    where: TextMap | None = None

    @property
    def text(self) -> str | None:
        return None if self.where is None else self.where.text


@dataclass(frozen=True)
class Continuation:
    """An answer, or a foil."""

    field: str
    ids: list[int]
    text: str
    note: str = ""  # what a reader should know of it


async def continue_prompts(
    read_prompts: Sequence[tuple[str, str | list[int], Sequence[ReadPrompt]]],
    model: ModelInfo,
    codec: Codec,
) -> list[Continuation]:
    """`read_prompts`: field, what follows, and behind which prompts.

    Text gets the tokens that it has behind each of them.

    Raises a 400 naming the field when there are none, too many, or not the same behind each, when
    the text changes the prompt's own tokens, and for token ids outside the vocabulary.
    """
    plain: list[tuple[str, str]] = []  # field, text
    for field, value, prompts in read_prompts:
        if not value:
            raise invalid(field, "is empty: it needs at least one token")
        if isinstance(value, str):
            parts = [
                part
                for prompt in prompts
                if prompt.text is not None
                for part in (prompt.text, prompt.text + value)
            ] or [value]
            plain += [(field, part) for part in parts]
        else:
            await tokenise([ParsedPrompt(field, value)], model, codec)
    try:
        encoded = iter(await codec.encodings([text for _, text in plain], special_tokens=False))
    except TooLong as error:
        raise invalid(
            plain[error.index][0],
            f"together with its prompt, it {error.detail}",
            allowed=f"at most {model.max_model_len} tokens in total",
        ) from None
    made = []
    for field, value, prompts in read_prompts:
        if isinstance(value, str):
            texts = [prompt.text for prompt in prompts if prompt.text is not None]
            behind = [
                _behind(field, value, next(encoded).ids, next(encoded).ids, codec) for _ in texts
            ]
            behind = behind or [codec.as_list(next(encoded).ids)]
            made.append(
                Continuation(
                    field, _agreed(field, behind, codec), value, _joined(field, value, texts)
                )
            )
        else:
            made.append(Continuation(field, value, "".join(codec.words(value, None))))
        if not 0 < len(made[-1].ids) <= MAX_ANSWER_TOKENS:
            raise invalid(
                field, f"has {len(made[-1].ids)} tokens", allowed=f"1 to {MAX_ANSWER_TOKENS} tokens"
            )
    return made


def _behind(
    field: str, value: str, prompt: np.ndarray, whole: np.ndarray, codec: Codec
) -> list[int]:
    """Return what is added to the prompt's tokens."""
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


def _agreed(field: str, behind: list[list[int]], codec: Codec) -> list[int]:
    if all(ids == behind[0] for ids in behind):
        return behind[0]
    shown = " and ".join(_shown(codec.words(ids, None)) for ids in behind)
    raise invalid(
        field,
        f"has different tokens after the clean and the corrupt prompt: {shown}",
        allowed="token ids",
    )


def _joined(field: str, value: str, texts: Sequence[str]) -> str:
    """A word that is written on at the prompt's last one is rarely meant."""
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
