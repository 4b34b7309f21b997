"""What may a tenant use, who says no, and when may it come again?

Limits in the commit that accepts, over HTTP and by the ledger.
"""

import random
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
from edge import MODEL, Hand, model_info, refused, running
from ledger_kit import (
    BOOT,
    EPOCH,
    IDENTITY,
    WORKER,
    make_job,
    open_ledger,
    outputs,
    put_module,
    queued_job,
    receipt,
    settler,
    worker_info,
)
from mortal_redis import mortal
from redis_kit import handed_over
from sweep_rig import sweep, sweep_job

from midstream.broker.ledger.core import scripts, tenants
from midstream.broker.ledger.core.job_room import room_of
from midstream.broker.ledger.core.memory_pressure import SAMPLE_S
from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.named.registry import Registry
from midstream.broker.ledger.named.steering import LedgerSteering
from midstream.broker.ledger.recovery.reaper import Reaper, UsageReconciliation
from midstream.schemas.access.keys import Limits, Tenant, scoped
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.jobs.jobs import Event, Job, Output, Sampling, State, TokenLogprob
from midstream.schemas.jobs.receipts import CapturedFile
from midstream.schemas.requests.steering import MODULES, Module, SteeringTemplate, content_digest
from midstream_ops import redis_server


async def not_taken(ledger: Ledger, job: Any, **more: Any) -> MidstreamError:
    with pytest.raises(MidstreamError) as told:
        await ledger.submit(job, {}, **more)
    return told.value


async def limited(ledger: Ledger, name: str = "t", **limits: Any) -> None:
    await ledger.tenants.put(Tenant(name=name, limits=Limits(**limits)))


async def counted_anew(ledger: Ledger) -> list[str]:
    count = UsageReconciliation(ledger, now())
    while (differed := await count.step()) is None:
        pass
    return differed


def sweep_of(tenant: str) -> Job:
    return msgspec.structs.replace(sweep_job(sweep(), "tiny"), tenant=tenant)


def a_file(size: int) -> CapturedFile:
    return CapturedFile(path="p", bytes=size, crc32=1, rows=1, layers=[0], positions=1)


