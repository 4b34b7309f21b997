"""Does a span of the prompt's text name exactly the tokens that spell it, whatever the
tokenizer?
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from model_kit import model
from refusal_kit import refuses
from spelling import byte_level, fallback, overlapping
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from midstream.api.resolve.admission.admission import facts_of
from midstream.api.resolve.positions.windows import with_trigger_tokens, with_window_tokens
from midstream.api.resolve.prompts.request_parsing import ParsedPrompt, ParsedRequest
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.broker.prompts.text_spans import TextMap
from midstream.schemas.base.records import from_msgpack, to_msgpack
from midstream.schemas.jobs.jobs import Sampling, StoredPrompt
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.prompts.selectors import (
    PositionSelector,
    SelectorError,
    Span,
    resolve_positions,
)
from midstream.schemas.prompts.windows import Around, Trigger
from midstream.schemas.requests.specs import CaptureSpec, SteeringSpec

PIECES = [
    "The",
    " Eiffel",
    " Tower",
    "a",
    "b",
    "aa",
    " ",
    "  ",
    "\n",
    "é",
    "e\u0301",
    "東京",
    "🙂",
    "👩‍🚀",
    "<s>",
    "12",
    "l",
    " is in ",
    "'",
    "ß",
]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=24).map("".join)


def codec_of(tokenizer: Tokenizer) -> Codec:
    return Codec(
        TokenizerBundle(
            tokenizer_json=tokenizer.to_str(),
            chat_template=None,
            special_tokens={},
            eos_token_ids=[],
        )
    )


def merged_byte_level() -> Tokenizer:
    """Byte-level BPE with merges across spaces and inside characters, as GPT-2's, Qwen's and Llama
    3's.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ġ", "T"),
        ("ĠT", "o"),
        ("Ġ", "Ġ"),
        ("e", "r"),
        ("æ", "Ŀ"),
        ("a", "a"),
        ("Ã", "©"),
        ("ð", "Ł"),
    ]
    vocab = {
        sign: number for number, sign in enumerate([*alphabet, *("".join(pair) for pair in merges)])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def trimmed() -> Tokenizer:
    """Its saved form says that a token's offsets leave out the space it begins with."""
    tokenizer = merged_byte_level()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def trimmed_with_bos() -> Tokenizer:
    tokenizer = merged_byte_level()
    template = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), template]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """`▁` for spaces and bytes for what is not in the vocabulary, as Llama 2's, Mistral's and
    Gemma's.
    """
    signs = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"TheEiflowraisnb12<>/'",
        "▁T",
        "▁▁",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={sign: number for number, sign in enumerate(dict.fromkeys(signs))},
            merges=[("▁", "T"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


#: Tokenizer → how its tokens are spelled, and how many it puts before the text.
KINDS: dict[str, tuple[Callable[[], Tokenizer], Callable[[str], bytes], int]] = {
    "byte level": (merged_byte_level, lambda token: byte_level(token, {"<s>", "</s>"}), 0),
    "trimmed offsets": (trimmed, lambda token: byte_level(token, {"<s>", "</s>"}), 0),
    "tokens around the text": (
        trimmed_with_bos,
        lambda token: byte_level(token, {"<s>", "</s>"}),
        1,
    ),
    "byte fallback": (byte_fallback, fallback, 0),
}


@functools.cache
def made(kind: str) -> tuple[Tokenizer, Codec]:
    tokenizer = KINDS[kind][0]()
    return tokenizer, codec_of(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=50, deadline=None)
def test_words_are_token_text_with_spaces(kind: str, text: str) -> None:
    before = KINDS[kind][2]
    tokenizer, codec = made(kind)
    ids = tokenizer.encode(text).ids
    where = codec.map_text(text, ids, special_tokens=True)
    for words in (codec.words(ids, where), codec.words(ids, None)):
        assert len(words) == len(ids)
        assert all(words), "each can be shown"
    if text.isascii():  # else a character may be several tokens, each of which reads as all of it
        assert "".join(codec.words(ids, where)[before : len(ids) - before]) == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_span_names_the_tokens_whose_bytes_it_contains(
    kind: str, text: str, data: st.DataObject
) -> None:
    _, spell, before = KINDS[kind]
    tokenizer, codec = made(kind)
    start = data.draw(st.integers(0, len(text) - 1))
    part = text[start : data.draw(st.integers(start + 1, len(text)))]
    count = text.count(part)
    span = Span(text=part, occurrence=data.draw(st.none() | st.integers(-count, count - 1)))
    ids = tokenizer.encode(text).ids
    found = codec.map_text(text, ids, special_tokens=True)
    assert found is not None
    own = ids[before : len(ids) - before]
    wanted = overlapping([spell(tokenizer.id_to_token(token)) for token in own], text, span)
    assert found.find(span) == [before + position for position in wanted]


def find(text: str, wish: Any) -> Any:
    codec = codec_of(merged_byte_level())
    (ids,) = asyncio.run(codec.encode([text], special_tokens=False))
    found = codec.map_text(text, ids, special_tokens=False)
    return resolve_positions(wish, len(ids), found.find)


@pytest.mark.parametrize(
    ("text", "wish", "positions"),
    [
        (
            "a b a b",
            [-1, Span(text="a", occurrence=None), 0, Span(text=" b", occurrence=-1)],
            [0, 4, 5, 6],
        ),
        ("abc", Span(text="b"), [1]),
        ("bbbbb", Span(text="bb", occurrence=1), [2, 3]),
        ("bbbbb", Span(text="bb", occurrence=None), [0, 1, 2, 3]),
    ],
)
def test_spans_become_ascending_positions_and_occurrences_count_as_in_python(
    text: str, wish: Any, positions: list[int]
) -> None:
    assert find(text, wish) == positions


@pytest.mark.parametrize(
    ("wish", "at", "words"),
    [
        ([0, Span(text="x")], "[1].text", "'x' does not occur in the prompt, which begins 'a b a'"),
        (Span(text="x"), ".text", "does not occur in the prompt"),
        (
            Span(text="a", occurrence=2),
            ".occurrence",
            "'a' occurs 2 times in the prompt: there is no occurrence 2",
        ),
        ([Span(text="b", occurrence=-2)], "[0].occurrence", "'b' occurs once"),
        ([0, 5], "[1]", "position 5 is out of range: the prompt has positions 0 to 4"),
    ],
)
# field case 27
def test_a_span_that_is_not_there_is_refused_with_its_place_and_what_is_there(
    wish: Any, at: str, words: str
) -> None:
    with pytest.raises(SelectorError, match=words) as refused:
        find("a b a", wish)
    assert refused.value.at == at


@pytest.mark.parametrize(
    ("text", "part", "written"),
    [
        ("cafe\u0301 b", "caf\u00e9", r": the prompt has 'cafe\\u0301'$"),
        ("caf\u00e9 b", "cafe\u0301", r": the prompt has 'caf\\xe9'$"),
        ("cafe b", "caf\u00e9", "begins 'cafe b'$"),
    ],
)
def test_a_span_in_another_normal_form_is_refused_with_that_of_the_prompt(
    text: str, part: str, written: str
) -> None:
    with pytest.raises(SelectorError, match=written):
        TextMap(text, np.zeros((0, 2), np.int32)).find(Span(text=part))


def test_errors_show_the_start_of_a_long_prompt() -> None:
    with pytest.raises(SelectorError) as refused:
        find("the beginning " + "a" * 10_000, Span(text="nowhere"))
    assert "the beginning" in str(refused.value)
    assert len(str(refused.value)) < 200


def test_text_that_the_tokenizer_passes_over_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = codec_of(tokenizer).map_text("a b", [0, 1], special_tokens=False)
    assert found.find(Span(text="a b")) == [0, 1]
    with pytest.raises(SelectorError, match="no token covers it"):
        found.find(Span(text=" "))


def test_token_ids_have_spans_when_their_text_gives_the_same_ids() -> None:
    codec = codec_of(merged_byte_level())
    (ids,) = asyncio.run(codec.encode(["<s>the 東京 Tower"], special_tokens=False))
    found = codec.map_ids(ids)
    assert found.text == "<s>the 東京 Tower"
    assert codec.map_ids(torn(codec, ids)) is None
    (ids,) = asyncio.run(codec.encode(["the 東京 Tower"], special_tokens=False))
    wish = ParsedRequest(
        "generate",
        "m",
        [ParsedPrompt("prompts[0]", ids)],
        Sampling(),
        capture=CaptureSpec(positions=[Span(text="the")]),
    )

    def resolved(token_ids: list[int]) -> PositionSelector:
        stored = [StoredPrompt(token_ids=token_ids)]
        ((facts,), _) = asyncio.run(facts_of(wish, stored, model(), codec))
        return resolve_positions([Span(text="the")], facts.tokens, facts.find)

    assert resolved(ids) == [0, 1, 2]
    with pytest.raises(SelectorError, match="do not decode to a text that encodes to them"):
        resolved(torn(codec, ids))


def torn(codec: Codec, ids: list[int]) -> list[int]:
    """The ids up to the middle of a character: the text that they decode to has other tokens."""
    return ids[: ids.index(codec._tokenizer.token_to_id("æĿ")) + 1]


def test_many_spans_are_searched_for_once() -> None:
    """16,000 spans were 8,000 searches each."""
    calls = 0

    class Counted(str):
        def find(self, *arguments: Any) -> int:
            nonlocal calls
            calls += 1
            return super().find(*arguments)

    text = Counted("ab " * 4000)
    mapped = TextMap(text, np.array([[at, at + 1] for at in range(len(text))], np.int32))
    spans = [
        Span(text=part, occurrence=number) for part in ("a", "b", "ab") for number in range(4000)
    ]
    assert resolve_positions(
        [*spans, *[Span(text="a", occurrence=None)] * 4000], len(text), mapped.find
    ) == [at for at in range(len(text)) if text[at] != " "]
    assert calls == 3 * 4001
    asked: list[Span] = []

    def find(span: Span) -> list[int]:
        asked.append(span)
        return [0]

    resolve_positions([Span(text="a"), Span(text="a"), Span(text="a", occurrence=None)], 1, find)
    assert len(asked) == 2


def test_a_windows_text_is_bounded_in_tokens_too() -> None:
    codec = codec_of(merged_byte_level())

    def windowed(text: str) -> CaptureSpec | None:
        spec = CaptureSpec(positions=Span(around=Around(text=text)))
        return asyncio.run(with_window_tokens(spec, codec))

    spec = windowed("x" * 255)
    assert from_msgpack(to_msgpack(spec), CaptureSpec) == spec
    for text in ("🙂" * 86, "x" * 256):  # the second has 256 tokens alone, and 257 after a space
        with refuses(match="1 to 256 tokens", status=400, field="capture.positions.around.text"):
            windowed(text)


def test_a_triggers_text_is_its_tokens_alone_and_after_a_space() -> None:
    codec = codec_of(merged_byte_level())
    plain = SteeringSpec()
    asked = SteeringSpec(trigger=Trigger(text="ab", after=2))
    found = asyncio.run(with_trigger_tokens([plain, asked], codec))
    sequences = asyncio.run(codec.encode(["ab", " ab"], special_tokens=False))
    wanted = Trigger(token_ids=[list(sequence) for sequence in sequences], after=2)
    assert [spec.trigger for spec in found] == [None, wanted]
    long = SteeringSpec(trigger=Trigger(text="🙂" * 86))
    with refuses(match="1 to 256 tokens", status=400, field="steering[1].trigger.text"):
        asyncio.run(with_trigger_tokens([plain, long], codec))
