"""Tokens of documents: long texts are tokenised in slices as if as a whole, and what is not a token
id is refused.
"""

import itertools
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from refusal_kit import refuses
from test_turns import CALL, CALLED, HELLO, HI, SYSTEM, THOUGHT, asked, codec_of, found
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.models import TokenizerBundle
from midstream_harvest.records.harvests import (
    HarvestCut,
    HarvestPositions,
    HarvestSource,
    StoredHarvest,
)
from midstream_harvest.run import tokens as harvest_tokens
from midstream_harvest.run.cut import CutDocument
from midstream_harvest.run.tokens import HarvestTokenizer

WORDS = [
    "the",
    "harvest",
    "of",
    "rows",
    "naïve",
    "日本語",
    "quick",
    "brown",
    "🦊",
    "12345",
    "e=mc²",
    "\n\n",
    "don't",
    "  ",
]
SPECIAL = {"<s>": 0, "</s>": 1}


def text_of(count: int) -> str:
    return " ".join(WORDS[(number * number + number // 7) % len(WORDS)] for number in range(count))


def byte_level(trim: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return trained(
        made, processors.ByteLevel(trim_offsets=trim), pre_tokenizers.ByteLevel.alphabet()
    )


def metaspace(split: bool) -> Tokenizer:
    """As Llama 2 and Gemma have it: without `split`, a text is one word."""
    made = Tokenizer(models.BPE(byte_fallback=False, unk_token="<s>"))
    if split:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    made.decoder = decoders.Metaspace()
    return trained(made, None, list("▁abcdefghijklmnopqrstuvwxyz0123456789"))


def trained(made: Tokenizer, processor: Any, alphabet: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet, max_token_length=12
    )
    made.train_from_iterator([word + " " + other for word in WORDS for other in WORDS], trainer)
    template = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=list(SPECIAL.items())
    )
    made.post_processor = (
        template if processor is None else processors.Sequence([processor, template])
    )
    return made


TOKENIZERS = {
    "byte level": lambda: byte_level(trim=False),
    "byte level, trimmed offsets": lambda: byte_level(trim=True),
    "metaspace": lambda: metaspace(split=True),
    "one word": lambda: metaspace(split=False),
}


def tokens_of(tokenizer: Tokenizer, kind: Any = "text", **changes: Any) -> HarvestTokenizer:
    harvest = StoredHarvest(
        id="hrv_1",
        model="m",
        created=0.0,
        uri="/none",
        sites={"post_block": [0]},
        source=HarvestSource(path="a.jsonl", kind=kind),
        row_bytes=4,
        **{"max_length": 10**6, **changes},
    )
    bundle = TokenizerBundle(
        tokenizer_json=tokenizer.to_str(), chat_template=None, special_tokens={}, eos_token_ids=[]
    )
    return HarvestTokenizer(harvest, bundle, tokenizer.get_vocab_size())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SLICE", 700), ("OVERLAP", 300), ("MARGIN", 60)):
        monkeypatch.setattr(harvest_tokens, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("special", [True, False])
def test_a_text_in_slices_has_the_tokens_of_the_whole(name: str, special: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    made = tokens_of(tokenizer, cut=HarvestCut(special_tokens=special))
    texts = [text_of(count) for count in (3, 200, 1500, 90)]
    found = list(made.documents((number, text, "") for number, text in enumerate(texts)))
    assert [document.number for document in found] == [0, 1, 2, 3]
    for text, document in zip(texts, found, strict=True):
        assert document.token_ids.tolist() == tokenizer.encode(text, add_special_tokens=special).ids


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_word_is_cut_without_a_character_lost(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "the " + "abcabd" * 800 + " of rows"
    (document,) = tokens_of(tokenizer, cut=HarvestCut(special_tokens=False)).documents(
        [(0, text, "")]
    )
    assert tokenizer.decode(document.token_ids.tolist()).replace(" ", "") == text.replace(" ", "")


@pytest.mark.usefixtures("small")
def test_slices_end_with_the_limit_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["byte level"]()
    text = text_of(20_000)
    slices: list[int] = []
    whole = HarvestTokenizer._slice
    monkeypatch.setattr(
        HarvestTokenizer,
        "_slice",
        lambda self, text, start, size: slices.append(start) or whole(self, text, start, size),
    )
    (truncated,) = tokens_of(tokenizer, max_length=500).documents([(0, text, "")])
    (limited,) = tokens_of(tokenizer, cut=HarvestCut(fit="split")).documents(
        [(0, text, ""), (1, text, "")], 500
    )
    assert (
        truncated.token_ids.tolist()
        == limited.token_ids.tolist()
        == tokenizer.encode(text).ids[:500]
    )
    assert max(slices) < 5000


@pytest.mark.parametrize(
    ("fit", "expected"), [("truncate", [4, 3]), ("split", [6, 1]), ("pack", [6])]
)
def test_a_limit_of_tokens_cuts_the_last_document(fit: Any, expected: list[int]) -> None:
    cut = HarvestCut(fit=fit)
    tokens = tokens_of(TOKENIZERS["byte level"](), kind="tokens", cut=cut, max_length=4)
    values = [(0, [5] * 6, ""), (1, [5] * 9, "")]
    assert [len(each.token_ids) for each in tokens.documents(values, 7)] == expected
    assert len([*tokens.documents(values)]) == 2


def test_no_document_is_read_once_the_limit_of_tokens_is_reached() -> None:
    read = []

    def values() -> Any:
        for number in range(1000):
            read.append(number)
            yield number, text_of(2000), ""

    found = list(tokens_of(TOKENIZERS["byte level"]()).documents(values(), 5000))
    assert sum(len(document.token_ids) for document in found) == 5000
    assert len(read) < 100


@pytest.mark.parametrize(
    "value", [[1.7], [True], ["12"], "12", [[1]], [-1], [600], [None], 12, {"a": 1}, [1 << 70]]
)
def test_what_is_not_a_list_of_token_ids_is_refused(value: Any) -> None:
    tokens = tokens_of(TOKENIZERS["byte level"](), kind="tokens")
    with refuses(
        "here is not a list of the model's token ids",
        allowed=f"integers from 0 to {tokens._vocabulary - 1}",
    ):
        list(tokens.documents([(0, value, "here")]))


# --- Spans


LONG = [SYSTEM, HI | {"content": "  🙂 Which  of\n them? " * 300}, HELLO, HI, THOUGHT]


@cache
def chat_codec(template: str) -> Codec:
    """With a tokenizer whose own offsets leave out the spaces that tokens begin with."""
    text = byte_level(trim=True).to_str()
    return Codec(msgspec.structs.replace(codec_of(template)._bundle, tokenizer_json=text))


def chats(template: str, messages: Any, *spans: dict[str, Any]) -> list[CutDocument]:
    """Two documents, of which the second has these messages."""
    rule = from_json(to_json({"spans": spans}), HarvestPositions)
    made = tokens_of(TOKENIZERS["one word"](), kind="chat", positions=rule)
    tokens = HarvestTokenizer(made._harvest, chat_codec(template)._bundle, 1 << 20)
    return [*tokens.documents([(0, [HI], "document 0"), (1, messages, "document 1")])]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("template", "span"),
    [
        *itertools.product(
            ["deepseek-r1", "gemma2", "llama3.1", "qwen2.5", "zephyr"],
            [{"role": "user"}, {"turn": -1}, {"turn": 1, "part": "header"}],
        ),
        ("qwen3", {"part": "reasoning"}),
    ],
)
def test_positions_are_those_of_a_request(template: str, span: dict[str, Any]) -> None:
    messages = LONG[template == "gemma2" :]  # refuses system prompts
    sent = [*messages[:-1], HELLO | {"reasoning_content": "A greeting."}]
    made = chats(template, sent, span)[1]
    parsed = asked(messages, span, add_generation_prompt=False)
    text, positions, _ = found(chat_codec(template), parsed)
    assert (
        made.token_ids.tolist() == chat_codec(template).encode_here([text], False)[0].ids.tolist()
    )
    assert np.flatnonzero(made.in_spans).tolist() == positions


def test_spans_are_joined_and_messages_that_are_not_there_have_no_rows() -> None:
    spans = [{"role": "assistant"}, {"turn": 0}, {"role": "assistant", "part": "tool_calls"}]
    lone, all_three = chats("zephyr", [SYSTEM, HI, HELLO], *spans)
    first, second, third = (chats("zephyr", [SYSTEM, HI, HELLO], span)[1] for span in spans)
    assert all_three.in_spans.tolist() == (first.in_spans | second.in_spans).tolist()
    assert not third.in_spans.any()
    assert lone.in_spans.sum() == 2


def test_spans_of_long_conversations_are_bounded_by_their_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = [HI] * 100
    assert chats("qwen2.5", messages, {"part": "header"})[1].in_spans.any()
    monkeypatch.setattr(harvest_tokens, "MESSAGE_CHARACTERS", 8)
    with refuses("finding spans in 100 messages of 3098 characters takes too long"):
        chats("qwen2.5", messages, {"part": "header"})


@pytest.mark.parametrize(
    ("template", "messages", "span", "words"),
    [
        ("qwen3", [HI, THOUGHT, HI], {"part": "reasoning"}, "the chat template drops it"),
        ("mistral-v3", [SYSTEM, HI, HELLO, HI], {"turn": 0}, "puts it behind a later message"),
        ("llama3.1", [HI | {"content": 7}], {"turn": 0}, "the chat template drops it"),
        ("zephyr", ["Hi"], {"turn": 0}, "Expected `object`, got `str` - at `$[0]`"),
        ("qwen2.5", [HI] * 200, {"part": "all"}, "finding spans in 200 messages of"),
        (
            "qwen2.5",
            [HI, CALLED[1] | {"tool_calls": [CALL | {"function": {"arguments": {}}}]}],
            {"part": "tool_calls"},
            "tool_calls of message 1 have no function's name",
        ),
    ],
)
def test_a_document_whose_turns_are_unknown_is_named_with_the_reason(
    template: str, messages: list[Any], span: dict[str, Any], words: str
) -> None:
    with refuses(words, kind="invalid_request", field="positions.spans") as failed:
        chats(template, messages, span)
    assert failed.value.detail.startswith("document 1: ")
