"""Does the API make the same token ids of text and conversations as the engine's own libraries
would, also in processes of their own?
"""

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from midstream_fake_engine.model import make_tokenizer
from refusal_kit import refuses
from tokenizers import processors
from transformers.utils.chat_template_utils import render_jinja_template

from midstream.api.resolve.prompts import tokenizer, tokenizer_pool
from midstream.api.resolve.prompts.tokenizer import (
    INLINE_CHARACTERS,
    SHORT_CHARACTERS,
    ChatInput,
    Codec,
    SearchedPrompt,
    TooLong,
)
from midstream.api.resolve.prompts.tokenizer_pool import Helpers
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.prompts.selectors import SelectorError, Span
from midstream.schemas.settings.settings import load_settings

MESSAGES = [
    {"role": "system", "content": "be <brief> & 'kind'"},
    {"role": "user", "content": "hello\n  there"},
    {"role": "assistant", "content": "ünïcode 🙂"},
    {"role": "user", "content": "again"},
]

#: What chat templates in the wild use, each in a few lines.
TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks trimmed": "{{ bos_token }}\n{% for message in messages %}\n    {% if message.role == "
    "'user' %}\n"
    "U: {{ message.content | trim }}\n"
    "    {% endif %}\n{% endfor %}\n",
    "json": (
        "{% for message in messages %}{{ message | tojson }}{{ message.content | "
        "tojson(indent=2) }}{% endfor %}"
    ),
    "loop controls": (
        "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ "
        "message.content }}{% endfor %}"
    ),
    "generation marks": "{% for message in messages %}{% if message.role == 'assistant' %}{% "
    "generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}",
    "no tools": (
        "{% if tools is none and documents is none %}plain{% endif %}{% if x is not "
        "defined %} undefined{% endif %}"
    ),
    "namespace": "{% set n = namespace(found=0) %}{% for m in messages %}"
    "{% set n.found = n.found + 1 %}{% endfor %}{{ n.found }}{{ eos_token }}",
}


