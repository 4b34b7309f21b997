"""Does a deleted capture stay deleted, whoever still writes for its job; does what is old go in
time; whom does a full quota stop?

Of jobs whose time is over nothing is left in Redis; until then whoever asks is told that they are
gone.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from capture_kit import finished, write
from edge import Hand, running
from ledger_kit import (
    BOOT,
    EPOCH,
    IDENTITY,
    WORKER,
    claimed,
    claimed_again,
    error_of,
    make_job,
    open_ledger,
    outputs,
    queued_job,
    receipt,
    running_job,
    sent,
    settler,
    state_of,
    worker_info,
)
from refusal_kit import refuses
from sweep_rig import sweep, sweep_job

from midstream.broker.artifacts import retention
from midstream.broker.ledger.core.scripts import BLOB_TTL_FACTOR, SHELVED_S
from midstream.broker.ledger.jobs import captures as captures_module
from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.ledger.results import views
from midstream.client import CaptureReader
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.jobs.jobs import Job, State
from midstream.schemas.jobs.queues import COMPARISON_S, COMPARISONS
from midstream.schemas.jobs.receipts import STORE_UNAVAILABLE, CapturedFile
from midstream.schemas.requests.specs import CaptureSpec, StoredCapture
from midstream.storage.file_store import FileStore
from midstream.storage.store import open_store

LAYOUTS = ["packed", "segment"]
AGAIN = captures_module.SWEEP_AGAIN_S


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "captures"


@pytest.fixture
def captures(ledger: Ledger) -> LedgerCaptures:
    return LedgerCaptures(ledger)


async def ended(ledger: Ledger, url: str, sequence: int = 1, **changes: Any) -> Job:
    """A capturing job that has succeeded, with a receipt and no files."""
    job = make_job(capture=True, **changes)
    attempt = await claimed(ledger, job, ranks=1)
    await ledger.store_outputs(job.id, attempt, outputs())
    settler(url).settle(WORKER, 0, EPOCH, [(sequence, receipt(job))])
    assert (await ledger.view(job.id)).state is State.SUCCEEDED
    return job


async def ended_by_its_first_error(
    ledger: Ledger, url: str, end: str, root: Path
) -> tuple[Job, int]:
    """A job of two requests, over while the second is yet to be written; and the sequence number of
    the next receipt.
    """
    job = make_job(prompts=2, capture=True)
    attempt = await claimed(ledger, job, ranks=1)
    files = write(root, finished(job.id, 0, layout="packed"))
    if end == "error":
        settler(url).settle(
            WORKER, 0, EPOCH, [(1, receipt(job, 0, files=files, status="error", message="x"))]
        )
    else:
        settler(url).settle(WORKER, 0, EPOCH, [(1, receipt(job, 0, files=files))])
        await ledger.store_outputs(job.id, attempt, outputs(2))
        await ledger.request_cancel(job.id)
    assert (await ledger.view(job.id)).state is (
        State.FAILED if end == "error" else State.CANCELLED
    )
    return job, 2


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("end", ["error", "cancel"])
async def test_files_written_after_an_early_deletion_are_removed(
    ledger: Ledger, captures: LedgerCaptures, root: Path, redis_url: str, layout: str, end: str
) -> None:
    job, _ = await ended_by_its_first_error(ledger, redis_url, end, root)
    await captures.delete(job.id)
    deleted = now()
    write(root, finished(job.id, 1, layout=layout), owner="w.late.0")
    with refuses(kind="gone"):
        CaptureReader(root, job.id)
    await captures.sweep(deleted)
    assert files_in(root) == []
    write(root, finished(job.id, 1, layout=layout), owner="w.later.0")
    grace = 60 + captures_module.GRACE_LEASES * 15
    await captures.sweep(deleted + grace - AGAIN)
    assert open_store(root).marks() == [job.id]
    await captures.sweep(deleted + grace + 1)
    assert open_store(root).marks() == []
    assert files_in(root) == []
    assert await ledger.redis.zcard("ms:deleting") == 0


async def test_a_deletion_continues_while_receipts_arrive(
    ledger: Ledger,
    captures: LedgerCaptures,
    root: Path,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, sequence = await ended_by_its_first_error(ledger, redis_url, "error", root)
    await captures.delete(job.id)
    delete = retention.delete

    def and_then_written(*arguments: Any) -> list[str]:
        done = delete(*arguments)
        late = write(root, finished(job.id, 1), owner="w.late.0")
        settler(redis_url).settle(WORKER, 0, EPOCH, [(sequence, receipt(job, 1, files=late))])
        return done

    monkeypatch.setattr(retention, "delete", and_then_written)
    await captures.sweep(now() + 3600)
    monkeypatch.undo()
    await captures.sweep(now() + 3600 + AGAIN)
    assert files_in(root) == []
    assert await ledger.redis.zcard("ms:deleting") == 0


async def test_a_deletion_recorded_only_on_disk_is_completed(
    ledger: Ledger, captures: LedgerCaptures, root: Path
) -> None:
    """Redis has lost its last second."""

    write(root, finished("job_x", layout="packed"))
    (root / ".deleted" / "job_x").mkdir(parents=True)
    await captures.sweep(now())
    assert files_in(root) == []
    assert open_store(root).marks() == ["job_x"]
    await captures.sweep(now() + 3600)
    assert open_store(root).marks() == []


async def test_a_deletion_without_the_capture_root_is_left_to_a_process_with_it(
    redis_url: str, tmp_path: Path
) -> None:
    async with (
        open_ledger(redis_url, data_dir=str(tmp_path)) as here,
        open_ledger(redis_url, data_dir=str(tmp_path / "no")) as elsewhere,
    ):
        job = await ended(here, redis_url)
        write(tmp_path / "captures", finished(job.id))
        with refuses(match="their files are still on disk", kind="internal"):
            await LedgerCaptures(elsewhere).delete(job.id)
        with pytest.raises(OSError, match="no"):
            await LedgerCaptures(elsewhere).sweep(now() + 3600)
        assert files_in(tmp_path / "captures") != []
        await LedgerCaptures(here).sweep(now() + 3600)
        assert files_in(tmp_path / "captures") == []
        assert await here.redis.zcard("ms:deleting") == 0


async def test_undeletable_captures_do_not_block_other_deletions(
    ledger: Ledger,
    captures: LedgerCaptures,
    root: Path,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck, fine = [await ended(ledger, redis_url, n) for n in (1, 2)]
    write(root, finished(stuck.id, layout="packed"), finished(fine.id, layout="packed"))
    for job in (stuck, fine):
        await captures.delete(job.id)
    unmark = FileStore.unmark

    def refusing(store: FileStore, name: str) -> None:
        if name == stuck.id:
            raise PermissionError(13, "Permission denied")
        unmark(store, name)

    monkeypatch.setattr(FileStore, "unmark", refusing)
    with pytest.raises(OSError, match="Permission denied"):
        await captures.sweep(now() + 3600)
    assert [name.decode() for name in await ledger.redis.zrange("ms:deleting", 0, -1)] == [stuck.id]


@pytest.mark.parametrize("end", ["succeeded", "aborted"])
async def test_the_age_of_captures_counts_from_the_end_of_their_job(
    redis_url: str, tmp_path: Path, end: str
) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path), capture_ttl_s=100) as ledger:
        captures = LedgerCaptures(ledger)
        (tmp_path / "captures").mkdir()
        accepted = now() - 5000  # it was queued for long
        before = now()
        if end == "succeeded":
            job = await ended(ledger, redis_url, created=accepted)
        else:
            job = await queued_job(ledger, capture=True, created=accepted)
            await ledger.request_cancel(job.id)
        assert await captures.sweep(before + 99) == []
        assert await captures.sweep(now() + 101) == [job.id]
        assert (await captures.list()).captures == []


async def test_captures_of_a_killed_gradient_worker_are_deleted_without_a_ttl(
    ledger: Ledger, redis_url: str, captures: LedgerCaptures, root: Path
) -> None:
    root.mkdir()
    of_tenant = await ended(ledger, redis_url)
    left = await ended(ledger, redis_url, 2, tenant=COMPARISONS)
    assert await captures.sweep(left.created + COMPARISON_S - 1) == []
    assert await captures.sweep(left.created + COMPARISON_S + 1) == [left.id]
    assert [entry.job for entry in (await captures.list()).captures] == [of_tenant.id]


async def test_only_captures_in_files_are_kept_for_expiry(redis_url: str, tmp_path: Path) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path), capture_ttl_s=100) as ledger:
        returned = StoredCapture(
            sites={"post_block": [0]}, positions="all", tag="t", consumers=["memory"]
        )
        await ended(ledger, redis_url, captures=[[returned]])
        assert await ledger.redis.zcard("ms:captured") == 0


# --- Quota ---


def filled(directory: Path, size: int) -> None:
    (directory / "captures").mkdir()
    (directory / "captures" / "earlier").write_bytes(bytes(size))


@pytest.mark.long
def test_idempotent_submission_ignores_a_full_capture_quota(redis_url: str, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompts": ["a"], "capture": {"layers": "all"}}
    key = {"Idempotency-Key": "k"}
    with running(tmp_path, redis_url, capture_quota_mib=1) as api, Hand(api.settings):
        first = api.http.post("/v1/jobs", json=body, headers=key)
        filled(tmp_path, 2 << 20)
        api.stop()
        api.start()  # and measure again
        again = api.http.post("/v1/jobs", json=body, headers=key)
        assert first.status_code == 202
        assert again.json()["id"] == first.json()["id"]
        assert (
            api.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "other"}).status_code
            == 507
        )
        assert (
            api.http.post("/v1/jobs", json={**body, "prompts": ["b"]}, headers=key).json()["type"]
            == "urn:midstream:idempotency_mismatch"
        )


# a user's capture would still have room in the first
@pytest.mark.long
@pytest.mark.parametrize("size", [(1 << 20) - (20 << 10), 2 << 20])
def test_a_full_quota_skips_global_captures_and_refuses_no_job_without_captures(
    redis_url: str, tmp_path: Path, size: int
) -> None:
    filled(tmp_path, size)
    with (
        running(tmp_path, redis_url, capture_quota_mib=1) as api,
        Hand(api.settings, global_captures=[CaptureSpec(tag="ops")]) as hand,
    ):
        plain = api.submit()
        returned = api.submit(
            capture={
                "layers": [0],
                "positions": "last_prompt",
                "tag": "mine",
                "consumers": ["memory"],
            }
        )
        tags = [
            [capture.tag for captures in hand.claim(job_id).job.captures for capture in captures]
            for job_id in (plain, returned)
        ]
        assert tags == [[], ["mine"]]
        assert api.view(plain)["capture_status"] == "not_requested"
        assert api.http.post(
            "/v1/jobs", json={"model": "tiny", "prompts": ["a"], "capture": {"layers": "all"}}
        ).status_code == (202 if size < 1 << 20 else 507)
        assert api.log().count("global capture skipped") == 1


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
        name = "0" * 64
        vector = Tensor(dtype="float32", shape=[1], data=b"\0\0\0\0")
        plain = make_job(tenant="a")
        late = make_job(tenant="b", expires=now() + 0.1)
        unwanted = make_job(tenant="b")
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
        assert (await Reaper(ledger).sweep()).late == [late.id]
        monkeypatch.setattr(views, "now", lambda: now() + RESULT_TTL_S)
        for job in (plain, late, unwanted, captured, swept):
            assert (await ledger.view(job.id)).state == "expired"
            with pytest.raises(MidstreamError, match="deleted after"):
                await ledger.result(job.id)
        await Reaper(ledger).sweep(now() + RESULT_TTL_S)
        with pytest.raises(MidstreamError, match="deleted"):
            await LedgerCaptures(ledger).check(captured.id)
        for key in await ledger.redis.keys("ms:*"):  # Redis deletes these by itself, soon enough
            ttl = await ledger.redis.ttl(key)
            if 0 < ttl <= BLOB_TTL_FACTOR * RESULT_TTL_S or (key.startswith(MARK) and ttl > 0):
                await ledger.redis.delete(key)
        await Reaper(ledger).sweep(now() + 2 * RESULT_TTL_S)
        assert {key.decode() for key in await ledger.redis.keys("ms:*")} <= STANDING


async def test_expiry_of_a_busy_tenant_is_not_delayed_by_idle_ones(redis_url: str) -> None:
    async with open_ledger(redis_url, result_ttl_s=1) as ledger:
        await ledger.redis.sadd("ms:owners", *[f"t{number}" for number in range(100)])
        gone = {f"job_{number}": now() - 100 for number in range(3000)}
        for listed in ("ms:jobs", "ms:jobs:t7"):
            await ledger.redis.zadd(listed, gone)
        reaper = Reaper(ledger)
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
        await Reaper(ledger).sweep()
        assert await ledger.redis.hkeys("ms:workers") == [b"holds"], (
            "what it is known by decides what becomes of its jobs"
        )
        await Reaper(ledger).sweep(now() + 100)
        await Reaper(ledger).sweep()
        assert await ledger.redis.hkeys("ms:workers") == []


# --- Jobs that wait for their artifact store ------------------------------------------------------


def refuse(redis_url: str, job: Job, attempt: int = 1, **settings: float) -> None:
    told = receipt(
        job,
        attempt=attempt,
        status="error",
        kind=STORE_UNAVAILABLE,
        message="write failed: it cannot be reached",
    )
    settler(redis_url, **settings).settle(WORKER, 0, f"{EPOCH}{attempt}", [(1, told)])


async def test_a_job_whose_rows_the_store_did_not_take_is_queued_again(redis_url: str) -> None:
    async with open_ledger(redis_url, max_attempts=2) as ledger:
        reaper = Reaper(ledger)
        job = await running_job(ledger, ranks=1, capture=True)
        await ledger.store_outputs(job.id, 1, outputs(1))
        await ledger.redis.delete(*await ledger.redis.keys("midstream.*"))
        for attempt in range(1, 6):  # more than `max_attempts`
            refuse(redis_url, job, attempt)
            assert await state_of(ledger, job) is State.QUEUED
            assert await sent(ledger) == [], "it has no message before it is due"
            assert await ledger.redis.scard(f"ms:sent:{job.model}:3") == 0, (
                "it takes no place in the window"
            )
            await reaper.sweep(now() + SHELVED_S - 1)
            assert await sent(ledger) == []
            await reaper.sweep(now() + SHELVED_S + 1)
            assert [message.job_id for message in await sent(ledger)] == [job.id]
            assert not await ledger.redis.hexists(f"ms:job:{job.id}", "shelved"), (
                "it is one of the queue again"
            )
            await ledger.redis.delete(*await ledger.redis.keys("midstream.*"))
            assert await claimed_again(ledger, job) == attempt + 1
        assert await ledger.release(job.id, 6) is State.QUEUED, (
            "what the store did is not held against it"
        )
        await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
        assert await ledger.release(job.id, 7) is State.FAILED, "the losses of its worker are"


async def test_a_worker_whose_store_takes_nothing_leaves_captures_in_the_queue(
    ledger: Ledger, reaper: Reaper
) -> None:
    job = make_job(capture=True)
    other = make_job()
    for each in (job, other):
        await ledger.submit(each, {})
    assert (
        await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
        is None
    )
    assert (
        await ledger.claim(other.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
        is not None
    )
    view = await ledger.view(job.id)
    assert view.state == State.QUEUED
    assert view.attempt == 0
    await ledger.redis.delete(*await ledger.redis.keys("midstream.*"))
    await reaper.sweep(now() + SHELVED_S + 1)
    assert [message.job_id for message in await sent(ledger)] == [job.id]
    assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY) is not None


async def test_a_job_waits_for_the_store_as_long_as_the_setting_says(redis_url: str) -> None:
    async with open_ledger(redis_url, artifact_wait_s=0.05) as ledger:
        running = make_job(capture=True)
        queued = make_job(capture=True)
        await claimed(ledger, running, ranks=1)
        await ledger.submit(queued, {})
        refuse(redis_url, running, artifact_wait_s=0.05)
        await ledger.claim(queued.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
        await asyncio.sleep(0.1)
        assert (await ledger.claim(running.id, WORKER, BOOT, 1, IDENTITY)) is not None
        refuse(redis_url, running, 2, artifact_wait_s=0.05)
        await ledger.claim(queued.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
        for job in (running, queued):
            error = await error_of(ledger, job)
            assert error.type == "urn:midstream:capture_failed"
            assert "it cannot be reached; the job has waited 0.05 s" in error.detail


async def test_a_job_that_waits_for_the_store_keeps_its_own_deadline(
    ledger: Ledger, reaper: Reaper
) -> None:
    job = await queued_job(ledger, capture=True, expires=now() + 3)
    await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
    assert (await reaper.sweep(now() + 1)).late == []
    assert (await reaper.sweep(now() + 4)).late == [job.id]


async def test_a_job_that_could_not_read_the_store_waits_for_it(redis_url: str) -> None:
    async with open_ledger(redis_url, artifact_wait_s=0.05, max_attempts=1) as ledger:
        job = make_job()
        cancelled = make_job()
        await claimed(ledger, job, ranks=1)
        await ledger.redis.delete(*await ledger.redis.keys("midstream.*"))
        assert await ledger.release(job.id, 1, unreachable="it cannot be reached") is State.QUEUED
        assert await sent(ledger) == [], "it has no message before it is due"
        assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY) is not None
        await asyncio.sleep(0.1)
        assert await ledger.release(job.id, 2, unreachable="it cannot be reached") is State.FAILED
        error = await error_of(ledger, job)
        assert error.type == "urn:midstream:intervention_failed"
        assert "it cannot be reached; the job has waited 0.05 s" in error.detail
        await claimed(ledger, cancelled, ranks=1)
        await ledger.request_cancel(cancelled.id)
        assert (
            await ledger.release(cancelled.id, 1, unreachable="it cannot be reached")
            is State.CANCELLED
        )
