"""Does each of many commands that travel together get its own answer, its own error, and none but its own?"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions
from ledger_kit import settings_for

from midstream.broker.grouped import GROUP_LIMIT
from midstream.broker.ledger import Ledger


def with_client(url: str, body: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        ledger = Ledger.connect(settings_for(url))
        await body(ledger.redis)
        await ledger.close()

    asyncio.run(run())


def test_everybody_gets_the_answer_to_what_they_asked(redis_url: str) -> None:
    async def body(client: Any) -> None:
        many = 3 * GROUP_LIMIT + 5
        await client.hset("numbers", mapping={str(number): number * number for number in range(many)})
        answers = await asyncio.gather(*(client.hget("numbers", str(number)) for number in range(many)))
        assert [int(answer) for answer in answers] == [number * number for number in range(many)]

    with_client(redis_url, body)


def test_an_error_is_its_commands_alone(redis_url: str) -> None:
    async def body(client: Any) -> None:
        await client.set("text", "no hash")
        await client.hset("hash", "field", "value")
        answers = await asyncio.gather(*(client.hget(name, "field") for name in ("hash", "text", "hash")), return_exceptions=True)
        assert (answers[0], answers[2]) == (b"value", b"value")
        assert isinstance(answers[1], redis.exceptions.ResponseError)

    with_client(redis_url, body)


def test_a_script_that_redis_has_forgotten_is_loaded_again_for_all_who_call_it(redis_url: str) -> None:
    async def body(client: Any) -> None:
        double = client.register_script("return 2 * ARGV[1]")
        assert await asyncio.gather(*(double(args=[number]) for number in range(20))) == [2 * number for number in range(20)]

    with_client(redis_url, body)


def test_who_leaves_takes_nobody_along(redis_url: str) -> None:
    async def body(client: Any) -> None:
        await client.hset("hash", "field", "value")
        leaving, staying = (asyncio.create_task(client.hget("hash", "field")) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying == b"value"
        with pytest.raises(asyncio.CancelledError):
            await leaving

    with_client(redis_url, body)


def test_a_cut_connection_costs_a_repetition_and_no_answer(redis_url: str) -> None:  # field case 38
    async def body(client: Any) -> None:
        await client.hset("hash", "field", "value")
        await asyncio.gather(*(client.hget("hash", "field") for _ in range(10)))
        async with redis.asyncio.Redis.from_url(redis_url) as other:
            await other.client_kill_filter(_type="normal", skipme=True)
        assert await asyncio.gather(*(client.hget("hash", "field") for _ in range(10))) == [b"value"] * 10

    with_client(redis_url, body)


def test_without_redis_everybody_is_told() -> None:
    async def body(client: Any) -> None:
        answers = await asyncio.gather(*(client.hget("hash", "field") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(answer, redis.exceptions.ConnectionError) for answer in answers)

    with_client("redis://127.0.0.1:1/0", body)
