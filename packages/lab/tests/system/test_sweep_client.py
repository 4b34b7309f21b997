"""Do both clients sweep against the real stack as they say, and cancel what nobody waits for?"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from midstream_fake_engine.model import NUM_LAYERS
from stack import Stack

from midstream import AsyncClient, Client, PatchStudy
from midstream.schemas.jobs.jobs import State
from midstream_lab.records.sweeps import SweepCell, SweepSummary

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

SWEEP: dict[str, Any] = {
    "model": "fake-model",
    "pairs": [{"clean": "hello you", "corrupt": "hallo you", "answer": " a", "foil": " b"}],
}


def test_a_patch_study_zooms_and_cancels_on_interrupt(client: Client, tmp_path: Path) -> None:
    study = PatchStudy("hello you", "hallo you", " a", " b", client=client).sweep(
        hooks=["resid_pre", "mlp_out"], metric="logit_diff"
    )
    assert study.grid().hooks == study.result.hooks == ["resid_pre", "mlp_out"]
    told = study.result.summary
    assert told.cells + told.skipped == told.total
    assert told.total == 2 * NUM_LAYERS * len(study.result.pairs[0].labels)
    study.save(tmp_path / "study.json")
    best = study.top(1)[0]
    closer = PatchStudy.load(tmp_path / "study.json", client).zoom(best)
    assert closer.result.pairs[0].positions == [best.positions]
    assert closer.top(1)[0].value == pytest.approx(best.value)
    assert client.capture(study.job, tag="base").token_ids()

    def stop(event: object) -> None:
        raise KeyboardInterrupt

    long = PatchStudy("hello you" * 10, "hallo you" * 10, " a", " b", client=client)
    with pytest.raises(KeyboardInterrupt):
        long.sweep(hooks=["resid_pre", "mlp_out"], metric="logit_diff", progress=stop)
    (last,) = client.jobs.list(limit=1).jobs
    assert client.wait(last.id, timeout=120).state is State.CANCELLED


async def test_the_awaiting_client_sweeps(stack: Stack) -> None:
    fields = SWEEP | {"hooks": ["pre_attn"], "metric": "logit_diff"}
    seen: list[Any] = []
    async with AsyncClient(stack.url) as client:
        found = await client.sweep(**fields, progress=seen.append)
        job = await client.sweeps.submit(**fields)
        assert (await client.sweeps.result(job)).pairs[0].grids == found.pairs[0].grids
        assert len(found.pairs[0].grids["pre_attn"]) == NUM_LAYERS
        for each in (seen, [event async for event in client.sweeps.events(job)]):
            assert any(isinstance(event, SweepCell) for event in each)
            assert isinstance(each[-1], SweepSummary)


async def test_a_cancelled_wait_for_a_sweep_cancels_the_sweep(stack: Stack) -> None:
    async with AsyncClient(stack.url) as client:
        first = asyncio.Event()
        long = {**SWEEP["pairs"][0], "clean": 30 * "hello you ", "corrupt": 30 * "hallo you "}
        job = await client.sweeps.submit(
            model="fake-model", pairs=[long], hooks=["pre_attn", "mlp_out"]
        )
        task = asyncio.create_task(
            client.sweeps.result(job, lambda event: first.set(), cancel=True)
        )
        await asyncio.wait_for(first.wait(), 60)
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)
        assert (await client.wait(job, timeout=120)).state is State.CANCELLED
