"""The worker's record of autoencoders on the ranks: a request gets all that it names, or waits, and
holds nothing while it waits.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from refusal_kit import refuses
from wait_kit import settled

from midstream.schemas.artifacts.saes import StoredSae
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


@pytest.fixture
def ranks() -> Loaded:
    return Loaded()


@pytest.fixture
def saes(ranks: Loaded, tmp_path: Path) -> RankSaes:
    return RankSaes(cast(Ranks, ranks), str(tmp_path), 12)


def release(saes: RankSaes, *held: StoredSae) -> None:
    saes.release(sae.digest for sae in held)


async def test_a_waiting_request_that_is_cancelled_holds_nothing(
    sae: Callable[[str, int], StoredSae], saes: RankSaes, ranks: Loaded
) -> None:
    a = sae("a", 4)
    b = sae("b", 4)
    c = sae("c", 8)
    await saes.hold([a])
    waiting = asyncio.create_task(saes.hold([b, c]))
    await settled()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release(saes, a)
    await saes.hold([c])
    assert ranks.digests == ["aaa", "ccc"], "it loaded nothing while it waited"


async def test_autoencoders_that_exceed_the_cache_together_are_refused(
    sae: Callable[[str, int], StoredSae], saes: RankSaes, ranks: Loaded
) -> None:
    with refuses("14 bytes of weights ('a', 'b') exceed", kind="invalid_request", field="features"):
        await saes.hold([sae("a", 7), sae("b", 7)])
    assert ranks.digests == []
