"""Has every cell the right number, and are finished cells kept when the worker ends?

Everything real but the model and the worker's process.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledger_kit import BOOT, EPOCH, WORKER, open_ledger, receipt, settler
from midstream_fake_engine.model import identity_of
from sweep_rig import (
    CLEAN,
    CORRUPT,
    LAYERS,
    Rig,
    check_grid,
    difference,
    having,
    keep,
    pair,
    records_of,
    sweep,
    sweep_job,
)

from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.ledger.jobs.units import LedgerUnits
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Job, Sampling, State, StoredPrompt
from midstream.schemas.jobs.receipts import CapturedFile
from midstream.workers.engine.protocol import EngineRequest, NewOutput
from midstream.workers.serving.attempt import AttemptOutcome, JobFailed
from midstream_lab.records.sweep_paths import StoredEnd, StoredPath
from midstream_lab.records.sweep_units import SweepWork, Units
from midstream_lab.records.sweeps import Column, PatchWindow, SweepCell, SweepResult, UnitRecord
from midstream_lab.results.sweep_result import sweep_cell
from midstream_lab.run import attempt as sweeps


@pytest.fixture
async def rig(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """Two stages of two ranks."""
    ranks = {"engine.tensor_parallel_size": 2, "engine.pipeline_parallel_size": 2}
    async with Rig(redis_url, tmp_path, **ranks, **getattr(request, "param", {})) as opened:
        yield opened


async def test_every_cell_of_a_sweep_has_the_value_that_its_patch_gives(rig: Rig) -> None:
    asked = sweep(
        pair(),
        pair(CLEAN + "!", CORRUPT + "?"),
        hooks=["pre_attn", "mlp_out"],
        metric="recovered",
        window=PatchWindow(layers=2, positions=3),
    )
    job_id = await rig.run(asked)
    view = await rig.ledger.view(job_id)
    assert view.state == State.SUCCEEDED
    assert view.error is None
    assert view.capture_status == "ok"
    assert view.cells == asked.num_cells
    assert view.cells_expected == asked.num_cells
    told = await rig.ledger.result(job_id)
    result = told.sweep
    check_grid(asked, result)
    assert [of.noise_floor for of in result.pairs] == [0.0, 0.0]
    first, second = (of.grids["mlp_out"][1][0] for of in result.pairs)
    assert result.mean["mlp_out"][1][0] == pytest.approx((first + second) / 2)
    assert result.spread["mlp_out"][1][0] == pytest.approx(abs(first - second) / 2**0.5)
    assert told.outputs == []
    assert told.determinism.consistent
    assert {file.tag for file in told.capture_results.files} == {"base", "source"}


async def test_sweep_events_are_start_each_cell_once_and_end(rig: Rig) -> None:
    asked = sweep()
    job_id = await rig.run(asked)
    events = await rig.ledger.events(job_id, count=100_000)
    assert [event.event for event in events if event.event not in ("state", "cell")] == [
        "start",
        "summary",
        "done",
    ]
    result = await rig.result(job_id)
    cells = [event.data for event in events if event.event == "cell"]
    assert len(cells) == asked.num_cells
    for cell in cells:
        assert result.pairs[0].grids[cell["hook"]][cell["layer"]][cell["column"]] == cell["value"]
    summary = next(event.data for event in events if event.event == "summary")
    assert {**summary, "seconds": None} == msgspec.to_builtins(
        msgspec.structs.replace(result.summary, seconds=None)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"metric": "kl"},
        {"metric": "kl", "direction": "noise", "alpha": 0.5},
        {"metric": "logprob", "ablation": "zeros"},
        {"metric": "kl", "ablation": "mean", "hooks": ["attn_out"]},
    ],
    ids=["kl", "kl, noise, half", "zeros", "mean"],
)
async def test_metrics_directions_and_ablations_give_their_values(
    rig: Rig, changes: dict[str, Any]
) -> None:
    stored = pair()
    if "ablation" in changes:
        ablated = [
            Column(
                label=column.label,
                places=[(to, -1) for to, _ in column.places],
                reason=column.reason,
            )
            for column in stored.columns
        ]
        stored = msgspec.structs.replace(stored, source=[], columns=ablated)
    asked = sweep(stored, **changes)
    check_grid(asked, await rig.result(await rig.run(asked)))


async def test_cells_by_neurons_write_those_in_which_the_prompts_differ_most(rig: Rig) -> None:
    """By rank and by name, and the result says which were chosen."""
    places = [(place, place) for place in range(4)]
    parts: list[dict[str, Any]] = [{"ranks": (0, 1)}, {"ranks": (0, 5)}, {"dims": "0-2, 7"}]
    made = pair(
        columns=[
            Column(label=f"c{number}", places=places, **part) for number, part in enumerate(parts)
        ]
    )
    asked = sweep(made, axis="neuron", hooks=["post_block", "mlp_out"])
    job_id = await rig.run(asked)
    result = await rig.result(job_id)
    check_grid(asked, result, job=job_id)
    assert result.axis == "neuron"
    for rows in result.pairs[0].neurons.values():
        assert [[len(chosen) for chosen in row] for row in rows] == [[1, 5, 0]] * len(asked.layers)
        assert all(row[0] == row[1][:1] for row in rows)


async def test_an_answer_of_several_tokens_is_asked_token_by_token(rig: Rig) -> None:
    asked = sweep(pair(answer="Paris", foil="Pisa"), metric="recovered", layers=[1, 3])
    check_grid(asked, await rig.result(await rig.run(asked)))


# field case 35
async def test_two_prompts_that_do_not_differ_are_refused_as_a_baseline(rig: Rig) -> None:
    job_id = await rig.submit(sweep(pair(CLEAN, CLEAN), metric="recovered"))
    async with rig.worker() as runs:
        with pytest.raises(JobFailed, match=r"a difference of 0\.0000; at least 0\.1000"):
            await runs.run_job(job_id)
    view = await rig.ledger.view(job_id)
    assert view.state == State.FAILED
    assert view.error.type == "urn:midstream:useless_baseline"


# field case 35
async def test_only_the_pair_with_a_useless_baseline_has_no_values(rig: Rig) -> None:
    asked = sweep(pair(CLEAN, CLEAN), pair(), metric="recovered")
    job_id = await rig.run(asked)
    first = len(asked.layers) * asked.num_columns
    units = Units(asked)
    check_grid(
        asked,
        await rig.result(job_id),
        {units.first_cell + number: "differ too little" for number in range(first)},
    )


async def test_two_sweeps_at_once_and_ordinary_jobs_are_all_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each is far more than the cells in flight: once both have begun, the second's hundredth cell
    # comes long before the first's last.
    asked = sweep(pair(CLEAN * 3, CORRUPT * 3), hooks=["post_block", "attn_out"])
    sweeps = [await rig.submit(asked) for _ in range(2)]
    ordinary = Job(
        id=new_job_id(),
        kind="generate",
        model="fake-model",
        prompts=[StoredPrompt(token_ids=[1, 2])],
        sampling=Sampling(max_tokens=4),
        created=now(),
        identity=identity_of(rig.settings),
    )
    await rig.ledger.submit(ordinary, {})
    async with asyncio.timeout(60), rig.worker() as runs:
        answer = rig.engine.generate
        awaited = set(sweeps)

        async def answered_once_both_have_begun(
            ask: EngineRequest,
        ) -> AsyncGenerator[NewOutput, None]:
            awaited.discard(ask.job)
            while awaited:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            async for progress in answer(ask):
                yield progress

        monkeypatch.setattr(rig.engine, "generate", answered_once_both_have_begun)
        running = [asyncio.create_task(runs.run_job(job_id)) for job_id in sweeps]
        await rig.known(sweeps[1], 100)
        assert await runs.run_job(ordinary.id) is AttemptOutcome.SUCCEEDED
        assert await asyncio.gather(*running) == [AttemptOutcome.SUCCEEDED] * 2
    for job_id in sweeps:
        check_grid(asked, await rig.result(job_id))
    before, after = [
        [
            int(event.id.partition("-")[0])  # by Redis' clock, in milliseconds
            for event in await rig.ledger.events(job_id, count=100_000)
            if event.event == "cell"
        ]
        for job_id in sweeps
    ]
    assert after[99] < before[-1], "they take turns"


# field case 36
@having(**{"tuning.sweep_cells_in_flight": 4})
async def test_the_cells_of_an_attempt_that_ended_are_not_asked_again(rig: Rig) -> None:
    asked = sweep(pair(CLEAN * 2, CORRUPT * 2), metric="kl")
    job_id = await rig.interrupted(asked, 50)
    kept = await rig.records(job_id)
    await rig.run(job_id, "boot2")
    view = await rig.ledger.view(job_id)
    assert view.state == State.SUCCEEDED
    assert view.attempt == 2
    assert view.cells == asked.num_cells
    attempts = Counter(record.attempt for record in (await rig.records(job_id)).values())
    assert attempts[1] == len(kept) >= 50
    check_grid(asked, await rig.result(job_id))
    events = await rig.ledger.events(job_id, count=100_000)
    kinds = Counter(event.event for event in events)
    assert kinds["start"] == 1
    assert kinds["cell"] == asked.num_cells
    assert kinds["summary"] == 1


# --- Paths: passes that follow each other
# --------------------------------------------------------------------------------------------------
# The fake engine's rows do not depend on patches: what the receivers compute in the first pass is
# what they compute anyway, so every cell has the base's value.

PLACES = [(place, place) for place in range(1, 6)]
MADE = pair(
    columns=[Column(label=f"c{number}", places=PLACES) for number in range(6)], sender=PLACES
)
RECEIVERS = [
    StoredEnd(layer=LAYERS[-1], hook="mlp_out"),
    StoredEnd(layer=LAYERS[-1], hook="attn_out"),
]


def path_sweep(path: StoredPath, layers: list[int], **changes: Any) -> Any:
    return sweep(
        MADE,
        MADE,
        axis="together",
        hooks=["attn_out"],
        layers=layers,
        path=path,
        noise=2,
        **changes,
    )


def check(result: SweepResult, cells: int, path: StoredPath) -> None:
    assert not result.skipped
    assert result.summary.cells == cells
    assert result.path == path.shown()
    expected = difference(MADE.base, [], MADE)
    for found in result.pairs:
        assert [value for row in found.grids["attn_out"] for value in row] == pytest.approx(
            [expected] * (cells // 2)
        )
        assert found.noise_floor == 0.0


@pytest.mark.parametrize("ends", ["receivers", "sender"])
@having(**{"tuning.sweep_cells_in_flight": 2})
async def test_a_killed_path_sweep_goes_on_with_the_cells_that_are_not_known(
    rig: Rig, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "FIRST_PASSES", 4)
    if ends == "receivers":
        path = StoredPath(frozen=["attn", "mlp"], receivers=RECEIVERS)
        layers = LAYERS[:-1]
    else:
        path = StoredPath(frozen=["attn"], sender=StoredEnd(layer=0, hook="attn_out"))
        layers = LAYERS[1:]
    asked = path_sweep(path, layers)

    job_id = await rig.interrupted(asked, 6)
    await rig.run(job_id, "boot2")
    check(await rig.result(job_id), asked.num_cells, path)
    records = await rig.records(job_id)
    assert {record.attempt for record in records.values()} == {1, 2}
    units = Units(asked)
    assert [
        records[sender.number].reason
        for number in range(2)
        if (sender := units.sender(number)) is not None
    ] == ([] if ends == "receivers" else ["", ""])


async def test_a_first_pass_that_fails_leaves_its_cell_without_a_value(rig: Rig) -> None:
    """The rows that hold the branches are in no run: no cell, and no other number instead."""
    path = StoredPath(frozen=["attn"], receivers=[StoredEnd(layer=LAYERS[-1], hook="mlp_out")])
    asked = path_sweep(path, LAYERS[:1])

    job_id = await rig.failed(asked, fault="lose_run:rank=0")
    result = await rig.result(job_id)
    assert result.summary.cells < asked.num_cells
    assert any(
        "first pass failed" in each.reason and "is not on this rank" in each.reason
        for each in result.skipped
    )


# --- Units in the ledger --------------------------------------------------------------------------


MODEL = "tiny"


async def begun(ledger: Ledger, **changes: Any) -> Job:
    job = sweep_job(sweep(**changes), MODEL)
    await ledger.submit(job, {})
    assert await ledger.claim(job.id, WORKER, BOOT, 2, job.identity) is not None
    return job


def cell(job: Job, number: int, **changes: Any) -> tuple[UnitRecord, SweepCell | None]:
    """A record of cell `number` of the sweep, as it would be kept."""
    sweep = job.work_as(SweepWork).sweep
    units = Units(sweep)
    unit = units.cell(units.first_cell + number)
    record = UnitRecord(**({"unit": unit.number, "value": float(number), "attempt": 1} | changes))
    return record, sweep_cell(sweep, unit, record)


async def test_a_unit_is_kept_once_with_its_event_and_its_receipts_are_forgotten(
    ledger: Ledger, redis_url: str
) -> None:
    job = await begun(ledger)
    units = LedgerUnits(ledger)
    sweep = job.work_as(SweepWork).sweep
    first = Units(sweep).first_cell
    told = [(seq + 1, receipt(job, first + seq // 2, seq % 2)) for seq in range(3)]
    settler(redis_url).settle(WORKER, 0, EPOCH, told)
    receipts = await units.receipts(job.id, [first, first + 1], 2)
    assert [of.rank for of in receipts[first]] == [0, 1]
    assert [of.rank for of in receipts[first + 1]] == [0], "the other one has not reported"
    assert await keep(ledger, job, 1, cell(job, 0), cell(job, 2)) == "kept"
    assert await keep(ledger, job, 1, cell(job, 0, value=99.0), cell(job, 1)) == "kept"
    records = await records_of(ledger, job.id)
    assert {record.unit - first: record.value for record in records.values()} == {
        0: 0.0,
        1: 1.0,
        2: 2.0,
    }
    assert await units.receipts(job.id, [first, first + 1], 2) == {first: [], first + 1: []}
    assert await ledger.redis.hlen(f"ms:agree:{job.id}") == 0
    events = [event.data["value"] for event in await ledger.events(job.id) if event.event == "cell"]
    assert events == [0.0, 2.0, 1.0]
    view = await ledger.view(job.id)
    assert view.cells == 3
    assert view.cells_expected == sweep.num_cells
    assert view.receipts == 0
    assert view.receipts_expected == 0
    assert view.prompts == 0
    assert (await ledger.tenants.usage("default")).sweep_cells == sweep.num_cells - 3


async def test_kept_cells_outlive_the_attempt_and_stale_attempts_add_none(redis_url: str) -> None:
    async with open_ledger(redis_url, result_ttl_s=1000) as ledger:
        job = await begun(ledger)
        await keep(ledger, job, 1, cell(job, 0))
        await ledger.release(job.id, 1)
        assert len(await records_of(ledger, job.id)) == 1
        assert await keep(ledger, job, 1, cell(job, 1)) == "stale"
        assert await ledger.claim(job.id, WORKER, BOOT, 2, job.identity) is not None
        assert await keep(ledger, job, 1, cell(job, 1)) == "stale"
        await ledger.request_cancel(job.id)
        assert await keep(ledger, job, 2, cell(job, 1)) == "cancelling"
        await ledger.finish_cancel(job.id, 2)
        assert len(await records_of(ledger, job.id)) == 1
        assert 900 < await ledger.redis.ttl(f"ms:units:{job.id}") <= 1000
        assert (await ledger.tenants.usage("default")).sweep_cells == 0


async def test_an_error_of_one_cell_does_not_fail_a_sweep_and_a_disagreement_puts_it_back(
    ledger: Ledger, redis_url: str
) -> None:
    job = await begun(ledger)
    await keep(ledger, job, 1, cell(job, 0))
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
    assert len(await records_of(ledger, job.id)) == 1
    assert await ledger.redis.exists(f"ms:ticket:{job.id}") == 0


async def test_sweep_events_are_exempt_from_the_event_limit(redis_url: str) -> None:
    async with open_ledger(redis_url, **{"tuning.event_limit": 10}) as ledger:
        job = await begun(ledger, hooks=["pre_attn", "post_attn", "post_block", "attn_out"])
        sweep = job.work_as(SweepWork).sweep
        await keep(ledger, job, 1, *(cell(job, number) for number in range(sweep.num_cells)))
        await ledger.store_outputs(job.id, 1, [])
        events = await ledger.events(job.id, count=10_000)
        assert sum(event.event == "cell" for event in events) == sweep.num_cells
        assert events[0].data["state"] == "queued"
        assert events[-1].event == "done"


async def test_captures_of_a_sweep_are_listed_shown_and_deleted(
    redis_url: str, tmp_path: Any
) -> None:
    async with open_ledger(redis_url, data_dir=str(tmp_path)) as ledger:
        ledger.settings.capture_root.mkdir(parents=True)
        job = await begun(ledger)
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
        await keep(ledger, job, 1, (base, None))
        result = await ledger.result(job.id)
        assert result.capture_results.status == "pending"
        assert [file.tag for file in result.capture_results.files] == ["base"]
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
