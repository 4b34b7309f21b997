"""When is a job's ticket settled, by which receipts, and is each counted once?"""

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
import redis
from ledger_kit import (
    BOOT,
    EPOCH,
    IDENTITY,
    MODEL,
    WORKER,
    claimed,
    make_job,
    open_ledger,
    outputs,
    receipt,
    sent,
    settler,
    worker_info,
)

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.named.steering import Steering
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.jobs import CaptureResults, Job, JobResult, State
from midstream.schemas.jobs.receipts import CapturedFile, Consumed, LostRange


def file(path: str = "t/j/p0000.a1.pp0.safetensors", **changes: Any) -> CapturedFile:
    facts: dict[str, Any] = {
        "bytes": 64,
        "crc32": 123,
        "rows": 4,
        "positions": 2,
        "sites": {"post_block": [0, 1]},
    }
    return CapturedFile(path, **(facts | changes))


async def state_of(ledger: Ledger, job: Job) -> State:
    return (await ledger.view(job.id)).state


#: One prompt-rank grid of 2 x 2 and the outputs: every order in which they may come.
ARRIVALS = [(0, 0), (0, 1), (1, 0), (1, 1), "outputs"]


@pytest.mark.parametrize("order", list(itertools.permutations(ARRIVALS))[::7])
async def test_a_job_succeeds_once_outputs_and_all_receipts_are_there(
    redis_url: str, order: tuple[object, ...]
) -> None:
    # field case 18: not with the first stage, not with the first prompt of a batch
    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=2, capture=True)
        await claimed(ledger, job, ranks=2)
        settle = settler(redis_url)
        for place, arrival in enumerate(order):
            view = await ledger.view(job.id)
            assert (view.state, view.capture_status) == (State.RUNNING, "pending")
            assert (view.generated is not None) == ("outputs" in order[:place])
            if arrival == "outputs":
                await ledger.store_outputs(job.id, 1, outputs(2))
            else:
                request, rank = arrival  # type: ignore[misc]
                settle.settle(
                    WORKER,
                    rank,
                    EPOCH + str(place),
                    [(1, receipt(job, request, rank, pp=rank, files=[file()]))],
                )
        result = await ledger.result(job.id)
        assert result.state is State.SUCCEEDED
        assert result.capture_results.status == "ok"
        assert len(result.capture_results.files) == 4
        assert (result.capture_results.bytes, result.capture_results.rows) == (4 * 64, 4 * 4)
        assert result.determinism is not None
        assert [stage.pp for stage in result.determinism.stages] == [0, 1]


async def test_a_job_that_asked_for_nothing_succeeds_with_its_outputs(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job()
        await claimed(ledger, job)
        await ledger.store_outputs(job.id, 1, outputs())
        result = await ledger.result(job.id)
        assert result.state is State.SUCCEEDED
        assert result.capture_results.status == "not_requested"
        assert result.determinism is None


async def test_a_settled_job_does_not_wait_for_another(redis_url: str) -> None:  # field case 20
    async with open_ledger(redis_url) as ledger:
        jobs = [make_job(capture=True) for _ in range(2)]
        for job in jobs:
            await claimed(ledger, job, ranks=1)
            await ledger.store_outputs(job.id, 1, outputs())
        settler(redis_url).settle(WORKER, 0, EPOCH, [(1, receipt(jobs[0]))])
        assert await state_of(ledger, jobs[0]) is State.SUCCEEDED
        assert await state_of(ledger, jobs[1]) is State.RUNNING


DIFFERENT = [{"checksum": "0000000000000001"}, {"actions": 4}, {"epoch": 1}, {"applied": 7}]


@pytest.mark.parametrize("changed", DIFFERENT)
async def test_ranks_of_a_stage_that_disagree_fail_the_job_at_once(
    redis_url: str, changed: dict[str, object]
) -> None:
    # field case 29
    async with open_ledger(redis_url, on_desync="fail") as ledger:
        job = make_job(prompts=2, steer=True)
        await claimed(ledger, job)
        settle = settler(redis_url, on_desync="fail")
        settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, 0, 0))])
        settle.settle(WORKER, 1, EPOCH, [(1, receipt(job, 0, 1, **changed))])
        view = await ledger.view(job.id)
        assert view.state is State.FAILED
        assert view.error is not None
        assert view.error.type == "urn:midstream:ranks_disagree"
        assert "rank 0" in view.error.detail
        assert "rank 1" in view.error.detail
        assert "fedcba9876543210" in view.error.detail
        assert ("ledger number 1" in view.error.detail) == ("epoch" in changed)
        assert ("7 edited rows" in view.error.detail) == ("applied" in changed)
        result = await ledger.result(job.id)
        assert result.determinism is not None
        assert not result.determinism.consistent
        assert {rank.checksum for rank in result.determinism.stages[0].ranks} == {
            "fedcba9876543210",
            changed.get("checksum", "fedcba9876543210"),
        }


