"""When something fails in a sweep: is a cell without a vouched value null, with the reason, and are
the others as they should be?
"""

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import Container
from typing import Any

import msgspec
import pytest
from sweep_rig import CLEAN, CORRUPT, LAYERS, Rig, check_grid, having, pair, sweep, sweep_job

from midstream.broker.ledger.core.scripts import SHELVED_S
from midstream.broker.ledger.named.probes import watched_model, with_policies
from midstream.broker.ledger.named.source_runs import LedgerRuns
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.schemas.base.records import now, to_msgpack
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.policies import Steer, Webhook
from midstream.storage.file_store import FileStore
from midstream.workers.serving.attempt import AttemptOutcome
from midstream_lab.records.sweep_units import Units
from midstream_lab.records.sweeps import StoredSweep, UnitRecord
from midstream_webhooks.outbox import WebhookOutbox

HOOK = Webhook(url="http://127.0.0.1:9/policy")


def each_cell(asked: StoredSweep, why: str, but: Container[int] = ()) -> dict[int, str]:
    """Number of each cell, but those of `but` → why it has no value."""
    first = Units(asked).first_cell
    return {n: why for n in range(first, first + asked.num_cells) if n not in but}


# field case 36
# field case 32
async def test_only_cells_that_engine_or_ranks_fail_have_no_value(rig: Rig) -> None:
    asked = sweep()
    units = Units(asked)
    refused = units.first_cell + 2
    failed = units.first_cell + asked.num_columns + 5

    job_id = await rig.run(asked, fault=f"generate:request={refused};refuse:request={failed}")
    assert (await rig.ledger.view(job_id)).state is State.SUCCEEDED
    result = await rig.result(job_id)
    check_grid(
        asked,
        result,
        {refused: "rank 0 rejected prompt", failed: "rank 0 (stage 0): injected fault"},
    )
    assert result.summary.skipped == len(LAYERS) + 2


@having(**{"global_capture.sites": "post_block:1", "global_capture.tag": "ops"})
async def test_prompts_of_a_sweep_are_scored_and_captured_as_all_traffic_is(rig: Rig) -> None:
    """A pair whose prompt the operator's probe stops has no values, and the cells say why; the
    decisions are in the result, and sent.
    """
    longer = pair(CLEAN + ", and it stays there", CORRUPT)
    asked = sweep(pair(), longer, noise=0)

    async with rig.worker() as runs:
        threshold = max(len(pair().base), len(pair().source)) + 2.0
        await rig.watch(threshold, "flag", "stop", Steer(module="m"), HOOK)
        info, policies = await watched_model(rig.ledger, "fake-model")
        job = msgspec.structs.replace(sweep_job(asked), global_captures=info.global_captures)
        job = with_policies(job, policies)
        await rig.ledger.submit(
            job, {}, None, [name for probe in job.probes for name in probe.content.tensors]
        )
        assert await runs.run_job(job.id) is AttemptOutcome.SUCCEEDED
    result = await rig.ledger.result(job.id)
    grids = [
        [value for row in each.grids["post_block"] for value in row] for each in result.sweep.pairs
    ]
    assert any(value is not None for value in grids[0])
    assert {*grids[1]} == {None}
    assert any(
        "source prompt failed: the probe 'policy:guard' ended it" in skipped.reason
        for skipped in result.sweep.skipped
    )
    units = Units(asked)
    flagged = {scores.request for scores in result.probes if scores.flagged}
    assert flagged == {units.request(units.source(1), 0)}
    sent = (await WebhookOutbox(rig.ledger).deliveries(None, job.id)).deliveries
    assert [(each.event, each.url) for each in sent] == [("job.decided", HOOK.url)]
    prompts = {
        units.request(unit, 0)
        for number in (0, 1)
        for unit in (units.base(number), units.source(number))
    }
    found = {file.request for file in result.capture_results.files if file.tag == "ops"}
    stopped = units.request(units.source(1), 0)  # its receipt may come too late to be listed
    assert prompts - {stopped} <= found <= prompts


