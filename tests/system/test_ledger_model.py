"""Does the ledger follow a simple model of itself through any sequence of deeds, also of stale
attempts?

Jobs of two tenants, receipts of two ranks in batches, restarts of their worker, windows of two
messages and limits: the real scripts in a real Redis against plain Python.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import HealthCheck, given, settings, strategies as st
from ledger_kit import IDENTITY, MODEL, WORKER, make_job, outputs, receipt, sent, settings_for

from midstream.broker.ledger.core.job_room import room_of
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.ledger.recovery.reaper import Reaper, UsageReconciliation
from midstream.broker.processes.liveness import RELAY_KEY
from midstream.schemas.access.keys import Limits, Tenant
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import TERMINAL, TRANSITIONS, Job, Sampling, State
from midstream.schemas.jobs.receipts import CapturedFile, Receipt

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])
MAX_ATTEMPTS = 3
WINDOW = 2
#: Tenant → its weight and how many jobs it may have in flight (0: any number).
TENANTS = {"a": (1, 4), "b": (3, 0)}
#: Jobs of one example at most, and how many of them at a time.
JOBS = 20
UNFINISHED = 8
STEPS = 100
#: Two prompts, two ranks.
PLACES = [(request, rank) for request in (0, 1) for rank in (0, 1)]
SIZE = 1000  # bytes of the files of a receipt
# how many attempts ago the speaker claimed; mostly the present one
AGE = st.sampled_from([0, 0, 0, 1])
WHICH = st.integers(0, 59)
PROBLEM = MidstreamError("engine_failed", "it broke").problem()
STRANGER = "a worker that has no job"
#: What a rank says: of which job, attempt, request and rank, how it went, and its checksum.
RECEIPTS = st.tuples(
    WHICH,
    AGE,
    st.sampled_from(PLACES),
    st.sampled_from(["ok"] * 5 + ["partial", "error"]),
    st.sampled_from(["11"] * 6 + ["22"]),
)

#: All that a job waits for.
ALL_RECEIPTS = st.tuples(WHICH, st.sampled_from(["ok", "partial"])).map(
    lambda drawn: [(drawn[0], 0, place, drawn[1], "11") for place in PLACES]
)


@dataclass
class Broker:
    """The real thing, on one event loop for all examples."""

    loop: asyncio.AbstractEventLoop
    ledger: Ledger
    settler: Settler
    reaper: Reaper

    def do(self, call: Awaitable[T]) -> T:
        async def run() -> T:
            return await call

        return self.loop.run_until_complete(run())


@dataclass
class Modelled:
    """A job as it should be."""

    job: Job
    state: State = State.QUEUED
    attempt: int = 0
    version: int = 1
    generated: bool = False
    retried: bool = False  # because its ranks disagreed
    arrived: dict[tuple[int, int], str] = field(default_factory=dict)  # (request, rank) → checksum
    partial: bool = False
    over: bool = False  # nothing may change any more; looked at again when all is over
    error: str = ""  # the kind of problem that ended it
    states: list[State] = field(default_factory=lambda: [State.QUEUED])  # all that it was in

    def working(self, age: int = 0) -> bool:
        return age == 0 and self.state in (State.RUNNING, State.CANCELLING)

    @property
    def expected(self) -> int:
        return len(PLACES) if self.job.captures else 0

    @property
    def capture_status(self) -> str:
        if not self.job.captures:
            return "not_requested"
        if self.state not in TERMINAL:
            return "pending"
        if self.state is State.SUCCEEDED:
            return "partial" if self.partial else "ok"
        return "timed_out" if self.error == "receipts_timed_out" else "error"


class Line:
    """Who is sent next, in plain Python."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.waiting: dict[str, list[Modelled]] = {tenant: [] for tenant in TENANTS}
        self.times: dict[str, float] = {}
        self.messages: list[tuple[str, int]] = []  # (id, attempts made), in order

    def front(self) -> str | None:
        for tenant in sorted(self.times, key=lambda name: (self.times[name], name)):
            if self.waiting[tenant]:
                return tenant
            del self.times[tenant]
        return None

    def send(self, job: Modelled) -> None:
        self.sent.add(job.job.id)
        self.messages.append((job.job.id, job.attempt))

    def fill(self) -> None:
        while len(self.sent) < WINDOW and (tenant := self.front()) is not None:
            job = self.waiting[tenant].pop(0)
            self.times[tenant] += job.job.cost / TENANTS[tenant][0]
            self.send(job)

    def enter(self, job: Modelled) -> None:
        first = self.front()
        if first is None and len(self.sent) < WINDOW:
            self.send(job)
            return
        self.times.setdefault(job.job.tenant, self.times[first] if first is not None else 0.0)
        self.waiting[job.job.tenant].append(job)
        self.fill()

    def leave(self, job: Modelled) -> None:
        if job.job.id in self.sent:
            self.sent.remove(job.job.id)
        else:
            self.waiting[job.job.tenant].remove(job)
        self.fill()


