"""Is the steering of a model what was set, versioned, and are its tensors there exactly as long as
somebody needs them?
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from ledger_kit import (
    BOOT,
    IDENTITY,
    MODEL,
    WORKER,
    make_job,
    open_ledger,
    outputs,
    put_module,
    queued_job,
    settings_for,
    worker_info,
)
from refusal_kit import refuses

from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.jobs.ledger import ClaimRefused, Ledger
from midstream.broker.ledger.named import registry, steering as broker_steering
from midstream.broker.ledger.named.registry import Registry
from midstream.broker.ledger.named.steering import LedgerSteering
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now, to_msgpack
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job, State
from midstream.schemas.requests.steering import (
    MODULES,
    GlobalSteering,
    Module,
    SteeringTemplate,
    WorkerSteering,
    content_digest,
)

TENSORS: dict[str, Tensor] = {
    content_hash(tensor): tensor
    for tensor in (from_numpy(np.full(4, value, np.float32)) for value in (1.0, 2.0, 3.0, 4.0))
}
A, B, C, D = TENSORS


def entry(*tensors: str, scale: float = 1.0) -> SteeringTemplate:
    return SteeringTemplate(
        layers=[0],
        hook="post_block",
        positions="all",
        family="add",
        tensors=list(tensors),
        scale=scale,
    )


def module(*tensors: str, name: str = "joy", **changes: Any) -> Module:
    entries = [entry(tensor) for tensor in tensors]
    return Module(
        **(
            {
                "name": name,
                "model": MODEL,
                "digest": content_digest(entries),
                "entries": entries,
                "bytes": 16,
                "created": 1.0,
            }
            | changes
        )
    )


def blobs(*names: str) -> dict[str, bytes | Tensor]:
    return {name: to_msgpack(TENSORS[name]) for name in names}


def report(worker: str = WORKER, boot: str = BOOT, **changes: Any) -> WorkerSteering:
    facts: dict[str, Any] = {
        "worker": worker,
        "boot": boot,
        "model": MODEL,
        "state": "serving",
        "detail": "",
        "at": now(),
    }
    return WorkerSteering(**(facts | changes))


@pytest.fixture
async def ledger(redis_url: str) -> AsyncIterator[Ledger]:
    async with open_ledger(redis_url, steering_wait_s=60) as opened:
        yield opened


@pytest.fixture
def steering(ledger: Ledger) -> LedgerSteering:
    return LedgerSteering(ledger)


async def pinned(ledger: Ledger) -> dict[str, set[str]]:
    """Content hash → owners, and that there is a tensor for each."""
    found = {}
    for raw in await ledger.redis.keys("ms:pinned:*"):
        name = raw.decode().removeprefix("ms:pinned:")
        found[name] = {
            owner.decode() for owner in await ledger.redis.smembers(f"ms:pinners:{name}")
        }
    assert {
        raw.decode().removeprefix("ms:pinners:") for raw in await ledger.redis.keys("ms:pinners:*")
    } == set(found)
    return found


async def later(seconds: float, call: Awaitable[Any]) -> Any:
    await asyncio.sleep(seconds)
    return await call


async def change(steering: LedgerSteering, *tensors: str) -> GlobalSteering:
    entries = [entry(tensor) for tensor in tensors]
    check = await steering.open_check(MODEL, entries, blobs(*tensors))
    return await steering.set_global(MODEL, check, entries)


async def claimed(ledger: Ledger, job: Job, ranks: int = 1) -> Job:
    claim = await ledger.claim(job.id, WORKER, BOOT, ranks, IDENTITY)
    assert claim is not None
    return claim.job


# --- Global steering
# --------------------------------------------------------------------------------------------------


# field case 43
async def test_state_of_another_version_names_both_versions(
    ledger: Ledger, steering: LedgerSteering, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(value: object) -> bytes:
        return to_msgpack(msgspec.msgpack.decode(to_msgpack(value)) | {"tomorrow": 1})

    with monkeypatch.context() as newer:
        newer.setattr(scripts, "__version__", "9.0.0")
        newer.setattr(registry, "to_msgpack", later)
        scripts.sources.cache_clear()
        newer.setattr(ledger, "scripts", scripts.Scripts(ledger.redis))
        theirs = LedgerSteering(ledger)
        await put_module(ledger, module(A), blobs(A))
        newer.setattr(broker_steering, "__version__", "9.0.0")
        newer.setattr(broker_steering, "to_msgpack", lambda value: b"\xc3")
        check = await theirs.open_check("another", [entry(A)], {})
        await theirs.set_global("another", check, [entry(A)])
        check = await theirs.open_check(MODEL, [entry(A)], {})
    scripts.sources.cache_clear()
    for call, what in (
        (Registry(ledger, MODULES).delete(MODEL, "joy"), f"the module 'joy' of {MODEL!r}"),
        (steering.checked_entries(check), "the checked global steering"),
        (steering.current("another"), "the global steering of 'another'"),
    ):
        with refuses(f"{what} was stored by midstream 9.0.0", kind="version_mismatch"):
            await call
    await ledger.redis.hdel("ms:steering:another", "current_by")
    with pytest.raises(MidstreamError, match=r"the global steering of .* midstream \(unknown\)"):
        await steering.current("another")
    await ledger.redis.set(f"ms:pinned:{A}", later(TENSORS[A]))
    with refuses(match="tomorrow", kind="version_mismatch"):
        await steering.get_tensor(A)


async def test_checks_are_open_to_workers_until_they_are_closed_or_over(
    ledger: Ledger, steering: LedgerSteering, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await steering.look(MODEL, WORKER) == (0, "", "", [])
    first = await steering.open_check(MODEL, [entry(A)], blobs(A))
    second = await steering.open_check(MODEL, [entry(B)], blobs(B))
    await steering.open_check("another model", [entry(B)], blobs(B))
    assert sorted((await steering.look(MODEL, WORKER)).checks) == sorted([first, second])
    assert await steering.checked_entries(first) == [entry(A)]
    assert await steering.get_tensor(A, first) == TENSORS[A]
    for worker in ("w1", "w2", "w3"):
        await ledger.heartbeat(worker_info(worker, boot=f"boot of {worker}"))
    await ledger.heartbeat(worker_info("other", model="another model"))
    for boot, refusal in (("boot of w1", ""), ("boot of w2", "no"), ("former boot of w3", "")):
        await steering.answer(first, boot, refusal)
    assert await steering.answers(MODEL, first) == {"w1": "", "w2": "no", "w3": None}
    assert await steering.answers(MODEL, second) == dict.fromkeys(("w1", "w2", "w3"))
    await steering.close_check(MODEL, first)
    assert await steering.checked_entries(first) == []
    assert await steering.answers(MODEL, first) == dict.fromkeys(("w1", "w2", "w3"))
    assert (await steering.look(MODEL, WORKER)).checks == [second]
    monkeypatch.setattr(broker_steering, "now", lambda: now() + 61)
    assert (await steering.look(MODEL, WORKER)).checks == []


async def test_a_check_becomes_the_global_steering_once(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    check = await steering.open_check(MODEL, [entry(A)], blobs(A))
    assert await steering.current(MODEL) == GlobalSteering()
    made = await steering.set_global(MODEL, check, [entry(A)])
    assert made.version == 1
    assert made.entries == [entry(A)]
    assert abs(made.changed - now()) < 60
    assert await steering.current(MODEL) == made
    await steering.close_check(MODEL, check)
    again = await steering.set_global(MODEL, check, [entry(A)])
    assert again == made, "its answer may have been lost"
    assert (await steering.look(MODEL, WORKER)).version == 1
    cleared = await change(steering)
    assert cleared.version == 2
    assert cleared.entries == []
    assert await pinned(ledger) == {}
    with refuses(kind="conflict"):
        await steering.set_global(MODEL, check, [entry(A)])


# --- Claims
# --------------------------------------------------------------------------------------------------


async def test_a_claim_brings_the_global_steering_of_its_moment(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    before = await queued_job(ledger)
    assert (await claimed(ledger, before)).global_steering == GlobalSteering()
    assert not (await ledger.view(before.id)).steered
    job = await queued_job(ledger, prompts=3)
    current = await change(steering, A)
    steered = await claimed(ledger, job, 2)
    assert steered.global_steering == msgspec.structs.replace(current, changed=0.0)
    view = await ledger.view(job.id)
    assert view.receipts_expected == 6
    assert view.steered, "every prompt tells of it"
    await ledger.store_outputs(job.id, 1, outputs(3))
    result = await ledger.result(job.id)
    assert result.state is State.RUNNING
    assert result.determinism.global_version == current.version


async def test_a_claimed_job_keeps_the_tensors_of_its_global_steering(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    job = await queued_job(ledger)
    await change(steering, A)
    with refuses("no longer stored", kind="intervention_failed"):
        await ledger.get_tensor(A)
    await claimed(ledger, job)
    await change(steering, B)
    assert set(await pinned(ledger)) == {B}
    assert await ledger.get_tensor(A) == TENSORS[A]
    assert await ledger.redis.ttl(f"ms:blob:{A}") > 0


async def test_a_repeated_claim_begins_under_the_global_steering_that_it_returns(
    ledger: Ledger, steering: LedgerSteering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection broke before the reply arrived; meanwhile the steering was changed."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "the same call")
    job = await queued_job(ledger, prompts=2)
    await claimed(ledger, job)
    monkeypatch.undo()
    current = await change(steering, A)
    monkeypatch.setattr("secrets.token_hex", lambda _: "the same call")
    assert (await claimed(ledger, job)).global_steering.version == current.version
    view = await ledger.view(job.id)
    assert view.attempt == 1
    assert view.global_version == current.version
    assert view.receipts_expected == 2


async def test_a_job_whose_global_steering_cannot_be_read_fails(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    """A worker does not claim before its ranks have checked what is in force: this one was away."""
    job = await queued_job(ledger)
    await change(steering, A)
    await ledger.redis.hset(f"ms:steering:{MODEL}", "entries", b"\xc3")
    assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY) is None
    view = await ledger.view(job.id)
    assert view.state == State.FAILED
    assert "global steering version 1" in view.error.detail


async def test_a_requeued_job_forgets_its_global_steering(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    job = await queued_job(ledger)
    await change(steering, A)
    await claimed(ledger, job)
    await ledger.release(job.id, 1)
    assert not (await ledger.view(job.id)).steered
    await change(steering)
    await claimed(ledger, job)
    await ledger.store_outputs(job.id, 2, outputs())
    result = await ledger.result(job.id)
    assert result.state == State.SUCCEEDED
    assert result.determinism is None


async def test_a_worker_whose_ranks_disagree_claims_nothing_until_they_are_equal(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    job = await queued_job(ledger)
    await ledger.redis.hset("ms:desync", WORKER, "rank 1 differs")
    with pytest.raises(ClaimRefused) as refused:
        await ledger.claim(job.id, WORKER, BOOT, 2, IDENTITY)
    assert refused.value.detail == "rank 1 differs"
    assert (await steering.look(MODEL, WORKER)).desync == "rank 1 differs"
    await steering.clear_desync(WORKER, BOOT)
    assert await ledger.claim(job.id, WORKER, BOOT, 2, IDENTITY) is not None


# --- Reports
# --------------------------------------------------------------------------------------------------


async def test_only_current_reports_of_live_workers_count(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    for told in (report("w1"), report("w2", "old boot"), report("dead"), report("other")):
        await steering.report(told)
    for worker in ("w1", "w2", "w3"):
        await ledger.heartbeat(worker_info(worker))
    await ledger.heartbeat(worker_info("other", model="another"))
    accounts = await steering.accounts(MODEL)
    assert [(account.info.worker, account.report is not None) for account in accounts] == [
        ("w1", True),
        ("w2", False),
        ("w3", False),
    ]
    assert len(await steering.accounts()) == 4


async def test_a_report_answers_the_questions_up_to_the_one_it_names(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    await ledger.heartbeat(worker_info())
    first = await steering.ask(MODEL)
    second = await steering.ask(MODEL)
    assert (await steering.look(MODEL, WORKER)).ask == second
    for told, answered in (
        ("", (False, False)),
        (first, (True, False)),
        (second, (True, True)),
    ):
        await steering.report(report(ask=told))
        (account,) = await steering.accounts(MODEL)
        assert (account.answers(first), account.answers(second)) == answered


async def test_a_report_of_another_version_counts_as_none(ledger: Ledger) -> None:
    await ledger.heartbeat(worker_info())
    await ledger.redis.set(f"ms:steering-report:{WORKER}", to_msgpack({"worker": WORKER, "new": 1}))
    (account,) = await LedgerSteering(ledger).accounts(MODEL)
    assert account.report is None


# --- Modules and jobs
# --------------------------------------------------------------------------------------------------


async def test_a_name_points_at_content_and_the_same_content_again_is_no_change(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    joy = module(A, B)
    assert await put_module(ledger, joy, blobs(A, B)) is None
    assert await put_module(ledger, msgspec.structs.replace(joy, created=9.0), blobs(A, B)) == joy
    described = module(A, B, description="glad", created=9.0)
    assert await put_module(ledger, described, {}) == joy
    stored = await Registry(ledger, MODULES).get(MODEL, "joy")
    assert stored == msgspec.structs.replace(described, created=joy.created)
    assert await put_module(ledger, module(B, C), blobs(C)) == stored, (
        "what it has already need not come again"
    )
    assert set(await pinned(ledger)) == {B, C}
    assert (
        [found.name for found in await Registry(ledger, MODULES).of_model(MODEL)]
        == await Registry(ledger, MODULES).names(MODEL)
        == ["joy"]
    )
    assert await Registry(ledger, MODULES).delete(MODEL, "joy")
    assert not await Registry(ledger, MODULES).delete(MODEL, "joy")
    assert await pinned(ledger) == {}
    assert await Registry(ledger, MODULES).get(MODEL, "joy") is None


async def test_what_an_accepted_job_learned_has_the_room_that_is_kept_for_jobs(
    redis_url: str,
) -> None:
    learned = module(A)
    blobs = {A: TENSORS[A]}
    async with open_ledger(redis_url, **{"tuning.redis_fill_limit": 0.1}) as ledger:
        registry = Registry(ledger, MODULES)
        used = (await ledger.redis.info("memory"))["used_memory"]
        await ledger.redis.config_set("maxmemory", 4 * used)
        try:
            with refuses("% full", kind="overloaded"):
                await registry.put(MODEL, "joy", learned.after, blobs)
            stored, _ = await registry.put(MODEL, "joy", learned.after, blobs, of_accepted=True)
        finally:
            await ledger.redis.config_set("maxmemory", 0)
    assert stored.digest == learned.digest


async def test_many_changes_of_one_name_at_once_leave_one_of_them_whole(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    formers = await asyncio.gather(
        *[put_module(ledger, module(name), blobs(name)) for name in TENSORS]
    )
    stored = await Registry(ledger, MODULES).get(MODEL, "joy")
    assert sorted(
        map(str, [former.tensors[0] if former else None for former in formers])
    ) == sorted(map(str, {*TENSORS, None} - set(stored.tensors))), "each replaced another"
    assert set(await pinned(ledger)) == set(stored.tensors)


async def test_an_accepted_job_has_its_tensors_whatever_becomes_of_the_module(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    # field case 26
    joy = module(A)
    await put_module(ledger, joy, blobs(A))
    job = msgspec.structs.replace(make_job(steer=True), modules={"joy": joy.digest})
    await ledger.submit(job, {}, pinned=[A])
    await put_module(ledger, module(B), blobs(B))  # field case 15
    await Registry(ledger, MODULES).delete(MODEL, "joy")
    assert await pinned(ledger) == {}
    assert content_hash(await ledger.get_tensor(A)) == A
    assert await steering.get_tensor(A) == await ledger.get_tensor(A)
    assert await ledger.redis.ttl(f"ms:blob:{A}") > 0
    assert (await ledger.view(job.id)).modules == {"joy": joy.digest}
    late = msgspec.structs.replace(make_job(steer=True), modules={"joy": module(B).digest})
    with refuses(kind="conflict") as refused:
        await ledger.submit(late, {}, pinned=[B])
    assert "joy" in refused.value.detail
    with pytest.raises(MidstreamError):
        await ledger.view(late.id)


async def test_unregistering_racing_a_submission_is_atomic(
    ledger: Ledger, steering: LedgerSteering
) -> None:
    # field case 26
    accepted = refused = 0
    for turn in range(40):
        await ledger.redis.flushall()
        await put_module(ledger, module(A), blobs(A))
        job = make_job(steer=True)
        calls = [ledger.submit(job, {}, pinned=[A]), Registry(ledger, MODULES).delete(MODEL, "joy")]
        first, second = calls if turn % 2 else calls[::-1]
        if turn < 2:  # one after the other
            outcomes = [
                *await asyncio.gather(first, return_exceptions=True),
                *await asyncio.gather(second, return_exceptions=True),
            ]
        else:
            gap = turn // 2 * 0.0002  # a deletion asks twice
            outcomes = await asyncio.gather(first, later(gap, second), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            refused += 1
            assert [getattr(failure, "kind", failure) for failure in failures] == ["conflict"]
            assert not await ledger.redis.exists(f"ms:job:{job.id}")
        else:
            accepted += 1
            assert content_hash(await ledger.get_tensor(A)) == A
    assert accepted > 0
    assert refused > 0


# --- Pins, under anything
# ----------------------------------------------------------------------------------------------


@dataclass
class Broker:
    loop: asyncio.AbstractEventLoop
    ledger: Ledger
    steering: LedgerSteering

    def do(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)


NAMES = st.lists(st.sampled_from(list(TENSORS)), max_size=3, unique=True)
MODELS = st.sampled_from([MODEL, "m:2"])


class Pins(RuleBasedStateMachine):
    """What is pinned is exactly what the modules and the global steering of all models name; a
    check changes nothing, and a tensor must be there.
    """

    broker: ClassVar[Broker]

    def __init__(self) -> None:
        super().__init__()
        self.broker.do(self.broker.ledger.redis.flushall())
        self.owned: dict[str, set[str]] = {}
        self.current: dict[str, int] = {}  # version of what was set last

    @rule(
        model=MODELS,
        name=st.sampled_from(["joy", "sad"]),
        names=NAMES.filter(bool),
        bring=st.booleans(),
    )
    def put(self, model: str, name: str, names: list[str], bring: bool) -> None:
        call = put_module(
            self.broker.ledger,
            module(*names, name=name, model=model),
            blobs(*names) if bring else {},
        )
        if not self.tried(call, names, bring):
            return
        self.owned[f"modules:{model}:{name}"] = set(names)

    @rule(model=MODELS, name=st.sampled_from(["joy", "sad"]))
    def delete(self, model: str, name: str) -> None:
        former = self.broker.do(Registry(self.broker.ledger, MODULES).delete(model, name))
        assert former == bool(self.owned.pop(f"modules:{model}:{name}", None))

    @rule(model=MODELS, names=NAMES, bring=st.booleans(), passes=st.booleans())
    def change(self, model: str, names: list[str], bring: bool, passes: bool) -> None:
        steering = self.broker.steering
        entries = [entry(name) for name in names]
        check = self.broker.do(steering.open_check(model, entries, blobs(*names) if bring else {}))
        if passes and (
            made := self.tried(steering.set_global(model, check, entries), names, bring)
        ):
            self.current[model] = self.current.get(model, 0) + 1
            assert made.version == self.current[model]
            assert set(made.tensors) == set(names)
            self.owned[f"global:{model}"] = set(names)
        self.broker.do(steering.close_check(model, check))

    def tried(self, call: Any, names: list[str], bring: bool) -> Any:
        """What the call gives, True for None; False when it is refused, as it must be for a tensor
        that is nowhere.
        """
        if bring or set(names) <= set().union(*self.owned.values(), set()):
            done = self.broker.do(call)
            return True if done is None else done
        with refuses(kind="conflict"):
            self.broker.do(call)
        return False

    @invariant()
    def what_is_owned_is_there_and_nothing_else(self) -> None:
        expected: dict[str, set[str]] = {}
        for owner, names in self.owned.items():
            for name in names:
                expected.setdefault(name, set()).add(owner)
        assert self.broker.do(pinned(self.broker.ledger)) == expected
        for name in expected:
            assert content_hash(self.broker.do(self.broker.steering.get_tensor(name))) == name
        for model in (MODEL, "m:2"):
            current = self.broker.do(self.broker.steering.current(model))
            assert current.version == self.current.get(model, 0)


@pytest.fixture
def broker(redis_url: str) -> Iterator[Broker]:
    loop = asyncio.new_event_loop()
    ledger = Ledger.connect(settings_for(redis_url))
    yield Broker(loop, ledger, LedgerSteering(ledger))
    loop.run_until_complete(ledger.close())
    loop.close()


@pytest.mark.parametrize("examples", [10, pytest.param(25, marks=pytest.mark.long)])
def test_tensors_are_pinned_exactly_while_referenced(broker: Broker, examples: int) -> None:
    Pins.broker = broker
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Pins,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
