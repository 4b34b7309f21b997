"""One rank fails at each kind of apply: the ranks are as before, or nobody may use them.

The worker's own calls on fake ranks.
"""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from midstream_fake_engine.engine import FakeEngine
from refusal_kit import refuses

from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.requests.steering import GlobalSteering, RankSteering, SteeringTemplate
from midstream.schemas.settings.settings import load_settings
from midstream.workers.engine.ranks.collective import Quarantined, Refused, Undo

TENSORS = {
    content_hash(t): t for t in (from_numpy(np.full(8, n, dtype=np.float32)) for n in range(3))
}
FIRST, SECOND, THIRD = TENSORS


async def fetch(name: str) -> Tensor:
    return TENSORS[name]


def steering(version: int, *vectors: str) -> GlobalSteering:
    entries = [
        SteeringTemplate(
            layers=[layer], hook="post_block", positions="all", family="add", tensors=[v]
        )
        for layer, v in enumerate(vectors)
    ]
    return GlobalSteering(version=version, entries=entries)


class Rig:
    """Two ranks with vectors on them."""

    def __init__(self, directory: Path, **changed: object) -> None:
        values = {
            "data_dir": str(directory),
            "engine": "fake",
            "model": "m",
            "worker_id": "w",
            "relay_url": "tcp://127.0.0.1:9",
        }
        self.engine = FakeEngine(
            load_settings({}, **(values | {"engine.tensor_parallel_size": 2} | changed))
        )
        self.quarantined: list[str] = []
        self.engine.on_quarantine = self.quarantined.append

    async def fill(self) -> None:
        await self.engine._vectors.hold([FIRST, SECOND], fetch)

    async def content(self) -> list[RankSteering]:
        """What the ranks have, their accounts of how they came to it left out."""
        return [
            msgspec.structs.replace(rank, checksum="", actions=0)
            for rank in await self.engine.steering_status()
        ]


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    await made.fill()
    return made


async def test_vectors_refused_by_one_rank_are_dropped_on_all(rig: Rig) -> None:
    # field case 29
    before = await rig.content()
    rig.engine.faults.switch("hold:rank=1,times=1")
    with pytest.raises(Refused, match=r"sending vectors failed on rank 1: .*injected fault"):
        await rig.engine._vectors.hold([THIRD], fetch)
    assert await rig.content() == before
    assert await rig.engine.same_content()
    assert not rig.quarantined
    await rig.engine._vectors.hold([THIRD], fetch)
    assert await rig.engine.same_content()


async def test_a_failed_rollback_quarantines_the_worker(rig: Rig) -> None:
    # field case 29
    rig.engine.faults.switch("hold:rank=1;drop:rank=0")
    with pytest.raises(Quarantined, match=r"rank 1: .*; undoing .* rank 0: injected fault"):
        await rig.engine._vectors.hold([THIRD], fetch)
    assert len(rig.quarantined) == 1


async def test_a_check_of_global_steering_names_the_ranks_that_refuse_and_changes_nothing(
    rig: Rig,
) -> None:
    before = await rig.content()
    rig.engine.faults.switch("check_global:rank=1,times=1")
    with pytest.raises(Refused, match="the check failed on rank 1: injected fault"):
        await rig.engine.check_global(steering(1, FIRST), fetch)
    await rig.engine.check_global(steering(1, FIRST), fetch)
    assert await rig.content() == before
    assert not rig.quarantined


async def test_tensors_of_a_checked_global_steering_are_held_only_while_it_is_checked(
    rig: Rig,
) -> None:
    held = rig.engine._vectors._held.copy()
    await rig.engine.check_global(steering(1, THIRD), fetch)
    assert rig.engine._vectors._held == held
    assert THIRD in rig.engine._vectors.names
    rig.engine._vectors.forget()
    rig.engine.faults.switch("hold:rank=1")
    with pytest.raises(Refused, match="rank 1: refused vector"):
        await rig.engine.check_global(steering(1, THIRD), fetch)
    assert not rig.engine._vectors._held


async def test_global_steering_too_large_for_the_table_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, **{"tuning.steering_entries": 1})
    with refuses("needs 2 steering entries", kind="intervention_failed"):
        await rig.engine.check_global(steering(1, FIRST, SECOND), fetch)
    assert not rig.engine._vectors.names


async def test_a_worker_with_less_room_refuses_global_steering_that_it_did_not_check(
    tmp_path: Path,
) -> None:
    """Of its share, with the listed positions, so that no request finds less than its own."""
    listed = [
        msgspec.structs.replace(entry, positions=[n])
        for n, entry in enumerate(steering(1, FIRST, SECOND, THIRD).entries)
    ]
    everyone = GlobalSteering(version=1, entries=listed)
    await Rig(tmp_path / "whole", **{"tuning.steering_rows": 5}).engine.check_global(
        everyone, fetch
    )
    less = Rig(tmp_path / "less", **{"tuning.steering_rows": 4})
    with refuses("needs 3 steering rows", kind="intervention_failed"):
        await less.engine.check_global(everyone, fetch)


async def test_an_irreversible_failure_quarantines_the_worker(
    tmp_path: Path,
) -> None:  # field case 29
    async def evicts(engine: FakeEngine) -> None:
        async with engine.holding_vectors([THIRD], fetch):
            pass
        engine._vectors._budget = 0
        await engine._vectors._evict(1, set())

    for fault, act in (("drop", evicts), ("restart", FakeEngine.restart_ledgers)):
        rig = Rig(tmp_path, fault=f"{fault}:rank=1")
        await rig.fill()
        with pytest.raises(Quarantined, match="rank 1: injected fault"):
            await act(rig.engine)
        assert len(rig.quarantined) == 1


@pytest.mark.parametrize("turns", range(8))
async def test_cancellation_at_any_point_leaves_ranks_consistent(
    tmp_path: Path, turns: int
) -> None:
    rig = Rig(tmp_path)
    sending = asyncio.create_task(rig.engine._vectors.hold([THIRD], fetch))
    for _ in range(turns):
        await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])
    known = THIRD in rig.engine._vectors._sizes
    assert [rank.vectors for rank in await rig.engine.steering_status()] == [int(known)] * 2
    assert rig.engine._vectors._held.total() == (not sending.cancelled())


async def test_a_dead_engine_is_not_a_refusal(rig: Rig) -> None:
    rig.engine._die("gone")
    for undo in (None, Undo("midstream_drop_vectors", ([],))):
        with refuses("gone", kind="engine_failed"):
            await rig.engine._ranks.apply("x", "midstream_put_vectors", {}, [], undo=undo)
    assert not rig.quarantined
