"""Every rank's answer is looked at; what the worker believes of the ranks is what they said."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from wait_kit import settled

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.requests.steering import RankSteering
from midstream.schemas.settings.settings import Settings
from midstream.workers.engine import vllm
from midstream.workers.engine.admission import (
    CaptureBudget,
    CellSlots,
    RowAdmission,
    RowDemand,
    StepRows,
)
from midstream.workers.engine.ranks.collective import Ranks, check_apply_results
from midstream.workers.engine.ranks.vectors import RankVectors
from midstream.workers.engine.vllm import VllmEngine
from midstream.workers.runner.base.backlog import WORKS

TENSORS = {
    content_hash(t): t for t in (from_numpy(np.full(4, n, dtype=np.float32)) for n in range(6))
}
NAMES = list(TENSORS)


async def fetch(name: str):
    return TENSORS[name]


class Two:
    """Two ranks that answer as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.refuse: dict[str, tuple[bool, str]] = {}

    async def __call__(self, method: str, args: tuple) -> list:
        self.calls.append((method, sorted(args[0])))
        return [(True, ""), self.refuse.get(method, (True, ""))]

    def vectors(self, budget_bytes: int = 1 << 20) -> RankVectors:
        return RankVectors(Ranks(self, 2, lambda why: None), budget_bytes)


def test_a_failure_on_any_rank_raises_with_rank_and_reason() -> None:
    with pytest.raises(MidstreamError, match="applying failed on rank 1: no memory; rank 2: late"):
        # field case 29
        check_apply_results("applying", [(True, ""), (False, "no memory"), (False, "late")], 3)
    with pytest.raises(MidstreamError, match="1 of 2 ranks answered"):
        check_apply_results("applying", [(True, "")], 2)
    check_apply_results("applying", [(True, ""), (True, "fine")], 2)


async def test_vectors_refused_by_one_rank_are_dropped_on_all_and_sent_again_next_time() -> None:
    ranks = Two()
    vectors = ranks.vectors()
    ranks.refuse["midstream_put_vectors"] = (False, "wrong width")
    with pytest.raises(MidstreamError, match="rank 1: wrong width"):
        await vectors.hold(NAMES[:2], fetch)
    ranks.refuse.clear()
    await vectors.hold(NAMES[:2], fetch)
    wanted = sorted(NAMES[:2])
    assert ranks.calls == [
        ("midstream_put_vectors", wanted),
        ("midstream_drop_vectors", wanted),
        ("midstream_put_vectors", wanted),
    ]


async def test_only_vectors_that_no_job_holds_are_evicted_beyond_the_budget() -> None:
    ranks = Two()
    vectors = ranks.vectors(3 * 16)
    await vectors.hold(NAMES[:2], fetch)
    await vectors.hold(NAMES[2:3], fetch)
    vectors.release(NAMES[2:3])
    await vectors.hold(NAMES[3:5], fetch)
    assert [call for call in ranks.calls if call[0] == "midstream_drop_vectors"] == [
        ("midstream_drop_vectors", [NAMES[2]])
    ]


def rows(*keys: str, entries: int = 1) -> frozenset[RowDemand]:
    return frozenset(RowDemand(key, entries) for key in keys)


def hold(gate: Any, demand: Any, done: asyncio.Event) -> "asyncio.Task[None]":
    """Wait for a place, and keep it until `done`."""

    async def use() -> None:
        async with gate.admitted(demand):
            await done.wait()

    return asyncio.create_task(use())


async def test_rows_beyond_the_table_wait_in_order_and_shared_rows_do_not_count_twice() -> None:
    admission = RowAdmission(2, 9)
    order = []

    async def use(label: str, *keys: str) -> None:
        async with admission.admitted(rows(*keys)):
            order.append(label)
            await asyncio.sleep(0.01)

    await asyncio.gather(
        use("a", "x"), use("b", "x", "y"), use("c", "z", "w"), use("d", "x"), use("e")
    )
    assert order[:2] == ["a", "b"]
    assert order.index("c") < order.index("d")  # first come, first served
    assert not admission._in_use
    assert admission.waiting == 0


async def test_a_cancelled_waiter_gives_up_its_place() -> None:
    admission = RowAdmission(1, 9)
    done = asyncio.Event()
    first, second, third = (hold(admission, rows(key), done) for key in "aba")
    await settled()
    second.cancel()
    await settled()
    assert admission.waiting == 0
    done.set()
    await asyncio.gather(first, third)
    assert not admission._in_use


async def test_a_request_that_alone_needs_too_many_rows_is_refused() -> None:
    with pytest.raises(MidstreamError, match="needs 3 steering rows, but the engine has 2"):
        async with RowAdmission(2, 9).admitted(rows("a", "b", "c")):
            pass


