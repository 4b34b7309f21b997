"""Tokenising processes: the same ids as in this process, refusals that name the text, and a new
process after one that died.
"""

import asyncio
import os
import signal
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from refusal_kit import refuses
from test_tokenizer import TEMPLATES, make_codec

from midstream.api.resolve.prompts import tokenizer_pool
from midstream.api.resolve.prompts.tokenizer import SHORT_CHARACTERS, Codec, TooLong
from midstream.api.resolve.prompts.tokenizer_pool import BundleHelpers, Helpers
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.settings import Settings

LIMIT = 100_000
PLAIN = make_codec(TEMPLATES["chatml"])
BUNDLE = PLAIN._bundle


def here(texts: list[str], special_tokens: bool) -> list[Sequence[int]]:
    return [array("i", found.ids.tobytes()) for found in PLAIN.encode_here(texts, special_tokens)]


def use(
    check: Callable[[Helpers, Codec], Coroutine[Any, Any, None]],
    limit: int = LIMIT,
    bundle: Any = BUNDLE,
    **settings: Any,
) -> None:
    async def run() -> None:
        async def fetch() -> bytes:
            return to_msgpack(bundle)

        helpers = Helpers(Settings(**{"tokenizer_processes": 1, **settings}))
        try:
            await check(helpers, Codec(bundle, limit, BundleHelpers(helpers, "t", fetch)))
        finally:
            await helpers.close()

    asyncio.run(run())


def test_long_texts_and_conversations_get_the_ids_they_get_in_this_process() -> None:
    texts = ["hello there " * 1000, "", "é🙂" * 30_000, *["short"] * 100]
    messages = [{"role": "user", "content": "hello " * 2000}]

    async def check(helpers: Helpers, codec: Codec) -> None:
        assert await codec.encode(texts, special_tokens=True) == here(texts, True)
        text = PLAIN.render(messages)
        assert await codec.encode_chat(messages) == (here([text], False)[0], text)
        assert len(helpers._all) == 1, (
            "the second question went to the process that knew the tokenizer"
        )

    use(check, 500_000)


def test_a_text_longer_than_the_model_is_refused_before_its_ids_are_sent() -> None:
    async def check(helpers: Helpers, codec: Codec) -> None:
        with pytest.raises(TooLong) as error:
            await codec.encode(["hello " * 20_000, "a", "hello " * 5000], special_tokens=False)
        assert (error.value.index, error.value.tokens) == (0, 120_000)
        with pytest.raises(TooLong, match="characters"):  # nothing is tokenised for this
            await codec.encode(["a" * (limit * 7 + 1)], special_tokens=False)
        assert len(helpers._all) == 1

    limit = LIMIT
    use(check)
    assert limit > SHORT_CHARACTERS


def test_template_errors_cross_from_the_tokeniser_process() -> None:
    async def check(_: Helpers, codec: Codec) -> None:
        with refuses(kind="invalid_request", field="messages"):
            await codec.encode_chat([{"role": "user", "content": "x" * 5000}])

    use(check, bundle=msgspec.structs.replace(BUNDLE, chat_template="{{ raise_exception('no') }}"))


def test_a_template_that_never_ends_costs_a_bounded_time_and_the_next_is_served() -> None:
    endless = (
        "{% if messages[0].content[0] == 'a' %}{% for a in range(99999) %}{% for b in "
        "range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )

    async def check(helpers: Helpers, codec: Codec) -> None:
        with refuses("tokenizer_timeout_s"):
            await codec.encode_chat([{"role": "user", "content": "a" * 5000}])
        assert (await codec.encode_chat([{"role": "user", "content": "b" * 5000}]))[1] == ""
        assert len(helpers._all) == 1

    use(
        check,
        bundle=msgspec.structs.replace(BUNDLE, chat_template=endless),
        tokenizer_timeout_s=0.5,
    )


def test_a_dead_tokeniser_process_is_replaced() -> None:
    async def check(helpers: Helpers, codec: Codec) -> None:
        text = "hello " * 2000
        await codec.encode([text], special_tokens=False)
        (process,) = helpers._all
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert await codec.encode([text], special_tokens=False) == here([text], False)
        (process,) = helpers._all
        os.kill(process.pid, signal.SIGSTOP)
        work = asyncio.ensure_future(codec.encode([text], special_tokens=False))
        await asyncio.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        with refuses(kind="unavailable"):
            await work
        assert await codec.encode([text], special_tokens=False) == here([text], False)

    use(check)


def test_requests_over_the_queue_limit_get_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "MAX_WAITING", 2)

    async def check(_: Helpers, codec: Codec) -> None:
        made = await asyncio.gather(
            *(codec.encode(["hello " * 2000], special_tokens=False) for _ in range(5)),
            return_exceptions=True,
        )
        refused = [one for one in made if isinstance(one, MidstreamError)]
        assert [error.kind for error in refused] == ["overloaded"] * 2
        assert len([one for one in made if isinstance(one, list)]) == 3

    use(check)


def test_an_abandoned_tokenisation_leaves_no_answer_behind() -> None:
    async def check(_: Helpers, codec: Codec) -> None:
        first = asyncio.ensure_future(codec.encode(["a" * 50_000], special_tokens=False))
        await asyncio.sleep(0.3)
        first.cancel()
        assert await codec.encode(["b" * 5000], special_tokens=False) == here(["b" * 5000], False)

    use(check)
