"""Do large bodies leave the event loop to small calls, however many are under way?"""

import asyncio
import time

import pytest

from midstream.api.web.pace import BYTES_PER_S, Pace

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
