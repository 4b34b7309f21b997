"""Does a deleted capture stay deleted, whoever still writes for its job; does what is old go in
time; whom does a full quota stop?
"""

from pathlib import Path
from typing import Any

import pytest
from capture_kit import finished, write
from edge import Hand, running
from ledger_kit import (
    EPOCH,
    WORKER,
    claimed,
    make_job,
    open_ledger,
    outputs,
    queued_job,
    receipt,
    settler,
)
from refusal_kit import refuses

from midstream.broker.artifacts import retention
from midstream.broker.ledger.jobs import captures as captures_module
from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.client import CaptureReader
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Job, State
from midstream.schemas.requests.specs import CaptureSpec, StoredCapture
from midstream.storage.file_store import FileStore
from midstream.storage.store import open_store

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


@pytest.mark.parametrize("layout", ["packed", "segment"])
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
    assert (open_store(root).marks(), files_in(root)) == ([], [])
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
    assert (files_in(root), await ledger.redis.zcard("ms:deleting")) == ([], 0)


async def test_a_deletion_recorded_only_on_disk_is_completed(
    ledger: Ledger, captures: LedgerCaptures, root: Path
) -> None:
    """Redis has lost its last second."""

    write(root, finished("job_x", layout="packed"))
    (root / ".deleted" / "job_x").mkdir(parents=True)
    await captures.sweep(now())
    assert (files_in(root), open_store(root).marks()) == ([], ["job_x"])
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
        assert (files_in(tmp_path / "captures"), await here.redis.zcard("ms:deleting")) == ([], 0)


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
        assert (
            await captures.sweep(before + 99),
            await captures.sweep(now() + 101),
            (await captures.list()).captures,
        ) == ([], [job.id], [])


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
    body, key = (
        {"model": "tiny", "prompts": ["a"], "capture": {"layers": "all"}},
        {"Idempotency-Key": "k"},
    )
    with running(tmp_path, redis_url, capture_quota_mib=1) as api, Hand(api.settings):
        first = api.http.post("/v1/jobs", json=body, headers=key)
        filled(tmp_path, 2 << 20)
        api.stop()
        api.start()  # and measure again
        again = api.http.post("/v1/jobs", json=body, headers=key)
        assert (first.status_code, again.json()["id"]) == (202, first.json()["id"])
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
        plain, returned = (
            api.submit(),
            api.submit(
                capture={
                    "layers": [0],
                    "positions": "last_prompt",
                    "tag": "mine",
                    "consumers": ["memory"],
                }
            ),
        )
        assert [
            [capture.tag for capture in hand.claim(job_id).job.captures[:1] for capture in capture]
            for job_id in (plain, returned)
        ] == [[], ["mine"]]
        assert api.view(plain)["capture_status"] == "not_requested"
        assert api.http.post(
            "/v1/jobs", json={"model": "tiny", "prompts": ["a"], "capture": {"layers": "all"}}
        ).status_code == (202 if size < 1 << 20 else 507)
        assert api.log().count("global capture skipped") == 1