@pytest.mark.parametrize("changed", DIFFERENT)
async def test_ranks_that_disagree_cost_the_job_one_attempt_and_the_next_says_why(
    redis_url: str, changed: dict[str, object]
) -> None:
    # field case 29, 30
    async with open_ledger(redis_url) as ledger:
        job = make_job(steer=True)
        await claimed(ledger, job)
        settle = settler(redis_url)
        await ledger.store_outputs(job.id, 1, outputs())
        settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, 0, 0))])
        settle.settle(WORKER, 1, EPOCH, [(1, receipt(job, 0, 1, **changed))])
        assert settle.counts.disagreements == 1
        told = [
            event.data["status"]
            for event in await ledger.events(job.id)
            if event.event == "receipt"
        ]
        assert told == ["ok", "disagrees"], "the first receipt concerned is marked"
        view = await ledger.view(job.id)
        assert (view.state, view.receipts, view.generated) == (State.QUEUED, 0, None)
        assert (await sent(ledger))[-1][:2] == (job.id, 1), "its message is sent in the same commit"
        assert await ledger.redis.hget("ms:desync", WORKER) is not None
        assert await ledger.claim(job.id, "w2", BOOT, 2, IDENTITY) is not None
        for rank in (0, 1):
            settle.settle("w2", rank, EPOCH, [(1, receipt(job, 0, rank, attempt=2, worker="w2"))])
        await ledger.store_outputs(job.id, 2, outputs())
        result = await ledger.result(job.id)
        assert (result.state, result.attempt) == (State.SUCCEEDED, 2)
        assert result.determinism is not None
        assert result.determinism.consistent
        (reason,) = result.determinism.retried
        assert reason.startswith(
            "request 0, stage 0: rank 0 reports checksum fedcba9876543210 after 3 actions"
        )