#: What may happen, with which arguments; and the names, some of them several times.
ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {}
DEEDS: list[str] = []


def deed(often: int = 1, **arguments: st.SearchStrategy[Any]) -> Callable[[F], F]:
    """The method may be drawn, `often` times as often as others."""

    def add(method: F) -> F:
        ARGUMENTS[method.__name__] = st.fixed_dictionaries(arguments)
        DEEDS.extend([method.__name__] * often)
        return method

    return add


class LedgerModel:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.jobs: list[Modelled] = []
        self.line = Line()
        self.marks: Counter[tuple[str, str]] = Counter()  # of each worker and epoch
        self.boots = 1
        self.clock = 0.0
        self.recount: UsageReconciliation | None = None
        self.wrong: dict[str, int] = {}  # what is counted too much, until it is counted anew
        self.do(self.broker.ledger.redis.flushall())
        self.do(self.ledger.redis.set(RELAY_KEY, '{"since": 0}', ex=3600))
        for name, (weight, limit) in TENANTS.items():
            self.do(
                self.broker.ledger.tenants.put(
                    Tenant(name=name, limits=Limits(weight=weight, jobs_in_flight=limit))
                )
            )

    def do(self, call: Awaitable[T]) -> T:
        return self.broker.do(call)

    @property
    def ledger(self) -> Ledger:
        return self.broker.ledger

    def one(self, which: int) -> Modelled:
        """Mostly one that is being worked on, if there is any."""
        working = [job for job in self.jobs if job.working()]
        among = working if working and which % 3 else self.jobs
        return among[which % len(among)]

    @property
    def boot(self) -> str:
        """The present start of the worker."""
        return f"boot {self.boots}"

    def to(self, job: Modelled, state: State, error: str = "") -> None:
        assert state in TRANSITIONS[job.state]
        before = job.state
        job.state = state
        job.error = error
        job.states.append(state)
        if before is State.QUEUED:
            self.line.leave(job)
        if state is State.QUEUED:
            job.generated = False
            job.partial = False
            job.arrived = {}
            self.line.send(job)

    def finish(self, job: Modelled) -> None:
        if job.generated and len(job.arrived) >= job.expected:
            self.to(job, State.CANCELLED if job.state is State.CANCELLING else State.SUCCEEDED)

    def put_back(self, job: Modelled) -> None:
        if job.state is State.CANCELLING:
            self.to(job, State.CANCELLED)
        elif job.attempt >= MAX_ATTEMPTS:
            self.to(job, State.FAILED, "worker_lost")
        else:
            self.to(job, State.QUEUED)

    def put_back_desynced(self, job: Modelled) -> None:
        if job.state is State.CANCELLING:
            self.to(job, State.CANCELLED)
        elif job.retried or job.attempt >= MAX_ATTEMPTS:
            self.to(job, State.FAILED, "ranks_disagree")
        else:
            job.retried = True
            self.to(job, State.QUEUED)

    @deed(
        4,
        tenant=st.sampled_from(sorted(TENANTS)),
        max_tokens=st.sampled_from([1, 16, 61]),
        capture=st.sampled_from([True, True, False]),
        hurried=st.booleans(),
        begun=st.booleans(),
    )
    def submit(
        self, tenant: str, max_tokens: int, capture: bool, hurried: bool, begun: bool
    ) -> None:
        under_way = sum(job.state not in TERMINAL for job in self.jobs)
        if len(self.jobs) == JOBS or under_way == UNFINISHED:
            return
        expires = now() + 500 if hurried else None
        job = Modelled(
            make_job(
                prompts=2,
                capture=capture,
                tenant=tenant,
                sampling=Sampling(max_tokens=max_tokens),
                expires=expires,
            )
        )
        limit = TENANTS[tenant][1]
        if (
            limit
            and sum(each.job.tenant == tenant and each.state not in TERMINAL for each in self.jobs)
            >= limit
        ):
            with pytest.raises(MidstreamError, match="in flight"):
                self.do(self.ledger.submit(job.job, {}))
            return
        assert self.do(self.ledger.submit(job.job, {})) == (job.job.id, True)
        self.jobs.append(job)
        self.line.enter(job)
        if begun:
            self.claim(len(self.jobs) - 1)

    @deed(which=WHICH)
    def submit_again(self, which: int) -> None:
        job = self.one(which)
        assert self.do(self.ledger.submit(job.job, {})) == (job.job.id, True), (
            "a client whose connection broke"
        )

    @deed(which=WHICH)
    def claim(self, which: int) -> None:
        job = self.jobs[which % len(self.jobs)]
        got = self.do(self.ledger.claim(job.job.id, WORKER, self.boot, 2, IDENTITY))
        assert (got is not None) == (job.state is State.QUEUED)
        if got is not None:
            self.to(job, State.RUNNING)
            job.attempt += 1
            assert got.attempt == job.attempt

    @deed(4)
    def claim_the_first_that_was_sent(self) -> None:
        if not self.line.sent:
            return
        self.claim(
            next(place for place, job in enumerate(self.jobs) if job.job.id in self.line.sent)
        )

    @deed(4, which=WHICH, age=AGE)
    def store(self, which: int, age: int) -> None:
        job = self.one(which)
        after = self.do(self.ledger.store_outputs(job.job.id, job.attempt - age, outputs(2)))
        accepted = job.working(age) and job.state is State.RUNNING
        if job.working(age) and job.state is State.CANCELLING:
            self.to(job, State.CANCELLED)
        elif accepted:
            job.generated = True
            self.finish(job)
        assert after is (job.state if accepted else None)

    @deed(
        8,
        batch=st.lists(RECEIPTS, min_size=1, max_size=6) | ALL_RECEIPTS,
        worker=st.sampled_from([WORKER] * 5 + [STRANGER]),
        epoch=st.sampled_from(["epoch", "another"]),
        twice=st.booleans(),
    )
    def receive(
        self,
        batch: list[tuple[int, int, tuple[int, int], str, str]],
        worker: str,
        epoch: str,
        twice: bool,
    ) -> None:
        stream = (worker, epoch)
        reports = [(self.one(which), *said) for which, *said in batch]
        first = self.marks[stream] + 1
        self.marks[stream] += len(reports)
        told = list(enumerate([self.said(worker, *report) for report in reports], first))
        for _ in range(2 if twice else 1):
            assert self.broker.settler.settle(worker, 0, epoch, told) == self.marks[stream]
        touched: dict[str, Modelled] = {}
        for job, age, place, status, checksum in reports:
            if worker == WORKER and job.working(age) and place not in job.arrived:
                touched[job.job.id] = job
                self.arrive(job, place, status, checksum)
        for job in touched.values():  # when all of the batch has been looked at
            if job.working():
                self.finish(job)
        self.do(self.ledger.redis.hdel("ms:desync", WORKER))  # its ranks are made equal

    def said(
        self,
        worker: str,
        job: Modelled,
        age: int,
        place: tuple[int, int],
        status: str,
        checksum: str,
    ) -> Receipt:
        path = f"{job.attempt - age}/{place[0]}/{place[1]}"
        return receipt(
            job.job,
            *place,
            attempt=job.attempt - age,
            worker=worker,
            status=status,
            message="m",
            files=[CapturedFile(path=path, bytes=SIZE, crc32=1, rows=1)],
            checksum=checksum,
        )

    def arrive(self, job: Modelled, place: tuple[int, int], status: str, checksum: str) -> None:
        others = {said for (request, _), said in job.arrived.items() if request == place[0]}
        job.arrived[place] = checksum
        job.partial = job.partial or status == "partial"
        if job.state is not State.RUNNING:
            return
        if status == "error":
            self.to(job, State.FAILED, "capture_failed")
        elif others - {checksum}:
            self.put_back_desynced(job)

    @deed(which=WHICH, age=AGE)
    def release(self, which: int, age: int) -> None:
        job = self.one(which)
        after = self.do(self.ledger.release(job.job.id, job.attempt - age))
        if job.working(age):
            self.put_back(job)
            assert after is job.state
        else:
            assert after is None

    @deed(which=WHICH, age=AGE)
    def abandon_because_ranks_are_out_of_step(self, which: int, age: int) -> None:
        job = self.one(which)
        after = self.do(self.ledger.desync_release(job.job.id, job.attempt - age, "rank 1 differs"))
        if job.working(age):
            self.put_back_desynced(job)
            assert after is job.state
        else:
            assert after is None

    @deed()
    def restart_the_worker(self) -> None:
        self.boots += 1
        held = {job.job.id: job for job in self.jobs if job.working()}
        put_back = self.do(self.broker.reaper.release_boots(WORKER, self.boot))
        # in the order in which they are sent again; then those that are not
        for job in [*map(held.pop, put_back), *held.values()]:
            self.put_back(job)

    @deed(which=WHICH, age=AGE)
    def fail(self, which: int, age: int) -> None:
        job = self.one(which)
        assert self.do(self.ledger.fail(job.job.id, job.attempt - age, PROBLEM)) == job.working(age)
        if job.working(age):
            self.to(job, State.FAILED, "engine_failed")

    @deed(which=WHICH)
    def request_cancel(self, which: int) -> None:
        job = self.one(which)
        if job.state in TERMINAL:
            with pytest.raises(MidstreamError, match="has ended"):
                self.do(self.ledger.request_cancel(job.job.id))
            return
        self.do(self.ledger.request_cancel(job.job.id))
        if job.state is State.QUEUED:
            self.to(job, State.ABORTED)
        elif job.state is State.RUNNING:
            self.to(job, State.CANCELLING)
            if job.generated:
                self.to(job, State.CANCELLED)

    @deed(which=WHICH, age=AGE)
    def finish_cancel(self, which: int, age: int) -> None:
        job = self.one(which)
        told = self.do(self.ledger.finish_cancel(job.job.id, job.attempt - age))
        assert told == (job.working(age) and job.state is State.CANCELLING)
        if told:
            self.to(job, State.CANCELLED)

    @deed(age=AGE)
    def renew(self, age: int) -> None:
        held = {job.job.id: job.attempt - age for job in self.jobs}
        told = self.do(self.ledger.renew(WORKER, self.boot, held | {"job_unknown": 1}))
        assert told.cancelling == {
            job.job.id for job in self.jobs if job.working(age) and job.state is State.CANCELLING
        }
        done = {job.job.id for job in self.jobs if age == 0 and job.state is State.SUCCEEDED}
        ours = {job.job.id for job in self.jobs if job.working(age)} | done
        assert told.lost == held.keys() - ours | {"job_unknown"}
        assert self.do(self.ledger.renew(STRANGER, self.boot, held)).lost == held.keys() - done

    @deed()
    def let_deadlines_and_leases_run_out(self) -> None:
        self.clock += 1000
        met = {
            raw.decode(): place
            for place, raw in enumerate(self.do(self.ledger.redis.zrange("ms:live", 0, -1)))
        }
        self.do(self.broker.reaper.sweep(now() + self.clock))
        while True:
            # as the sweeper meets them: what it aborts may make room for what is then met as sent
            due = sorted(filter(self._is_over, self.jobs), key=lambda job: met[job.job.id])
            if not due:
                break
            for job in due:
                if job.state is State.QUEUED:
                    self.to(job, State.ABORTED, "not_started_in_time")
                elif job.state is State.RUNNING and job.generated:
                    self.to(job, State.FAILED, "receipts_timed_out")
                else:
                    self.put_back(job)

    @deed()
    def count_anew_a_little_further(self) -> None:
        if self.recount is None:
            self.recount = UsageReconciliation(self.ledger, now(), slice_=1)
            if not self.wrong:
                self.wrong = {"b/bytes": 700, "/cells": 3, "/room": 5, "a/room": 2}
                for name, number in self.wrong.items():
                    self.do(self.ledger.redis.hincrby("ms:usage", name, number))
        self.counted(self.do(self.recount.step()))

    def counted(self, told: list[str] | None) -> None:
        if told is not None:
            assert {line.partition(":")[0] for line in told} == set(self.wrong), (
                "and what changed meanwhile is right"
            )
            self.recount = None
            self.wrong = {}

    def _is_over(self, job: Modelled) -> bool:
        late = job.state is State.QUEUED and job.attempt == 0 and job.job.expires is not None
        return late or job.state in (State.RUNNING, State.CANCELLING)

    def the_ledger_says_what_the_model_says(self) -> None:
        for job in self.jobs:
            if not job.over:
                self.look_at(job)
            job.over = job.state in TERMINAL

    def look_at(self, job: Modelled) -> None:
        view = self.do(self.ledger.view(job.job.id))
        assert view.state == job.state
        assert view.attempt == job.attempt
        assert (view.generated is not None) == job.generated
        assert view.receipts == len(job.arrived)
        assert view.capture_status == job.capture_status
        assert view.error is None or view.error.type == f"urn:midstream:{job.error}"
        assert (view.error is None) == (job.error == "")
        assert (view.finished is None) == (job.state not in TERMINAL)
        assert view.version >= job.version
        job.version = view.version

    def every_queued_job_has_its_place_and_every_other_none(self) -> None:
        states = [f"jobs-in:{state}" for state in State]
        waits = [f"wait:{MODEL}:6:{tenant}" for tenant in TENANTS]

        async def look() -> list[list[bytes]]:
            async with self.ledger.redis.pipeline() as pipe:
                for name in (f"held:{WORKER}", f"sent:{MODEL}:6"):
                    pipe.smembers(f"ms:{name}")
                for name in ("live", *states, *waits):
                    pipe.zrange(f"ms:{name}", 0, -1)
                return list(await pipe.execute())

        held, sent, live, *lists = [[name.decode() for name in found] for found in self.do(look())]
        in_state = lists[: len(states)]
        waiting = lists[len(states) :]
        assert [set(ids) for ids in in_state] == [
            {job.job.id for job in self.jobs if job.state is state} for state in State
        ]
        assert set(live) == {job.job.id for job in self.jobs if job.state not in TERMINAL}
        assert set(held) == {job.job.id for job in self.jobs if job.working()}
        assert set(sent) == self.line.sent
        assert waiting == [[job.job.id for job in self.line.waiting[tenant]] for tenant in TENANTS]
        put_back = {job.job.id for job in self.jobs if job.attempt}
        assert len(set(sent) - put_back) <= WINDOW
        assert len(sent) + sum(map(len, waiting)) == sum(
            job.state is State.QUEUED for job in self.jobs
        )

    def the_queue_holds_the_messages_in_the_order_in_which_jobs_were_picked(self) -> None:
        assert [
            (message.job_id, message.attempt) for message in self.do(sent(self.ledger))
        ] == self.line.messages

    def usage_is_what_there_is(self) -> None:
        raw = self.do(self.ledger.redis.hgetall("ms:usage"))
        counted = {name.decode(): int(number) for name, number in raw.items() if int(number)}
        unfinished = [job.job for job in self.jobs if job.state not in TERMINAL]
        is_ = {
            "/queued": sum(job.state is State.QUEUED for job in self.jobs),
            "/room": sum(room_of(job, self.ledger.settings) for job in unfinished),
        }
        for tenant in TENANTS:
            own = [job for job in self.jobs if job.job.tenant == tenant]
            is_[f"{tenant}/jobs"] = sum(job.state not in TERMINAL for job in own)
            is_[f"{tenant}/room"] = sum(
                room_of(job.job, self.ledger.settings) for job in own if job.state not in TERMINAL
            )
            is_[f"{tenant}/bytes"] = SIZE * sum(len(job.arrived) for job in own if job.expected)
        for name, number in self.wrong.items():
            is_[name] = is_.get(name, 0) + number
        assert counted == {name: number for name, number in is_.items() if number}

    def check(self) -> None:
        self.the_ledger_says_what_the_model_says()
        self.every_queued_job_has_its_place_and_every_other_none()
        self.the_queue_holds_the_messages_in_the_order_in_which_jobs_were_picked()
        self.usage_is_what_there_is()

    def end(self) -> None:
        self.check()
        for job in self.jobs:
            self.look_at(job)
            events = self.do(self.ledger.events(job.job.id))
            assert [event.data["state"] for event in events if event.event == "state"] == job.states
            if job.state is State.SUCCEEDED and job.expected:
                files = self.do(self.ledger.result(job.job.id)).capture_results.files
                assert {file.path for file in files} == {
                    f"{job.attempt}/{request}/{rank}" for request, rank in job.arrived
                }
        while self.recount is not None:
            self.counted(self.do(self.recount.step()))
        assert self.do(Reaper(self.ledger)._recount(now())) == []


