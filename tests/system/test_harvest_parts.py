"""Parts of a harvest on a worker without its process: exactly once through releases, refusals of
the store, pauses and bad input.
"""

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import s3_kit
from harvest_kit import check_equal, check_rows, checked, texts
from harvest_rig import live, stored, work
from midstream_fake_engine.model import make_tokenizer, residual_rows
from s3_kit import FaultProxy
from sweep_rig import Rig

from midstream.broker.artifacts.headers import find_entries
from midstream.broker.ledger.recovery.harvests import TRIES, Harvests, job_id_of
from midstream.client.harvest import open, verify
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.harvests import (
    HarvestCut,
    HarvestPositions,
    HarvestShards,
    HarvestSource,
    HarvestView,
    StoredHarvest,
)
from midstream.schemas.jobs.jobs import SamplingRequest
from midstream.storage.store import below, open_store
from midstream.workers.serving import harvests as serving
from midstream.workers.serving.attempt import AttemptOutcome

SITES = {"post_block": [1, 3]}
DOCUMENTS = texts(300, 200)
#: Small shards: about ten units of several each.
SHARDS = {"row_bytes": 8192, "shards": HarvestShards(mib=2)}


async def submitted(rig: Rig, documents: list[str] = DOCUMENTS, **changes: Any) -> StoredHarvest:
    harvest = stored(rig, documents, SITES, **{**SHARDS, **changes})
    await Harvests(rig.ledger).submit(harvest)
    await Harvests(rig.ledger).advance(harvest.id)
    return harvest


async def harvested(
    rig: Rig, documents: list[str] = DOCUMENTS, **changes: Any
) -> tuple[StoredHarvest, HarvestView]:
    async with rig.worker() as runs:
        harvest = await submitted(rig, documents, **changes)
        return harvest, await work(rig, runs, harvest.id)


