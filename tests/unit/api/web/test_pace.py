"""Do large bodies leave the event loop to small calls, however many are under way?"""

import asyncio
import time
from typing import Any
from unittest.mock import patch

import pytest
from litestar.testing import RequestFactory

from midstream.api.operations import twin
from midstream.api.web import body
from midstream.api.web.body import INLINE_BYTES, JsonRequest
from midstream.api.web.pace import BYTES_PER_S, Pace
from midstream.api.web.request_context import CURRENT, ApiCall, HandedOver
from midstream.broker.telemetry.traces import TraceSpan

PIECE = 256 << 10
SLOT_S = PIECE / BYTES_PER_S


async def test_pieces_of_all_large_bodies_keep_their_distance() -> None:
    pace = Pace()
    handled: list[float] = []

    async def body(pieces: int) -> None:
        for _ in range(pieces):
            await pace.wait(PIECE)
            handled.append(time.monotonic())

    began = time.monotonic()
    await asyncio.gather(*(body(10) for _ in range(4)))
    # a loop that was held up catches up, but nothing is handled before its time
    early = [at - began for at in handled]
    assert all(at >= number * SLOT_S * 0.99 for number, at in enumerate(early))


async def test_the_first_piece_after_a_pause_does_not_wait() -> None:
    pace = Pace()
    await pace.wait(PIECE)
    await asyncio.sleep(2 * SLOT_S)
    # a coroutine that returns at its first step does not wait
    with pytest.raises(StopIteration):
        pace.wait(PIECE).send(None)


class Asked:
    """A pace that says for how many bytes it was asked."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def wait(self, size: int) -> None:
        self.sizes.append(size)


async def pieces_of(size: int) -> Any:
    for start in range(0, size, PIECE):
        yield b" " * min(PIECE, size - start)


async def read(size: int, *, has_twin: bool) -> list[int]:
    """Read a body of `size` bytes; returns the sizes that its pace was asked for."""
    request = JsonRequest(RequestFactory().post("/").scope)
    CURRENT.set(ApiCall(TraceSpan(""), 0.0, "POST", has_twin=has_twin))
    asked = Asked()
    with (
        patch.object(body, "PACE", asked),
        patch("litestar.Request.stream", lambda _: pieces_of(size)),
    ):
        try:
            async for _ in request.stream():
                pass
        except HandedOver:
            assert has_twin
    return asked.sizes


async def test_only_large_bodies_that_a_twin_will_read_keep_the_pace() -> None:
    assert await read(INLINE_BYTES, has_twin=True) == []
    assert await read(INLINE_BYTES + 2 * PIECE, has_twin=True) == [PIECE, PIECE]
    # the twin itself holds nobody up
    assert await read(INLINE_BYTES + 2 * PIECE, has_twin=False) == []


async def test_a_body_is_handed_to_the_twin_at_the_pace() -> None:
    asked = Asked()
    with patch.object(twin, "PACE", asked):
        sent = [piece async for piece in twin._in_pieces([b"a" * (twin.PIECE + 1), b"b"])]
    assert b"".join(sent) == b"a" * (twin.PIECE + 1) + b"b"
    assert asked.sizes == [twin.PIECE, 1, 1]
