"""What each tenant gets of the engine's steps, counted in vLLM's scheduler with our part."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from line_kit import python_lines
from scheduler_kit import STEP_S, TOKEN_S, Steps
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from midstream.schemas.base.version import __version__
from midstream.workers.runner.base.packed_spec import TenantShare, pack
from midstream.workers.runner.vllm.tenant_queue import TenantQueue
from midstream.workers.runner.vllm.tenant_turns import divided

#: Tokens of a step at most, and of a long prompt.
MOST = 2048
LONG = 1900

Make = Callable[..., Steps]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **options: Steps(tmp_path, monkeypatch, **options)


def test_a_small_job_enters_the_next_step_beside_a_backlog(engine: Make) -> None:
    steps = engine()
    for _ in range(60):
        steps.ask("large", LONG)
    steps.steps(2)
    for generated in (1, 8, 16):
        small = steps.ask("small", 32 - generated, generated)
        while small not in steps.ends:
            steps.step()
        assert steps.firsts[small] == 1, "its prompt is in the first step that is composed"


def test_a_step_that_computes_tokens_of_others_keeps_their_pace(engine: Make) -> None:
    steps = engine()
    for _ in range(60):
        steps.ask("large", LONG)
    steps.steps(2)
    steps.ask("small", 16, 200)
    taken = [STEP_S + TOKEN_S * sum(counts.values()) for counts in steps.steps(100)]
    assert max(taken[60:]) <= 2.3 * STEP_S, "once the times of steps are known"
    assert sorted(taken[60:])[4] >= 1.8 * STEP_S, "all but probes use what is left of the time"


@pytest.mark.parametrize(("weight", "share"), [(1, 0.5), (3, 0.75)])
def test_two_backlogged_tenants_share_full_steps_by_their_weights(
    engine: Make, weight: int, share: float
) -> None:
    steps = engine()
    for _ in range(40):
        steps.ask("early", LONG, weight=weight)
    for _ in range(100):
        steps.ask("late", 300)
    for _ in range(20):
        assert sum(steps.step().values()) == MOST, "nothing is given up for the division"
    assert abs(steps.tokens["early"] / steps.tokens.total() - share) < 0.05


def test_a_tenant_alone_is_served_as_by_vllm(engine: Make) -> None:
    steps = engine()
    asked = [steps.ask("alone", LONG) for _ in range(6)]
    counts = steps.steps(6)
    assert [sum(each.values()) for each in counts] == [MOST] * 5 + [6 * LONG - 5 * MOST]
    assert list(dict.fromkeys(name for each in counts for name in each)) == asked


def test_a_tenant_that_asks_again_at_once_is_expected_for_a_while(engine: Make) -> None:
    steps = engine()
    for _ in range(60):
        steps.ask("large", LONG)
    steps.ask("small", 16)
    steps.step()
    assert "small.1" in steps.ends
    assert sum(steps.step().values()) < MOST
    steps.clock.now += 1
    assert sum(steps.step().values()) == MOST, "it does not come back"


def test_a_returning_tenant_is_not_paid_for_the_time_it_was_away(engine: Make) -> None:
    steps = engine()
    for _ in range(60):
        steps.ask("stayed", LONG)
    steps.steps(5)
    before = dict(steps.tokens)
    for _ in range(60):
        steps.ask("returned", LONG)
    steps.steps(10)
    more = steps.tokens["stayed"] - before["stayed"]
    assert abs(more / (more + steps.tokens["returned"]) - 0.5) < 0.05


def test_what_cannot_be_split_takes_turns_as_a_whole(engine: Make) -> None:
    steps = engine(max_num_batched_tokens=4096, enable_chunked_prefill=False)
    for number in range(16):
        steps.ask("early", LONG)
        if number < 8:
            steps.ask("late", LONG)
    for counts in steps.steps(4):
        assert set(counts.values()) == {LONG}
    assert steps.tokens["early"] == steps.tokens["late"]


def test_a_preempted_request_keeps_its_tenants_place(engine: Make) -> None:
    steps = engine()
    steps.ask("large", LONG, 400)
    steps.ask("small", 16, 50)
    steps.steps(20)
    scheduler = steps.scheduler
    request = scheduler.running.pop(0)
    scheduler._preempt_request(request, 0.0)
    for _ in range(60):
        steps.ask("large", LONG)
    steps.steps(20)
    assert request in scheduler.running, "it is computed anew before those that came later"
    assert "small.1" in steps.ends or steps.tokens["small"] > 40


def test_a_step_without_prompts_looks_at_no_request_of_any_tenant(engine: Make) -> None:
    steps = engine()
    lines = []
    for number in (8, 24):
        for tenant in ("one", "two"):
            for _ in range(number - steps.numbers[tenant]):
                steps.ask(tenant, 16, 4000)
        steps.steps(5)
        lines.append(min(python_lines(steps.step) for _ in range(3)))
    assert lines[0] == lines[1]


def test_tokens_that_vllm_pads_by_drafts_are_taken_whole(engine: Make) -> None:
    turns = engine().scheduler._turns
    turns._next_tokens = 4
    cached = waiting_request()
    turns.join(cached)
    turns.left = {"a": 2}
    assert turns.take(cached, 5, whole=False) == 2
    turns.left = {"a": 2}
    assert turns.take(cached, 4, whole=False) == 4
    assert turns.take(cached, 4, whole=False) == 0, "its tenant has had its share"


def waiting_request() -> Any:
    request: Any = Request("a1")
    request.status = RequestStatus.WAITING
    return request


# --- Places


def test_a_tenant_gets_a_place_among_requests_that_generate_for_long(engine: Make) -> None:
    steps = engine(max_num_seqs=8)
    large = [steps.ask("large", 40, 500) for _ in range(20)]
    steps.steps(30)
    for _ in range(4):
        small = steps.ask("small", 16, 4)
        while small not in steps.ends:
            steps.step()
        assert steps.firsts[small] == 1
    scheduler = steps.scheduler
    assert sum(scheduler.requests[name].num_preemptions for name in large) == 1, (
        "the place is kept for a tenant that comes again"
    )
    assert len(scheduler.running) == 7
    steps.clock.now += 1
    steps.steps(2)
    assert len(scheduler.running) == 8, "the tenant does not come again"


def test_places_that_nobody_else_wants_are_not_kept(engine: Make) -> None:
    steps = engine(max_num_seqs=8)
    for _ in range(20):
        steps.ask("large", 40, 500)
    steps.ask("small", 16, 500)
    steps.steps(10)
    running = Counter(request.request_id.split(".")[0] for request in steps.scheduler.running)
    assert running == {"large": 6, "small": 1}, "one is kept for the tenant with one of four"
    for _ in range(20):
        steps.ask("small", 16, 500)
    steps.steps(10)
    running = Counter(request.request_id.split(".")[0] for request in steps.scheduler.running)
    assert running == {"large": 4, "small": 4}


def test_with_a_place_for_one_request_turns_are_taken_when_it_ends(engine: Make) -> None:
    steps = engine(max_num_seqs=1)
    large = [steps.ask("large", 40, 20) for _ in range(3)]
    steps.step()
    small = steps.ask("small", 16, 4)
    steps.steps(30)
    assert small in steps.ends
    assert large[2] not in steps.ends
    assert not any(request.num_preemptions for request in steps.scheduler.requests.values())


# --- The division


@pytest.mark.parametrize(
    ("most", "needs", "weights", "shares"),
    [
        (100, {"a": 500, "b": 500}, {}, {"a": 50, "b": 50}),
        (100, {"a": 500, "b": 10}, {}, {"a": 90, "b": 10}),
        (100, {"a": 30, "b": 10}, {}, {"a": 30, "b": 10}),
        (100, {"a": 500, "b": 500, "c": 20}, {"a": 3}, {"a": 60, "b": 20, "c": 20}),
        (1, {"a": 500, "b": 500}, {}, {"a": 1, "b": 0}),
        (0, {"a": 500}, {}, {"a": 0}),
        (-3, {"a": 500}, {}, {"a": 0}),
        (100, {}, {}, {}),
    ],
)
def test_a_division_leaves_nothing_over_that_somebody_needs(
    most: int, needs: dict[str, int], weights: dict[str, int], shares: dict[str, int]
) -> None:
    every = dict.fromkeys(needs, 1) | weights
    assert divided(most, needs, every) == shares


# --- The queue


class Request:
    """A request as vLLM's queues see it."""

    def __init__(self, name: str, priority: int = 0) -> None:
        self.name = name
        self.priority = priority
        extra = pack(None, TenantShare(name[0]))
        self.sampling_params = type("Params", (), {"extra_args": extra})

    def __lt__(self, other: "Request") -> bool:
        return (self.priority, self.name) < (other.priority, other.name)


