"""Source runs on the ranks: whole, on all ranks or on none, within a budget, and never given up
while somebody uses them.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from midstream_fake_engine.model import HIDDEN_SIZE
from midstream_fake_engine.rank import FakeFaults
from midstream_fake_engine.ranks import FakeRanks
from refusal_kit import refuses
from wait_kit import settled

from midstream.schemas.requests.source_runs import RunFile, RunFiles
from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.ranks.collective import Quarantined, Ranks
from midstream.workers.engine.ranks.source_runs import RankRuns

A, B, C, D = (f"job_{letter}.0.t" for letter in "abcd")
SIZE = 100


class Rig:
    """Two ranks of the fake engine, and what the worker asks of them.

    `sizes`: bytes of runs that are not of `SIZE`.
    """

    def __init__(self, budget: int, fault: str = "", **sizes: int) -> None:
        self.faults = FakeFaults(fault)
        self._fake = FakeRanks(
            Settings(vllm=VllmOptions(tensor_parallel_size=2)), self.faults, lambda reason: None
        )
        self.ranks = self._fake.ranks
        self.calls: list[tuple[str, Any]] = []
        self.quarantined: list[str] = []
        # awaited while the ranks are at it
        self.in_call: Callable[[], Awaitable[None]] | None = None
        self._sizes = {f"job_{letter}.0.t": size for letter, size in sizes.items()}
        self.runs = RankRuns(Ranks(self._call, 2, self.quarantined.append), budget)

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        self.calls.append(
            (method, arguments[0]["key"] if method == "midstream_put_run" else arguments[0])
        )
        await asyncio.sleep(0)
        if self.in_call is not None:
            await self.in_call()
        return self._fake.call(method, arguments)

    async def locate(self, key: str) -> RunFiles:
        await asyncio.sleep(0)
        file = RunFile(path=f"t/{key}.safetensors", offset=0, bytes=1, crc32=0)
        return RunFiles(
            key=key,
            sites={"post_block": [0]},
            positions=[0],
            hidden_size=HIDDEN_SIZE,
            bytes=self._sizes.get(key, SIZE),
            files=[file],
        )

    async def hold(self, *keys: str) -> None:
        await self.runs.hold([await self.locate(key) for key in keys])

    @asynccontextmanager
    async def held(self, *keys: str):
        await self.hold(*keys)
        try:
            yield
        finally:
            self.runs.release(keys)

    def loads(self, key: str) -> int:
        return self.calls.count(("midstream_put_run", key))

    def on_ranks(self) -> list[set[str]]:
        return [set(rank.runs) for rank in self.ranks]


async def test_concurrent_holders_load_a_run_once_and_one_rpc_carries_it() -> None:
    rig = Rig(10 * SIZE)
    await asyncio.gather(*(rig.hold(A) for _ in range(5)), rig.hold(B, A))
    assert rig.calls == [("midstream_put_run", A), ("midstream_put_run", B)]
    assert rig.on_ranks() == [{A, B}, {A, B}]


async def test_the_least_recently_used_run_is_evicted_whole_and_reloaded_on_demand() -> None:
    rig = Rig(3 * SIZE)
    for key in (A, B, C, A, D):
        async with rig.held(key):
            pass
    assert rig.calls[-2:] == [("midstream_drop_runs", [B]), ("midstream_put_run", D)]
    assert rig.runs.names == [C, A, D]
    assert rig.on_ranks()[1] == {A, C, D}
    async with rig.held(B):
        assert rig.on_ranks() == [{A, B, D}] * 2
    assert rig.loads(B) == 2


# field case 31
async def test_a_held_run_is_never_evicted_and_waiters_are_served_in_order() -> None:
    rig = Rig(2 * SIZE, c=2 * SIZE)
    order = []

    async def use(label: str, *keys: str) -> None:
        async with rig.held(*keys):
            order.append(label)
            await settled(50)

    await rig.hold(A)
    waiting = [
        asyncio.create_task(use(label, key)) for label, key in (("c", C), ("b", B), ("a", A))
    ]
    await settled(50)
    assert order == [], "b fits and a is there, but c was first"
    assert rig.on_ranks() == [{A}, {A}]
    rig.runs.release([A])
    await asyncio.gather(*waiting)
    assert order == ["c", "b", "a"]


async def test_a_run_larger_than_the_budget_is_loaded_when_nobody_holds_another() -> None:
    rig = Rig(2 * SIZE, c=5 * SIZE)
    async with rig.held(A):
        pass
    async with rig.held(C):
        assert rig.on_ranks() == [{C}, {C}]
        second = asyncio.create_task(rig.hold(A))
        await settled(50)
        assert not second.done()
    await second
    assert rig.on_ranks() == [{A}, {A}]


async def test_a_holder_cancelled_during_loading_leaves_a_complete_run_without_holders() -> None:
    rig = Rig(SIZE)
    reached = asyncio.Event()
    go_on = asyncio.Event()

    async def in_call() -> None:
        reached.set()
        await go_on.wait()

    rig.in_call = in_call
    holder = asyncio.create_task(rig.hold(A))
    await reached.wait()
    holder.cancel()
    await settled(50)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await holder
    assert rig.runs.names == [A]
    assert rig.on_ranks() == [{A}, {A}]
    await rig.hold(B)  # A gives way: it is held by nobody
    assert rig.on_ranks() == [{B}, {B}]


# field case 28
async def test_a_run_that_one_rank_cannot_load_is_dropped_by_all_with_the_reason() -> None:
    rig = Rig(10 * SIZE, fault="put_run:rank=1,after=1,times=1")
    with refuses(f"source run {B} failed on rank 1: injected fault", kind="intervention_failed"):
        await rig.hold(A, B)
    assert ("midstream_drop_runs", [B]) in rig.calls
    assert rig.on_ranks() == [{A}, {A}]
    assert rig.quarantined == []
    await rig.hold(B)  # the ranks go on, and it is sent anew
    assert rig.on_ranks() == [{A, B}, {A, B}]


async def test_failing_to_drop_a_run_quarantines_the_worker() -> None:
    rig = Rig(SIZE, fault="drop_runs:rank=0")
    async with rig.held(A):
        pass
    with pytest.raises(Quarantined, match="dropping source runs failed on rank 0"):
        await rig.hold(B)
    assert len(rig.quarantined) == 1


async def test_after_a_resync_runs_are_loaded_again_and_late_releases_do_no_harm() -> None:
    rig = Rig(2 * SIZE)
    await rig.hold(A)
    waiting = asyncio.create_task(rig.hold(B, C))
    await settled(50)
    for rank in rig.ranks:
        rank.midstream_drop_runs([A])
    rig.runs.forget()
    await waiting
    rig.runs.release([A])
    rig.runs.release([B, C])
    await rig.hold(A)
    assert rig.loads(A) == 2
    assert rig.on_ranks()[0] >= {A}


# field case 31
async def test_holders_in_any_order_keep_their_runs_within_the_budget() -> None:
    keys = [f"job_{number}.0.t" for number in range(8)]
    rig = Rig(3 * SIZE)
    dice = random.Random(7)
    budget = 3 * SIZE
    holders: list[Sequence[str]] = []
    done = 0

    async def one() -> None:
        nonlocal done
        mine = dice.sample(keys, dice.choice([1, 1, 2, 3, 4]))  # four are more than the budget
        task = asyncio.ensure_future(rig.hold(*mine))
        if dice.random() < 0.2:
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return
        holders.append(mine)
        for _ in range(dice.randrange(30)):
            held = {key for each in holders for key in each}
            assert all(held <= there for there in rig.on_ranks())
            # Together within the budget; or one needs more, and the others only what it has.
            assert len(held) * SIZE <= budget or len(held) == max(map(len, holders))
            await asyncio.sleep(0)
        holders.remove(mine)
        rig.runs.release(mine)
        done += 1

    await asyncio.gather(*(one() for _ in range(300)))
    assert done > 200
    assert sorted(rig.runs.names) == sorted(rig.on_ranks()[0])
    assert rig.on_ranks()[0] == rig.on_ranks()[1]
    assert rig.quarantined == []
