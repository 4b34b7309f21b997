"""What does the ledger keep of a sweep's units, who may say it, and what do readers see of it?"""

from typing import Any

import pytest
from ledger_kit import BOOT, EPOCH, WORKER, open_ledger, receipt, settler
from sweep_rig import CLEAN, pair, sweep, sweep_job

from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.sweeps import LedgerSweeps
from midstream.broker.ledger.results.sweep_result import sweep_cell
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import Job, State
from midstream.schemas.jobs.receipts import CapturedFile
from midstream.schemas.jobs.sweep_units import Units
from midstream.schemas.jobs.sweeps import SweepCell, UnitRecord
from midstream.schemas.jobs.works import SweepWork

MODEL = "tiny"


async def begun(ledger: Ledger, **changes: Any) -> tuple[Job, LedgerSweeps]:
    job = sweep_job(sweep(**changes), MODEL)
    await ledger.submit(job, {})
    assert await ledger.claim(job.id, WORKER, BOOT, 2, job.identity) is not None
    return job, LedgerSweeps(ledger)


def cell(job: Job, number: int, **changes: Any) -> tuple[UnitRecord, SweepCell | None]:
    """A record of cell `number` of the sweep, as it would be kept."""
    sweep = job.work_as(SweepWork).sweep
    units = Units(sweep)
    unit = units.cell(units.first_cell + number)
    assert unit is not None
    record = UnitRecord(**({"unit": unit.number, "value": float(number), "attempt": 1} | changes))
    return record, sweep_cell(sweep, unit, record)