async def test_a_job_whose_ranks_disagree_twice_fails(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(steer=True)
        await claimed(ledger, job)
        settle = settler(redis_url)
        for attempt, worker in ((1, WORKER), (2, "w2")):
            if attempt == 2:
                assert await ledger.claim(job.id, worker, BOOT, 2, IDENTITY) is not None
            settle.settle(worker, 0, EPOCH, [(1, receipt(job, attempt=attempt, worker=worker))])
            settle.settle(
                worker,
                1,
                EPOCH,
                [(1, receipt(job, rank=1, attempt=attempt, worker=worker, actions=4))],
            )
        view = await ledger.view(job.id)
        assert view.state is State.FAILED
        assert view.error is not None
        assert view.error.type == "urn:midstream:ranks_disagree"


async def test_a_cancelled_job_whose_ranks_disagree_is_not_run_again(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(steer=True)
        await claimed(ledger, job)
        await ledger.request_cancel(job.id)
        assert await ledger.desync_release(job.id, 1, "rank 1 differs") is State.CANCELLED
        assert await ledger.desync_release(job.id, 1, "rank 1 differs") is None


async def test_attempts_abandoned_for_desync_are_retried_once(redis_url: str) -> None:
    for on_desync, after in (("retry", State.QUEUED), ("fail", State.FAILED)):
        async with open_ledger(redis_url, on_desync=on_desync) as ledger:
            job = make_job(steer=True)
            await claimed(ledger, job)
            assert await ledger.desync_release(job.id, 1, "rank 1 differs") is after
            assert await ledger.desync_release(job.id, 1, "rank 1 differs") is None, "stale"
            if after is State.QUEUED:
                assert await ledger.claim(job.id, WORKER, BOOT, 2, IDENTITY) is not None
                assert await ledger.desync_release(job.id, 2, "rank 1 differs") is State.FAILED, (
                    "once only"
                )
                result = await ledger.result(job.id)
                assert result.determinism is not None
                assert result.determinism.retried == ["rank 1 differs"]


async def test_late_receipts_of_ledgers_that_are_settled_do_not_mark_the_worker_again(
    redis_url: str,
) -> None:
    async with open_ledger(redis_url) as ledger:
        steering, settle = Steering(ledger), settler(redis_url)

        async def disagree(seq: int, boot: str, epoch: int) -> bool:
            job = make_job(steer=True)
            await claimed(ledger, job)
            for rank in (0, 1):
                told = receipt(
                    job, 0, rank, worker=WORKER, boot=boot, epoch=epoch, actions=3 + rank
                )
                settle.settle(WORKER, rank, EPOCH, [(seq, told)])
            return (await steering.look(MODEL, WORKER)).desync != ""

        assert await disagree(1, BOOT, 0)
        await steering.clear_desync(WORKER, BOOT, 1)
        assert not await disagree(2, BOOT, 0)
        assert await disagree(3, BOOT, 1)
        await steering.clear_desync(WORKER, BOOT, 2)
        await ledger.heartbeat(worker_info(boot="boot2"))
        assert not await disagree(4, BOOT, 7), "of a former start"
        assert await disagree(5, "boot2", 0)


async def test_stages_and_requests_may_differ_in_their_checksums(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=2, steer=True)
        await claimed(ledger, job, ranks=2)
        told = [
            receipt(job, request, rank, pp=rank, checksum=f"{request}{rank}" * 8)
            for request in (0, 1)
            for rank in (0, 1)
        ]
        settler(redis_url).settle(WORKER, 0, EPOCH, list(enumerate(told, 1)))
        await ledger.store_outputs(job.id, 1, outputs(2))
        assert await state_of(ledger, job) is State.SUCCEEDED


@pytest.mark.parametrize(
    ("asked", "kind", "expected"),
    [
        ({"capture": True}, "", "capture_failed"),
        ({"steer": True}, "", "intervention_failed"),
        ({"capture": True, "steer": True}, "intervention_failed", "intervention_failed"),
        ({"capture": True, "steer": True}, "", "capture_failed"),
    ],
)
async def test_an_error_of_one_rank_fails_the_job_with_rank_and_reason(
    redis_url: str, asked: dict[str, bool], kind: str, expected: str
) -> None:
    # field case 19, 29
    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=2, **asked)  # type: ignore[arg-type]
        await claimed(ledger, job)
        settler(redis_url).settle(
            WORKER,
            1,
            EPOCH,
            [
                (1, receipt(job, 1, 1, status="error", kind=kind, message='disk "full" \\ é')),
                (2, receipt(job, 0, 1)),
            ],
        )
        view = await ledger.view(job.id)
        assert view.state is State.FAILED
        assert view.error is not None
        assert view.error.type == f"urn:midstream:{expected}"
        assert view.error.status == 500
        assert view.error.detail == 'request 1, rank 1 (stage 0): disk "full" \\ é'
        assert view.capture_status == ("error" if "capture" in asked else "not_requested")


async def test_a_partial_receipt_makes_the_capture_partial_and_never_ok(redis_url: str) -> None:
    # field case 19
    async with open_ledger(redis_url) as ledger:
        job = make_job(capture=True)
        await claimed(ledger, job)
        settle = settler(redis_url)
        settle.settle(
            WORKER, 0, EPOCH, [(1, receipt(job, 0, 0, status="partial", message="2 of 4 rows"))]
        )
        settle.settle(WORKER, 1, EPOCH, [(1, receipt(job, 0, 1))])
        await ledger.store_outputs(job.id, 1, outputs())
        results = (await ledger.result(job.id)).capture_results
        assert results.status == "partial"
        assert "2 of 4 rows" in results.detail


async def test_a_repeated_batch_is_counted_once(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=3, capture=True)
        await claimed(ledger, job, ranks=1)
        settle = settler(redis_url)
        batch = [(seq, receipt(job, seq - 1)) for seq in (1, 2)]
        assert settle.settle(WORKER, 0, EPOCH, batch) == 2
        assert settle.settle(WORKER, 0, EPOCH, batch) == 2
        assert settle.settle(WORKER, 0, EPOCH, [(2, receipt(job, 1)), (1, receipt(job, 0))]) == 2
        assert settle.settle(WORKER, 0, "another epoch", batch) == 2, (
            "what a rank had told already, from a new outbox"
        )
        assert (settle.counts.applied, settle.counts.duplicate) == (2, 6)
        assert (await ledger.view(job.id)).receipts == 2
        assert (
            len([event for event in await ledger.events(job.id) if event.event == "receipt"]) == 2
        )


async def test_a_batchs_counts_are_added_once_and_reverted_where_its_ranks_disagree(
    redis_url: str,
) -> None:
    async with open_ledger(redis_url) as ledger:
        ill, well = (
            make_job(prompts=3, capture=True, tenant="ill"),
            make_job(capture=True, tenant="well"),
        )
        await claimed(ledger, ill)
        await claimed(ledger, well)
        settle = settler(redis_url)
        told = [
            receipt(ill, 0, 0, files=[file()]),
            receipt(well, 0, 0, files=[file(), file(rows=5)]),
            receipt(ill, 1, 0, files=[file()]),
            receipt(ill, 0, 1, files=[file()], actions=4),
            receipt(ill, 2, 0, files=[file()]),
            receipt(well, 0, 1, files=[file()]),
        ]
        settle.settle(WORKER, 0, EPOCH, list(enumerate(told, 1)))
        assert (settle.counts.applied, settle.counts.stale) == (5, 1), (
            "what follows the disagreement is stale"
        )
        for job, state, receipts, size, rows in (
            (ill, State.QUEUED, 0, 0, 0),
            (well, State.RUNNING, 2, 3 * 64, 13),
        ):
            view = await ledger.view(job.id)
            assert (view.state, view.receipts) == (state, receipts)
            assert await ledger.redis.hmget(f"ms:capture:{job.id}", "bytes", "rows") == [
                b"%d" % size,
                b"%d" % rows,
            ]
            assert (await ledger.tenants.usage(job.tenant)).capture_bytes == size


async def test_a_gap_holds_the_mark_until_it_is_filled(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=4, capture=True)
        await claimed(ledger, job, ranks=1)
        settle = settler(redis_url)
        assert settle.mark(WORKER, 0, EPOCH) == 0
        assert (
            settle.settle(
                WORKER,
                0,
                EPOCH,
                [(1, receipt(job, 0)), (3, receipt(job, 2)), (4, receipt(job, 3))],
            )
            == 1
        )
        assert settle.counts.beyond_gap == 2
        assert (await ledger.view(job.id)).receipts == 1
        assert (
            settle.settle(
                WORKER,
                0,
                EPOCH,
                [(4, receipt(job, 3)), (2, receipt(job, 1)), (3, receipt(job, 2))],
            )
            == 4
        )
        assert settle.mark(WORKER, 0, EPOCH) == 4
        assert settle.mark(WORKER, 1, EPOCH) == 0
        assert (await ledger.view(job.id)).receipts == 4


async def test_a_batch_longer_than_one_script_call_is_settled_whole(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=700, capture=True)
        await claimed(ledger, job, ranks=1)
        await ledger.store_outputs(job.id, 1, outputs(700))
        assert (
            settler(redis_url).settle(
                WORKER, 0, EPOCH, [(seq, receipt(job, seq - 1)) for seq in range(1, 701)]
            )
            == 700
        )
        assert await state_of(ledger, job) is State.SUCCEEDED


async def test_a_batch_of_many_bytes_is_settled_in_several_script_calls(redis_url: str) -> None:
    def calls(client: redis.Redis) -> int:
        stats: Any = client.info("commandstats")
        return int(stats["cmdstat_evalsha"]["calls"])

    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=20, capture=True)
        await claimed(ledger, job, ranks=1)
        await ledger.store_outputs(job.id, 1, outputs(20))
        settle = settler(redis_url)
        settle.settle(WORKER, 0, EPOCH, [(1, receipt(job))])  # the script is loaded
        rows = [Consumed(name="memory", rows=bytes(1 << 20))]
        with redis.Redis.from_url(redis_url) as client:
            before = calls(client)
            assert (
                settle.settle(
                    WORKER,
                    0,
                    EPOCH,
                    [(seq, receipt(job, seq - 1, consumed=rows)) for seq in range(2, 21)],
                )
                == 20
            )
            assert calls(client) - before == 3, "8 + 8 + 3 MiB"
        assert await state_of(ledger, job) is State.SUCCEEDED


