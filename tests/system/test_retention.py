"""What is left in Redis of jobs whose time is over?

Nothing; and until then whoever asks is told that they are gone.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest
from ledger_kit import (
    BOOT,
    EPOCH,
    IDENTITY,
    WORKER,
    make_job,
    open_ledger,
    outputs,
    queued_job,
    receipt,
    settler,
    worker_info,
)
from sweep_rig import sweep, sweep_job

from midstream.broker.ledger.core.scripts import BLOB_TTL_FACTOR
from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.ledger.results import views
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.receipts import CapturedFile

#: Of the service and not of a job: what was ever served, whose lists there are, and how many jobs
#: came into each state.
STANDING = {"ms:models", "ms:owners", "ms:counts"}
#: Of a worker's stream of receipts.
MARK = b"ms:mark:"
RESULT_TTL_S = 60


async def test_an_expired_job_leaves_no_keys_and_its_reader_is_told_first(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "captures").mkdir()
    times = {"capture_ttl_s": 1, "capture_timeout_s": 0.1, "lease_s": 0.1}
    times["result_ttl_s"] = RESULT_TTL_S
    async with open_ledger(
        redis_url, data_dir=str(tmp_path), **{"tuning.dispatch_window": 1}, **times
    ) as ledger:
        settle = settler(redis_url, **times)
        name, vector = "0" * 64, Tensor(dtype="float32", shape=[1], data=b"\0\0\0\0")
        plain, late, unwanted = (
            make_job(tenant="a"),
            make_job(tenant="b", expires=now() + 0.1),
            make_job(tenant="b"),
        )
        captured = make_job(capture=True, steer=True)
        swept = msgspec.structs.replace(sweep_job(sweep(), "tiny"), tenant="a", identity=IDENTITY)
        await ledger.heartbeat(worker_info())
        await ledger.submit(plain, {}, ("k", "body"))
        await ledger.submit(late, {})
        await ledger.submit(unwanted, {})
        await ledger.submit(captured, {name: vector})
        await ledger.submit(swept, {})
        for job in (plain, captured, swept):
            assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY) is not None
        settle.settle(
            WORKER,
            0,
            EPOCH,
            [(1, receipt(captured, files=[CapturedFile(path="p", bytes=9, crc32=1, rows=1)]))],
        )
        assert (await ledger.request_cancel(unwanted.id)).state is State.ABORTED
        for job in (plain, captured, swept):
            assert await ledger.store_outputs(job.id, 1, outputs()) is State.SUCCEEDED
        await asyncio.sleep(0.1)
        assert (await Reaper(ledger, ledger.settings).sweep()).late == [late.id]
        monkeypatch.setattr(views, "now", lambda: now() + RESULT_TTL_S)
        for job in (plain, late, unwanted, captured, swept):
            assert (await ledger.view(job.id)).state == "expired"
            with pytest.raises(MidstreamError, match="deleted after"):
                await ledger.result(job.id)
        await Reaper(ledger, ledger.settings).sweep(now() + RESULT_TTL_S)
        with pytest.raises(MidstreamError, match="deleted"):
            await LedgerCaptures(ledger).check(captured.id)
        for key in await ledger.redis.keys("ms:*"):  # Redis deletes these by itself, soon enough
            ttl = await ledger.redis.ttl(key)
            if 0 < ttl <= BLOB_TTL_FACTOR * RESULT_TTL_S or (key.startswith(MARK) and ttl > 0):
                await ledger.redis.delete(key)
        await Reaper(ledger, ledger.settings).sweep(now() + 2 * RESULT_TTL_S)
        assert {key.decode() for key in await ledger.redis.keys("ms:*")} <= STANDING


async def test_expiry_of_a_busy_tenant_is_not_delayed_by_idle_ones(redis_url: str) -> None:
    async with open_ledger(redis_url, result_ttl_s=1) as ledger:
        await ledger.redis.sadd("ms:owners", *[f"t{number}" for number in range(100)])
        gone = {f"job_{number}": now() - 100 for number in range(3000)}
        for listed in ("ms:jobs", "ms:jobs:t7"):
            await ledger.redis.zadd(listed, gone)
        reaper = Reaper(ledger, ledger.settings)
        left = []
        for _ in range(2):
            await reaper._prune(now())
            left.append(
                (await ledger.redis.zcard("ms:jobs"), await ledger.redis.zcard("ms:jobs:t7"))
            )
        assert left == [(1000, 1000), (0, 0)]


async def test_a_dead_worker_is_forgotten_once_it_holds_nothing(redis_url: str) -> None:
    async with open_ledger(redis_url, lease_s=0.05, max_attempts=1) as ledger:
        for worker in ("holds", "idle"):
            await ledger.heartbeat(worker_info(worker))
        job = await queued_job(ledger)
        await ledger.claim(job.id, "holds", BOOT, 1, IDENTITY)
        await asyncio.sleep(0.1)
        assert sorted(await ledger.redis.hkeys("ms:workers")) == [b"holds", b"idle"]
        await ledger.redis.zadd("ms:live", {job.id: now() + 60})
        await Reaper(ledger, ledger.settings).sweep()
        assert await ledger.redis.hkeys("ms:workers") == [b"holds"], (
            "what it is known by decides what becomes of its jobs"
        )
        await Reaper(ledger, ledger.settings).sweep(now() + 100)
        await Reaper(ledger, ledger.settings).sweep()
        assert await ledger.redis.hkeys("ms:workers") == []