def test_a_repeated_submission_waits_until_the_first_is_durable(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    async def scenario(rig: Rig) -> None:
        waits: list[str] = []

        async def written() -> None:
            waits.append("")

        monkeypatch.setattr(rig.ledger, "written", written)
        first, again, third = (stored(rig, ["one"], SITES) for _ in range(3))
        harvests = Harvests(rig.ledger)
        assert await harvests.submit(first, ("key", "body")) == first.id
        assert await harvests.submit(again, ("key", "body")) == first.id
        assert len(waits) == 2
        # as if the first had ended before its record was made
        await rig.ledger.redis.delete(f"ms:harvest:{first.id}")
        assert await harvests.submit(again, ("key", "body")) == again.id
        assert await harvests.submit(third, ("key", "body")) == again.id

    Rig(redis_url, tmp_path)(scenario)


def test_probes_that_watch_all_traffic_and_global_capture_apply_to_harvests(
    redis_url: str, tmp_path: Path
) -> None:
    """The operator's `stop` ends what a sequence generates; the operator's captures are charged to
    nobody.
    """
    documents = ["a document", "another one", "yet another one"]
    lengths = [
        len(make_tokenizer().encode(text, add_special_tokens=True).ids) for text in documents
    ]
    stop_at = max(lengths) + 2

    async def scenario(rig: Rig) -> None:
        async with rig.worker() as runs:
            await rig.watch(stop_at)
            harvest = await submitted(
                rig, documents, generate=SamplingRequest(max_tokens=20, ignore_eos=True)
            )
            view = await work(rig, runs, harvest.id)
        assert (view.state, view.error) == ("succeeded", None)
        assert [unit.generated for unit in checked(harvest.uri).units] == [
            sum(stop_at + 1 - length for length in lengths)
        ]
        found = find_entries(open_store(rig.settings.artifacts), job_id_of(harvest.id, 0, 0), "ops")
        assert sorted(entry.manifest.request for _, entry in found) == [0, 1, 2]
        assert (await rig.ledger.tenants.usage("default")).capture_bytes == view.bytes

    Rig(redis_url, tmp_path, global_capture="post_block:1", global_capture_tag="ops")(scenario)


@pytest.mark.long
def test_a_harvest_waits_while_a_policy_of_all_traffic_does_not_fit_the_model(
    redis_url: str, tmp_path: Path
) -> None:
    async def scenario(rig: Rig) -> None:
        async with rig.worker() as runs:
            await rig.watch(1.0)
            await rig.ledger.publish_model(
                msgspec.structs.replace(rig.engine.info, hooks=["mlp_out"]), live(rig)
            )
            harvest = await submitted(rig)
            view = await Harvests(rig.ledger).view(harvest.id)
            assert (
                view.jobs,
                "'guard', which applies to all traffic, reads hook post_block" in view.reason,
            ) == ([], True)
            await rig.ledger.publish_model(rig.engine.info, live(rig))
            assert (await work(rig, runs, harvest.id)).state == "succeeded"

    Rig(redis_url, tmp_path)(scenario)


@pytest.mark.long
def test_a_harvest_is_planned_computed_and_sealed(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        harvest, view = await harvested(rig)
        assert (view.state, view.error, view.share) == ("succeeded", None, 1.0)
        made = checked(harvest.uri)
        assert len(made.units) > 3
        assert len(made.shards) > len(made.units)
        check_rows(made, DOCUMENTS, [("post_block", 1), ("post_block", 3)])
        assert (view.rows, view.documents, view.shards) == (
            len(made),
            len(DOCUMENTS),
            len(made.shards),
        )
        assert [
            key.decode() async for key in rig.ledger.redis.scan_iter("ms:harvest-units:*")
        ] == []

    Rig(redis_url, tmp_path)(scenario)


def test_the_stages_of_a_pipeline_write_files_of_the_same_rows(
    redis_url: str, tmp_path: Path
) -> None:
    async def scenario(rig: Rig) -> None:
        harvest, _ = await harvested(rig, DOCUMENTS[:60])
        made = checked(harvest.uri)
        assert [[file.pp for file in shard.entry.files] for shard in made.shards] == [[0, 1]] * len(
            made.shards
        )
        check_rows(made, DOCUMENTS[:60], [("post_block", 1), ("post_block", 3)])

    Rig(redis_url, tmp_path, pipeline_parallel_size=2, tensor_parallel_size=2)(scenario)


@pytest.mark.long
def test_an_attempt_that_was_cut_short_is_gone_on_with(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        whole, _ = await harvested(rig)
        harvests = Harvests(rig.ledger)
        async with rig.worker() as runs:
            harvest = await submitted(rig)
            await work(rig, runs, harvest.id, parts=1)
        async with rig.worker(engine_options={"token_s": 0.005}, max_num_seqs=2) as runs:
            (job, *_) = (await harvests.view(harvest.id)).jobs
            running = asyncio.create_task(runs.run_part(job))
            while (await harvests.view(harvest.id)).units_done < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            runs.stop([job], AttemptOutcome.RELEASED)
            assert await running is AttemptOutcome.RELEASED
        async with rig.worker("another") as runs:
            view = await work(rig, runs, harvest.id)
        assert (view.state, view.error) == ("succeeded", None)
        made = checked(harvest.uri)
        check_equal(made, open(whole.uri))
        attempts = {
            file.key.rpartition(".a")[2].split(".")[0]
            for shard in made.shards
            for file in shard.entry.files
        }
        assert attempts == {"1", "2"}  # what the first attempt kept was not computed again

    Rig(redis_url, tmp_path)(scenario)


@pytest.mark.long
def test_a_store_that_refuses_pauses_the_harvest_until_it_takes(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0.05)

    async def scenario(rig: Rig) -> None:
        harvests = Harvests(rig.ledger)
        async with rig.worker() as runs:
            harvest = await submitted(rig)
            await work(rig, runs, harvest.id, parts=1)
            blocked = Path(harvest.uri) / "shards"
            blocked.write_text("no folder can be made here")
            working = asyncio.create_task(work(rig, runs, harvest.id))
            while (view := await harvests.view(harvest.id)).state != "paused":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert "shards" in view.reason
            await asyncio.sleep(0.3)
            assert not working.done()
            blocked.unlink()
            view = await working
        assert (view.state, view.reason) == ("succeeded", "")
        check_rows(checked(harvest.uri), DOCUMENTS, [("post_block", 1), ("post_block", 3)])

    Rig(redis_url, tmp_path)(scenario)


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Callable[[int], object]]:
    """A file system of so many MiB at `folder`; what is yielded changes its size."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield lambda more: subprocess.run(
            ["mount", "-o", f"remount,size={more}m", str(folder)], check=True
        )
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.long
def test_a_disk_that_is_full_pauses_the_harvest_until_there_is_room(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0.05)

    async def scenario(rig: Rig, resize: Callable[[int], object]) -> None:
        harvests, uri = Harvests(rig.ledger), str(tmp_path / "disk" / "harvest")
        async with rig.worker() as runs:
            harvest = await submitted(rig, uri=uri)
            working = asyncio.create_task(work(rig, runs, harvest.id))
            while (view := await harvests.view(harvest.id)).state != "paused":
                assert not working.done(), "the disk is larger than the harvest"
                await asyncio.sleep(0.01)
            assert "No space left on device" in view.reason
            done = view.units_done
            await asyncio.sleep(0.3)
            assert (await harvests.view(harvest.id)).units_done == done
            resize(64)
            view = await working
        assert (view.state, view.reason) == ("succeeded", "")
        made = checked(uri)
        assert made.manifest.bytes > 2 << 20
        check_rows(made, DOCUMENTS, [("post_block", 1), ("post_block", 3)])

    with small_disk(tmp_path / "disk", 2) as resize:
        Rig(redis_url, tmp_path)(lambda rig: scenario(rig, resize))


@pytest.mark.long
def test_a_paused_harvest_goes_on_with_what_is_missing(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        harvests = Harvests(rig.ledger)
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

    Rig(redis_url, tmp_path)(scenario)


def test_a_cancelled_harvest_has_no_manifest(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        async with rig.worker() as runs:
            harvest = await submitted(rig)
            await work(rig, runs, harvest.id, parts=2)
            view = await Harvests(rig.ledger).ask(harvest.id, "cancel")
        assert view.state == "cancelled"
        with pytest.raises(MidstreamError, match=r"has no manifest\.json"):
            open(harvest.uri)

    Rig(redis_url, tmp_path)(scenario)


def test_what_a_cancelled_harvest_had_kept_is_dropped(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        harvests = Harvests(rig.ledger)
        async with rig.worker() as runs:
            harvest = await submitted(rig)
            await work(rig, runs, harvest.id, parts=1)
        async with rig.worker(engine_options={"token_s": 0.005}, max_num_seqs=2) as runs:
            (job, *_) = (await harvests.view(harvest.id)).jobs
            running = asyncio.create_task(runs.run_part(job))
            while (await harvests.view(harvest.id)).units_done < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            runs.stop([job], AttemptOutcome.RELEASED)
            await running
        assert await rig.ledger.redis.keys(f"ms:harvest-units:{harvest.id}:*")
        assert (await harvests.ask(harvest.id, "cancel")).state == "cancelled"
        assert not await rig.ledger.redis.keys(f"ms:harvest-units:{harvest.id}:*")

    Rig(redis_url, tmp_path)(scenario)


def test_an_accepted_cancel_is_final(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        harvests = Harvests(rig.ledger)
        async with rig.worker(engine_options={"token_s": 0.005}, max_num_seqs=2) as runs:
            harvest = await submitted(rig)
            await work(rig, runs, harvest.id, parts=1)
            (job, *_) = (await harvests.view(harvest.id)).jobs
            running = asyncio.create_task(runs.run_part(job))
            while (await harvests.view(harvest.id)).units_done < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            view = await harvests.ask(harvest.id, "cancel")
            assert (view.state, view.reason) == ("running", "being cancelled")
            for wanted in ("run", "pause"):
                with pytest.raises(MidstreamError, match="is being cancelled"):
                    await harvests.ask(harvest.id, wanted)
            # its next unit is not kept: nobody has to tell it
            assert await asyncio.wait_for(running, 10) is AttemptOutcome.CANCELLED
            await harvests.advance(harvest.id)
            ended = await harvests.view(harvest.id)
            assert (ended.state, ended.units_done) == ("cancelled", view.units_done)

    Rig(redis_url, tmp_path)(scenario)


def test_a_cancel_while_a_harvest_is_sealed_leaves_no_manifest(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = serving.HarvestAttempt._manifest

    def cancelled_meanwhile(self: Any, harvest: StoredHarvest, *rest: Any) -> Any:
        with redis.Redis.from_url(redis_url) as client:
            client.hset(f"ms:harvest:{harvest.id}", "wanted", "cancel")
        return seal(self, harvest, *rest)

    monkeypatch.setattr(serving.HarvestAttempt, "_manifest", cancelled_meanwhile)

    async def scenario(rig: Rig) -> None:
        harvest, view = await harvested(rig, DOCUMENTS[:20])
        assert view.state == "cancelled"
        assert not (Path(harvest.uri) / "manifest.json").exists()

    Rig(redis_url, tmp_path)(scenario)


def test_a_harvest_whose_manifest_is_being_written_is_not_cancelled(
    redis_url: str, tmp_path: Path
) -> None:
    async def scenario(rig: Rig) -> None:
        harvests = Harvests(rig.ledger)
        harvest = await submitted(rig, DOCUMENTS[:20])
        await rig.ledger.redis.hset(f"ms:harvest:{harvest.id}", "closing", 1)
        for wanted in ("cancel", "pause"):
            with pytest.raises(MidstreamError, match="its manifest is being written"):
                await harvests.ask(harvest.id, wanted)
        async with rig.worker() as runs:
            assert (await work(rig, runs, harvest.id)).state == "succeeded"

    Rig(redis_url, tmp_path)(scenario)


def test_a_part_does_not_recreate_the_record_of_a_deleted_harvest(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    plan = serving.SourceReader.plan

    async def deleted_meanwhile(self: Any) -> Any:
        with redis.Redis.from_url(redis_url) as client:
            client.delete(f"ms:harvest:{self._opening.harvest.id}")
        return await plan(self)

    monkeypatch.setattr(serving.SourceReader, "plan", deleted_meanwhile)

    async def scenario(rig: Rig) -> None:
        async with rig.worker() as runs:
            harvest = await submitted(rig)
            (job,) = (await Harvests(rig.ledger).view(harvest.id)).jobs
            assert await runs.run_part(job) is AttemptOutcome.CANCELLED
        assert not await rig.ledger.redis.exists(f"ms:harvest:{harvest.id}")
        assert (await rig.ledger.view(job)).state == "cancelled"

    Rig(redis_url, tmp_path)(scenario)


def test_a_submission_that_comes_late_does_not_put_a_part_out(
    redis_url: str, tmp_path: Path
) -> None:
    """Another process has cancelled the harvest since this one read its record."""

    async def scenario(rig: Rig) -> None:
        harvests = Harvests(rig.ledger)
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

    Rig(redis_url, tmp_path)(scenario)


def test_a_source_that_cannot_be_read_fails_at_once_and_says_where(
    redis_url: str, tmp_path: Path
) -> None:
    corpora = tmp_path / "corpora"
    corpora.mkdir()
    (corpora / "bad.jsonl").write_text('{"text": "a"}\nnot JSON\n')

    async def scenario(rig: Rig) -> None:
        _, view = await harvested(
            rig, source=HarvestSource(path="bad.jsonl", format="jsonl"), root=str(corpora)
        )
        assert view.state == "failed"
        assert view.error is not None
        assert (view.error.status, view.error.field) == (400, "source")
        assert "document 1 is not JSON" in view.error.detail

    Rig(redis_url, tmp_path, harvest_sources=str(corpora))(scenario)


def test_a_source_that_changes_ends_the_harvest_without_a_manifest(
    redis_url: str, tmp_path: Path
) -> None:
    corpora = tmp_path / "corpora"
    corpora.mkdir()

    def write(documents: list[str]) -> None:
        (corpora / "texts.jsonl").write_text(
            "".join(f'{{"text": "{text}"}}\n' for text in documents)
        )

    write(DOCUMENTS)

    async def scenario(rig: Rig) -> None:
        async with rig.worker() as runs:
            harvest = await submitted(
                rig, source=HarvestSource(path="texts.jsonl", format="jsonl"), root=str(corpora)
            )
            await work(rig, runs, harvest.id, parts=1)
            write(DOCUMENTS[::-1])
            view = await work(rig, runs, harvest.id)
        assert view.error is not None
        assert (view.state, view.error.status, view.error.field) == ("failed", 409, "source.path")
        assert "'texts.jsonl' was changed since the harvest was planned" in view.error.detail
        assert not (Path(harvest.uri) / "manifest.json").exists()

    Rig(redis_url, tmp_path, harvest_sources=str(corpora))(scenario)


def test_a_part_that_keeps_failing_ends_the_harvest(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        async with rig.worker(fault="refuse:request=1") as runs:
            harvest = await submitted(rig)
            view = await work(rig, runs, harvest.id, parts=20)
        assert view.state == "failed"
        assert view.error is not None
        assert "injected fault" in view.error.detail
        assert (
            len([job for job in (await rig.ledger.list(limit=50)).jobs if job.state == "failed"])
            >= TRIES
        )

    Rig(redis_url, tmp_path)(scenario)


def test_another_global_steering_ends_the_harvest(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        _, view = await harvested(rig, steering="of another version")
        assert view.state == "failed"
        assert view.error is not None
        assert (view.error.status, "global steering" in view.error.detail) == (409, True)

    Rig(redis_url, tmp_path)(scenario)


@pytest.mark.long
def test_a_seal_that_finds_fewer_parts_than_were_planned_removes_nothing(
    redis_url: str, tmp_path: Path
) -> None:
    """As when it is run again long after the harvest has ended."""

    async def scenario(rig: Rig) -> None:
        harvest, _ = await harvested(rig)
        await rig.ledger.redis.delete(f"ms:harvest-done:{harvest.id}")
        again = object.__new__(serving.HarvestAttempt)
        again._harvests = Harvests(rig.ledger)
        with pytest.raises(MidstreamError, match="no files were removed"):
            await again._seal(harvest, open_store(harvest.uri))
        check_rows(checked(harvest.uri), DOCUMENTS, [("post_block", 1), ("post_block", 3)])

    Rig(redis_url, tmp_path)(scenario)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_rows_of_every_dtype_are_read_back(redis_url: str, tmp_path: Path, dtype: Any) -> None:
    async def scenario(rig: Rig) -> None:
        harvest, view = await harvested(rig, DOCUMENTS[:20], dtype=dtype)
        assert view.state == "succeeded"
        made = checked(harvest.uri)
        keys = made.keys(slice(None))
        expected = residual_rows(3, keys.positions, keys.token_ids, "post_block")
        bound = {"bfloat16": 2**-8, "float16": 2**-10, "int8": 1 / 127, "float8_e4m3fn": 2**-4}[
            dtype
        ]
        found = made.rows(slice(None), 3).astype("float32")
        assert (abs(found - expected).max(axis=1) <= bound * abs(expected).max(axis=1) + 1e-6).all()

    Rig(redis_url, tmp_path)(scenario)


def test_positions_cuts_and_limits_hold_over_a_harvest(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        sampled = HarvestPositions(sample=5, seed=3)
        harvest, view = await harvested(
            rig, cut=HarvestCut(fit="pack"), max_length=128, positions=sampled
        )
        assert view.state == "succeeded"
        keys = checked(harvest.uri).keys(slice(None))
        assert len(keys.documents) == 5 * len(DOCUMENTS)
        again, _ = await harvested(
            rig, cut=HarvestCut(fit="pack"), max_length=128, positions=sampled
        )
        check_equal(open(harvest.uri), open(again.uri))
        limited, view = await harvested(rig, max_tokens=10_000)
        assert view.tokens == 10_000
        assert set(checked(limited.uri).keys(slice(None)).documents.tolist()) == set(
            range(view.documents)
        )

    Rig(redis_url, tmp_path)(scenario)


def test_generated_tokens_have_rows_too(redis_url: str, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
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

    Rig(redis_url, tmp_path)(scenario)


@pytest.mark.matrix
@pytest.mark.long
def test_a_bucket_that_goes_away_pauses_the_harvest_and_gets_every_row(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0.05)
    for name, value in s3_kit.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    async def scenario(rig: Rig, proxy: FaultProxy) -> None:
        harvests, uri = Harvests(rig.ledger), s3_kit.uri(proxy)
        async with rig.worker() as runs:
            harvest = stored(rig, DOCUMENTS, SITES, **SHARDS)  # type: ignore[arg-type]
            harvest = msgspec.structs.replace(harvest, uri=below(uri, harvest.id))
            await harvests.submit(harvest)
            await harvests.advance(harvest.id)
            await work(rig, runs, harvest.id, parts=1)
            fault = proxy.fault("403 AccessDenied", r"PUT .*(shards|probe)")
            working = asyncio.create_task(work(rig, runs, harvest.id))
            while (view := await harvests.view(harvest.id)).state != "paused":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert view.reason
            fault.times = 0
            proxy.fault("cut", r"PUT .*shards", times=2)
            view = await working
        assert (view.state, view.error) == ("succeeded", None)
        found = verify(harvest.uri)
        assert (found.faults, found.rows) == ([], view.rows)
        check_rows(open(harvest.uri), DOCUMENTS, [("post_block", 1), ("post_block", 3)])

    with s3_kit.s3_server() as proxy:
        Rig(redis_url, tmp_path)(lambda rig: scenario(rig, proxy))