async def test_a_receipt_of_a_worker_that_does_not_have_the_job_changes_nothing(
    redis_url: str,
) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(capture=True)
        await claimed(ledger, job, ranks=1)
        await ledger.store_outputs(job.id, 1, outputs())
        settle = settler(redis_url)
        for forged in (
            receipt(job, worker="other", files=[file()]),
            receipt(job, worker="other", status="error"),
        ):
            settle.settle("other", 0, EPOCH, [(settle.mark("other", 0, EPOCH) + 1, forged)])
        assert (settle.counts.stale, (await ledger.view(job.id)).receipts) == (2, 0)
        settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, files=[file()]))])
        assert await state_of(ledger, job) is State.SUCCEEDED


async def test_receipts_of_a_former_attempt_are_acknowledged_and_change_nothing(
    redis_url: str,
) -> None:
    # field case 37
    async with open_ledger(redis_url) as ledger:
        job = make_job(capture=True)
        await claimed(ledger, job, ranks=1)
        settle = settler(redis_url)
        settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, files=[file("first")]))])
        await ledger.release(job.id, 1)
        assert settle.settle(WORKER, 0, EPOCH, [(2, receipt(job, attempt=1))]) == 2, (
            "nobody holds it now"
        )
        await ledger.claim(job.id, "w2", BOOT, 1, IDENTITY)
        assert (await ledger.view(job.id)).receipts == 0
        assert (
            settle.settle(
                WORKER, 0, EPOCH, [(3, receipt(job, attempt=1, status="error", message="late"))]
            )
            == 3
        )
        assert settle.counts.stale == 2
        await ledger.store_outputs(job.id, 2, outputs())
        settle.settle(
            "w2", 0, EPOCH, [(1, receipt(job, attempt=2, worker="w2", files=[file("second")]))]
        )
        result = await ledger.result(job.id)
        assert result.state is State.SUCCEEDED
        assert [entry.path for entry in result.capture_results.files] == ["second"]
        settle.settle(
            "w2",
            0,
            EPOCH,
            [
                (
                    2,
                    receipt(job, attempt=2, worker="w2", status="error", message="after the end"),
                )
            ],
        )
        assert await ledger.result(job.id) == result, "terminal is final"


