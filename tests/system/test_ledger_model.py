"""Does the ledger follow a simple model of itself through any sequence of deeds, also of stale attempts?"""

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import pytest
from celery import Celery
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from ledger_kit import WORKER, make_job, outputs, receipt, settings_for

from midstream.broker.celery_app import make_app
from midstream.broker.ledger import Ledger
from midstream.broker.settle import Settler
from midstream.broker.sweeper import Sweeper
from midstream.schemas.base import now
from midstream.schemas.errors import MidstreamError
from midstream.schemas.jobs import TERMINAL, TRANSITIONS, Job, State

T = TypeVar("T")
MAX_ATTEMPTS = 3
#: Two prompts, two ranks.
PLACES = [(request, rank) for request in (0, 1) for rank in (0, 1)]
AGE = st.sampled_from([0, 0, 0, 1])  # how many attempts ago the speaker claimed; mostly the present one
PROBLEM = MidstreamError("engine_failed", "it broke").problem()


@dataclass
class Broker:
    """The real thing, on one event loop for all examples."""

    loop: asyncio.AbstractEventLoop
    ledger: Ledger
    settler: Settler
    sweeper: Sweeper
    app: Celery

    def do(self, call: Awaitable[T]) -> T:
        async def run() -> T:
            return await call

        return self.loop.run_until_complete(run())


class LedgerModel(RuleBasedStateMachine):
    broker: ClassVar[Broker]

    def __init__(self) -> None:
        super().__init__()
        self.job: Job = make_job(prompts=2, capture=True)
        self.broker.do(self.broker.ledger.submit(self.job, {}))
        self.state, self.attempt, self.version = State.QUEUED, 0, 1
        self.generated, self.arrived, self.seq = False, set[tuple[int, int]](), 0

    def working(self, age: int) -> bool:
        return age == 0 and self.state in (State.RUNNING, State.CANCELLING)

    def to(self, state: State) -> None:
        assert state in TRANSITIONS[self.state]
        self.state = state
        if state is State.QUEUED:
            self.generated, self.arrived = False, set()

    def finish(self) -> None:
        if self.generated and len(self.arrived) == len(PLACES):
            self.to(State.CANCELLED if self.state is State.CANCELLING else State.SUCCEEDED)

    def put_back(self) -> None:
        if self.state is State.CANCELLING:
            self.to(State.CANCELLED)
        else:
            self.to(State.FAILED if self.attempt >= MAX_ATTEMPTS else State.QUEUED)

    @rule()
    def claim(self) -> None:
        got = self.broker.do(self.broker.ledger.claim(self.job.id, WORKER, "boot", 2))
        assert (got is not None) == (self.state is State.QUEUED)
        if got is not None:
            self.to(State.RUNNING)
            self.attempt += 1
            assert got.attempt == self.attempt

    @rule(age=AGE)
    def store(self, age: int) -> None:
        accepted = self.broker.do(self.broker.ledger.store_outputs(self.job.id, self.attempt - age, outputs(2)))
        assert (accepted is not None) == (self.working(age) and self.state is State.RUNNING)
        if self.working(age) and self.state is State.CANCELLING:
            self.to(State.CANCELLED)
        elif accepted:
            self.generated = True
            self.finish()

    @rule(age=AGE, place=st.sampled_from(PLACES), status=st.sampled_from(["ok", "ok", "ok", "ok", "partial", "error"]))
    def receive(self, age: int, place: tuple[int, int], status: str) -> None:
        self.seq += 1
        told = receipt(self.job, *place, attempt=self.attempt - age, status=status, message="m")
        assert self.broker.settler.settle(WORKER, 0, self.job.id, [(self.seq, told)]) == self.seq
        if self.working(age) and place not in self.arrived:
            self.arrived.add(place)
            if status == "error" and self.state is State.RUNNING:
                self.to(State.FAILED)
            else:
                self.finish()

    @rule(age=AGE)
    def release(self, age: int) -> None:
        after = self.broker.do(self.broker.ledger.release(self.job.id, self.attempt - age))
        if self.working(age):
            self.put_back()
            assert after is self.state
        else:
            assert after is None

    @precondition(lambda self: self.attempt > 1)
    @rule(age=AGE)
    def fail(self, age: int) -> None:
        assert self.broker.do(self.broker.ledger.fail(self.job.id, self.attempt - age, PROBLEM)) == self.working(age)
        if self.working(age):
            self.to(State.FAILED)

    @precondition(lambda self: self.attempt > 0)
    @rule()
    def request_cancel(self) -> None:
        if self.state in TERMINAL:
            with pytest.raises(MidstreamError):
                self.broker.do(self.broker.ledger.request_cancel(self.job.id))
            return
        self.broker.do(self.broker.ledger.request_cancel(self.job.id))
        if self.state is State.QUEUED:
            self.to(State.ABORTED)
        elif self.state is State.RUNNING:
            self.to(State.CANCELLING)
            if self.generated:
                self.to(State.CANCELLED)

    @rule(age=AGE)
    def finish_cancel(self, age: int) -> None:
        told = self.broker.do(self.broker.ledger.finish_cancel(self.job.id, self.attempt - age))
        assert told == (self.working(age) and self.state is State.CANCELLING)
        if told:
            self.to(State.CANCELLED)

    @rule()
    def let_the_lease_run_out(self) -> None:
        self.broker.do(self.broker.sweeper.sweep(now() + 1000))
        if self.state is State.RUNNING and self.generated:
            self.to(State.FAILED)
        elif self.state in (State.RUNNING, State.CANCELLING):
            self.put_back()

    @invariant()
    def the_ledger_says_what_the_model_says(self) -> None:
        view = self.broker.do(self.broker.ledger.view(self.job.id))
        assert (view.state, view.attempt, view.generated is not None) == (self.state, self.attempt, self.generated)
        assert view.version >= self.version
        self.version = view.version
        if self.state not in TERMINAL:
            assert view.receipts == len(self.arrived)
            assert view.capture_status == "pending"
        else:
            assert view.capture_status in (("ok", "partial") if self.state is State.SUCCEEDED else ("error", "timed_out"))
            assert view.finished is not None

    @invariant()
    def it_is_known_where_the_sweeper_must_look(self) -> None:
        async def indexes() -> tuple[bool, bool]:
            redis = self.broker.ledger.redis
            return await redis.zscore("ms:live", self.job.id) is not None, bool(await redis.sismember(f"ms:held:{WORKER}", self.job.id))

        live, held = self.broker.do(indexes())
        assert live == (self.state not in TERMINAL)
        assert held == (self.state in (State.RUNNING, State.CANCELLING))


@pytest.fixture
def broker(redis_url: str) -> Iterator[Broker]:
    import redis

    config = settings_for(redis_url, max_attempts=MAX_ATTEMPTS)
    loop = asyncio.new_event_loop()
    ledger, app = Ledger.connect(config), make_app(config)
    yield Broker(loop, ledger, Settler(redis.Redis.from_url(redis_url), config), Sweeper(ledger, app, config), app)
    loop.run_until_complete(ledger.close())
    loop.close()
    app.close()


def test_the_ledger_follows_its_model(broker: Broker) -> None:
    LedgerModel.broker = broker
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        LedgerModel,
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None),
    )
