"""How does a worker follow what is desired, and what does it do when its ranks are out of step?

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

from midstream.broker.ledger.named.steering import Look
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.settings import Settings
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.requests.steering import (
    Desired,
    GlobalSteering,
    Module,
    Proposal,
    SteeringTemplate,
    WorkerSteering,
)
from midstream.workers.serving.redis_retry import end_tasks
from midstream.workers.serving.steering import SteeringReconciler
from midstream.workers.serving.steering_leases import SteeringLease

TENSORS = {
    content_hash(t): t for t in (from_numpy(np.full(8, n, dtype=np.float32)) for n in range(4))
}
NAMES = list(TENSORS)
FAR = 1e12


def entry(vector: str) -> SteeringTemplate:
    return SteeringTemplate(
        layers=[1], hook="post_block", positions="all", family="add", tensors=[vector]
    )


def steering(version: int, *vectors: str) -> GlobalSteering:
    return GlobalSteering(version=version, entries=[entry(vector) for vector in vectors])


def module(vector: str) -> Module:
    return Module(
        name="joy",
        model="m",
        digest=f"of {vector[:8]}",
        entries=[entry(vector)],
        bytes=32,
        created=0.0,
    )


class Board:
    """What Redis would hold."""

    def __init__(self) -> None:
        self.state = Desired()
        self.desync, self.asked, self.away, self.committed = "", "", False, ""
        self.unreadable = False
        self.cleared: list[int] = []
        self.reports: list[WorkerSteering] = []
        self.gone: set[str] = set()

    def want(self, **changed: Any) -> None:
        fields = {
            "version": self.state.version + 1,
            "current": self.state.current,
            "proposal": None,
            "modules": self.state.modules,
        }
        self.state = Desired(**(fields | changed))

    def _there(self) -> None:
        if self.away:
            raise MidstreamError("unavailable", "Redis is away")

    async def desired(self, model: str) -> Desired:
        self._there()
        if self.unreadable:
            raise MidstreamError("version_mismatch", "stored by another version")
        return self.state

    async def look(self, model: str, worker: str) -> Look:
        self._there()
        return Look(
            self.state.version,
            self.state.proposal.id if self.state.proposal else "",
            self.asked,
            self.desync,
            self.committed,
        )

    async def report(self, report: WorkerSteering) -> None:
        self._there()
        self.reports.append(report)

    async def clear_desync(self, worker: str, boot: str = "", epoch: int = 0) -> None:
        self._there()
        self.desync = ""
        self.cleared.append(epoch)

    async def get_tensor(self, name: str) -> Tensor:
        self._there()
        if name in self.gone:
            raise MidstreamError("intervention_failed", f"the tensor {name} is no longer stored")
        return TENSORS[name]


class Worker:
    """A `SteeringReconciler` over two fake ranks, with runs that are leases."""

    def __init__(self, directory: Path, **changed: Any) -> None:
        values = {
            "data_dir": str(directory),
            "engine": "fake",
            "model": "m",
            "worker_id": "w",
            "relay_url": "tcp://127.0.0.1:9",
        }
        self.settings = Settings(
            **(values | {"tensor_parallel_size": 2, "steering_poll_s": 0.01} | changed)
        )
        self.engine, self.board, self.told = FakeEngine(self.settings), Board(), 0
        self.standing = SteeringReconciler(
            self.board, self.engine, self.settings, "boot", self._tell
        )  # type: ignore[arg-type]
        self.standing.stop_runs = self._stop_runs
        self.runs: list[SteeringLease] = []
        self.stopped: list[str] = []

    async def _tell(self) -> None:
        self.told += 1

    def _stop_runs(self, why: str) -> None:
        for run in self.runs:
            self.stopped.append(why)
            run.end()
        self.runs.clear()

    async def begin(self) -> SteeringLease:
        lease = await self.standing.lease(60)
        assert lease is not None
        self.runs.append(lease)
        return lease

    async def follow(self) -> None:
        """Until everything that is desired now has been looked into."""
        for _ in range(2):
            await self.standing.catch_up(60)

    async def want(self, **changed: Any) -> WorkerSteering:
        """Desire `changed`, and follow it; the last report."""
        self.board.want(**changed)
        await self.follow()
        return self.board.reports[-1]

    async def until(self, state: str) -> WorkerSteering:
        """The first report from here on that says so."""
        start = len(self.board.reports)
        (found, *_) = await holding(
            lambda: [report for report in self.board.reports[start:] if report.state == state]
        )
        return found

    @contextlib.asynccontextmanager
    async def live(self) -> AsyncIterator["Worker"]:
        await self.standing.start()
        self.loop = asyncio.create_task(self.standing.run())
        try:
            yield self
        finally:
            await end_tasks([self.loop])
            if not self.loop.cancelled() and self.loop.exception():
                raise self.loop.exception()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.workers.serving.steering.RETRY_S", 0.02)


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Worker]:
    """A live worker to which nothing is said yet."""
    async with Worker(tmp_path).live() as worker:
        yield worker


async def test_desired_steering_is_applied_before_the_first_job(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.board.want(current=steering(3, NAMES[0]), modules={"joy": module(NAMES[1])})
    assert await worker.standing.lease(0.01) is None
    async with worker.live() as at:
        assert (await at.begin()).steering == steering(3, NAMES[0])
        assert [
            (rank.global_version, rank.modules, rank.vectors) for rank in at.board.reports[-1].ranks
        ] == [(3, {"joy": module(NAMES[1]).digest}, 2)] * 2


async def test_a_proposal_is_prepared_and_applied_only_after_the_decision(at: Worker) -> None:
    report = await at.want(
        version=0, proposal=Proposal(id="p1", steering=steering(1, NAMES[0]), deadline=FAR)
    )
    assert (report.proposal, report.prepared, report.refusal, report.global_version) == (
        "p1",
        True,
        "",
        0,
    )
    assert [answer.ok for answer in report.applied] == [True, True]
    assert (await at.begin()).steering == GlobalSteering()
    await at.want(current=steering(1, NAMES[0]))
    assert (await at.begin()).steering.version == at.board.reports[-1].global_version == 1


async def test_a_proposal_refused_by_a_rank_names_rank_and_reason_and_frees_tensors(
    tmp_path: Path,
) -> None:
    async with Worker(tmp_path, fault="prepare:rank=1").live() as at:
        report = await at.want(
            proposal=Proposal(id="p1", steering=steering(1, NAMES[0]), deadline=FAR)
        )
        assert (report.proposal, report.prepared, report.refusal) == (
            "p1",
            False,
            "rank 1: injected fault",
        )
        await at.want()
        assert at.board.reports[-1].proposal == ""
        assert not at.engine._vectors._pinned
        assert at.standing.serving


async def test_an_attempt_keeps_the_global_steering_that_it_began_under_and_its_tensors(
    at: Worker,
) -> None:
    await at.want(current=steering(1, NAMES[0]))
    old = await at.begin()
    await at.want(current=steering(2))
    assert (old.steering.version, (await at.begin()).steering.version) == (1, 2)
    assert NAMES[0] in at.engine._vectors._pinned
    old.end()
    await at.follow()
    assert NAMES[0] not in at.engine._vectors._pinned


async def test_a_redis_that_lost_a_change_and_came_to_the_same_version_again_is_followed(
    at: Worker,
) -> None:
    await at.want(current=steering(2, NAMES[0]))
    at.board.want(version=at.board.state.version, current=steering(1, NAMES[1]))
    at.board.committed = "the one before"
    await at.follow()
    assert (await at.begin()).steering.version == 1


async def test_ranks_that_disagree_stop_the_worker_until_they_are_equal_from_zero(
    at: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await at.want(current=steering(1, NAMES[0]), modules={"joy": module(NAMES[1])})
        await at.begin()
        for _ in range(2):
            at.engine.ranks.ranks[1].ledger.fold(0, "row_release", "x")
            resyncing = asyncio.create_task(at.until("resyncing"))
            at.board.asked += "x"
            assert "stage 0 disagree" in (await resyncing).detail
            assert await at.standing.lease(60)
            at.standing._global.users = 0
        report = at.board.reports[-1]
        assert (report.state, report.desyncs, report.resyncs, report.version) == (
            "serving",
            2,
            2,
            at.board.state.version,
        )
        assert {
            (rank.epoch, rank.global_version, rank.actions, len(rank.modules))
            for rank in report.ranks
        } == {(2, 1, 2, 1)}
        assert (len({rank.checksum for rank in report.ranks}), len(at.stopped)) == (1, 1)
        assert at.board.cleared[-2:] == [1, 2]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1, "once per interval, however often it happens"
    assert at.told >= 5, "that it does not serve is said at once, and that it does again"


async def test_a_quarantined_worker_begins_nothing_until_its_ranks_were_made_equal(
    at: Worker,
) -> None:
    at.engine.on_quarantine("rank 1 kept what it should have dropped")
    assert not at.standing.serving, "at once"
    assert await at.standing.lease(60)
    assert (at.standing.desyncs, at.standing.resyncs) == (1, 1)


async def test_a_worker_quarantined_during_a_change_does_not_serve_after_it(at: Worker) -> None:
    commit, serving = at.engine.commit_global, []

    async def quarantined_meanwhile(wanted: GlobalSteering) -> Any:
        at.engine.on_quarantine("rank 1 kept what it should have dropped")
        return await commit(wanted)

    async def noted(report: WorkerSteering) -> None:
        serving.append((report.state, at.standing.resyncs))

    at.engine.commit_global = quarantined_meanwhile  # type: ignore[method-assign]
    at.board.report = noted  # type: ignore[method-assign]
    await at.want(current=steering(1, NAMES[0]))
    at.engine.commit_global = commit  # type: ignore[method-assign]
    assert await at.standing.lease(60)
    assert ("serving", 0) not in serving


async def test_a_proposal_that_redis_interrupts_leaves_no_tensor_held(at: Worker) -> None:
    await at.want(proposal=Proposal(id="a", steering=steering(1, NAMES[0]), deadline=FAR))
    read = at.board.get_tensor

    async def cut(name: str) -> Tensor:
        at.board.get_tensor = read  # type: ignore[method-assign]
        raise MidstreamError("unavailable", "Redis is away")

    at.board.get_tensor = cut  # type: ignore[method-assign]
    await at.want(proposal=Proposal(id="b", steering=steering(2, NAMES[1]), deadline=FAR))
    await at.follow()
    assert at.board.reports[-1].proposal == "b"
    await at.want()
    assert not at.engine._vectors._pinned


@pytest.mark.parametrize(
    ("fault", "why"),
    [("fingerprint:rank=1", "tables differ"), ("restart:rank=1", "resync of the ranks failed")],
)
async def test_an_engine_whose_ranks_stay_different_is_given_up(
    tmp_path: Path, fault: str, why: str
) -> None:
    async with Worker(tmp_path, fault=fault).live() as at:
        at.board.desync = "a disagreement"
        assert why in await at.loop
        assert await at.standing.lease(0.01) is None
        at.loop = asyncio.create_task(asyncio.sleep(0))


async def test_a_resync_that_redis_interrupts_begins_again_and_counts_once(at: Worker) -> None:
    await at.want(current=steering(1, NAMES[0]))
    restart = at.engine.restart_ledgers

    async def cut() -> None:
        await restart()
        at.board.away, at.engine.restart_ledgers = True, restart  # type: ignore[method-assign]

    at.engine.restart_ledgers = cut  # type: ignore[method-assign]
    at.board.desync = "a disagreement"
    await holding(lambda: at.board.away)
    await asyncio.sleep(0.05)
    assert not at.standing.serving
    at.board.away = False
    assert ((await at.begin()).steering.version, at.standing.desyncs, at.standing.resyncs) == (
        1,
        1,
        1,
    )


async def test_a_resync_waits_until_the_desired_state_is_readable(at: Worker) -> None:
    at.board.unreadable, at.board.desync = True, "a disagreement"
    await holding(lambda: at.standing.detail == "stored by another version")
    assert (at.standing.state, await at.standing.lease(0.1)) == ("resyncing", None)
    at.board.unreadable = False
    assert await at.standing.lease(60) is not None
    assert (at.standing.desyncs, at.standing.resyncs) == (1, 1)


async def test_global_steering_refused_by_a_rank_is_retried_before_any_job(at: Worker) -> None:
    at.engine.faults.switch("commit:rank=1")
    quarantined = asyncio.create_task(at.until("quarantined"))
    at.board.want(current=steering(1, NAMES[0]), modules={"joy": module(NAMES[1])})
    report = await quarantined
    assert "rank 1: injected fault" in report.detail
    assert {(rank.global_version, len(rank.modules)) for rank in report.ranks} == {(0, 1)}, (
        "what they did not refuse, they have"
    )
    assert await at.standing.lease(0.05) is None
    at.engine.faults.switch("")
    assert (await at.begin()).steering.version == 1


async def test_a_worker_that_cannot_apply_the_state_at_start_waits_until_it_is_cleared(
    tmp_path: Path,
) -> None:
    """Its model came back with fewer layers, or its settings leave a hook out: such entries would
    be left out in silence.
    """
    worker = Worker(tmp_path, fault="prepare:rank=1")
    worker.board.want(current=steering(1, NAMES[0]))
    async with worker.live() as at:
        report = at.board.reports[-1]
        assert (report.state, report.global_version, report.detail) == (
            "quarantined",
            0,
            "global steering version 1: rank 1: injected fault",
        )
        assert await at.standing.lease(0.05) is None
        at.board.want(current=steering(2))
        assert (await at.begin()).steering.version == 2
        assert not at.engine._vectors._pinned


async def test_a_worker_that_cannot_read_the_desired_state_reports_it_and_begins_no_job(
    tmp_path: Path,
) -> None:
    worker = Worker(tmp_path)
    worker.board.want(current=steering(1, NAMES[0]))
    worker.board.unreadable = True
    async with worker.live() as at:
        report = at.board.reports[-1]
        assert (report.state, report.detail) == ("quarantined", "stored by another version")
        assert await at.standing.lease(0.05) is None
        at.board.unreadable = False
        assert (await at.begin()).steering.version == 1


async def test_a_module_refused_by_a_rank_does_not_stop_jobs(at: Worker) -> None:
    at.engine.faults.switch("set_module")
    report = await at.want(modules={"joy": module(NAMES[0])})
    assert (report.state, report.version) == ("serving", 0)
    assert "registering module 'joy' failed on rank 0: injected fault" in report.detail
    at.engine.faults.switch("")
    await at.want(modules={"joy": module(NAMES[1])})
    assert at.board.reports[-1].ranks[1].modules == {"joy": module(NAMES[1]).digest}
    assert (at.board.reports[-1].detail, at.board.reports[-1].version) == (
        "",
        at.board.state.version,
    )


async def test_a_module_whose_tensor_is_gone_is_tried_again(at: Worker) -> None:
    at.board.gone = {NAMES[0]}
    await at.want(modules={"joy": module(NAMES[0])})
    assert "no longer stored" in at.board.reports[-1].detail
    at.board.gone = set()
    await holding(lambda: not at.board.reports[-1].detail)
    assert at.board.reports[-1].ranks[0].modules.keys() == {"joy"}


async def test_modules_follow_changes_and_release_tensors(at: Worker) -> None:
    for vector in NAMES[:2]:
        await at.want(modules={"joy": module(vector)})
        assert (at.board.reports[-1].ranks[1].modules, set(at.engine._vectors._pinned)) == (
            {"joy": module(vector).digest},
            {vector},
        )
    await at.want(modules={})
    assert at.board.reports[-1].ranks[1].modules == {}
    assert not at.engine._vectors._pinned


async def test_a_report_request_gets_a_fresh_report(at: Worker) -> None:
    at.board.asked = "7"
    await at.follow()
    assert at.board.reports[-1].ask == "7"


async def test_without_redis_the_worker_serves_its_current_steering(at: Worker) -> None:
    at.board.away = True
    with contextlib.suppress(TimeoutError):
        await at.follow()
    assert at.standing.serving
    at.board.away = False
    await at.want(current=steering(1, NAMES[0]))
    assert (await at.begin()).steering.version == 1