def result_of(url: str, **told: Any) -> JobResult:
    """A job of one prompt and rank, settled by one receipt."""

    async def main() -> JobResult:
        async with open_ledger(url) as ledger:
            job = make_job(capture=True)
            await claimed(ledger, job, ranks=1)
            settler(url).settle(WORKER, 0, EPOCH, [(1, receipt(job, **told))])
            await ledger.store_outputs(job.id, 1, outputs())
            return await ledger.result(job.id)

    return asyncio.run(main())


# field case 19
def test_dropped_rows_are_partial_with_their_positions_whatever_the_rank_calls_it(
    redis_url: str,
) -> None:
    short = file(dropped=[4, 5, 6, 9])
    results = result_of(redis_url, files=[short], status="ok").capture_results
    assert (results.status, results.files[0].dropped) == ("partial", [4, 5, 6, 9])
    assert (
        results.detail == "request 0, rank 0: positions dropped under overload: 4-6, 9 (4 in total)"
    )


# field case 19
def test_a_consumer_that_failed_is_partial_and_named(redis_url: str) -> None:
    made = [Consumed("filesystem"), Consumed("kafka", ok=False, message="no broker")]
    results = result_of(redis_url, files=[file()], consumed=made, status="ok").capture_results
    assert (results.status, results.detail) == (
        "partial",
        "request 0, rank 0: consumer kafka failed: no broker",
    )
    assert [(report.name, report.ok, report.message) for report in results.consumers] == [
        ("filesystem", True, ""),
        ("kafka", False, "no broker"),
    ]


