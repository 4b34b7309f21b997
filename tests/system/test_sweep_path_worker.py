"""Paths in a worker: passes that follow each other, and an attempt that goes on where a killed one
was. Over the fake engine, whose rows do not depend on patches: what the receivers compute in the
first pass is what they compute anyway, so every cell has the base's value.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sweep_rig import LAYERS, Rig, difference, having, pair, sweep

from midstream.schemas.jobs.sweep_units import Units
from midstream.schemas.jobs.sweeps import Column, SweepResult
from midstream.schemas.requests.sweep_paths import StoredEnd, StoredPath
from midstream.workers.serving import sweeps
from midstream.workers.serving.attempt import AttemptOutcome

PLACES = [(place, place) for place in range(1, 6)]
MADE = pair(
    columns=[Column(label=f"c{number}", places=PLACES) for number in range(6)], sender=PLACES
)
RECEIVERS = [
    StoredEnd(layer=LAYERS[-1], hook="mlp_out"),
    StoredEnd(layer=LAYERS[-1], hook="attn_out"),
]


@pytest.fixture
async def rig(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with Rig(redis_url, tmp_path, **getattr(request, "param", {})) as opened:
        yield opened


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
@having(sweep_cells_in_flight=2)
async def test_a_killed_path_sweep_goes_on_with_the_cells_that_are_not_known(
    rig: Rig, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "FIRST_PASSES", 4)
    if ends == "receivers":
        path, layers = StoredPath(frozen=["attn", "mlp"], receivers=RECEIVERS), LAYERS[:-1]
    else:
        path, layers = (
            StoredPath(frozen=["attn"], sender=StoredEnd(layer=0, hook="attn_out")),
            LAYERS[1:],
        )
    asked = path_sweep(path, layers)

    job_id = await rig.interrupted(asked, 6)
    async with rig.worker("boot2") as runs:
        assert await runs.run_job(job_id) is AttemptOutcome.SUCCEEDED
    check(await rig.result(job_id), asked.num_cells, path)
    records = await rig.records(job_id)
    assert {record.attempt for record in records.values()} == {1, 2}
    units = Units(asked)
    senders = [
        records[sender.number].reason
        for number in range(2)
        if (sender := units.sender(number)) is not None
    ]
    assert senders == ([] if ends == "receivers" else ["", ""])


async def test_a_first_pass_that_fails_leaves_its_cell_without_a_value(rig: Rig) -> None:
    """The rows that hold the branches are in no run: no cell, and no other number instead."""
    path = StoredPath(frozen=["attn"], receivers=[StoredEnd(layer=LAYERS[-1], hook="mlp_out")])
    asked = path_sweep(path, LAYERS[:1])

    job_id = await rig.submit(asked)
    async with rig.worker(fault="lose_run:rank=0") as runs:
        assert await runs.run_job(job_id) is AttemptOutcome.SUCCEEDED
    result = await rig.result(job_id)
    assert result.summary.cells < asked.num_cells
    assert any(
        "first pass failed" in each.reason and "is not on this rank" in each.reason
        for each in result.skipped
    )
