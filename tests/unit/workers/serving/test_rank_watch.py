"""What does a worker answer when asked about its ranks, and what does it do when they are out of
step?

On fake ranks, Redis played by hand.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from midstream_fake_engine.engine import FakeEngine
from wait_kit import holding

from midstream.broker.ledger.core.reachable import Unreachable
from midstream.broker.ledger.named.steering import Look
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.requests.steering import (
    GlobalSteering,
    SteeringTemplate,
    WorkerSteering,
)
from midstream.schemas.settings.settings import load_settings
from midstream.workers.serving.rank_watch import RankWatch
from midstream.workers.serving.redis_retry import end_tasks

TENSORS = {
    content_hash(t): t for t in (from_numpy(np.full(8, n, dtype=np.float32)) for n in range(4))
}
NAMES = list(TENSORS)
REFUSED = "global steering version 1: the check failed on rank 1: injected fault"


def steering(version: int, *vectors: str) -> GlobalSteering:
    entries = [
        SteeringTemplate(
            layers=[1], hook="post_block", positions="all", family="add", tensors=[vector]
        )
        for vector in vectors
    ]
    return GlobalSteering(version=version, entries=entries)


class Board:
    """What Redis would hold."""

    def __init__(self) -> None:
        self.held = GlobalSteering()
        self.checks: dict[str, list[SteeringTemplate]] = {}
        self.answered: dict[str, str] = {}
        self.desync = ""
        self.asked = ""
        self.away = False
        self.unreadable = False
        self.cleared: list[int] = []
        self.reports: list[WorkerSteering] = []
        self.gone: set[str] = set()
        self.looks = 0

    def _there(self) -> None:
        if self.away:
            raise Unreachable("Redis is away")
        if self.unreadable:
            raise MidstreamError("version_mismatch", "stored by another version")

    async def current(self, model: str) -> GlobalSteering:
        self._there()
        return self.held

    async def look(self, model: str, worker: str) -> Look:
        self.looks += 1
        if self.away:
            raise Unreachable("Redis is away")
        return Look(self.held.version, self.asked, self.desync, list(self.checks))

    async def checked_entries(self, check: str) -> list[SteeringTemplate]:
        self._there()
        return self.checks[check]

    async def answer(self, check: str, boot: str, refusal: str) -> None:
        self.answered[check] = refusal

    async def report(self, report: WorkerSteering) -> None:
        if self.away:
            raise Unreachable("Redis is away")
        self.reports.append(report)

    async def clear_desync(self, worker: str, boot: str, epoch: int = 0) -> None:
        self._there()
        self.desync = ""
        self.cleared.append(epoch)

    async def get_tensor(self, name: str, check: str = "") -> Tensor:
        self._there()
        if name in self.gone:
            raise MidstreamError("intervention_failed", f"the tensor {name} is no longer stored")
        return TENSORS[name]


class Worker:
    """A `RankWatch` over two fake ranks, and how many runs would have to be stopped."""

    def __init__(self, directory: Path, **changed: Any) -> None:
        values = {
            "data_dir": str(directory),
            "engine": "fake",
            "model": "m",
            "worker_id": "w",
            "relay_url": "tcp://127.0.0.1:9",
        }
        self.settings = load_settings({}, **(values | {"engine.tensor_parallel_size": 2} | changed))
        self.engine = FakeEngine(self.settings)
        self.board = Board()
        self.told = 0
        self.watch = RankWatch(self.board, self.engine, self.settings, "boot", self._tell)  # type: ignore[arg-type]
        self.watch.stop_runs = self._stop_runs
        self.runs = 0
        self.stopped: list[str] = []

    async def _tell(self) -> None:
        self.told += 1

    def _stop_runs(self, why: str) -> bool:
        """Each run needs a moment to end."""
        self.runs, left = max(0, self.runs - 1), self.runs > 0
        self.stopped += [why] * left
        return left

    async def follow(self) -> None:
        """Until everything that is there now has been looked into: the next look is over."""
        after = self.board.looks + 2
        await holding(lambda: self.board.looks >= after)

    async def check(self, name: str, *vectors: str) -> str:
        """The answer to a new check."""
        self.board.checks[name] = steering(0, *vectors).entries
        await holding(lambda: name in self.board.answered)
        return self.board.answered[name]

    async def until(self, state: str) -> WorkerSteering:
        """The first report from here on that says so."""
        start = len(self.board.reports)
        found, *_ = await holding(
            lambda: [report for report in self.board.reports[start:] if report.state == state]
        )
        return found

    @contextlib.asynccontextmanager
    async def live(self) -> AsyncIterator["Worker"]:
        await self.watch.start()
        self.loop = asyncio.create_task(self.watch.run())
        try:
            yield self
        finally:
            await end_tasks([self.loop])
            if not self.loop.cancelled() and self.loop.exception():
                raise self.loop.exception()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.workers.serving.rank_watch.RETRY_S", 0.02)
    monkeypatch.setattr("midstream.workers.serving.rank_watch.POLL_S", 0.01)


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Worker]:
    """A live worker to which nothing is said yet."""
    async with Worker(tmp_path).live() as worker:
        yield worker


async def test_no_job_begins_before_the_ranks_were_looked_at(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    assert not await worker.watch.may_begin(0.01)
    async with worker.live() as at:
        assert await at.watch.may_begin(60)


async def test_a_check_is_answered_for_all_ranks_and_holds_nothing(at: Worker) -> None:
    assert await at.check("c1", NAMES[0]) == ""
    at.engine.faults.switch("check_global:rank=1")
    assert await at.check("c2", NAMES[1]) == "the check failed on rank 1: injected fault"
    assert at.watch.serving
    assert not at.engine._vectors._held


async def test_each_open_check_is_answered_once(at: Worker) -> None:
    await at.check("c1", NAMES[0])
    at.engine.faults.switch("check_global")
    assert await at.check("c2", NAMES[0])
    assert not at.board.answered["c1"]


async def test_a_check_whose_tensors_or_entries_cannot_be_read_is_refused(at: Worker) -> None:
    at.board.gone = {NAMES[0]}
    assert "no longer stored" in await at.check("c1", NAMES[0])
    at.board.unreadable = True
    assert await at.check("c2", NAMES[1]) == "stored by another version"
    assert at.watch.serving


async def test_a_check_that_redis_interrupts_is_answered_later(at: Worker) -> None:
    read = at.board.get_tensor

    async def cut(name: str, check: str = "") -> Tensor:
        at.board.get_tensor = read  # type: ignore[method-assign]
        raise Unreachable("Redis is away")

    at.board.get_tensor = cut  # type: ignore[method-assign]
    assert not await at.check("c1", NAMES[0])
    assert not at.engine._vectors._held


async def test_ranks_that_disagree_stop_the_worker_until_they_are_equal_from_zero(
    at: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        at.runs = 1
        for _ in range(2):
            at.engine.ranks.ranks[1].ledger.fold(0, "row_release", "x")
            resyncing = asyncio.create_task(at.until("resyncing"))
            at.board.asked += "x"
            assert "stage 0 disagree" in (await resyncing).detail
            assert await at.watch.may_begin(60)
        report = at.board.reports[-1]
        assert report.state == "serving"
        assert report.desyncs == 2
        assert report.resyncs == 2
        assert {(rank.epoch, rank.actions) for rank in report.ranks} == {(2, 0)}
        assert len({rank.checksum for rank in report.ranks}) == 1
        assert len(at.stopped) == 1
        assert at.board.cleared[-2:] == [1, 2]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1, "once per interval, however often it happens"
    assert at.told >= 5, "that it does not serve is said at once, and that it does again"


async def test_a_quarantined_worker_begins_nothing_until_its_ranks_were_made_equal(
    at: Worker,
) -> None:
    at.engine.on_quarantine("rank 1 kept what it should have dropped")
    assert not at.watch.serving, "at once"
    assert await at.watch.may_begin(60)
    assert at.watch.desyncs == 1
    assert at.watch.resyncs == 1


async def test_a_worker_quarantined_during_a_check_does_not_serve_after_it(at: Worker) -> None:
    check = at.engine.check_global
    serving = []

    async def quarantined_meanwhile(*arguments: Any) -> Any:
        at.engine.on_quarantine("rank 1 kept what it should have dropped")
        return await check(*arguments)

    async def noted(report: WorkerSteering) -> None:
        serving.append((report.state, at.watch.resyncs))

    at.engine.check_global = quarantined_meanwhile  # type: ignore[method-assign]
    at.board.report = noted  # type: ignore[method-assign]
    at.board.held = steering(1, NAMES[0])
    await at.follow()
    at.engine.check_global = check  # type: ignore[method-assign]
    assert await at.watch.may_begin(60)
    assert ("serving", 0) not in serving


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("fingerprint:rank=1", "tables differ"),
        ("restart:rank=1", "resync of the ranks failed"),
        ("hold:rank=1,after=1;drop:rank=0", "resync of the ranks failed"),
    ],
)
async def test_an_engine_whose_ranks_stay_different_is_given_up(
    tmp_path: Path, fault: str, why: str
) -> None:
    worker = Worker(tmp_path, fault=fault)
    worker.board.held = steering(1, NAMES[0])
    async with worker.live() as at:
        at.board.desync = "a disagreement"
        assert why in await at.loop
        assert not await at.watch.may_begin(0.01)
        at.loop = asyncio.create_task(asyncio.sleep(0))


@pytest.mark.parametrize("call", ["restart_ledgers", "check_global"])
async def test_a_resync_that_redis_interrupts_begins_again_and_counts_once(
    at: Worker, call: str
) -> None:
    at.board.held = steering(1, NAMES[0])
    await at.follow()
    original = getattr(at.engine, call)

    async def cut(*arguments: Any) -> Any:
        await original(*arguments)
        at.board.away = True
        setattr(at.engine, call, original)
        await at.board.look("m", "w")

    setattr(at.engine, call, cut)
    at.board.desync = "a disagreement"
    await holding(lambda: at.board.away)
    await asyncio.sleep(0.05)
    assert not at.watch.serving
    at.board.away = False
    assert await at.watch.may_begin(60)
    assert at.watch.desyncs == 1
    assert at.watch.resyncs == 1


async def test_global_steering_that_a_rank_refuses_is_retried_before_any_job(at: Worker) -> None:
    at.engine.faults.switch("check_global:rank=1")
    quarantined = asyncio.create_task(at.until("quarantined"))
    at.board.held = steering(1, NAMES[0])
    assert (await quarantined).detail == REFUSED
    assert not await at.watch.may_begin(0.05)
    at.engine.faults.switch("")
    assert await at.watch.may_begin(60)


async def test_a_worker_whose_ranks_refuse_global_steering_at_start_waits_for_another(
    tmp_path: Path,
) -> None:
    """Its model came back with fewer layers, or its settings leave a hook out: its ranks would fail
    every job.
    """
    worker = Worker(tmp_path, fault="check_global:rank=1")
    worker.board.held = steering(1, NAMES[0])
    async with worker.live() as at:
        report = at.board.reports[-1]
        assert report.state == "quarantined"
        assert report.detail == REFUSED
        assert not await at.watch.may_begin(0.05)
        at.board.held = steering(2)
        assert await at.watch.may_begin(60)


async def test_a_worker_that_cannot_read_global_steering_reports_it_and_begins_no_job(
    tmp_path: Path,
) -> None:
    worker = Worker(tmp_path)
    worker.board.held = steering(1, NAMES[0])

    async def unreadable(*_: Any) -> Any:
        raise MidstreamError("version_mismatch", "stored by another version")

    read = worker.board.current
    worker.board.current = unreadable  # type: ignore[method-assign]
    async with worker.live() as at:
        report = at.board.reports[-1]
        assert report.state == "quarantined"
        assert report.detail == "stored by another version"
        assert not await at.watch.may_begin(0.05)
        at.board.current = read  # type: ignore[method-assign]
        assert await at.watch.may_begin(60)


async def test_a_report_request_gets_a_fresh_report(at: Worker) -> None:
    at.board.asked = "7"
    await at.follow()
    assert at.board.reports[-1].ask == "7"


async def test_without_redis_the_worker_goes_on_serving(at: Worker) -> None:
    at.board.away = True
    with contextlib.suppress(TimeoutError):
        await at.follow()
    assert at.watch.serving
    at.board.away = False
    assert not await at.check("c1", NAMES[0])


async def test_a_writer_that_does_not_answer_is_published_at_once(tmp_path: Path) -> None:
    """`/readyz` and `doctor` show what the worker publishes."""
    worker = Worker(tmp_path)
    await worker.watch.start()
    told = worker.told
    worker.engine.trouble = "a rank's writer is silent"
    for _ in range(2):
        worker.watch._compared = float("-inf")
        await worker.watch._look()
    assert worker.told == told + 1
