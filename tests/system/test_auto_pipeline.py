"""Does each of many commands that travel together get its own answer, its own error, and none but
its own?
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions
from ledger_kit import open_ledger

from midstream.broker.ledger.core.auto_pipeline import GROUP_LIMIT, LARGE, SLICE


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with open_ledger(redis_url) as ledger:
        yield ledger.redis


async def test_pipelined_callers_get_their_own_answers(client: Any) -> None:
    many = 3 * GROUP_LIMIT + 5
    await client.hset("numbers", mapping={str(number): number * number for number in range(many)})
    answers = await asyncio.gather(*(client.hget("numbers", str(number)) for number in range(many)))
    assert [int(answer) for answer in answers] == [number * number for number in range(many)]


async def test_large_arguments_go_between_small_commands_and_change_no_answer(client: Any) -> None:
    large = "x" * 40 * LARGE
    await client.hset("sizes", mapping={large: "large", "a": "small"})
    answers = await asyncio.gather(
        *(client.hget("sizes", name) for name in (large, "a", "none", large))
    )
    assert answers == [b"large", b"small", None, b"large"]
    assert await client.hget("sizes", large) == b"large"


async def test_a_pipelined_error_affects_only_its_command(client: Any) -> None:
    await client.set("text", "no hash")
    await client.hset("hash", "field", "value")
    answers = await asyncio.gather(
        *(client.hget(name, "field") for name in ("hash", "text", "hash")),
        return_exceptions=True,
    )
    assert answers[0] == b"value"
    assert answers[2] == b"value"
    assert isinstance(answers[1], redis.exceptions.ResponseError)


async def test_a_script_that_redis_has_forgotten_is_loaded_again_for_all_who_call_it(
    client: Any,
) -> None:
    double = client.register_script("return 2 * ARGV[1]")
    assert await asyncio.gather(*(double(args=[number]) for number in range(20))) == [
        2 * number for number in range(20)
    ]


async def test_a_cancelled_pipelined_call_affects_no_other(client: Any) -> None:
    await client.hset("hash", "field", "value")
    leaving, staying = (asyncio.create_task(client.hget("hash", "field")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == b"value"
    with pytest.raises(asyncio.CancelledError):
        await leaving


# field case 38
async def test_a_lost_connection_repeats_pipelined_commands(client: Any, redis_url: str) -> None:
    await client.hset("hash", "field", "value")
    await asyncio.gather(*(client.hget("hash", "field") for _ in range(10)))
    async with redis.asyncio.Redis.from_url(redis_url) as other:
        await other.client_kill_filter(_type="normal", skipme=True)
    answers = await asyncio.gather(*(client.hget("hash", "field") for _ in range(10)))
    assert answers == [b"value"] * 10


async def test_an_unreachable_redis_fails_every_pipelined_call() -> None:
    async with open_ledger("redis://127.0.0.1:1/0") as ledger:
        answers = await asyncio.gather(
            *(ledger.redis.hget("hash", "field") for _ in range(3)), return_exceptions=True
        )
    assert all(isinstance(answer, redis.exceptions.ConnectionError) for answer in answers)


async def test_a_connection_that_is_closed_within_a_large_argument_gets_no_rest_of_it(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another connection the rest, which may be the text of a prompt, would be commands."""
    large = b"x" * 2 * SLICE + b"\r\nHSET sizes injected 1\r\n"
    await client.hset("sizes", mapping={large: "large"})
    closing: list[asyncio.Task[None]] = []
    sleep = asyncio.sleep

    async def closes_between_slices(seconds: float) -> None:
        if not closing:  # as at a failover
            closing.append(asyncio.create_task(client.connection_pool.disconnect()))
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", closes_between_slices)
    assert await client.hget("sizes", large) == b"large", "sent again from its beginning"
    assert closing
    assert await client.hget("sizes", "injected") is None