class Clock:
    """What the ledger takes for the time; it stands until it is moved."""

    def __init__(self) -> None:
        self.time = 60.0 * (now() // 60)  # usage is counted by the minute

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(scripts, "now", made)
    monkeypatch.setattr(tenants, "now", made)
    return made


def of_tokens(prompts: int, most: int, **changes: Any) -> Job:
    """Of the tenant `t`; each prompt has three tokens."""
    return make_job(prompts, tenant="t", sampling=Sampling(max_tokens=most - 3), **changes)


async def test_requests_per_minute_limit_and_retry_after(ledger: Ledger, clock: Clock) -> None:
    await limited(ledger, requests_per_minute=60)
    for _ in range(60):  # a minute's worth at once
        await ledger.submit(make_job(tenant="t"), {})
    error = await not_taken(ledger, make_job(tenant="t"))
    assert error.kind == "rate_limited"
    assert error.retry_after == pytest.approx(1)
    await ledger.submit(make_job(tenant="other"), {})
    clock.time += 1
    await ledger.submit(make_job(tenant="t"), {})


async def test_tokens_per_minute_count_prompts_and_what_they_may_generate(
    ledger: Ledger, clock: Clock
) -> None:
    await limited(ledger, tokens_per_minute=600)
    await ledger.submit(of_tokens(3, 100), {})
    usage = await ledger.tenants.usage("t")
    assert usage.tokens_this_minute == 300
    assert usage.requests_this_minute == 1
    error = await not_taken(ledger, of_tokens(4, 100))
    assert error.retry_after == pytest.approx(10), "a hundred tokens too many, ten a second"
    await ledger.submit(of_tokens(2, 100), {})
    clock.time += 600
    await ledger.submit(of_tokens(60, 100), {})  # more than a minute's worth when idle is repaid
    error = await not_taken(ledger, of_tokens(1, 100))
    assert error.retry_after == pytest.approx(550), "600 s of debt, less what fits into a minute"


@pytest.mark.parametrize(
    ("limit", "jobs", "wait"),
    [({"requests_per_minute": 1}, 1, 60), ({"tokens_per_minute": 600}, 60, 550)],
)
async def test_a_clock_that_is_set_back_makes_nobody_wait_longer(
    ledger: Ledger, clock: Clock, limit: dict[str, int], jobs: int, wait: float
) -> None:
    await limited(ledger, **limit)
    await ledger.submit(of_tokens(jobs, 100), {})
    clock.time -= 3600
    error = await not_taken(ledger, of_tokens(1, 100))
    assert error.retry_after == pytest.approx(wait)
    clock.time += wait
    await ledger.submit(of_tokens(1, 100), {})


async def test_a_clock_that_is_behind_by_a_moment_forgives_nothing(
    ledger: Ledger, clock: Clock
) -> None:
    await limited(ledger, requests_per_minute=1)
    await ledger.submit(make_job(tenant="t"), {})
    clock.time -= 1  # in the minute before
    error = await not_taken(ledger, make_job(tenant="t"))
    assert error.retry_after == pytest.approx(61)


async def test_a_refused_or_repeated_submission_takes_nothing(ledger: Ledger, clock: Clock) -> None:
    await limited(ledger, requests_per_minute=2, tokens_per_minute=100, jobs_in_flight=2)
    job = of_tokens(1, 60)
    for repeated in (job, make_job(tenant="t"), make_job(tenant="t")):
        assert (await ledger.submit(repeated, {}, ("k", "body"))) == (job.id, repeated is job)
    for _ in range(3):
        assert "tokens" in (await not_taken(ledger, of_tokens(1, 60))).detail
    await ledger.submit(of_tokens(1, 4), {})
    for _ in range(3):
        assert (await not_taken(ledger, of_tokens(1, 4))).kind == "too_many_jobs"
    assert await ledger.submit(make_job(tenant="t"), {}, ("k", "body")) == (job.id, False), (
        "also while others are refused"
    )
    usage = await ledger.tenants.usage("t")
    assert usage.jobs_in_flight == 2
    assert usage.requests_this_minute == 2


async def test_cells_of_sweeps_are_counted_exactly_for_a_tenant_and_for_all(ledger: Ledger) -> None:
    size = sweep().num_cells
    await limited(ledger, sweep_cells=size)
    job = sweep_of("t")
    await ledger.submit(job, {})
    error = await not_taken(ledger, sweep_of("t"))
    assert error.kind == "too_many_cells"
    assert str(size) in error.detail
    await limited(ledger, "small", sweep_cells=size - 1)
    never = await not_taken(ledger, sweep_of("small"))
    assert never.kind == "invalid_request"
    assert never.field == "pairs"
    assert never.retry_after is None, "to wait would be in vain"
    await ledger.submit(make_job(tenant="t"), {})
    await ledger.submit(sweep_of("u"), {})
    await ledger.request_cancel(job.id)
    await ledger.submit(sweep_of("t"), {})


async def test_a_tenants_own_capture_files_count_until_they_are_deleted(
    redis_url: str, tmp_path: Path
) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        (tmp_path / "captures").mkdir()
        await limited(ledger, capture_mib=2)
        operators = make_job(capture=True, tenant="t")
        await ledger.submit(operators, {}, operator_tags=["t"])
        mine = await queued_job(ledger, capture=True, tenant="t")
        settle = settler(redis_url)
        for seq, job in enumerate((operators, mine), start=1):
            await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
            settle.settle(WORKER, 0, EPOCH, [(seq, receipt(job, files=[a_file(3 << 20)]))])
            await ledger.store_outputs(job.id, 1, outputs())
        assert (await ledger.tenants.usage("t")).capture_bytes == 3 << 20, (
            "what the operator captures costs nobody anything"
        )
        assert (await not_taken(ledger, make_job(capture=True, tenant="t"))).kind == "capture_limit"
        await ledger.submit(make_job(capture=True, tenant="t"), {}, operator_tags=["t"])
        await ledger.submit(make_job(tenant="t"), {})
        await LedgerCaptures(ledger).delete(mine.id)
        assert (await ledger.tenants.usage("t")).capture_bytes == 0
        await ledger.submit(make_job(capture=True, tenant="t"), {})


async def test_a_count_is_abandoned_when_redis_restarts_since_its_scan_cursors_are_invalid(
    tmp_path: Path,
) -> None:
    with mortal(tmp_path) as server:
        async with open_ledger(server.url) as ledger:
            await ledger.submit(make_job(tenant="t"), {})
            for steps in (1, 2):  # before all was looked at, and after
                count = UsageReconciliation(ledger, now())
                assert [await count.step() for _ in range(steps)] == [None] * steps
                await ledger.redis.hset("ms:usage", "t/jobs", 9)
                handed_over(server.url)
                server.kill()
                server.start()
                assert await count.step() == []
                assert await ledger.redis.hget("ms:usage", "t/jobs") == b"9"


async def test_an_abandoned_usage_count_changes_nothing(ledger: Ledger) -> None:
    await ledger.submit(make_job(tenant="t"), {})
    await ledger.redis.hset("ms:usage", "t/jobs", 9)
    first, second = (UsageReconciliation(ledger, now()) for _ in range(2))
    assert await first.step() is None
    for kept in ("ms:recount", "ms:recount-seen"):
        assert await ledger.redis.ttl(kept) > 0, "nobody may go on"
    assert await second.step() is None
    assert await first.step() == [], "another one has begun"
    while (told := await second.step()) is None:
        pass
    assert told == ["t/jobs: 9 instead of 1"]
    assert await ledger.redis.keys("ms:recount*") == []


# --- Named modules --------------------------------------------------------------------------------


def a_module(
    name: str, vectors: int = 1, tenant: str = "t", **changes: Any
) -> tuple[Module, dict[str, bytes | Tensor]]:
    """With so many vectors of 256 KiB, which no other has."""
    tensors = [
        from_numpy(np.full(1 << 16, zlib.crc32(f"{name} {number}".encode()) >> 8, np.float32))
        for number in range(vectors)
    ]
    blobs: dict[str, bytes | Tensor] = {content_hash(tensor): tensor for tensor in tensors}
    entries = [
        SteeringTemplate(
            layers=[0], hook="post_block", positions="all", family="add", tensors=[blob]
        )
        for blob in blobs
    ]
    fields: dict[str, Any] = {
        "name": scoped(tenant, name),
        "model": MODEL,
        "digest": content_digest(entries),
        "entries": entries,
        "bytes": vectors << 18,
        "created": now(),
    }
    return Module(**(fields | changes)), blobs


async def no_module(ledger: Ledger, *asked: Any, **changes: Any) -> MidstreamError:
    with pytest.raises(MidstreamError) as told:
        await put_module(ledger, *a_module(*asked, **changes))
    return told.value


async def test_a_tenants_module_limit_spans_models_and_deletion_makes_room(redis_url: str) -> None:
    async with open_ledger(redis_url, **{"limits.modules": 2}) as ledger:
        modules = Registry(ledger, MODULES)
        await put_module(ledger, *a_module("one"))
        await put_module(ledger, *a_module("two", model="another"))
        error = await no_module(ledger, "three")
        assert error.kind == "module_limit"
        assert error.status == 429
        assert error.retry_after is None
        assert "named modules of tenant t: 2; the limit is 2" in error.detail
        assert await modules.get(MODEL, "t/three") is None
        await put_module(ledger, *a_module("one", 2))
        await put_module(ledger, *a_module("three", tenant="u"))
        await put_module(ledger, *a_module("three", tenant="default"))
        await limited(ledger, modules=3)
        await put_module(ledger, *a_module("three"))
        assert (await ledger.tenants.usage("t")).modules == 3
        await limited(ledger, modules=1)
        await put_module(ledger, *a_module("two", 2, model="another"))
        await modules.delete("another", "t/two")
        await modules.delete(MODEL, "t/one")
        assert (await no_module(ledger, "one")).kind == "module_limit"
        await modules.delete(MODEL, "t/three")
        await put_module(ledger, *a_module("one"))
        await modules.delete(MODEL, "t/one")
        usage = await ledger.tenants.usage("t")
        assert usage.modules == 0
        assert usage.module_bytes == 0


async def test_a_module_that_replaces_another_needs_room_for_the_difference_only(
    redis_url: str,
) -> None:
    async with open_ledger(redis_url, **{"limits.module_mib": 2}) as ledger:
        large = a_module("one", 6)
        small = a_module("one", 1)
        await put_module(ledger, *large)  # of eight vectors, less what entries take
        error = await no_module(ledger, "two", 2)
        assert error.kind == "module_limit"
        assert error.retry_after is None
        assert "with this module of 1 MiB" in error.detail
        await put_module(ledger, *a_module("two", 1))
        assert (await no_module(ledger, "one", 7)).kind == "module_limit"
        await put_module(ledger, msgspec.structs.replace(large[0], description="the same"), {})
        await put_module(ledger, *small)
        usage = await ledger.tenants.usage("t")
        assert usage.modules == 2
        assert usage.module_bytes >> 18 == 2
        await put_module(ledger, *a_module("two", 6))
        never = await no_module(ledger, "three", 8)
        assert never.kind == "invalid_request"
        assert never.field == "steering"
        assert "is 3 MiB" in never.detail


async def test_the_next_count_lists_modules_stored_or_deleted_by_an_older_version(
    redis_url: str,
) -> None:
    async with open_ledger(redis_url, **{"limits.modules": 3}) as ledger:
        await ledger.publish_model(model_info(), worker_info())
        for module in (
            *map(a_module, ("one", "two", "three")),
            a_module("one", tenant="u"),
            a_module("one", tenant="default"),
        ):
            await put_module(ledger, *module)
        right = {tenant: await ledger.tenants.usage(tenant) for tenant in ("t", "u", "default")}
        assert await counted_anew(ledger) == []
        await ledger.redis.delete("ms:module-bytes:t", "ms:module-bytes:default")
        await ledger.redis.hset("ms:module-bytes:u", f"{MODEL}/u/gone", 5)
        assert sorted(told.partition(":")[0] for told in await counted_anew(ledger)) == [
            "default/module_bytes", "t/module_bytes", "u/module_bytes",
        ]  # fmt: skip
        assert {tenant: await ledger.tenants.usage(tenant) for tenant in right} == right
        assert (await no_module(ledger, "four")).kind == "module_limit"
        (size,) = await ledger.redis.hvals("ms:module-bytes:u")
        await ledger.redis.delete("ms:module-bytes:u")
        await ledger.redis.hset("ms:module-bytes:u", f"{MODEL}/u/two", size)
        await counted_anew(ledger)
        assert await ledger.redis.hkeys("ms:module-bytes:u") == [f"{MODEL}/u/one".encode()], (
            "another one of the same size, too"
        )
        await ledger.redis.hdel(f"ms:modules:{MODEL}", "u/one")
        await counted_anew(ledger)
        assert (await ledger.tenants.usage("u")).modules == 0


def test_a_full_queue_and_a_rate_limit_give_retry_after(redis_url: str, tmp_path: Path) -> None:
    limits = {"queue_limit": 1, "limits.requests_per_minute": 2}
    with running(tmp_path, redis_url, **limits) as api, Hand(api.settings) as hand:
        api.submit()
        overloaded = api.http.post("/v1/jobs", json={"model": MODEL, "prompts": ["hello"]})
        refused(overloaded, 503, kind="overloaded")
        assert int(overloaded.headers["retry-after"]) >= 1
        hand.claim_next()
        api.submit()
        hand.claim_next()
        hasty = api.http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})
        assert hasty.status_code == 429
        assert hasty.json()["type"] == "urn:midstream:rate_limited"
        assert 1 <= int(hasty.headers["retry-after"]) <= 30, "one request every thirty seconds"
        assert "its limit of requests per minute (2)" in hasty.json()["error"]["message"]


