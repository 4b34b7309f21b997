"""What a run's name means, whether it is ready, where its rows are and who keeps them, in a real
Redis and on a real disk.
"""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from capture_kit import HIDDEN, finished, write
from edge import model_info
from ledger_kit import (
    EPOCH,
    MODEL,
    WORKER,
    claimed,
    claimed_again,
    make_job,
    open_ledger,
    outputs,
    queued_job,
    receipt,
    settler,
    worker_info,
)
from refusal_kit import refuses

from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.named import source_runs as runs_module
from midstream.broker.ledger.named.source_runs import LedgerRuns
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Job, State
from midstream.schemas.requests.source_runs import RunFiles, RunRecord, RunView, run_key
from midstream.schemas.requests.specs import StoredCapture
from midstream.storage.file_store import DELETED
from midstream.workers.engine.protocol import Locate
from midstream.workers.serving.source_run_leases import LEASES, SourceRunLeases

SITES = {"pre_attn": [0, 2], "post_block": [0, 1, 2, 3]}
STAGES = [{"pre_attn": [0], "post_block": [0, 1]}, {"pre_attn": [2], "post_block": [2, 3]}]
TAG = "t"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "captures"


@pytest.fixture
def runs(ledger: Ledger) -> LedgerRuns:
    return LedgerRuns(ledger)


def run_job(prompts: int = 1, name: str = "clean", **changes: Any) -> Job:
    capture = StoredCapture(sites=SITES, positions="all", tag=TAG)
    return make_job(prompts, captures=[[capture]] * prompts, run=name, **changes)


async def finish(
    ledger: Ledger, url: str, job: Job, root: Path, layout: str = "packed", **changes: Any
) -> Job:
    """Let two stages capture all prompts of a submitted job, and end it."""
    attempt = await claimed_again(ledger, job, ranks=2)
    receipts = []
    for request in range(len(job.prompts)):
        for pp, sites in enumerate(STAGES):
            made = finished(
                job.id,
                request,
                sites,
                all_sites=SITES,
                layout=layout,
                tag=TAG,
                pp=pp,
                stages=2,
                **changes,
            )
            files = write(root, made, owner=f"w.{job.id[-6:]}.{request}.{pp}")
            receipts.append(receipt(job, request, rank=pp, tp=0, pp=pp, files=files))
    await ledger.store_outputs(job.id, attempt, outputs(len(job.prompts)))
    epoch = f"{EPOCH}{job.id[-6:]}"
    settler(url).settle(
        WORKER, 0, epoch, [(place + 1, told) for place, told in enumerate(receipts)]
    )
    return job


async def ready(
    ledger: Ledger, url: str, root: Path, prompts: int = 1, name: str = "clean", **changes: Any
) -> Job:
    job = run_job(prompts, name)
    await ledger.submit(job, {})
    await finish(ledger, url, job, root, **changes)
    assert (await ledger.view(job.id)).state is State.SUCCEEDED
    return job


def told(files: RunFiles) -> tuple[Any, ...]:
    """All of it, but the order of the files."""
    places = {(file.path, file.offset, file.bytes, file.crc32) for file in files.files}
    return files.key, files.sites, files.positions, files.hidden_size, files.bytes, places


async def named(runs: LedgerRuns, name: str = "clean") -> RunRecord:
    run = await runs.lookup(MODEL, name)
    assert run is not None
    return run


