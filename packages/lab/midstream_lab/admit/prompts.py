"""Reads the prompts of a sweep: limits their characters first, then tokenises them, and finds the
place of each token in its text.
"""

from collections.abc import Mapping, Sequence

import anyio.to_thread

from midstream.api.resolve.admission.admission import EMPTY_ONCE_TOKENISED, tokenise, too_long
from midstream.api.resolve.prompts.request_parsing import ParsedPrompt
from midstream.api.resolve.prompts.tokenizer import Codec, Encoded, TooLong, found_map
from midstream.schemas.base.errors import Translated, invalid
from midstream.schemas.base.limits import MAX_SWEEP_TEXT
from midstream.schemas.jobs.models import ModelInfo

from ..records.sweeps import TEXTS, SweepPair
from .continuations import ReadPrompt


def check_text(pairs: Sequence[SweepPair], spelled: Mapping[str, str] | None = None) -> None:
    """Raises a 400 naming the field at which the sweep exceeds `MAX_SWEEP_TEXT` characters.

    `spelled`: field → text of token ids. Without it a token counts as one character, the fewest
    that it may have.
    """
    total = 0
    for index, pair in enumerate(pairs):
        for name in TEXTS:
            field = f"pairs[{index}].{name}"
            total += len((spelled or {}).get(field) or getattr(pair, name) or "")
            if total > MAX_SWEEP_TEXT:
                detail = (
                    f"the sweep's prompts and answers exceed {MAX_SWEEP_TEXT} characters in total"
                )
                raise invalid(
                    field, detail, hint="use shorter prompts, or fewer pairs in one sweep"
                )


async def read_prompts(
    pairs: Sequence[SweepPair], model: ModelInfo, codec: Codec
) -> list[ReadPrompt]:
    """Return the prompts of all pairs in turn, clean before corrupt.

    Raises a 400 naming the first that is invalid.
    """
    check_text(pairs)
    parsed = [
        ParsedPrompt(f"pairs[{index}].{name}", prompt)
        for index, pair in enumerate(pairs)
        for name, prompt in (("clean", pair.clean), ("corrupt", pair.corrupt))
        if prompt is not None
    ]
    texts = [prompt for prompt in parsed if isinstance(prompt.value, str)]
    as_ids = [prompt for prompt in parsed if not isinstance(prompt.value, str)]
    # ids first: their lengths can be checked without tokenising
    of_ids = iter(await _read_ids(pairs, as_ids, model, codec))
    of_texts = iter(await _read_texts(texts, model, codec))
    return [next(of_texts if isinstance(prompt.value, str) else of_ids) for prompt in parsed]


async def _read_texts(
    prompts: Sequence[ParsedPrompt], model: ModelInfo, codec: Codec
) -> list[ReadPrompt]:
    texts = [str(prompt.value) for prompt in prompts]
    for prompt in prompts:
        if not prompt.value:
            raise invalid(prompt.field, "is empty: a prompt needs at least one token")
    with Translated(
        TooLong, lambda error: too_long(error, prompts[error.index].field, model), hidden=True
    ):
        encoded = await codec.encodings(texts, special_tokens=True, offsets=True)
    for prompt, result in zip(prompts, encoded, strict=True):
        if not len(result.ids):
            raise invalid(prompt.field, EMPTY_ONCE_TOKENISED)
    ids = [codec.as_list(result.ids) for result in encoded]
    return await anyio.to_thread.run_sync(_as_read, texts, ids, encoded, codec)


async def _read_ids(
    pairs: Sequence[SweepPair], prompts: Sequence[ParsedPrompt], model: ModelInfo, codec: Codec
) -> list[ReadPrompt]:
    for prompt in prompts:
        if len(prompt.value) > model.max_model_len:
            raise too_long(TooLong(0, len(prompt.value)), prompt.field, model)
    ids = [list(stored.token_ids) for stored in await tokenise(prompts, model, codec)]

    def spell() -> list[str]:
        texts: list[str] = []
        for tokens in ids:
            texts.append(codec.text_of(tokens) if sum(map(len, texts)) <= MAX_SWEEP_TEXT else "")
        return texts

    texts = await anyio.to_thread.run_sync(spell)
    check_text(pairs, dict(zip((prompt.field for prompt in prompts), texts, strict=True)))
    encoded = await codec.encodings(texts, special_tokens=False, offsets=True)
    return await anyio.to_thread.run_sync(_as_read, texts, ids, encoded, codec)


def _as_read(
    texts: Sequence[str], ids: Sequence[list[int]], encoded: Sequence[Encoded], codec: Codec
) -> list[ReadPrompt]:
    made = []
    for text, tokens, result in zip(texts, ids, encoded, strict=True):
        where = found_map(text, result, tokens)
        made.append(ReadPrompt(tokens, codec.words(tokens, where), where))
    return made