async def has_room(ledger: Ledger, job: Job) -> bool:
    """Whether the job was accepted; otherwise Redis is too full."""
    try:
        await ledger.submit(job, {})
    except MidstreamError as error:
        if "% full" not in error.detail:
            raise
        return False
    return True


async def until_redis_is_full(ledger: Ledger, **changes: Any) -> list[Job]:
    """Small jobs, each of another tenant, as many as are accepted."""
    await ledger.redis.config_set("maxmemory", 8 << 20)
    jobs = [make_job(**changes)]
    while await has_room(ledger, jobs[-1]):
        jobs.append(make_job(tenant=f"t{len(jobs)}", **changes))
    return jobs[:-1]


@pytest.mark.parametrize(("tokens", "logprobs"), [(4000, None), (1000, 5)])
async def test_small_jobs_are_accepted_only_while_their_large_outputs_have_room(
    tmp_path: Path, tokens: int, logprobs: int | None
) -> None:
    token = TokenLogprob(token_id=1 << 17, token="four", logprob=-0.25)
    alternatives = msgspec.structs.replace(token, top=[token] * (logprobs or 0))
    output = Output(
        index=0,
        text="four" * tokens,
        token_ids=[1 << 17] * tokens,
        finish_reason="length",
        prompt_tokens=3,
        logprobs=[alternatives] * tokens if logprobs else None,
    )
    sampling = Sampling(max_tokens=tokens, logprobs=logprobs)
    with mortal(tmp_path) as server:
        async with open_ledger(server.url) as ledger:
            accepted = await until_redis_is_full(ledger, sampling=sampling)
            assert len(accepted) > 5
            for job in accepted:
                claim = await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
                assert claim is not None
                stored = await ledger.store_outputs(job.id, claim.attempt, [output])
                assert stored is State.SUCCEEDED
            assert await ledger.redis.hget("ms:usage", "/room") == b"0"