# field case 31
@having(**{"engine.tensor_parallel_size": 2})
async def test_cells_whose_source_run_is_not_there_when_they_need_it_have_no_value(
    rig: Rig,
) -> None:
    asked = sweep()

    job_id = await rig.submit(asked)
    async with rig.worker(fault="lose_run:rank=1,after=30") as runs:
        await runs.run_job(job_id)
    lost = {
        number: "is not on this rank"
        for number, record in (await rig.records(job_id)).items()
        if "is not on this rank" in record.reason
    }
    assert 20 < len(lost) < asked.num_cells
    check_grid(
        asked,
        await rig.result(job_id),
        {n: why for n, why in lost.items() if n >= Units(asked).first_cell},
    )


# field case 31
@having(**{"tuning.sweep_cells_in_flight": 4})
async def test_source_files_missing_when_a_sweep_resumes_leave_cells_without_values(
    rig: Rig,
) -> None:
    asked = sweep(pair(CLEAN * 3, CORRUPT * 3))

    job_id = await rig.interrupted(asked, 40)
    kept = await rig.records(job_id)
    shutil.rmtree(rig.settings.capture_root)
    await rig.run(job_id, "boot2")
    lost = {
        number: "cannot be read"
        for number in (await rig.records(job_id)).keys() - kept.keys()
        if number >= Units(asked).first_cell
    }
    assert lost
    check_grid(asked, await rig.result(job_id), lost)


# field case 31
@having(**{"engine.tensor_parallel_size": 2})
async def test_a_sweep_whose_source_runs_a_rank_cannot_load_fails(rig: Rig) -> None:
    asked = sweep(metric="recovered")

    job_id = await rig.failed(asked, fault="put_run:rank=1")
    assert (await rig.ledger.view(job_id)).error.type == "urn:midstream:intervention_failed"
    check_grid(asked, await rig.result(job_id), each_cell(asked, "rank 1: injected fault"))


@having(**{"tuning.sweep_cells_in_flight": 2})
async def test_a_sweep_fails_whose_prompt_failed_in_an_earlier_attempt(rig: Rig) -> None:
    asked = sweep()
    job_id = await rig.interrupted(asked, 1)
    units = Units(asked)
    failed = UnitRecord(unit=units.base(0).number, reason="no room")
    await rig.ledger.redis.hset(f"ms:units:{job_id}", failed.unit, to_msgpack(failed))
    kept = await rig.records(job_id)
    await rig.ledger.redis.hdel(f"ms:units:{job_id}", *[n for n in kept if n != failed.unit])
    await rig.failed(job_id, "boot2")
    error = (await rig.ledger.view(job_id)).error
    assert error.detail == "no cell has a value: no room"


async def test_a_sweep_fails_with_the_kind_of_its_prompts_failure(rig: Rig) -> None:
    asked = sweep()
    base = Units(asked).base(0).number
    job_id = await rig.failed(asked, fault=f"refuse:request={base},kind=capture_failed")
    assert (await rig.ledger.view(job_id)).error.type == "urn:midstream:capture_failed"


async def test_a_sweep_with_one_pair_that_failed_succeeds(rig: Rig) -> None:
    asked = sweep(pair(), pair(CLEAN + ", and it stays there", CORRUPT))
    units = Units(asked)

    job_id = await rig.run(asked, fault=f"refuse:request={units.request(units.base(1), 0)}")
    assert (await rig.ledger.view(job_id)).state is State.SUCCEEDED


@having(**{"engine.tensor_parallel_size": 2}, capture_timeout_s=2.0)
async def test_a_sweep_of_which_a_rank_never_reports_fails(rig: Rig) -> None:
    asked = sweep(layers=[1], hooks=["attn_out"])

    job_id = await rig.failed(asked, fault="silent:rank=1")
    assert (await rig.ledger.view(job_id)).error.type == "urn:midstream:receipts_timed_out"
    why = (await rig.records(job_id))[Units(asked).base(0).number].reason
    assert why == "1 of 2 receipts arrived within 2 s of the engine's output"
    missing = each_cell(asked, "of 2 receipts arrived within 2 s")
    check_grid(asked, await rig.result(job_id), missing)