def queue_of(*names: str, policy: SchedulingPolicy = SchedulingPolicy.FCFS) -> TenantQueue:
    queue = TenantQueue(policy)
    for name in names:
        queue.add_request(Request(name))
    return queue


def names_in(queue: TenantQueue) -> list[str]:
    return [request.name for request in queue]


def test_a_queue_shows_what_a_step_may_take_in_the_order_of_the_turns() -> None:
    queue = queue_of("a1", "b1", "a2", "c1")
    assert len(queue) == 4
    turns = {"b": 5, "d": 9, "a": 5, "c": 0}
    queue.serve(turns)
    assert queue.peek_request().name == "b1"
    turns["b"] = 0
    assert queue.pop_request().name == "b1", "what was looked at, though its share is used"
    assert queue.pop_request().name == "a1"
    turns["a"] = -1
    assert not queue
    assert len(queue) == 2
    for take in (queue.peek_request, queue.pop_request):
        with pytest.raises(IndexError):
            take()
    queue.serve(None)
    assert names_in(queue) == ["a2", "c1"]


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_queue_keeps_each_tenants_order(policy: SchedulingPolicy) -> None:
    queue = queue_of("a2", "b1", "a3", policy=policy)
    queue.prepend_request(Request("a1"))
    queue.prepend_requests([Request("b0")])
    assert names_in(queue) == ["a1", "a2", "a3", "b0", "b1"]
    first, second, *_ = queue
    queue.remove_request(first)
    queue.remove_requests([second, Request("c1")])
    assert names_in(queue) == ["a3", "b0", "b1"]
    assert [queue.pop_request().name for _ in range(3)] == ["a3", "b0", "b1"]
    assert not queue
    assert not queue.of_tenants()