async def test_small_jobs_are_accepted_only_while_their_events_have_room(tmp_path: Path) -> None:
    data = {"index": 0, "text": "four", "token_ids": [1 << 17], "finish_reason": None}
    tokens = 200
    with mortal(tmp_path) as server:
        async with open_ledger(server.url) as ledger:
            accepted = await until_redis_is_full(
                ledger, sampling=Sampling(max_tokens=tokens), stream=True
            )
            assert len(accepted) > 5
            for job in accepted:
                claim = await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
                assert claim is not None
                for number in range(1, tokens + 1):
                    said = Event(event="token", data=data, attempt=claim.attempt)
                    assert await ledger.emit(job.id, claim.attempt, number, said)
                stored = await ledger.store_outputs(job.id, claim.attempt, outputs(), text=tokens)
                assert stored is State.SUCCEEDED


async def test_a_tenants_jobs_leave_others_half_of_the_room(tmp_path: Path) -> None:
    large = Sampling(max_tokens=4000)
    with mortal(tmp_path) as server:
        async with open_ledger(server.url) as ledger:
            await ledger.redis.config_set("maxmemory", 8 << 20)
            kept = 0
            refusal = None
            while refusal is None:
                job = make_job(tenant="greedy", sampling=large)
                try:
                    await ledger.submit(job, {})
                    kept += room_of(job, ledger.settings)
                except MidstreamError as error:
                    refusal = error
            assert refusal.kind == "too_many_jobs"
            assert "unfinished jobs of tenant greedy may still store 3 MiB" in refusal.detail
            assert 2 << 20 < kept < 3 << 20
            for number in range(10):
                await ledger.submit(make_job(tenant=f"t{number}", sampling=large), {})