def test_a_rank_says_in_its_own_words_why_a_capture_is_partial(redis_url: str) -> None:
    results = result_of(
        redis_url, files=[file(dropped=[4])], status="partial", message="position 4 was dropped"
    ).capture_results
    assert (results.status, results.detail) == (
        "partial",
        "request 0, rank 0: position 4 was dropped",
    )


def test_returned_rows_name_their_prompt_and_stage(redis_url: str) -> None:
    results = result_of(
        redis_url, pp=1, consumed=[Consumed("memory", rows=b"\x00\xffrows")]
    ).capture_results
    assert results.status == "ok"
    assert [
        (report.name, report.request, report.pp, report.rows) for report in results.consumers
    ] == [("memory", 0, 1, b"\x00\xffrows")]
    assert from_json(to_json(results), CaptureResults) == results, "bytes survive JSON"


def test_the_result_says_how_many_rows_an_earlier_request_computed(redis_url: str) -> None:
    results = result_of(redis_url, files=[file(reused=3)]).capture_results
    assert (results.status, results.files[0].reused) == ("ok", 3)
    assert results.detail == "rows computed by an earlier request: 3 of 4"


def test_captured_files_list_sites_tag_layout_and_offset(redis_url: str) -> None:
    sites = {"pre_attn": [0], "post_block": [1, 2]}
    (entry,) = result_of(
        redis_url, files=[file(sites=sites, tag="t", layout="segment", offset=4096)]
    ).capture_results.files
    assert (entry.sites, entry.tag, entry.layout, entry.offset) == (sites, "t", "segment", 4096)


def test_a_receipt_from_before_there_were_other_hooks_means_post_block(redis_url: str) -> None:
    (entry,) = result_of(redis_url, files=[file(sites={}, layers=[0, 1])]).capture_results.files
    assert entry.sites == {"post_block": [0, 1]}


async def test_only_prompts_with_a_capture_or_steering_are_waited_for(redis_url: str) -> None:
    """What the operator captures may leave short prompts alone."""

    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=2, capture=True)
        job = msgspec.structs.replace(job, captures=[[], job.captures[1]])
        await claimed(ledger, job, ranks=1)
        await ledger.store_outputs(job.id, 1, outputs(2))
        view = await ledger.view(job.id)
        assert (view.receipts_expected, view.capture_status, view.state) == (
            1,
            "pending",
            State.RUNNING,
        )
        settler(redis_url).settle(WORKER, 0, EPOCH, [(1, receipt(job, request=1))])
        assert (await ledger.view(job.id)).state is State.SUCCEEDED


def test_receipts_of_an_unknown_job_are_acknowledged_and_counted(redis_url: str) -> None:
    settle = settler(redis_url)
    assert settle.settle(WORKER, 0, EPOCH, [(1, receipt("job_unknown"))]) == 1
    assert settle.counts.unknown == 1


