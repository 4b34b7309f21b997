"""Every call of `AsyncClient` against the real stack with the fake engine, at least once; answers
are those of `Client`.
"""

import asyncio
import inspect
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from midstream_fake_engine.model import HIDDEN_SIZE, NUM_LAYERS, residual_rows
from up_kit import Up

from midstream import AsyncClient, Client, MidstreamError
from midstream.client.sdk.answers import download
from midstream.schemas.access.keys import Limits
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.sweeps import SweepCell, SweepSummary

CAPTURE = {"layers": "all", "positions": "all_prompt", "tag": "mine"}
SWEEP: dict[str, Any] = {
    "model": "fake",
    "pairs": [{"clean": "hello you", "corrupt": "hallo you", "answer": " a", "foil": " b"}],
}


class Recorder(AsyncClient):
    """Notes which calls were made."""

    called: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        Recorder.called.add(name)
        return super().__getattribute__(name)


async def refused(call: Awaitable[Any], kind: str) -> None:
    with pytest.raises(MidstreamError) as caught:
        await call
    assert caught.value.kind == kind, caught.value


async def jobs(client: AsyncClient) -> None:
    assert await client.ready()
    assert await client.models() == ["fake"]
    assert (await client.model("fake"))["num_layers"] == NUM_LAYERS
    job = await client.submit(prompts=["hello", "you"], capture=CAPTURE, max_tokens=3)
    assert [event.event async for event in client.events(job)][-1] == "done"
    assert (
        (await client.wait(job, timeout=120)).state
        == (await client.job(job)).state
        == State.SUCCEEDED
    )
    assert job.id in [each.id for each in (await client.jobs(limit=5)).jobs]
    assert len((await client.result(job)).outputs) == 2
    await refused(client.cancel(job), "conflict")
    with pytest.raises(TimeoutError):
        await client.wait(job, timeout=0)
    answer = await client.chat("fake", [{"role": "user", "content": "hi"}], max_tokens=2)
    assert (
        answer.texts == (await client.result(answer.job)).outputs[0].text.splitlines()
        or answer.text
    )
    assert [
        item.index async for item in client.map(["a", "b", "c"], job_prompts=2, max_tokens=2)
    ] == [0, 1, 2]
    assert (await client.status()).version


async def captures(client: AsyncClient, folder: Path) -> None:
    result = await client.run(prompts=["hello"], capture=CAPTURE, progress=False)
    reader = await client.capture(result, folder)
    tokens = reader.token_ids()
    np.testing.assert_array_equal(
        reader.array(2), residual_rows(2, np.arange(len(tokens)), np.array(tokens))
    )
    assert reader.tokens() == (await client.detokenize("fake", tokens)).token_strs
    assert (await client.tokenize("fake", "hello")).tokens[-len("hello") :] == tokens[
        -len("hello") :
    ]
    assert (await client.matrix([result], 0)).shape == (1, HIDDEN_SIZE)
    assert result.id in [each.job for each in (await client.captures()).captures]
    await client.delete_capture(result)
    await refused(client.capture(result), "gone")


async def steering(client: AsyncClient, folder: Path) -> None:
    vector = np.ones(HIDDEN_SIZE, np.float32)
    assert (await client.register_module("joy", {"post_block.1": vector})).digest == (
        await client.module("joy")
    ).digest
    assert [each.name for each in await client.modules()] == ["joy"]
    assert await client.export_module("joy", folder / "joy.npz") == "npz"
    assert (await client.register_module("joy", folder / "joy.npz")).digest == (
        await client.module("joy")
    ).digest
    plain, steered = [
        (await client.completion("fake", "hi", steering=each, max_tokens=4)).text
        for each in ([], [{"module": "joy"}])
    ]
    assert plain != steered
    await client.unregister_module("joy")
    await refused(client.module("joy"), "not_found")
    assert (await client.set_global([{"layers": 1, "vector": vector}])).applied
    assert (await client.global_steering()).digest
    assert (await client.clear_global()).digest == ""
    assert (await client.dynamic()).determinism.consistent


async def probes(client: AsyncClient) -> None:
    await client.register_probe(
        "calm", weight=np.ones(HIDDEN_SIZE), layer=0, thresholds=2, labels=["calm"]
    )
    assert [each.name for each in await client.probes()] == [(await client.probe("calm")).name]
    assert (await client.watch_probe("calm")).watch == "flag"
    assert not (await client.unwatch_probe("calm")).watch
    await client.unregister_probe("calm")
    await refused(client.probe("calm"), "not_found")


async def registries(client: AsyncClient) -> None:
    """Of what operators put into folders: there is none here."""
    assert (await client.loras(), await client.saes(), await client.tuned_lenses()) == ([], [], [])
    for call in (
        client.lora,
        client.unregister_lora,
        client.sae,
        client.unregister_sae,
        client.tuned_lens,
        client.unregister_lens,
    ):
        await refused(call("none"), "not_found")
    for register in (client.register_lora, client.register_sae, client.register_lens):
        await refused(register("none", "nowhere"), "invalid_request")
    for features in (client.features("hi", "none"), client.features_of("hi", ["none"])):
        await refused(features, "invalid_request")