@pytest.mark.parametrize(
    ("field", "prompts", "sampling"),
    [
        ("sampling.max_tokens", 50, Sampling(max_tokens=4000)),
        ("sampling.logprobs", 2, Sampling(max_tokens=4000, logprobs=5)),
        ("prompts", 20_000, Sampling(max_tokens=1)),
    ],
)
async def test_a_job_that_never_fits_names_what_takes_most(
    tmp_path: Path, field: str, prompts: int, sampling: Sampling
) -> None:
    with mortal(tmp_path) as server:
        async with open_ledger(server.url) as ledger:
            await ledger.redis.config_set("maxmemory", 8 << 20)
            error = await not_taken(ledger, make_job(prompts, sampling=sampling))
            assert error.kind == "invalid_request"
            assert error.field == field
            assert "at most 3 MiB" in str(error.allowed)


def test_a_completion_that_never_fits_names_its_own_field(tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": ["hello"] * 64, "max_tokens": 4000}
    with mortal(tmp_path / "redis") as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 8 << 20)
        with running(tmp_path, server.url) as api, Hand(api.settings, max_model_len=20_000):
            answer = api.http.post("/v1/completions", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "max_tokens"
            fits = api.http.post("/v1/jobs", json={"model": MODEL, "prompts": ["hello"]})
            assert fits.status_code == 202


@pytest.mark.long
def test_submissions_are_refused_before_redis_is_full_and_accepted_jobs_finish(
    tmp_path: Path,
) -> None:
    server = redis_server.start(tmp_path / "redis")
    try:
        with (
            redis.Redis.from_url(server.url) as client,
            running(tmp_path, server.url) as api,
            Hand(api.settings, max_model_len=20_000) as hand,
        ):
            client.config_set("maxmemory", 20 << 20)
            letters = random.Random(0)  # their record must not become small where it is compressed
            body = {"model": MODEL, "prompts": ["".join(letters.choices("helo ", k=20_000))]}
            accepted = []
            while (answer := api.http.post("/v1/jobs", json=body)).status_code == 202:
                accepted.append(answer.json()["id"])
            refused(answer, 429, kind="too_many_jobs")
            assert int(answer.headers["retry-after"]) >= 1
            assert len(accepted) > 50
            assert client.info("memory")["used_memory"] < 0.9 * (20 << 20)
            again = api.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k"})
            assert again.status_code == 429, "nothing of it was kept"
            client.config_set("maxmemory", client.info("memory")["used_memory"] * 100 // 90)
            vector = dict(msgspec.to_builtins(from_numpy(np.ones(8, np.float32))))
            entries = {"steering": [{"layers": [0], "vector": vector}]}
            deadline = (
                time.monotonic() + 60 * SAMPLE_S
            )  # it has looked a moment ago, and may accept some until it looks again
            while (
                last := api.http.put(f"/v1/artifacts/modules/m{now()}", json=entries)
            ).status_code == 201:
                assert time.monotonic() < deadline
            for answer in (last, api.http.put("/v1/steering/global", json=entries)):
                refused(answer, 503, kind="overloaded")
            assert hand.do(LedgerSteering(hand.ledger).open_check(MODEL, [], {})), (
                "what steers everyone can be taken away all the same"
            )
            client.config_set("maxmemory", 20 << 20)
            for job_id in accepted:
                claim = hand.claim(job_id)
                assert (
                    hand.do(hand.ledger.store_outputs(job_id, claim.attempt, outputs()))
                    is State.SUCCEEDED
                )
    finally:
        server.stop()


def test_an_expired_deadline_is_504_for_held_requests(api: Any, hand: Hand) -> None:
    job_id = api.submit(expires_in=0.5)
    hand.do(Reaper(hand.ledger).sweep(now() + 1))
    refused(api.http.get(f"/v1/jobs/{job_id}/result"), 504, kind="not_started_in_time")
    assert api.view(job_id)["state"] == "aborted"