def make_codec(template: str | None, **changes: Any) -> Codec:
    tokenizer = make_tokenizer("<s>", "</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    for name, arguments in changes.items():
        getattr(tokenizer, name)(**arguments)
    return Codec(
        TokenizerBundle(
            tokenizer_json=tokenizer.to_str(),
            chat_template=template,
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
            eos_token_ids=[257],
        )
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_renders_as_transformers_renders_it(name: str) -> None:
    template = TEMPLATES[name]
    (wanted,), _ = render_jinja_template(
        conversations=[MESSAGES],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert make_codec(template).render(MESSAGES) == wanted


async def test_plain_text_gets_the_tokenizers_special_tokens_and_a_chat_only_the_templates() -> (
    None
):
    codec = make_codec("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    (plain,) = await codec.encode(["ab"], special_tokens=True)
    ((chat, text),) = await codec.encode_chats([ChatInput([{"role": "user", "content": "ab"}])])
    assert text == "<s>ab"
    assert plain == chat, "one BOS each, not two"


async def test_saved_truncation_and_padding_are_not_applied() -> None:
    codec = make_codec(None, enable_truncation={"max_length": 3}, enable_padding={"length": 64})
    short, long = await codec.encode(["a", "abcdefgh"], special_tokens=False)
    assert len(short) == 1
    assert len(long) == 8


async def test_a_long_text_is_tokenised_off_the_event_loop_to_the_same_ids() -> None:
    codec = make_codec(None)
    ticks = 0
    text = "hello there " * (INLINE_CHARACTERS // 6)

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(tick())
    (ids,) = await codec.encode([text], special_tokens=False)
    beside.cancel()
    assert list(ids) == codec.encode_here([text], False)[0].ids.tolist()
    assert ticks > 1, "the loop went on meanwhile"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "messages"),
        (None, "no chat template"),
        ("{% if %}", "broken"),
        # field case 42
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ""),
        ("{{ messages.append(1) }}", ""),
        ("{{ raise_exception.__globals__['x'] }}", ""),
    ],
)
def test_a_conversation_the_template_refuses_is_a_bad_request_about_messages(
    template: str | None, reason: str
) -> None:
    with refuses(reason, status=400, field="messages"):
        make_codec(template).render(MESSAGES)


# field case 42
@pytest.mark.parametrize(
    "content",
    [
        "{{ 7 * 7 }}",
        "{% for x in range(9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_chat_messages_are_not_rendered_as_templates(content: str) -> None:
    said = [{"role": "user", "content": content}]
    assert make_codec("{{ messages[0].content }}").render(said) == content


# --- Tokenizer pool ---


LIMIT = 100_000
PLAIN = make_codec(TEMPLATES["chatml"])
BUNDLE = PLAIN._bundle


def here(texts: list[str], special_tokens: bool) -> list[Sequence[int]]:
    return [array("i", found.ids.tobytes()) for found in PLAIN.encode_here(texts, special_tokens)]


@asynccontextmanager
async def served(
    limit: int = LIMIT, bundle: Any = BUNDLE, **settings: Any
) -> AsyncIterator[tuple[Helpers, Codec]]:
    """A codec that tokenises in a process of its own."""

    async def fetch() -> bytes:
        return to_msgpack(bundle)

    helpers = Helpers(load_settings({}, **{"tuning.tokenizer_processes": 1, **settings}))
    try:
        yield helpers, Codec(bundle, limit, partial(helpers.ask, "t", fetch))
    finally:
        await helpers.close()


async def test_long_texts_and_conversations_get_the_ids_they_get_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["hello there " * 1000, "", "é🙂" * 30_000, *["short"] * 100]
    messages = [{"role": "user", "content": "hello " * 2000}]
    async with served(500_000) as (helpers, codec):
        assert await codec.encode(texts, special_tokens=True) == here(texts, True)
        first = helpers._all[0].process
        text = PLAIN.render(messages)
        assert await codec.encode_chats([ChatInput(messages)]) == [(here([text], False)[0], text)]
        assert helpers._all[0].process is first, (
            "the second question went to the process that knew the tokenizer"
        )
        # requests over the queue's limit are refused
        monkeypatch.setattr(tokenizer_pool, "MAX_WAITING", 2)
        made = await asyncio.gather(
            *(codec.encode(["hello " * 2000], special_tokens=False) for _ in range(5)),
            return_exceptions=True,
        )
        refused = [one for one in made if isinstance(one, MidstreamError)]
        assert [error.kind for error in refused] == ["overloaded"] * 2
        assert len([one for one in made if isinstance(one, list)]) == 3


async def test_a_text_longer_than_the_model_is_refused_before_its_ids_are_sent() -> None:
    async with served() as (_, codec):
        with pytest.raises(TooLong) as error:
            await codec.encode(["hello " * 20_000, "a", "hello " * 5000], special_tokens=False)
        assert error.value.index == 0
        assert error.value.tokens == 120_000
        with pytest.raises(TooLong, match="characters"):  # nothing is tokenised for this
            await codec.encode(["a" * (LIMIT * 7 + 1)], special_tokens=False)
        # one that is given up leaves no answer behind
        first = asyncio.ensure_future(codec.encode(["a" * 50_000], special_tokens=False))
        await asyncio.sleep(0)
        first.cancel()
        assert await codec.encode(["b" * 5000], special_tokens=False) == here(["b" * 5000], False)
    assert LIMIT > SHORT_CHARACTERS


async def test_a_template_that_fails_or_never_ends_is_an_error_and_the_next_is_served() -> None:
    template = (
        "{% if messages[0].content[0] == 'x' %}{{ raise_exception('no') }}{% endif %}"
        "{% if messages[0].content[0] == 'a' %}{% for a in range(99999) %}{% for b in "
        "range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )
    bundle = msgspec.structs.replace(BUNDLE, chat_template=template)
    async with served(bundle=bundle, **{"tuning.tokenizer_timeout_s": 0.5}) as (_, codec):
        with refuses(kind="invalid_request", field="messages"):
            await codec.encode_chats([ChatInput([{"role": "user", "content": "x" * 5000}])])
        with refuses("tokenizer_timeout_s"):
            await codec.encode_chats([ChatInput([{"role": "user", "content": "a" * 5000}])])
        ((_, text),) = await codec.encode_chats(
            [ChatInput([{"role": "user", "content": "b" * 5000}])]
        )
        assert text == ""


def _forbidden(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("in the API's process")


def said(content: str) -> SearchedPrompt:
    messages = [{"role": "user", "content": content}]
    chat = ChatInput(messages, roles=["user"])
    text = PLAIN.render(messages)
    return SearchedPrompt(PLAIN.encode_here([text], False)[0].ids.tobytes(), text, chat)


async def test_long_prompts_are_rendered_and_searched_in_a_helper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [said("hello " * number) for number in (2, 1000)]
    spans = [Span(turn=0), Span(turn=7)]
    wanted = await PLAIN.locate(prompts, spans, apart=False)
    asked: list[int] = []
    exchange = Helpers._exchange

    async def counted(helpers: Helpers, helper: Any, ask: Any) -> Any:
        asked.append(len(ask.question.items))
        return await exchange(helpers, helper, ask)

    async with served() as (_, codec):
        monkeypatch.setattr(Helpers, "_exchange", counted)
        monkeypatch.setattr(Codec, "render", _forbidden)
        monkeypatch.setattr(Codec, "map_text", _forbidden)
        assert await codec.locate(prompts, spans, apart=True) == wanted
        asked.clear()
        made = await codec.encode_chats([prompt.chat for prompt in prompts[:1] * 1200])
        assert {text for _, text in made} == {prompts[0].text}
    assert sum(asked) == 1200
    assert max(asked) <= tokenizer.GROUP_ITEMS
    assert wanted[0][0].positions()
    with pytest.raises(SelectorError, match="no turn 7"):
        wanted[0][1].positions()


async def test_a_template_that_never_ends_for_a_span_is_an_error_of_the_request() -> None:
    template = (
        "{% if messages[0].content[0] != 'a' %}{% for a in range(99999) %}{% for b in "
        "range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    bundle = msgspec.structs.replace(BUNDLE, chat_template=template)
    text = "a" * 5000
    ids = PLAIN.encode_here([text], False)[0].ids.tobytes()
    prompt = SearchedPrompt(
        ids, text, ChatInput([{"role": "user", "content": text}], roles=["user"])
    )
    async with served(bundle=bundle, **{"tuning.tokenizer_timeout_s": 0.5}) as (_, codec):
        with refuses("tokenizer_timeout_s", kind="invalid_request"):
            await codec.locate([prompt], [Span(turn=0)], apart=True)


async def test_the_positions_of_all_spans_together_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [said("hello " * 10)] * 4
    spans = [Span(turn=0), Span(role="user")]
    ((first, _), *_) = await PLAIN.locate(prompts, spans, apart=False)
    monkeypatch.setattr(tokenizer, "MAX_FOUND_POSITIONS", 8 * len(first.positions()))
    assert len(await PLAIN.locate(prompts, spans, apart=False)) == 4
    with refuses("selects too many positions over all prompts"):
        await PLAIN.locate([*prompts, prompts[0]], spans, apart=False)


async def test_a_dead_tokeniser_process_is_replaced() -> None:
    text = "hello " * 2000
    async with served() as (helpers, codec):
        await codec.encode([text], special_tokens=False)
        (helper,) = helpers._all
        process = helper.start()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert await codec.encode([text], special_tokens=False) == here([text], False)
        process = helper.start()
        os.kill(process.pid, signal.SIGSTOP)
        work = asyncio.ensure_future(codec.encode([text], special_tokens=False))
        await asyncio.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        with refuses(kind="unavailable"):
            await work
        assert await codec.encode([text], special_tokens=False) == here([text], False)