async def readings(client: AsyncClient) -> None:
    assert (await client.lens("hello", layers=[1], positions="last_prompt")).tokens.shape == (
        1,
        1,
        5,
    )
    await refused(client.attention("hello"), "invalid_request")
    await refused(client.patch_attention("hello", {(0, 0): np.eye(5)}), "invalid_request")


async def sweeps(client: AsyncClient) -> None:
    fields = SWEEP | {"hooks": ["pre_attn"], "metric": "logit_diff"}
    seen: list[Any] = []
    found = await client.sweep(**fields, progress=seen.append)
    job = await client.submit_sweep(**fields)
    assert (await client.sweep_result(job)).pairs[0].grids == found.pairs[0].grids
    assert len(found.pairs[0].grids["pre_attn"]) == NUM_LAYERS
    events = [event async for event in client.sweep_events(job)]
    for each in (seen, events):
        assert any(isinstance(event, SweepCell) for event in each)
        assert isinstance(each[-1], SweepSummary)


async def runs(client: AsyncClient) -> None:
    await client.run(prompts=["hello"], capture={**CAPTURE, "run": "clean"}, progress=False)
    assert [run.name for run in (await client.source_runs()).runs] == [
        (await client.source_run("clean")).name
    ]
    await client.delete_run("clean")
    await refused(client.source_run("clean"), "not_found")


async def keys(client: AsyncClient) -> None:
    key = await client.create_key("ada", tenant="vision", expires_in="1h")
    assert key.id in [each.id for each in await client.api_keys()]
    await client.revoke_key(key.id)
    assert (
        (await client.set_tenant("vision", Limits(jobs_in_flight=3))).name
        == (await client.tenant("vision")).name
        == "vision"
    )
    assert "vision" in [each.name for each in await client.tenants()]


async def webhooks(client: AsyncClient) -> None:
    assert (await client.deliveries()).deliveries == []
    assert len((await client.webhook_secrets()).secrets) >= 1
    assert (await client.rotate_webhook_secret(keep_former_s="1h")).secrets
    assert await client.disabled_webhooks() == []
    for call in (
        client.delivery("msg_none"),
        client.redeliver("msg_none"),
        client.enable_webhooks("http://example.com/"),
    ):
        await refused(call, "not_found")


async def harvests(client: AsyncClient) -> None:
    source = {"lines": ["one line", "another line"]}
    seen: list[Any] = []
    view = await client.wait_harvest(
        await client.submit_harvest(model="fake", source=source, layers=[0]),
        seen.append,
        timeout=120,
    )
    assert (view.rows > 0, seen[-1]) == (True, view)
    assert (await client.harvest(view)).id in [
        each.id for each in (await client.harvests()).harvests
    ]
    for call in (client.pause_harvest, client.resume_harvest, client.cancel_harvest):
        await refused(call(view), "conflict")
    await client.delete_harvest(view)
    await refused(client.harvest(view), "not_found")


def test_every_call_of_the_awaiting_client_works(up: Up, tmp_path: Path) -> None:
    async def all_of_them() -> None:
        async with Recorder(up.ready()) as client:
            await jobs(client)
            await captures(client, tmp_path)
            await steering(client, tmp_path)
            for group in (probes, registries, readings, sweeps, runs, keys, webhooks, harvests):
                await group(client)

    asyncio.run(all_of_them())
    public = {
        name for name, _ in inspect.getmembers(AsyncClient, callable) if not name.startswith("_")
    }
    assert public - Recorder.called == set()


def test_both_clients_download_the_same_rows(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that a file comes in several pieces
    monkeypatch.setattr("midstream.client.sdk.transport.CHUNK", 64)

    async def awaited(job: str) -> np.ndarray:
        async with AsyncClient(up.ready()) as client:
            return (await client.capture(job, tmp_path / "there")).stack()

    with Client(up.ready()) as client:
        job = client.run(prompts=["hello you"], capture=CAPTURE).id
        here = client.capture(job, tmp_path / "here").stack()
    np.testing.assert_array_equal(here, asyncio.run(awaited(job)))
    assert len(download.downloaded(tmp_path / "there", 0)) == 1


def test_a_cancelled_wait_for_a_sweep_cancels_the_sweep(up: Up) -> None:
    async def interrupted() -> tuple[bool, State]:
        async with AsyncClient(up.ready()) as client:
            first = asyncio.Event()
            fields = SWEEP | {"hooks": ["pre_attn", "mlp_out"], "metric": "logit_diff"}
            job = await client.submit_sweep(**fields)
            task = asyncio.create_task(
                client.sweep_result(job, lambda event: first.set(), cancel=True)
            )
            await asyncio.wait_for(first.wait(), 60)
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            cancelled = isinstance(ended, asyncio.CancelledError)  # or it had ended
            return cancelled, (await client.wait(job, timeout=120)).state

    cancelled, state = asyncio.run(interrupted())
    assert state in ({State.CANCELLED, State.SUCCEEDED} if cancelled else {State.SUCCEEDED})