async def refusal(call: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(MidstreamError) as caught:
        await call
    return caught.value.kind, caught.value.detail


async def test_a_run_name_refers_to_the_last_accepted_job_with_that_name(
    ledger: Ledger, runs: LedgerRuns
) -> None:
    first = run_job()
    second = run_job()
    assert await ledger.submit(first, {}, ("key", "body")) == (first.id, True)
    run = await named(runs)
    assert run.job == first.id
    assert run.tag == TAG
    assert run.created == first.created
    assert (await ledger.view(first.id)).run == "clean"
    await ledger.submit(second, {})
    # The same submission once more, its answer was lost: no new job, and the name is not
    # turned back.
    assert await ledger.submit(run_job(), {}, ("key", "body")) == (first.id, False)
    assert (await named(runs)).job == second.id
    assert await runs.names(MODEL) == ["clean"]
    assert await runs.names("another") == []
    assert await runs.lookup("another", "clean") is None
    by_job = await named(runs, first.id)
    assert by_job.job == first.id
    assert by_job.tag == TAG
    assert await runs.lookup("another", first.id) is None
    user = await queued_job(ledger, runs={"clean": second.id})
    assert (await ledger.view(user.id)).runs == {"clean": second.id}
    assert (await ledger.view(user.id)).run == ""


async def test_a_run_is_pending_until_its_job_is_over_and_failed_with_its_reason(
    ledger: Ledger, runs: LedgerRuns, redis_url: str, tmp_path: Path
) -> None:
    job = run_job()
    attempt = await claimed(ledger, job)
    view = await runs.view(MODEL, "clean")
    assert view.state == "pending"
    assert view.detail == "its job is running"
    assert view.prompts is None
    run = await named(runs)
    assert (await runs.read(run)).prompts is None
    assert (await refusal(runs.files(run_key(job.id, 0, TAG))))[0] == "intervention_failed"
    await ledger.fail(
        job.id, attempt, MidstreamError("capture_failed", "the disk is full").problem()
    )
    view = await runs.view(MODEL, "clean")
    assert view.state == "failed"
    assert view.detail == "the disk is full"
    assert (await runs.read(run)).readiness.detail == "the disk is full"
    assert await refusal(runs.files(run_key(job.id, 0, TAG))) == (
        "intervention_failed",
        f"source run {run_key(job.id, 0, TAG)}: the disk is full",
    )
    partial = run_job(name="partial")
    await ledger.submit(partial, {})
    await finish(ledger, redis_url, partial, tmp_path / "captures", dropped=(3,))
    assert (await ledger.view(partial.id)).capture_status == "partial"
    assert (await runs.view(MODEL, "partial")).detail == "the status of its captures is partial"


@pytest.mark.parametrize("layout", ["packed", "per_file", "segment"])
async def test_rows_are_found_by_receipts_and_without_them_and_without_the_ledger(
    ledger: Ledger, runs: LedgerRuns, root: Path, redis_url: str, layout: str
) -> None:
    """A week later receipts are gone; two weeks later so is the job; and Redis may be lost
    altogether.
    """

    job = await ready(ledger, redis_url, root, prompts=2, layout=layout)
    # What an attempt left that was cut off: one stage of it, and later than the one that
    # counts.
    write(
        root,
        finished(
            job.id,
            1,
            STAGES[0],
            all_sites=SITES,
            layout=layout,
            tag=TAG,
            stages=2,
            attempt=2,
        ),
        owner="w.cut.0",
    )
    key = run_key(job.id, 1, TAG)
    by_receipts = await runs.files(key)
    assert by_receipts.sites == SITES
    assert by_receipts.positions == [0, 1, 2]
    assert by_receipts.hidden_size == HIDDEN
    assert by_receipts.bytes == 6 * 3 * HIDDEN * 2
    prompts = (await runs.view(MODEL, "clean")).prompts
    assert [(each.request, each.tokens, each.token_ids, each.dtype) for each in prompts] == [
        (0, 3, [100, 101, 102], "bfloat16"),
        (1, 3, [100, 101, 102], "bfloat16"),
    ]
    assert (await runs.read(await named(runs), [1])).prompts == prompts[1:]
    await ledger.redis.delete(f"ms:ticket:{job.id}")
    assert told(await runs.files(key)) == told(by_receipts)
    assert (await runs.view(MODEL, "clean")).prompts == prompts
    await ledger.redis.delete(f"ms:job:{job.id}")
    assert told(await runs.files(key)) == told(by_receipts)
    assert (await runs.view(MODEL, job.id)).state == "ready"
    await ledger.redis.flushall()
    assert told(await runs.files(key)) == told(by_receipts)
    kind, detail = await refusal(runs.files(run_key(job.id, 7, TAG)))
    assert kind == "intervention_failed"
    assert detail.endswith("no rows of this prompt were captured")
    mark = root / DELETED / job.id
    mark.mkdir(parents=True)  # only the disk knows that it is being deleted
    assert (await refusal(runs.files(key)))[1].endswith("were deleted")
    mark.rmdir()
    for path in root.rglob("*.pp1.*"):
        path.unlink()
    if layout != "segment":
        assert (await refusal(LedgerRuns(ledger).files(key)))[1].endswith(
            "post_block of layer 2 is in no file"
        )


# field case 31
async def test_deleted_runs_are_refused_by_name_and_key_after_their_records_are_gone(
    ledger: Ledger, runs: LedgerRuns, root: Path, redis_url: str
) -> None:
    job = await ready(ledger, redis_url, root)
    run = await named(runs)
    key = run_key(job.id, 0, TAG)
    await LedgerCaptures(ledger).delete(job.id)
    for forgotten in ("", f"ms:capture:{job.id}"):
        # long after the deletion its record is gone, too
        if forgotten:
            await ledger.redis.delete(forgotten, f"ms:job:{job.id}", f"ms:ticket:{job.id}")
        view = await runs.view(MODEL, "clean")
        assert view.state == "deleted"
        assert view.detail == "its captures were deleted"
        assert (await runs.read(run)).readiness.state == "deleted"
        assert (await refusal(runs.files(key)))[0] == "intervention_failed"
    await runs.delete(MODEL, "clean")
    assert await runs.lookup(MODEL, "clean") is None
    assert await refusal(runs.delete(MODEL, "clean")) == (
        "not_found",
        f"unknown source run 'clean' of model {MODEL!r}",
    )


async def test_run_names_of_deleted_captures_expire(
    ledger: Ledger, redis_url: str, tmp_path: Path
) -> None:
    runs = LedgerRuns(ledger)
    at = now()
    await ledger.publish_model(model_info(name=MODEL), worker_info())
    jobs = [
        await ready(ledger, redis_url, tmp_path / "captures", name=name) for name in ("old", "kept")
    ]
    await LedgerCaptures(ledger).delete(jobs[0].id)
    assert await runs.prune(at) == 0
    # as they expire
    await ledger.redis.delete(f"ms:capture:{jobs[0].id}", f"ms:job:{jobs[0].id}")
    assert await runs.prune(at + 60) == 0
    assert await runs.prune(at + runs_module.PRUNE_S) == 1
    assert await runs.names(MODEL) == ["kept"]


async def test_deleting_a_run_deletes_its_captures_and_a_name_that_still_refers_to_it(
    ledger: Ledger, runs: LedgerRuns, root: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await ready(ledger, redis_url, root)
    following = run_job()
    await ledger.submit(following, {})
    assert (await refusal(runs.delete(MODEL, "clean")))[0] == "conflict"
    assert await runs.names(MODEL) == ["clean"]
    await runs.delete(MODEL, job.id)
    assert (await LedgerCaptures(ledger).list()).captures[0].job == following.id
    assert await runs.names(MODEL) == ["clean"]
    await finish(ledger, redis_url, following, root)
    await runs.delete(MODEL, "clean")
    assert await runs.names(MODEL) == []
    assert (await LedgerCaptures(ledger).list()).captures == []
    assert not list(root.rglob("*.safetensors"))
    await ready(ledger, redis_url, root)
    delete = LedgerCaptures.delete
    last = run_job()

    async def and_meanwhile(captures: LedgerCaptures, job_id: str) -> None:
        await delete(captures, job_id)
        await ledger.submit(last, {})

    monkeypatch.setattr(LedgerCaptures, "delete", and_meanwhile)
    await runs.delete(MODEL, "clean")
    assert (await runs.view(MODEL, "clean")).job == last.id


async def test_runs_are_listed_newest_first_in_pages_with_what_became_of_each(
    ledger: Ledger, runs: LedgerRuns, root: Path, redis_url: str
) -> None:
    jobs = [await ready(ledger, redis_url, root, name=f"run-{number}") for number in range(3)]
    await ledger.submit(run_job(name="run-3"), {})
    await LedgerCaptures(ledger).delete(jobs[0].id)
    await ledger.heartbeat(worker_info())
    await runs.record_held(WORKER, [run_key(jobs[1].id, 0, TAG)], 60)
    await runs.lease({"job_user": [run_key(jobs[1].id, 0, TAG), run_key(jobs[1].id, 1, TAG)]}, 60)
    first = await runs.list(MODEL, limit=3)
    second = await runs.list(MODEL, limit=3, cursor=first.next)
    found: list[RunView] = [*first.runs, *second.runs]
    assert [(view.name, view.state) for view in found] == [
        ("run-3", "pending"),
        ("run-2", "ready"),
        ("run-1", "ready"),
        ("run-0", "deleted"),
    ]
    assert second.next is None
    assert [(view.in_use, view.held_by) for view in found] == [
        (0, []),
        (0, []),
        (1, [WORKER]),
        (0, []),
    ]
    assert found[1].bytes > 0


class Held:
    """The half of an engine that holds runs."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    @asynccontextmanager
    async def holding_runs(self, keys: list[str], locate: Locate) -> AsyncIterator[None]:
        self.keys += [(await locate(key)).key for key in keys]
        yield
        del self.keys[:]

    def held_runs(self) -> list[str]:
        return self.keys


# field case 36
async def test_a_run_in_use_does_not_expire(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path), capture_ttl_s=60) as ledger:
        captures = LedgerCaptures(ledger)
        runs = LedgerRuns(ledger)
        root = tmp_path / "captures"
        job = await ready(ledger, redis_url, root)
        later = now()

        def clock() -> float:
            return later

        monkeypatch.setattr(runs_module, "now", clock)
        monkeypatch.setattr(scripts, "now", clock)
        holds = SourceRunLeases(ledger, Held(), WORKER)  # type: ignore[arg-type]
        lease_s = ledger.settings.lease_s
        async with holds.holding("job_user", [run_key(job.id, 0, TAG)], {"clean": job.id}):
            for _ in range(200):  # many times as long as a lease
                later += lease_s / 3
                await holds.renew(runs)
                assert await captures.sweep(later) == []
            later += (LEASES - 1) * lease_s  # Redis was away meanwhile
            assert await captures.sweep(later) == []
            await holds.renew(runs)
            assert (await runs.view(MODEL, "clean")).in_use == 1
        assert (await runs.view(MODEL, "clean")).in_use == 0
        assert await captures.sweep(later) == [job.id]


async def test_a_dead_workers_lease_lapses_and_explicit_deletion_ignores_leases(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path), capture_ttl_s=60) as ledger:
        captures = LedgerCaptures(ledger)
        runs = LedgerRuns(ledger)
        root = tmp_path / "captures"
        jobs = [await ready(ledger, redis_url, root, name=name) for name in ("old", "wanted")]
        await runs.lease({"job_user": [run_key(job.id, 0, TAG) for job in jobs]}, 3600)
        await captures.delete(jobs[1].id)
        assert await captures.sweep(now() + 120) == []
        later = now() + 3601
        monkeypatch.setattr(scripts, "now", lambda: later)
        assert await captures.sweep(later) == [jobs[0].id]


async def test_a_job_is_told_which_of_its_runs_is_not_there_and_holds_nothing(
    ledger: Ledger, runs: LedgerRuns, root: Path, redis_url: str
) -> None:
    jobs = [await ready(ledger, redis_url, root, name=name) for name in ("here", "gone")]
    await runs.delete(MODEL, "gone")
    holds = SourceRunLeases(ledger, Held(), WORKER)  # type: ignore[arg-type]
    keys = [run_key(job.id, 0, TAG) for job in jobs]
    entered = False
    detail = f"run 'gone': source run {keys[1]}: its captures were deleted"
    with refuses(detail=detail):
        async with holds.holding("job_user", keys, {"here": jobs[0].id, "gone": jobs[1].id}):
            entered = True
    assert not entered
    assert (await runs.view(MODEL, "here")).in_use == 0
    assert await ledger.redis.keys("ms:run-lease:*") == []
