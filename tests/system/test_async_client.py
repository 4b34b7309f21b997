"""The awaiting client against the real stack with the fake engine: results, events, files in
pieces, refusals.

The calls of both clients are written once, and `test_client_surface.py` compares what they send.
"""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE, NUM_LAYERS, residual_rows
from refusal_kit import refuses
from stack import Stack

from midstream import AsyncClient
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.sweeps import SweepCell, SweepSummary

pytest_plugins = ["shared_stack"]
pytestmark = pytest.mark.xdist_group("shared_stack")

CAPTURE = {"layers": "all", "positions": "all_prompt", "tag": "mine"}
SWEEP: dict[str, Any] = {
    "model": "fake-model",
    "pairs": [{"clean": "hello you", "corrupt": "hallo you", "answer": " a", "foil": " b"}],
}


async def refused(call: Awaitable[Any], kind: str) -> None:
    with refuses(kind=kind):
        await call


async def jobs(client: AsyncClient) -> None:
    assert await client.ready()
    assert (await client.models(), (await client.model("fake-model"))["num_layers"]) == (
        ["fake-model"],
        NUM_LAYERS,
    )
    job = await client.submit(prompts=["hello", "you"], capture=CAPTURE, max_tokens=3)
    assert [event.event async for event in client.jobs.events(job)][-1] == "done"
    assert (await client.wait(job, timeout=120)).state is State.SUCCEEDED
    assert (await client.jobs.get(job)).state is State.SUCCEEDED
    assert job.id in [each.id for each in (await client.jobs.list(limit=5)).jobs]
    assert len((await client.result(job)).outputs) == 2
    await refused(client.jobs.cancel(job), "conflict")
    with pytest.raises(TimeoutError):
        await client.wait(job, timeout=0)
    answer = await client.chat("fake-model", [{"role": "user", "content": "hi"}], max_tokens=2)
    assert (
        answer.texts == (await client.result(answer.job)).outputs[0].text.splitlines()
        or answer.text
    )
    assert [
        item.index async for item in client.map(["a", "b", "c"], job_prompts=2, max_tokens=2)
    ] == [0, 1, 2]
    result = await client.dose(
        model="fake-model",
        prompts=["hello"],
        steering=[{"vector": [1.0] * HIDDEN_SIZE, "layers": 1}],
        scales=[1.0],
        effect={"words": ["a"]},
        held_out=["you"],
        max_tokens=4,
    )
    assert [cell.scale for cell in result.dose.cells] == [1.0]
    assert (await client.status()).version


async def captures(client: AsyncClient, folder: Path) -> None:
    result = await client.run(prompts=["hello"], capture=CAPTURE, progress=False)
    reader = await client.capture(result, folder)
    tokens = reader.token_ids()
    np.testing.assert_array_equal(
        reader.array(2), residual_rows(2, np.arange(len(tokens)), np.array(tokens))
    )
    assert reader.tokens() == (await client.detokenize("fake-model", tokens)).token_strs
    assert (await client.tokenize("fake-model", "hello")).tokens[-len("hello") :] == tokens[
        -len("hello") :
    ]
    assert (await client.captures.matrix([result], 0)).shape == (1, HIDDEN_SIZE)
    assert result.id in [each.job for each in (await client.captures.list()).captures]
    await client.captures.delete(result)
    await refused(client.capture(result), "gone")


async def registries(client: AsyncClient) -> None:
    """Of what operators put into folders: there is none here."""
    assert (await client.loras.list(), await client.saes.list(), await client.lenses.list()) == (
        [],
        [],
        [],
    )
    for call in (
        client.loras.get,
        client.loras.delete,
        client.saes.get,
        client.saes.delete,
        client.lenses.get,
        client.lenses.delete,
    ):
        await refused(call("none"), "not_found")
    for register in (client.loras.put, client.saes.put, client.lenses.put):
        await refused(register("none", "nowhere"), "invalid_request")
    for features in (client.features("hi", "none"), client.readings.features_of("hi", ["none"])):
        await refused(features, "invalid_request")


async def sweeps(client: AsyncClient) -> None:
    fields = SWEEP | {"hooks": ["pre_attn"], "metric": "logit_diff"}
    seen: list[Any] = []
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


async def test_the_awaiting_client_works(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.client.sdk.transport.CHUNK", 64)  # files come in several pieces
    async with AsyncClient(stack.url) as client:
        await jobs(client)
        await captures(client, tmp_path)
        await registries(client)
        await sweeps(client)