@pytest.mark.parametrize(
    ("gate", "demand", "says"),
    [
        (
            RowAdmission(9, 10),
            lambda label, count: rows(label, entries=count),
            "needs 11 steering entries, but the engine has 10",
        ),
        (
            StepRows(10),
            lambda label, count: count,
            "captures 11 rows for one token; one step has room for 10",
        ),
    ],
    ids=["steering entries", "captured rows"],
)
async def test_demands_that_do_not_fit_together_wait_and_oversized_ones_are_refused(
    gate: Any, demand: Callable[[str, int], Any], says: str
) -> None:
    order = []

    async def use(label: str, count: int) -> None:
        async with gate.admitted(demand(label, count)):
            order.append(label)
            await asyncio.sleep(0)
            order.append(f"{label} done")

    await asyncio.gather(use("a", 6), use("b", 6))
    assert order == ["a", "a done", "b", "b done"]
    with pytest.raises(MidstreamError, match=says):
        await use("c", 11)


async def test_without_a_limit_a_step_captures_any_number_of_rows() -> None:
    async with StepRows(0).admitted(10**9):
        pass


async def test_captures_beyond_the_budget_wait_and_one_that_is_larger_alone_still_runs() -> None:
    budget = CaptureBudget(10)
    order = []

    async def use(label: str, size: int) -> None:
        async with budget.admitted(size):
            order.append(label)
            await asyncio.sleep(0.01)
            order.append(f"{label} done")

    await asyncio.gather(use("a", 6), use("b", 6), use("huge", 50), use("c", 1), use("none", 0))
    assert order[:2] == ["a", "none"]
    assert order.index("a done") < order.index("b") < order.index("b done") < order.index("huge")
    assert order.index("huge done") < order.index("c")


async def test_holder_and_waiter_cancelled_together_leave_nothing_behind() -> None:
    budget = CaptureBudget(1)
    tasks = [hold(budget, 1, asyncio.Event()) for _ in range(2)]
    await settled()
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    async with budget.admitted(1):
        pass


async def test_sweep_cells_yield_rows_to_other_requests() -> None:
    limit = 3
    slots = CellSlots(lambda: limit)
    for _ in range(3):
        await slots.acquire("t")
    turns = [asyncio.ensure_future(slots.acquire("t")) for _ in range(3)]
    limit = 1
    for _ in range(2):
        slots.release()
        await asyncio.sleep(0)
        assert [turn.done() for turn in turns] == [False] * 3
    slots.release()
    await asyncio.sleep(0)
    assert [turn.done() for turn in turns] == [True, False, False]
    limit = 3
    slots.release()
    await asyncio.gather(*turns)


def engine_of_ranks(*changed: dict[str, Any]) -> Any:
    """An engine whose ranks say this of their writers."""
    counts = [field.name for field in msgspec.structs.fields(RankSteering) if field.type is int]
    usual = dict.fromkeys([*counts, "tainted", "unkept"], 0) | {"checksum": "", "silent_s": 0.0}

    async def call(method: str, args: tuple[Any, ...]) -> list[Any]:
        return [usual | {"behind": []} | each for each in changed]

    engine: Any = object.__new__(VllmEngine)
    engine._keeps_up = {work: asyncio.Event() for work in WORKS}
    engine._call = call
    return engine


async def test_writers_that_are_behind_stop_the_admission_of_their_kind_of_work() -> None:
    engine = engine_of_ranks({}, {"behind": ["reading"]})
    await engine.steering_status()
    admitted = {work: event.is_set() for work, event in engine._keeps_up.items()}
    assert admitted == {"writer": True, "placed": True, "reading": False}


@pytest.mark.parametrize(("silent_s", "trouble"), [(0.4, ""), (7.2, "answered for 7 s")])
async def test_a_rank_whose_writing_process_does_not_answer_is_trouble(
    silent_s: float, trouble: str
) -> None:
    engine = engine_of_ranks({"silent_s": silent_s}, {})
    await engine.steering_status()
    assert engine.trouble.endswith(trouble)
    assert bool(engine.trouble) == bool(trouble)


async def test_a_rank_gives_up_on_its_writing_process_before_its_jobs_have_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They run again then, as after the end of an engine."""

    class Planned(Exception):
        pass

    def planned(answer_s: float, **_: object) -> None:
        raise Planned(answer_s)

    monkeypatch.setattr(vllm, "PlaneConfig", planned)
    for changes_this_process in ("prepare_environment", "use_all_cores"):
        monkeypatch.setattr(vllm, changes_this_process, lambda _: None)
    with pytest.raises(Planned) as found:
        await VllmEngine(Settings(model="m", capture_timeout_s=12.0)).start()
    assert found.value.args[0] < 12.0 / 2


async def test_tenants_that_wait_for_room_take_turns() -> None:
    """A tenant's requests come in order, and none of them twice before another tenant's."""
    budget = CaptureBudget(1)
    order = []

    async def use(tenant: str, number: int) -> None:
        async with budget.admitted(1, tenant):
            order.append(f"{tenant}{number}")
            await asyncio.sleep(0)

    names = [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1), ("b", 2)]
    await asyncio.gather(*(use(*name) for name in names))
    assert order.index("b1") <= 2
    assert order.index("b2") <= 4
    assert [name for name in order if name[0] == "a"] == ["a1", "a2", "a3", "a4"]