@having(**{"engine.tensor_parallel_size": 2}, **{"tuning.sweep_cells_in_flight": 4})
async def test_ranks_that_disagree_put_a_sweep_back_and_its_cells_stay(rig: Rig) -> None:
    asked = sweep(pair(CLEAN * 2, CORRUPT * 2))

    job_id = await rig.submit(asked)
    async with rig.worker(
        engine_options={"token_s": 0.01}, fault="disagree:rank=1,after=120,times=1"
    ) as runs:
        running = asyncio.create_task(runs.run_job(job_id))
        while (  # noqa: ASYNC110
            view := await rig.ledger.view(job_id)
        ).state is not State.QUEUED or view.attempt == 0:
            await asyncio.sleep(0.01)
        runs.stop([job_id], AttemptOutcome.LOST)  # as the next heartbeat does
        assert await running is AttemptOutcome.LOST
    kept = await rig.records(job_id)
    await rig.ledger.redis.delete("ms:desync")  # its ranks were made equal
    await rig.run(job_id, "boot2")
    records = await rig.records(job_id)
    assert 50 < len(kept) < len(records)
    assert rig.engine.ranks.ranks[0].step == len(records) - len(kept), (
        "what is known is not asked again"
    )
    assert Counter(record.attempt for record in records.values()) == {
        1: len(kept),
        2: len(records) - len(kept),
    }
    check_grid(asked, await rig.result(job_id))
    determinism = (await rig.ledger.result(job_id)).determinism
    assert determinism.consistent
    assert "rank 1 reports checksum" in determinism.retried[0]


@having(**{"tuning.sweep_cells_in_flight": 2})
async def test_a_cancelled_sweep_stops_at_once_and_keeps_what_it_has(rig: Rig) -> None:
    asked = sweep(pair(CLEAN * 6, CORRUPT * 6))

    job_id = await rig.submit(asked)
    async with rig.worker(engine_options={"token_s": 0.02}) as runs:
        running = asyncio.create_task(runs.run_job(job_id))
        await rig.known(job_id, 20)
        await rig.ledger.request_cancel(job_id)
        known = (await rig.ledger.view(job_id)).cells
        asked_for = rig.engine.ranks.ranks[0].step
        assert await running is AttemptOutcome.CANCELLED
        assert rig.engine.ranks.ranks[0].step <= asked_for + 20, (
            "with the next cell, not with the last"
        )
    view = await rig.ledger.view(job_id)
    assert view.state is State.CANCELLED
    assert 20 <= view.cells == known < asked.num_cells


@pytest.mark.parametrize("entered", [True, False])
@having(**{"tuning.sweep_cells_in_flight": 2})
async def test_a_sweep_resumes_on_an_engine_with_other_reentry(rig: Rig, entered: bool) -> None:
    """A compiled engine after an eager one, or the other way round: base runs that are known keep
    other rows than it would ask for.
    """
    asked = sweep(pair(CLEAN * 2, CORRUPT * 2))

    job_id = await rig.interrupted(asked, 10, enters=entered)
    async with rig.worker("boot2") as runs:
        rig.engine.enters = not entered
        assert await runs.run_job(job_id) is AttemptOutcome.SUCCEEDED
    check_grid(asked, await rig.result(job_id))
    assert {record.attempt for record in (await rig.records(job_id)).values()} == {1, 2}


