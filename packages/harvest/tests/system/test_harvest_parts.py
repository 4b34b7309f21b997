"""Parts of a harvest on a worker without its process: exactly once through releases, refusals of
the store, pauses and bad input.
"""

import asyncio
import subprocess
from asyncio import Task
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from harvest_kit import check_equal, check_rows, checked, texts
from harvest_rig import live, stored, work
from midstream_fake_engine.model import VOCABULARY, make_tokenizer, residual_rows
from sweep_rig import Rig, having

from midstream.broker.artifacts.headers import find_entries
from midstream.broker.ledger.jobs.units import LedgerUnits, UnitFate
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import SamplingRequest
from midstream.schemas.prompts.selectors import Span
from midstream.schemas.prompts.windows import HeadAndTail
from midstream.schemas.requests.policies import Steer, Webhook
from midstream.storage.store import open_store
from midstream.workers.serving.attempt import AttemptOutcome
from midstream.workers.serving.attempts import Attempts
from midstream_harvest.ledger.harvests import (
    TRIES,
    LedgerHarvests,
    job_id_of,
    record_key,
    unit_row,
    units_key,
)
from midstream_harvest.reader import open
from midstream_harvest.records.harvests import (
    HarvestCut,
    HarvestPositions,
    HarvestShards,
    HarvestSource,
    HarvestView,
    StoredHarvest,
    UnitEntry,
)
from midstream_harvest.records.work import HarvestPart
from midstream_harvest.run import attempt as serving
from midstream_webhooks.outbox import WebhookOutbox

SITES = {"post_block": [1, 3]}
HEAD = Span(head_and_tail=HeadAndTail(head=2, tail=0))
DOCUMENTS = texts(80, 300)
#: Small shards: six units of several each.
SHARDS = {"row_bytes": 1024, "shards": HarvestShards(mib=1)}