@pytest.fixture
def broker(redis_url: str) -> Iterator[Broker]:
    config = settings_for(
        redis_url, max_attempts=MAX_ATTEMPTS, **{"tuning.dispatch_window": WINDOW}
    )
    loop = asyncio.new_event_loop()
    ledger = Ledger.connect(config)
    few = "zset-max-ziplist-entries"  # sets of so few are looked at in one go
    usual: dict[str, str] = loop.run_until_complete(ledger.redis.config_get(few))
    loop.run_until_complete(ledger.redis.config_set(few, 0))
    reaper = Reaper(ledger)
    reaper._recount_at = math.inf  # the model counts anew, whenever it likes
    yield Broker(loop, ledger, Settler(redis.Redis.from_url(redis_url), config), reaper)
    loop.run_until_complete(ledger.redis.config_set(few, usual[few]))
    loop.run_until_complete(ledger.close())
    loop.close()


@pytest.mark.slow("a thousand deeds, compared with what the ledger holds after every fifth")
@pytest.mark.parametrize("examples", [5, pytest.param(60, marks=pytest.mark.long)])
def test_the_ledger_follows_its_model(broker: Broker, examples: int) -> None:
    @settings(
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def follow(data: st.DataObject) -> None:
        model = LedgerModel(broker)
        model.submit("a", 1, capture=True, hurried=False, begun=True)
        for step in range(STEPS):
            name = data.draw(st.sampled_from(DEEDS))
            getattr(model, name)(**data.draw(ARGUMENTS[name]))
            if step % 5 == 0:  # most of what is wrong stays wrong
                model.check()
        model.end()

    follow()
