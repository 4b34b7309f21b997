"""Do spans name the right tokens with the demo model's own tokenizer and chat template?"""

import asyncio

import pytest
from hypothesis import given, settings, strategies as st
from spelling import byte_level, overlapping
from tokenizers import Tokenizer

from midstream.api.resolve.prompts.tokenizer import ChatInput, Codec
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.prompts.selectors import Span
from midstream_ops.demo_model import fetch_demo_model

pytestmark = pytest.mark.matrix

WORDS = [
    "The",
    " Eiffel",
    " Tower",
    " is",
    " in",
    " Paris",
    ".",
    "\n",
    "  ",
    " 2026",
    " naïve",
    " 東京",
    "都",
    " 🙂",
    "👩\u200d🚀",
    " e\u0301",
    "ß",
    "<|im_end|>",
    " Grüße",
    "\t",
    " مرحبا",
    "def f(x):\n    return x",
    " don't",
    " l'été",
    "…",
]


@pytest.fixture(scope="module")
def bundle() -> TokenizerBundle:
    # Here and not above: every test process imports every test file, and this imports transformers
    # (4 s).
    from midstream.workers.engine.prompts.tokenizer import tokenizer_bundle

    return tokenizer_bundle(str(fetch_demo_model(say=lambda line: None)))


@pytest.fixture(scope="module")
def codec(bundle: TokenizerBundle) -> Codec:
    return Codec(bundle)


@pytest.fixture(scope="module")
def spell(bundle: TokenizerBundle):
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return lambda ids: [byte_level(tokenizer.id_to_token(token), added) for token in ids]


@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=16), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_span_of_any_text_names_the_tokens_that_spell_it(
    codec: Codec, spell, words: list[str], data: st.DataObject
) -> None:
    text = "".join(words)
    start = data.draw(st.integers(0, len(text) - 1))
    part = text[start : data.draw(st.integers(start + 1, len(text)))]
    count = text.count(part)
    span = Span(text=part, occurrence=data.draw(st.none() | st.integers(-count, count - 1)))
    (ids,) = asyncio.run(codec.encode([text], special_tokens=True))
    found = codec.map_text(text, ids, special_tokens=True)
    assert found.find(span) == overlapping(spell(ids), text, span)


async def test_a_span_of_a_conversation_counts_from_the_templates_first_token(
    codec: Codec, spell
) -> None:
    said = [{"role": "user", "content": "Where is the Eiffel Tower? The Eiffel Tower!"}]
    ((ids, text),) = await codec.encode_chats([ChatInput(said)])
    assert text.startswith("<|im_start|>system")
    found = codec.map_text(text, ids, special_tokens=False)
    assert found is not None
    for span in (
        Span(text="Eiffel Tower", occurrence=1),
        Span(text="<|im_start|>user"),
        Span(text=text),
    ):
        assert found.find(span) == overlapping(spell(ids), text, span)
    second = found.find(Span(text="Eiffel Tower", occurrence=1))
    assert b"".join(spell(ids)[position] for position in second).decode() == " Eiffel Tower"


async def test_token_ids_find_their_text(codec: Codec) -> None:
    (ids,) = await codec.encode(["The Eiffel Tower in 東京 🙂"], special_tokens=True)
    found = codec.map_ids(ids)
    assert found.find(Span(text="Tower")) == [3]