@pytest.fixture
async def rig(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    settings = {"harvest_sources": str(tmp_path)} | getattr(request, "param", {})
    async with Rig(redis_url, tmp_path, **settings) as opened:
        yield opened


async def submitted(rig: Rig, documents: list[Any] = DOCUMENTS, **changes: Any) -> StoredHarvest:
    harvest = stored(rig, documents, SITES, **{**SHARDS, **changes})
    await LedgerHarvests(rig.ledger).submit(harvest)
    await LedgerHarvests(rig.ledger).advance(harvest.id)
    return harvest


async def harvested(
    rig: Rig, documents: list[Any] = DOCUMENTS, **changes: Any
) -> tuple[StoredHarvest, HarvestView]:
    async with rig.worker() as runs:
        harvest = await submitted(rig, documents, **changes)
        return harvest, await work(rig, runs, harvest.id)


@asynccontextmanager
async def under_way(rig: Rig) -> AsyncIterator[tuple[Attempts, StoredHarvest, Task]]:
    """A harvest whose first part, the task's name, has kept the first of its two units, and goes
    on once the file `gate` is gone.
    """
    harvests = LedgerHarvests(rig.ledger)
    gate = Path(rig.settings.data_dir) / "gate"
    gate.write_text("20")  # documents; a unit has 14
    async with rig.worker(fault=f"turnstile:file={gate}") as runs:
        harvest = await submitted(rig)
        await work(rig, runs, harvest.id, parts=1)
        job, *_ = (await harvests.view(harvest.id)).jobs
        running = asyncio.create_task(runs.run(job, "harvest"), name=job)
        while (await harvests.view(harvest.id)).units_done < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield runs, harvest, running


def units_of(harvest: StoredHarvest, running: Task) -> str:
    """The key of the units of the part that is under way."""
    (part,) = (part for part in range(6) if job_id_of(harvest.id, part, 0) == running.get_name())
    return units_key(HarvestPart(harvest=harvest.id, part=part))


async def test_a_repeated_submission_waits_until_the_first_is_durable(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []

    async def written() -> None:
        waits.append("")

    monkeypatch.setattr(rig.ledger, "written", written)
    first, again, third = (stored(rig, ["one"], SITES) for _ in range(3))
    harvests = LedgerHarvests(rig.ledger)
    assert await harvests.submit(first, ("key", "body")) == first.id
    assert await harvests.submit(again, ("key", "body")) == first.id
    assert len(waits) == 2
    # as if the first had ended before its record was made
    await rig.ledger.redis.delete(f"ms:harvest:{first.id}")
    assert await harvests.submit(again, ("key", "body")) == again.id
    assert await harvests.submit(third, ("key", "body")) == again.id


@having(**{"global_capture.sites": "post_block:1", "global_capture.tag": "ops"})
async def test_probes_that_watch_all_traffic_and_global_capture_apply_to_harvests(rig: Rig) -> None:
    """The operator's `stop` ends what a sequence generates; the operator's captures are charged to
    nobody.
    """
    documents = ["a document", "another one", "yet another one"]
    lengths = [
        len(make_tokenizer().encode(text, add_special_tokens=True).ids) for text in documents
    ]
    stop_at = max(lengths) + 2

    async with rig.worker() as runs:
        await rig.watch(stop_at)
        harvest = await submitted(
            rig, documents, generate=SamplingRequest(max_tokens=20, ignore_eos=True)
        )
        view = await work(rig, runs, harvest.id)
    assert view.state == "succeeded"
    assert view.error is None
    assert [unit.generated for unit in checked(harvest.uri).units] == [
        sum(stop_at + 1 - length for length in lengths)
    ]
    found = find_entries(open_store(rig.settings.artifacts), job_id_of(harvest.id, 0, 0), "ops")
    assert sorted(entry.manifest.request for _, entry in found) == [0, 1, 2]
    assert (await rig.ledger.tenants.usage("default")).capture_bytes == view.bytes


async def test_what_policies_decide_about_a_harvest_is_counted_and_sent(rig: Rig) -> None:
    async with rig.worker() as runs:
        hook = Webhook(url="http://127.0.0.1:9/policy")
        await rig.watch(1.0, "flag", "stop", Steer(module="m"), hook)
        harvest = await submitted(rig, ["a document", "another one", "yet another one"])
        view = await work(rig, runs, harvest.id)
    (shard,) = checked(harvest.uri).shards
    assert view.state == "succeeded"
    assert view.flagged == 3
    assert shard.entry.flagged == 3
    job = job_id_of(harvest.id, 0, 0)
    sent = (await WebhookOutbox(rig.ledger).deliveries(None, job)).deliveries
    assert [(each.event, each.url) for each in sent] == [("job.decided", hook.url)] * 3


async def test_a_harvest_waits_while_a_policy_of_all_traffic_does_not_fit_the_model(
    rig: Rig,
) -> None:
    async with rig.worker() as runs:
        await rig.watch(1.0)
        await rig.ledger.publish_model(
            msgspec.structs.replace(rig.engine.info, hooks=["mlp_out"]), live(rig)
        )
        harvest = await submitted(rig)
        view = await LedgerHarvests(rig.ledger).view(harvest.id)
        assert view.jobs == []
        assert "'guard', which applies to all traffic, reads hook post_block" in view.reason
        await rig.ledger.publish_model(rig.engine.info, live(rig))
        assert (await work(rig, runs, harvest.id)).state == "succeeded"


@having(
    **{"engine.pipeline_parallel_size": 2, "engine.tensor_parallel_size": 2},
)
async def test_the_stages_of_a_pipeline_write_files_of_the_same_rows(rig: Rig) -> None:
    harvest, _ = await harvested(rig, DOCUMENTS[:60])
    made = checked(harvest.uri)
    assert [[file.pp for file in shard.entry.files] for shard in made.shards] == [[0, 1]] * len(
        made.shards
    )
    check_rows(made, DOCUMENTS[:60], [("post_block", 1), ("post_block", 3)])
    assert [key async for key in rig.ledger.redis.scan_iter("ms:harvest-units:*")] == []


async def test_an_attempt_that_was_cut_short_is_gone_on_with(rig: Rig) -> None:
    whole, _ = await harvested(rig)
    async with under_way(rig) as (runs, harvest, running):
        runs.stop([running.get_name()], AttemptOutcome.RELEASED)
        assert await running is AttemptOutcome.RELEASED
    async with rig.worker("another") as runs:
        view = await work(rig, runs, harvest.id)
    assert view.state == "succeeded"
    assert view.error is None
    made = checked(harvest.uri)
    check_equal(made, open(whole.uri))
    attempts = {
        file.key.rpartition(".a")[2].split(".")[0]
        for shard in made.shards
        for file in shard.entry.files
    }
    assert attempts == {"1", "2"}  # what the first attempt kept was not computed again


async def test_units_that_the_ledger_has_lost_are_recorded_again_with_their_part(rig: Rig) -> None:
    """As when Redis's machine dies, and Redis loses its last second."""
    redis_client = rig.ledger.redis
    async with under_way(rig) as (runs, harvest, running):
        counted = ("units_done", "weight_done", "documents", "tokens", "rows", "bytes", "shards")
        await redis_client.hdel(f"ms:harvest:{harvest.id}", *counted)
        await redis_client.hdel("ms:usage", "default/bytes")
        assert await redis_client.delete(units_of(harvest, running)) == 1
        (Path(rig.settings.data_dir) / "gate").unlink()
        assert await running is AttemptOutcome.SUCCEEDED
        view = await work(rig, runs, harvest.id)
    manifest = checked(harvest.uri).manifest
    assert view.state == "succeeded"
    assert view.units_done == view.units
    assert view.rows == manifest.rows
    assert view.bytes == manifest.bytes
    assert (await rig.ledger.tenants.usage("default")).capture_bytes == manifest.bytes


async def test_a_unit_is_counted_once_and_its_receipts_are_forgotten(rig: Rig) -> None:
    """Not by an attempt that lost its lease, and not once the harvest is being cancelled."""
    harvests = LedgerHarvests(rig.ledger)
    redis_client = rig.ledger.redis
    async with under_way(rig) as (runs, harvest, running):
        name = running.get_name()
        before = await harvests.view(harvest.id)
        place = units_of(harvest, running)
        units = LedgerUnits(rig.ledger)
        ((number, entry),) = (await units.records(place, UnitEntry)).items()

        async def keep(attempt: int, unit: int) -> UnitFate:
            again = msgspec.structs.replace(entry, unit=unit, rows=7)
            rows = [unit_row(again, 1, [])]
            return await units.keep(
                name, attempt, rows, place=place, ranks=1, stages=1, whole=record_key(harvest.id)
            )

        left = [
            int(field.split(b"/")[0]) for field in await redis_client.hkeys(f"ms:ticket:{name}")
        ]
        assert min(left, default=entry.documents) >= entry.documents
        assert await keep(1, number) == "kept"
        after = await harvests.view(harvest.id)
        assert (await units.records(place, UnitEntry))[number] == entry
        assert after.rows == before.rows
        assert after.units_done == 1
        assert await keep(2, number + 1) == "stale"
        await harvests.ask(harvest.id, "cancel")
        assert await keep(1, number + 1) == "cancelling"
        assert await units.records(place, UnitEntry) == {number: entry}
        runs.stop([name], AttemptOutcome.CANCELLED)
        assert await running is AttemptOutcome.CANCELLED


async def test_a_plan_that_is_stored_after_the_seal_is_removed(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker could not reach the store until another one had done all of its work."""
    put = serving.HarvestAttempt._put
    reachable = asyncio.Event()

    async def late(self: Any, harvest: Any, store: Any, key: str, *rest: Any) -> Any:
        if key.endswith(".a1.msgpack"):
            await reachable.wait()
        return await put(self, harvest, store, key, *rest)

    monkeypatch.setattr(serving.HarvestAttempt, "_put", late)
    async with rig.worker() as runs:
        harvest = await submitted(rig, DOCUMENTS[:20])
        (job,) = (await LedgerHarvests(rig.ledger).view(harvest.id)).jobs
        first = asyncio.create_task(runs.run(job, "harvest"))
        while (await rig.ledger.view(job)).attempt < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await Reaper(rig.ledger).sweep(now() + 2 * rig.settings.lease_s)
        async with rig.worker("another", data_dir=str(tmp_path / "another")) as others:
            assert (await work(rig, others, harvest.id)).state == "succeeded"
            reachable.set()
            await first
    checked(harvest.uri)


@contextmanager
def refusing_store(folder: Path) -> Iterator[Callable[[], object]]:
    """No folder can be made below `folder`; what is yielded lets the store take rows."""
    folder.mkdir()
    blocked = folder / "shards"
    blocked.write_text("a file")
    yield blocked.unlink


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], object]]:
    """A file system of too little room at `folder`; what is yielded makes it larger."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    larger = ["mount", "-o", "remount,size=64m", str(folder)]
    try:
        yield lambda: subprocess.run(larger, check=True)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("store", "why"), [(refusing_store, "shards"), (small_disk, "No space left on device")]
)
async def test_a_harvest_pauses_until_its_store_takes_rows(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Any, why: str
) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0.05)
    with store(tmp_path / "store") as mend:
        async with rig.worker() as runs:
            harvest = await submitted(rig, uri=str(tmp_path / "store"))
            working = asyncio.create_task(work(rig, runs, harvest.id))
            while (view := await LedgerHarvests(rig.ledger).view(harvest.id)).state != "paused":
                assert not working.done(), "nothing has stopped it"
                await asyncio.sleep(0.01)
            assert why in view.reason
            await asyncio.sleep(0.3)
            assert (await LedgerHarvests(rig.ledger).view(harvest.id)).units_done == view.units_done
            mend()
            view = await working
        assert view.state == "succeeded"
        assert view.reason == ""
        check_rows(checked(harvest.uri), DOCUMENTS, [("post_block", 1), ("post_block", 3)])


async def test_a_paused_harvest_goes_on_with_what_is_missing(rig: Rig) -> None:
    harvests = LedgerHarvests(rig.ledger)
    async with rig.worker() as runs:
        harvest = await submitted(rig)
        await work(rig, runs, harvest.id, parts=2)
        view = await harvests.ask(harvest.id, "pause")
        assert view.state == "paused"
        assert {(await rig.ledger.view(job)).state for job in view.jobs} == {"aborted"}
        done = view.units_done
        await harvests.advance(harvest.id)
        assert (await harvests.view(harvest.id)).units_done == done
        await harvests.ask(harvest.id, "run")
        view = await work(rig, runs, harvest.id)
    assert view.state == "succeeded"
    check_rows(checked(harvest.uri), DOCUMENTS, [("post_block", 1), ("post_block", 3)])
    with pytest.raises(MidstreamError, match="has ended"):
        await harvests.ask(harvest.id, "pause")


async def test_a_cancelled_harvest_keeps_nothing_and_has_no_manifest(rig: Rig) -> None:
    async with under_way(rig) as (runs, harvest, running):
        runs.stop([running.get_name()], AttemptOutcome.RELEASED)
        await running
    assert await rig.ledger.redis.keys(f"ms:harvest-units:{harvest.id}:*")
    assert (await LedgerHarvests(rig.ledger).ask(harvest.id, "cancel")).state == "cancelled"
    assert not await rig.ledger.redis.keys(f"ms:harvest-units:{harvest.id}:*")
    with pytest.raises(MidstreamError, match=r"has no manifest\.json"):
        open(harvest.uri)


async def test_an_accepted_cancel_is_final(rig: Rig, tmp_path: Path) -> None:
    harvests = LedgerHarvests(rig.ledger)
    async with under_way(rig) as (_, harvest, running):
        view = await harvests.ask(harvest.id, "cancel")
        assert view.state == "running"
        assert view.reason == "being cancelled"
        for wanted in ("run", "pause"):
            with pytest.raises(MidstreamError, match="is being cancelled"):
                await harvests.ask(harvest.id, wanted)
        (tmp_path / "gate").unlink()
        # its next unit is not kept: nobody has to tell it
        assert await asyncio.wait_for(running, 60) is AttemptOutcome.CANCELLED
        await harvests.advance(harvest.id)
        ended = await harvests.view(harvest.id)
        assert ended.state == "cancelled"
        assert ended.units_done == view.units_done


async def test_a_cancel_while_a_harvest_is_sealed_leaves_no_manifest(
    rig: Rig, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = serving.HarvestAttempt._manifest

    def cancelled_meanwhile(self: Any, harvest: StoredHarvest, *rest: Any) -> Any:
        with redis.Redis.from_url(redis_url) as client:
            client.hset(f"ms:harvest:{harvest.id}", "wanted", "cancel")
        return seal(self, harvest, *rest)

    monkeypatch.setattr(serving.HarvestAttempt, "_manifest", cancelled_meanwhile)

    harvest, view = await harvested(rig, DOCUMENTS[:20])
    assert view.state == "cancelled"
    assert not (Path(harvest.uri) / "manifest.json").exists()


async def test_a_harvest_whose_manifest_is_being_written_is_not_cancelled(rig: Rig) -> None:
    harvests = LedgerHarvests(rig.ledger)
    harvest = await submitted(rig, DOCUMENTS[:20])
    await rig.ledger.redis.hset(f"ms:harvest:{harvest.id}", "closing", 1)
    for wanted in ("cancel", "pause"):
        with pytest.raises(MidstreamError, match="its manifest is being written"):
            await harvests.ask(harvest.id, wanted)
    async with rig.worker() as runs:
        assert (await work(rig, runs, harvest.id)).state == "succeeded"


async def test_a_part_does_not_recreate_the_record_of_a_deleted_harvest(
    rig: Rig, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = serving.SourceReader.plan

    async def deleted_meanwhile(self: Any) -> Any:
        with redis.Redis.from_url(redis_url) as client:
            client.delete(f"ms:harvest:{self._opening.harvest.id}")
        return await plan(self)

    monkeypatch.setattr(serving.SourceReader, "plan", deleted_meanwhile)

    async with rig.worker() as runs:
        harvest = await submitted(rig)
        (job,) = (await LedgerHarvests(rig.ledger).view(harvest.id)).jobs
        assert await runs.run(job, "harvest") is AttemptOutcome.CANCELLED
    assert not await rig.ledger.redis.exists(f"ms:harvest:{harvest.id}")
    assert (await rig.ledger.view(job)).state == "cancelled"
    assert not list(Path(harvest.uri).glob("plans/*"))


async def test_a_submission_that_comes_late_does_not_put_a_part_out(rig: Rig) -> None:
    """Another process has cancelled the harvest since this one read its record."""
    harvests = LedgerHarvests(rig.ledger)
    harvest = stored(rig, ["one"], SITES)
    await harvests.submit(harvest)
    await harvests.ask(harvest.id, "cancel")
    record: dict[str, Any] = {"state": "planning", "wanted": "run"}
    async with rig.worker():
        await harvests._submit(harvest, record, "planning", [], {})
    await harvests._show(harvest.id, record, "running", "")
    assert (await harvests.view(harvest.id)).state == "cancelled"
    assert not await rig.ledger.redis.exists(
        f"ms:harvest-out:{harvest.id}", f"ms:harvest-begun:{harvest.id}"
    )
    assert {job.state for job in (await rig.ledger.list(limit=9)).jobs} == {"aborted"}


async def test_a_source_that_cannot_be_read_fails_at_once_and_says_where(
    rig: Rig, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnot JSON\n')
    source = HarvestSource(path="bad.jsonl", format="jsonl")
    _, view = await harvested(rig, source=source, root=str(tmp_path))
    assert view.state == "failed"
    assert view.error.status == 400
    assert view.error.field == "source"
    assert "document 1 is not JSON" in view.error.detail


async def test_a_source_that_changes_ends_the_harvest_without_a_manifest(
    rig: Rig, tmp_path: Path
) -> None:
    lines = [f'{{"text": "{text}"}}\n' for text in DOCUMENTS]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(lines))
    source = HarvestSource(path=file.name, format="jsonl")
    async with rig.worker() as runs:
        harvest = await submitted(rig, source=source, root=str(tmp_path))
        await work(rig, runs, harvest.id, parts=1)
        file.write_text("".join(lines[::-1]))
        view = await work(rig, runs, harvest.id)
    assert view.state == "failed"
    assert view.error.status == 409
    assert view.error.field == "source.path"
    assert "'texts.jsonl' was changed since the harvest was planned" in view.error.detail
    assert not (Path(harvest.uri) / "manifest.json").exists()


async def test_a_part_that_keeps_failing_ends_the_harvest(rig: Rig) -> None:
    async with rig.worker(fault="refuse:request=1") as runs:
        view = await work(rig, runs, (await submitted(rig)).id, parts=20)
    assert view.state == "failed"
    assert "injected fault" in view.error.detail
    assert [job.state for job in (await rig.ledger.list(limit=50)).jobs].count("failed") >= TRIES


async def test_another_global_steering_ends_the_harvest(rig: Rig) -> None:
    _, view = await harvested(rig, steering="of another version")
    assert view.state == "failed"
    assert view.error.status == 409
    assert "global steering" in view.error.detail


async def test_a_seal_that_finds_fewer_parts_than_were_planned_removes_nothing(rig: Rig) -> None:
    """As when it is run again long after the harvest has ended."""
    harvest, _ = await harvested(rig)
    await rig.ledger.redis.delete(f"ms:harvest-done:{harvest.id}")
    again = object.__new__(serving.HarvestAttempt)
    again._harvests = LedgerHarvests(rig.ledger)
    with pytest.raises(MidstreamError, match="no files were removed"):
        await again._seal(harvest, open_store(harvest.uri))
    check_rows(checked(harvest.uri), DOCUMENTS, [("post_block", 1), ("post_block", 3)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float8_e4m3fn"])
async def test_rows_of_every_dtype_are_read_back(rig: Rig, dtype: Any) -> None:
    harvest, view = await harvested(rig, DOCUMENTS[:20], dtype=dtype)
    assert view.state == "succeeded"
    made = checked(harvest.uri)
    keys = made.keys(slice(None))
    expected = residual_rows(3, keys.positions, keys.token_ids, "post_block")
    bound = {"bfloat16": 2**-8, "float16": 2**-10, "int8": 1 / 127, "float8_e4m3fn": 2**-4}[dtype]
    found = made.rows(slice(None), 3).astype("float32")
    assert (abs(found - expected).max(axis=1) <= bound * abs(expected).max(axis=1) + 1e-6).all()


async def test_positions_cuts_and_limits_hold_over_a_harvest(rig: Rig) -> None:
    sampled = HarvestPositions(sample=5, seed=3)
    harvest, view = await harvested(
        rig, cut=HarvestCut(fit="pack"), max_length=128, positions=sampled
    )
    assert view.state == "succeeded"
    assert len(checked(harvest.uri).keys(slice(None)).documents) == 5 * len(DOCUMENTS)
    again, _ = await harvested(rig, cut=HarvestCut(fit="pack"), max_length=128, positions=sampled)
    check_equal(open(harvest.uri), open(again.uri))
    limited, view = await harvested(rig, max_tokens=10_000)
    assert view.tokens == 10_000
    assert set(checked(limited.uri).keys(slice(None)).documents.tolist()) == set(
        range(view.documents)
    )


async def test_generated_tokens_have_rows_too(rig: Rig) -> None:
    documents = DOCUMENTS[:8]
    harvest, view = await harvested(
        rig,
        documents,
        generate=SamplingRequest(max_tokens=6),
        positions=HarvestPositions(prompt=False),
    )
    assert view.state == "succeeded"
    made = checked(harvest.uri)
    assert made.manifest.generated == 6 * len(documents)
    assert all(shard.generated().all() for shard in made.shards)
    assert len(made) == 5 * len(documents)  # the last sampled token is never fed back


@pytest.mark.parametrize(
    ("positions", "alone", "generating"),
    [
        (HarvestPositions(window=HEAD), [1, 2], [1, 2]),
        (HarvestPositions(window=HEAD, skip_bos=False), [0, 1], [0, 1]),
        (HarvestPositions(window=HEAD, prompt=False), None, [20, 21]),
        (HarvestPositions(window=Span(last=3)), [17, 18, 19], [19, 20, 21]),
    ],
)
async def test_a_window_counts_the_positions_that_give_rows(
    rig: Rig, positions: HarvestPositions, alone: list[int] | None, generating: list[int]
) -> None:
    """A document is the text's beginning and 19 tokens; two of three generated ones have rows."""
    documents = [[VOCABULARY, *range(3 + number, 22 + number)] for number in range(3)]
    sampling = SamplingRequest(max_tokens=3, ignore_eos=True)
    for generate, kept in ((None, alone), (sampling, generating)):
        if kept is not None:
            harvest, _ = await harvested(rig, documents, positions=positions, generate=generate)
            keys = checked(harvest.uri).keys(slice(None))
            found = sorted(zip(keys.documents.tolist(), keys.positions.tolist(), strict=True))
            assert found == [(number, at) for number in range(3) for at in kept]