async def test_a_unit_is_kept_once_with_its_event_and_its_receipts_are_forgotten(
    ledger: Ledger, redis_url: str
) -> None:
    job, sweeps = await begun(ledger)
    sweep = job.work_as(SweepWork).sweep
    first = Units(sweep).first_cell
    told = [(seq + 1, receipt(job, first + seq // 2, seq % 2)) for seq in range(3)]
    settler(redis_url).settle(WORKER, 0, EPOCH, told)
    assert list(await sweeps.receipts(job.id, [first, first + 1], 2)) == [first], (
        "the other one lacks a rank"
    )
    assert [of.rank for of in await sweeps.reported(job.id, [first + 1], 2)] == [0]
    assert await sweeps.keep(job, 1, [cell(job, 0), cell(job, 2)], 2, 1) == "kept"
    assert await sweeps.keep(job, 1, [cell(job, 0, value=99.0), cell(job, 1)], 2, 1) == "kept"
    records = await sweeps.records(job.id)
    assert {record.unit - first: record.value for record in records.values()} == {
        0: 0.0,
        1: 1.0,
        2: 2.0,
    }
    assert await sweeps.receipts(job.id, [first, first + 1], 2) == {}
    assert await ledger.redis.hlen(f"ms:agree:{job.id}") == 0
    events = [event.data["value"] for event in await ledger.events(job.id) if event.event == "cell"]
    assert events == [0.0, 2.0, 1.0]
    view = await ledger.view(job.id)
    assert (
        view.cells,
        view.cells_expected,
        view.receipts,
        view.receipts_expected,
        view.prompts,
    ) == (
        3,
        sweep.num_cells,
        0,
        0,
        0,
    )
    assert (await ledger.tenants.usage("default")).sweep_cells == sweep.num_cells - 3


async def test_kept_cells_outlive_the_attempt_and_stale_attempts_add_none(redis_url: str) -> None:
    async with open_ledger(redis_url, result_ttl_s=1000) as ledger:
        job, sweeps = await begun(ledger)
        await sweeps.keep(job, 1, [cell(job, 0)], 2, 1)
        await ledger.release(job.id, 1)
        assert (
            len(await sweeps.records(job.id)),
            await sweeps.keep(job, 1, [cell(job, 1)], 2, 1),
        ) == (1, "stale")
        assert await ledger.claim(job.id, WORKER, BOOT, 2, job.identity) is not None
        assert await sweeps.keep(job, 1, [cell(job, 1)], 2, 1) == "stale"
        await ledger.request_cancel(job.id)
        assert await sweeps.keep(job, 2, [cell(job, 1)], 2, 1) == "cancelling"
        await ledger.finish_cancel(job.id, 2)
        assert len(await sweeps.records(job.id)) == 1
        assert 900 < await ledger.redis.ttl(f"ms:units:{job.id}") <= 1000
        assert (await ledger.tenants.usage("default")).sweep_cells == 0


async def test_an_error_of_one_cell_does_not_fail_a_sweep_and_a_disagreement_puts_it_back(
    ledger: Ledger, redis_url: str
) -> None:
    job, sweeps = await begun(ledger)
    await sweeps.keep(job, 1, [cell(job, 0)], 2, 1)
    receive = settler(redis_url)
    receive.settle(
        WORKER,
        0,
        EPOCH,
        [
            (1, receipt(job, 20, 0, status="error", message="lost")),
            (2, receipt(job, 21, 0)),
        ],
    )
    assert (await ledger.view(job.id)).state is State.RUNNING
    assert not [event for event in await ledger.events(job.id) if event.event == "receipt"]
    receive.settle(WORKER, 1, EPOCH, [(1, receipt(job, 21, 1, checksum="0" * 16))])
    assert (await ledger.view(job.id)).state is State.QUEUED
    assert [
        event.data["status"] for event in await ledger.events(job.id) if event.event == "receipt"
    ] == ["disagrees"]
    assert len(await sweeps.records(job.id)) == 1
    assert await ledger.redis.exists(f"ms:ticket:{job.id}") == 0


async def test_sweep_events_are_exempt_from_the_event_limit(redis_url: str) -> None:
    async with open_ledger(redis_url, **{"tuning.event_limit": 10}) as ledger:
        job, sweeps = await begun(ledger, hooks=["pre_attn", "post_attn", "post_block", "attn_out"])
        sweep = job.work_as(SweepWork).sweep
        await sweeps.keep(job, 1, [cell(job, number) for number in range(sweep.num_cells)], 2, 1)
        await ledger.store_outputs(job.id, 1, [])
        events = await ledger.events(job.id, count=10_000)
        assert sum(event.event == "cell" for event in events) == sweep.num_cells
        assert [events[0].data["state"], events[-1].event] == ["queued", "done"]


async def test_captures_of_a_sweep_are_listed_shown_and_deleted(
    redis_url: str, tmp_path: Any
) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        ledger.settings.capture_root.mkdir(parents=True)
        job, sweeps = await begun(ledger)
        captures = LedgerCaptures(ledger)
        assert [(entry.tags, entry.status) for entry in (await captures.list()).captures] == [
            (["base", "source"], "pending")
        ]
        file = CapturedFile(
            path=f"base/{job.id}/x",
            bytes=10,
            crc32=1,
            rows=2,
            sites={"post_block": [0]},
            tag="base",
        )
        base = UnitRecord(
            unit=0, value=1.0, receipts=[receipt(job, 0, 0, files=[file], graded=[1.0])]
        )
        await sweeps.keep(job, 1, [(base, None)], 2, 1)
        result = await ledger.result(job.id)
        assert (
            result.capture_results.status,
            [file.tag for file in result.capture_results.files],
        ) == ("pending", ["base"])
        assert (
            result.capture_results.detail
            == f"cells done: 0 of {(await ledger.view(job.id)).cells_expected}"
        )
        with pytest.raises(MidstreamError, match="has not ended"):
            await captures.delete(job.id)
        await ledger.store_outputs(job.id, 1, [])
        assert (await ledger.result(job.id)).capture_results.status == "ok"
        await captures.delete(job.id)
        assert (await captures.list()).captures == []


async def test_an_ablation_captures_no_source(ledger: Ledger) -> None:
    await begun(ledger, pairs=[pair(CLEAN, CLEAN)], ablation="zeros")
    assert [entry.tags for entry in (await LedgerCaptures(ledger).list()).captures] == [["base"]]