@having(**{"tuning.sweep_cells_in_flight": 2})
async def test_a_sweep_that_goes_on_under_another_global_steering_does_not_mix_its_cells(
    rig: Rig,
) -> None:
    asked = sweep()

    job_id = await rig.interrupted(asked, 10)
    kept = await rig.records(job_id)
    base = kept[0]
    elsewhere = msgspec.structs.replace(
        base,
        receipts=[msgspec.structs.replace(told, global_version=7) for told in base.receipts],
    )
    await rig.ledger.redis.hset(f"ms:units:{job_id}", 0, to_msgpack(elsewhere))
    await rig.run(job_id, "boot2")
    missing = each_cell(asked, "began under global steering version 7", but=kept)
    check_grid(asked, await rig.result(job_id), missing)


# field case 36
@having(**{"tuning.sweep_cells_in_flight": 2})
async def test_sweep_cells_lost_by_the_ledger_are_resent_at_the_end(rig: Rig) -> None:
    asked = sweep()

    job_id = await rig.submit(asked)
    async with rig.worker(engine_options={"token_s": 0.01}) as runs:
        running = asyncio.create_task(runs.run_job(job_id))
        await rig.known(job_id, 30)
        await rig.ledger.redis.hdel(f"ms:units:{job_id}", *(await rig.records(job_id)))
        assert await running is AttemptOutcome.SUCCEEDED
    check_grid(asked, await rig.result(job_id))


@pytest.mark.parametrize("ending", [AttemptOutcome.RELEASED, AttemptOutcome.LOST])
async def test_a_sweep_that_is_stopped_while_it_leases_its_runs_stops(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, ending: AttemptOutcome
) -> None:
    leasing = asyncio.Event()
    lease = LedgerRuns.lease

    async def swallowing(self: LedgerRuns, held: Any, seconds: float) -> None:
        """A cancellation that comes together with the answer, as redis-py takes it."""
        await lease(self, held, seconds)
        leasing.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(50)

    job_id = await rig.submit(sweep())
    monkeypatch.setattr(LedgerRuns, "lease", swallowing)
    async with rig.worker() as runs:
        running = asyncio.create_task(runs.run_job(job_id))
        await leasing.wait()
        runs.stop([job_id], ending)
        # not `wait_for`, which would cancel it once more
        await asyncio.wait([running], timeout=30)
        assert running.done()
        assert running.result() is ending


@having(**{"tuning.sweep_cells_in_flight": 2})
async def test_a_prompt_that_failed_in_an_earlier_attempt_is_not_rerun_for_comparison(
    rig: Rig,
) -> None:
    asked = sweep(metric="kl")
    job_id = await rig.interrupted(asked, 10)
    kept = await rig.records(job_id)
    clean = Units(asked).source(0).number
    failed = msgspec.structs.replace(kept[clean], value=None, reason="no room", receipts=[])
    await rig.ledger.redis.hset(f"ms:units:{job_id}", clean, to_msgpack(failed))
    await rig.run(job_id, "boot2")
    missing = each_cell(asked, "source prompt failed: no room", but=kept)
    check_grid(asked, await rig.result(job_id), missing)


@pytest.mark.parametrize(
    "fault", ["put_run:rank=1", "refuse:request=0,kind=store_away"], ids=["reading", "writing"]
)
@having(**{"engine.tensor_parallel_size": 2}, max_attempts=2)
async def test_a_sweep_waits_for_a_store_that_is_away_and_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Attempts that end for this reason do not count, however many they are."""
    asked = sweep(metric="recovered")
    trouble = ["it cannot be reached"]
    monkeypatch.setattr(FileStore, "trouble", lambda store: trouble[0])

    job_id = await rig.submit(asked)
    reaper = Reaper(rig.ledger)
    async with rig.worker(fault=fault) as runs:
        for _ in range(3):
            assert await runs.run_job(job_id) is AttemptOutcome.STORE_UNAVAILABLE
            assert (await rig.ledger.view(job_id)).state is State.QUEUED
            await reaper.sweep(now() + SHELVED_S + 1)
        trouble[0] = ""
        rig.engine.faults.switch("")
        assert await runs.run_job(job_id) is AttemptOutcome.SUCCEEDED
    check_grid(asked, await rig.result(job_id), {})