async def test_a_receipt_of_a_request_that_the_job_does_not_have_does_not_count(
    redis_url: str,
) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=1, capture=True)
        await claimed(ledger, job, ranks=1)
        await ledger.store_outputs(job.id, 1, outputs())
        settle = settler(redis_url)
        settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, request=1))])
        assert await state_of(ledger, job) is State.RUNNING
        assert settle.counts.unknown == 1


async def test_a_status_that_is_not_known_is_an_error(redis_url: str) -> None:  # field case 19
    async with open_ledger(redis_url) as ledger:
        job = make_job(capture=True)
        await claimed(ledger, job, ranks=1)
        settler(redis_url).settle(WORKER, 0, EPOCH, [(1, receipt(job, status='fine"'))])
        assert await state_of(ledger, job) is State.FAILED
        assert [
            event.data["status"]
            for event in await ledger.events(job.id)
            if event.event == "receipt"
        ] == ["error"]


async def test_an_error_while_cancelling_does_not_turn_the_cancel_into_a_failure(
    redis_url: str,
) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(capture=True)
        await claimed(ledger, job, ranks=1)
        await ledger.request_cancel(job.id)
        settler(redis_url).settle(
            WORKER, 0, EPOCH, [(1, receipt(job, status="error", message="aborted"))]
        )
        assert await state_of(ledger, job) is State.CANCELLING
        assert await ledger.finish_cancel(job.id, 1)
        assert await state_of(ledger, job) is State.CANCELLED


async def test_a_lost_range_fails_its_jobs_and_passes_the_mark(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        hit, elsewhere, over = make_job(capture=True), make_job(capture=True), make_job()
        await claimed(ledger, hit)
        await claimed(ledger, elsewhere, worker="w2")
        await claimed(ledger, over)
        await ledger.store_outputs(over.id, 1, outputs())
        settle = settler(redis_url)
        settle.settle(WORKER, 1, EPOCH, [(1, receipt("job_unknown"))])
        lost_jobs = [
            f"{hit.id}.1",
            f"{elsewhere.id}.1",
            f"{over.id}.1",
            "job_unknown.1",
            hit.id,
        ]
        lost = LostRange(first=2, last=5, jobs=lost_jobs, message="database is malformed")
        beyond = LostRange(first=3, last=5, jobs=[f"{hit.id}.1"])
        assert settle.lost(WORKER, 1, EPOCH, beyond) == 1, "a gap before the range is a gap"
        assert await state_of(ledger, hit) is State.RUNNING
        assert settle.lost(WORKER, 1, EPOCH, lost) == 5
        view = await ledger.view(hit.id)
        assert view.state is State.FAILED
        assert view.error is not None
        assert "rank 1" in view.error.detail
        assert "2 to 5" in view.error.detail
        assert "database is malformed" in view.error.detail
        assert await state_of(ledger, elsewhere) is State.RUNNING
        assert await state_of(ledger, over) is State.SUCCEEDED
        assert settle.lost(WORKER, 1, EPOCH, lost) == 5
        assert settle.counts.lost == 1
        assert settle.settle(WORKER, 1, EPOCH, [(6, receipt("job_unknown"))]) == 6


async def test_lost_receipts_of_a_former_attempt_do_not_fail_the_present_one(
    redis_url: str,
) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(capture=True)
        await claimed(ledger, job)
        await ledger.release(job.id, 1)
        assert await ledger.claim(job.id, WORKER, "boot-2", 2, IDENTITY) is not None
        former = LostRange(first=1, last=3, jobs=[f"{job.id}.1"])
        assert settler(redis_url).lost(WORKER, 0, EPOCH, former) == 3
        assert await state_of(ledger, job) is State.RUNNING
        present = LostRange(first=4, last=4, jobs=[f"{job.id}.2"])
        assert settler(redis_url).lost(WORKER, 0, EPOCH, present) == 4
        assert await state_of(ledger, job) is State.FAILED
