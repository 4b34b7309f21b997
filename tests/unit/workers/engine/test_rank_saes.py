"""The worker's record of autoencoders on the ranks: a request gets all that it names, or waits, and
holds nothing while it waits.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.errors import MidstreamError
from midstream.storage.formats.sae_files import CONFIG, WEIGHTS
from midstream.workers.engine.ranks.collective import Ranks
from midstream.workers.engine.ranks.saes import RankSaes


class Loaded:
    """What ranks would hold; calls are recorded."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    async def apply(self, what: str, call: str, *arguments: Any, undo: Any = None) -> None:
        await asyncio.sleep(0)
        if call == "midstream_put_sae":
            self.digests.append(arguments[0])
        else:
            self.digests = [digest for digest in self.digests if digest not in arguments[0]]


@pytest.fixture
def sae(tmp_path: Path) -> Callable[[str, int], StoredSae]:
    def made(name: str, size: int) -> StoredSae:
        (tmp_path / name).mkdir(exist_ok=True)
        for file in (CONFIG, WEIGHTS):
            (tmp_path / name / file).touch()
        return StoredSae(
            name=name, digest=name * 3, path=name, hook="post_block", layer=1, bytes=size
        )

    return made


def run(story: Callable[[RankSaes, Loaded], Awaitable[None]], root: Path, budget: int = 10) -> None:
    ranks = Loaded()
    asyncio.run(
        asyncio.wait_for(_run(story, ranks, RankSaes(cast(Ranks, ranks), str(root), budget)), 20)
    )


def release(saes: RankSaes, *held: StoredSae) -> None:
    saes.release(sae.digest for sae in held)


async def _run(
    story: Callable[[RankSaes, Loaded], Awaitable[None]], ranks: Loaded, saes: RankSaes
) -> None:
    await story(saes, ranks)


def test_two_requests_that_need_each_others_room_take_turns(
    sae: Callable[[str, int], StoredSae], tmp_path: Path
) -> None:
    a, b, c = sae("a", 4), sae("b", 4), sae("c", 4)

    async def story(saes: RankSaes, ranks: Loaded) -> None:
        await saes.hold([a, b])
        waiting = [asyncio.create_task(saes.hold(wanted)) for wanted in ([b, c], [c, a])]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        assert ranks.digests == ["aaa", "bbb"]
        release(saes, a, b)
        await waiting[0]
        assert ranks.digests == ["bbb", "ccc"], "what it needs itself is not dropped"
        assert not waiting[1].done()
        release(saes, b, c)
        await waiting[1]
        assert ranks.digests == ["ccc", "aaa"]

    run(story, tmp_path)


def test_a_waiting_request_that_is_cancelled_holds_nothing(
    sae: Callable[[str, int], StoredSae], tmp_path: Path
) -> None:
    a, b, c = sae("a", 4), sae("b", 4), sae("c", 8)

    async def story(saes: RankSaes, ranks: Loaded) -> None:
        await saes.hold([a])
        waiting = asyncio.create_task(saes.hold([b, c]))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        release(saes, a)
        await saes.hold([c])
        assert ranks.digests == ["aaa", "ccc"], "it loaded nothing while it waited"

    run(story, tmp_path, 12)


def test_autoencoders_that_exceed_the_cache_together_are_refused(
    sae: Callable[[str, int], StoredSae], tmp_path: Path
) -> None:
    async def story(saes: RankSaes, ranks: Loaded) -> None:
        with pytest.raises(
            MidstreamError, match=r"12 bytes of weights \('a', 'b'\) exceed"
        ) as refused:
            await saes.hold([sae("a", 6), sae("b", 6)])
        assert (refused.value.kind, refused.value.field, ranks.digests) == (
            "invalid_request",
            "features",
            [],
        )

    run(story, tmp_path)