def test_a_request_without_a_tenant_is_one_of_nobody() -> None:
    queue = TenantQueue(SchedulingPolicy.FCFS)
    plain: Any = Request("a1")
    plain.sampling_params = None
    queue.add_request(plain)
    assert list(queue.of_tenants()) == [""]


def test_a_flood_of_shallow_requests_takes_its_share_and_no_more(engine: Make) -> None:
    """Its steps take turns with those of others, who generate on and begin within two steps."""
    steps = engine()
    shallow = {"version": __version__, "depth": 3}
    for _ in range(60):
        steps.ask("shallow", LONG, spec=shallow)
        steps.ask("whole", LONG)
    writer = steps.ask("writer", 4, 100)
    counts = steps.steps(40)
    flood = steps.tokens["shallow"]
    assert abs(flood / (flood + steps.tokens["whole"]) - 0.5) < 0.05
    written = [writer in each for each in counts]
    assert all(any(pair) for pair in pairwise(written))
    small = steps.ask("small", 16)
    steps.steps(2)
    assert small in steps.firsts


def test_what_is_held_out_of_a_step_leaves_the_shares_as_they_are(engine: Make) -> None:
    steps = engine()
    turns = steps.scheduler._turns
    name = steps.ask("writer", 4, 100)
    steps.steps(2)
    request = steps.scheduler.requests[name]
    turns.left = {"writer": 5}
    assert turns.take(request, 1, whole=False) == 1
    turns.give_back(request, 1, 0)
    assert turns.left == {"writer": 5}
