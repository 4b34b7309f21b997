"""What harvests may use: how many are open, what they write, what they read; and that a key names
one harvest.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from edge import Hand, refused
from harvest_kit import checked, texts
from harvest_rig import stored, work
from ledger_kit import make_job, sent
from midstream_fake_engine.model import identity_of
from refusal_kit import refuses
from sweep_rig import Rig, having
from tenant_kit import ADMIN, Caller, asking, bearer

from midstream.broker.ledger.core import tenants
from midstream.broker.ledger.core.scripts import SHELVED_S
from midstream.broker.ledger.recovery.reaper import Reaper, UsageReconciliation
from midstream.schemas.access.keys import Limits, Tenant
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Job, State
from midstream.workers.serving import attempts
from midstream.workers.serving.attempt import AttemptOutcome
from midstream_harvest.ledger.harvests import SURVEYS, LedgerHarvests, survey_kept
from midstream_harvest.records.harvests import (
    HarvestShards,
    HarvestStream,
    HarvestWork,
    SurveyEntry,
)
from midstream_harvest.records.work import HarvestPart, Survey

SITES = {"post_block": [1, 3]}
DOCUMENTS = texts(100, 400)


async def counted_anew(rig: Rig) -> list[str]:
    count = UsageReconciliation(rig.ledger, now())
    while (differed := await count.step()) is None:
        pass
    return differed


@having(**{"limits.harvests": 7})
async def test_no_more_harvests_are_open_than_a_tenant_may_have(rig: Rig) -> None:
    harvests = LedgerHarvests(rig.ledger)
    many = [stored(rig, ["one"], SITES) for _ in range(60)]
    answers = await asyncio.gather(
        *[harvests.submit(each) for each in many], return_exceptions=True
    )
    (kind,) = {answer.kind for answer in answers if isinstance(answer, MidstreamError)}
    accepted = [answer for answer in answers if isinstance(answer, str)]
    assert kind == "too_many_harvests"
    assert len(accepted) == 7
    assert len(await harvests.live()) == 7
    assert (await rig.ledger.tenants.usage("default")).harvests == 7
    await harvests.submit(msgspec.structs.replace(many[0], id="hrv_of_another", tenant="another"))
    await harvests.ask(accepted[0], "cancel")
    await harvests.advance(accepted[0])
    await harvests.submit(stored(rig, ["one"], SITES))
    with pytest.raises(MidstreamError, match="the limit is 7"):
        await harvests.submit(stored(rig, ["one"], SITES))


async def test_one_key_names_one_harvest_however_often_it_is_sent(rig: Rig) -> None:
    harvests = LedgerHarvests(rig.ledger)
    sent = [harvests.submit(stored(rig, ["one"], SITES), ("key", "body")) for _ in range(40)]
    assert len(set(await asyncio.gather(*sent))) == 1
    assert len(await harvests.live()) == len((await harvests.list(None, 100)).harvests) == 1


async def test_a_key_names_its_harvest_as_long_as_the_record_is_kept(rig: Rig) -> None:
    harvests = LedgerHarvests(rig.ledger)
    first = await harvests.submit(stored(rig, ["one"], SITES), ("key", "body"))
    assert await rig.ledger.redis.ttl("ms:idem:key") == -1
    await harvests.ask(first, "cancel")
    await harvests.advance(first)
    assert await harvests.submit(stored(rig, ["one"], SITES), ("key", "body")) == first
    assert (await harvests.view(first)).state == "cancelled"
    await harvests.forget(first)
    assert not await rig.ledger.redis.exists("ms:idem:key")


async def test_a_tenant_keeps_no_more_records_than_the_limit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "MAX_HARVESTS_KEPT", 2)

    harvests = LedgerHarvests(rig.ledger)
    made = [await harvests.submit(stored(rig, ["one"], SITES)) for _ in range(2)]
    for harvest_id in made:
        await harvests.ask(harvest_id, "cancel")
        await harvests.advance(harvest_id)
    with refuses(match="kept: 2; the limit is 2", kind="too_many_harvests"):
        await harvests.submit(stored(rig, ["one"], SITES))
    await harvests.submit(stored(rig, ["one"], SITES, tenant="another"))
    await harvests.forget(made[0])
    await harvests.submit(stored(rig, ["one"], SITES))


async def test_an_older_redis_offers_no_unit_whose_shards_are_dropped(rig: Rig) -> None:
    harvests = LedgerHarvests(rig.ledger)
    harvest = stored(
        rig,
        DOCUMENTS,
        SITES,
        row_bytes=1024,
        shards=HarvestShards(mib=1),
        stream=HarvestStream(window=100),
    )
    async with rig.worker() as runs:
        await harvests.submit(harvest)
        assert (await work(rig, runs, harvest.id)).state == "succeeded"
    await harvests.acknowledge(harvest, "trainer", 1)
    await rig.ledger.redis.hdel(f"ms:harvest:{harvest.id}", "ack:trainer", "dropped")
    with refuses(match="the shards of unit 0 were dropped", kind="gone"):
        await harvests.stream_page(harvest, "trainer", None)
    assert (await harvests.stream_page(harvest, "trainer", 1)).units[0].unit == 1


def survey_of(harvest_id: str, **changes: Any) -> Job:
    part = HarvestPart(
        harvest=harvest_id,
        part=SURVEYS,
        role="survey",
        survey=Survey(uris=["/none"], top=1, context=0),
    )
    return make_job(
        kind="harvest", model="fake-model", prompts=0, work=HarvestWork(part=part).packed, **changes
    )


async def test_accepted_surveys_count_towards_the_limit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "MAX_SURVEYS", 3)
    harvest_id = await LedgerHarvests(rig.ledger).submit(stored(rig, ["one"], SITES))
    jobs = [survey_of(harvest_id) for _ in range(9)]
    answers = await asyncio.gather(
        *[rig.ledger.submit(job, {}) for job in jobs], return_exceptions=True
    )
    refused = [each for each in answers if isinstance(each, MidstreamError)]
    assert {(each.kind, each.detail[-14:]) for each in refused} == {("conflict", "the limit is 3")}
    assert len(refused) == 6
    accepted = [each[0] for each in answers if isinstance(each, tuple)]
    await rig.ledger.request_cancel(accepted[0])
    last = survey_of(harvest_id)
    assert (await rig.ledger.submit(last, {}))[1], "one has ended"
    claim = await rig.ledger.claim(accepted[1], "w", "boot", 1, last.identity)
    entry = SurveyEntry(
        job=accepted[1],
        survey=last.work_as(HarvestWork).part.survey,
        rows=1,
        key="k",
        bytes=7,
        crc32=0,
    )
    report = survey_kept(accepted[1], last.work_as(HarvestWork).part, entry)
    await LedgerHarvests(rig.ledger).report(claim.job, claim.attempt, report)
    with pytest.raises(MidstreamError, match="under way: 3"):
        await rig.ledger.submit(survey_of(harvest_id), {})
    with pytest.raises(MidstreamError, match="changed or unregistered"):
        await rig.ledger.submit(survey_of("hrv_deleted"), {})


@having(**{"limits.capture_mib": 1})
async def test_a_tenant_at_its_quota_gets_no_survey(rig: Rig) -> None:
    harvest_id = await LedgerHarvests(rig.ledger).submit(stored(rig, ["one"], SITES))
    await rig.ledger.redis.hset("ms:usage", "default/bytes", 1 << 20)
    with refuses(match="the limit is 1 MiB", kind="capture_limit"):
        await rig.ledger.submit(survey_of(harvest_id), {})


async def test_surveys_take_no_place_of_a_part_and_wait_in_the_ledger(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "ELSEWHERE_S", 0.01)
    ledger = rig.ledger
    begun = asyncio.Semaphore(0)
    go = asyncio.Event()
    harvest_id = await LedgerHarvests(ledger).submit(stored(rig, ["one"], SITES))
    surveys = [survey_of(harvest_id, identity=identity_of(rig.settings)) for _ in range(3)]
    for job in surveys:
        await ledger.submit(job, {})
    async with rig.worker() as runs:

        async def compute(attempt: Any) -> list[Any]:
            begun.release()
            await go.wait()
            return []

        monkeypatch.setattr(
            runs, "_runs", {"harvest": runs._runs["harvest"]._replace(work=compute)}
        )
        running = [asyncio.create_task(runs.run(job.id, "harvest")) for job in surveys[:2]]
        await begun.acquire()
        await begun.acquire()
        assert await runs.run(surveys[2].id, "harvest") == AttemptOutcome.NOT_OURS
        assert (await ledger.view(surveys[2].id)).state is State.QUEUED
        parts = [asyncio.create_task(runs.run(f"job_{number}", "harvest")) for number in range(2)]
        assert await asyncio.gather(*parts) == [AttemptOutcome.NOT_OURS] * 2, "there was room"
        go.set()
        assert await asyncio.gather(*running) == [AttemptOutcome.SUCCEEDED] * 2
        before = await sent(ledger, "fake-model")
        await Reaper(ledger).sweep(now() + 60)
        again = [each.job_id for each in (await sent(ledger, "fake-model"))[len(before) :]]
        assert again == [surveys[2].id]
        assert await runs.run(surveys[2].id, "harvest") == AttemptOutcome.SUCCEEDED


async def test_surveys_that_wait_are_sent_again_in_the_order_of_their_submission(rig: Rig) -> None:
    ledger = rig.ledger
    identity = identity_of(rig.settings)
    harvest_id = await LedgerHarvests(ledger).submit(stored(rig, ["one"], SITES))
    surveys = [survey_of(harvest_id, identity=identity, id=f"job_{age}") for age in range(4)]
    for job in surveys:
        await ledger.submit(job, {})
    left = SHELVED_S - now() % SHELVED_S
    if left < 1:  # none falls into the next round
        await asyncio.sleep(left)
    for age in (2, 0, 3, 1):
        assert await ledger.claim(surveys[age].id, "w1", "boot", 1, identity, crowded=True) is None
    before = await sent(ledger, "fake-model")
    await Reaper(ledger).sweep(now() + 60)
    again = [each.job_id for each in (await sent(ledger, "fake-model"))[len(before) :]]
    assert again == [job.id for job in surveys]


async def test_listings_do_not_read_the_lines_of_harvests(rig: Rig) -> None:
    harvests = LedgerHarvests(rig.ledger)
    ours = await harvests.submit(stored(rig, DOCUMENTS, SITES))
    theirs = await harvests.submit(stored(rig, DOCUMENTS, SITES, tenant="another"))
    assert await rig.ledger.redis.memory_usage(f"ms:harvest:{ours}") < 2000
    assert (await harvests.stored(ours)).source.lines == DOCUMENTS
    assert [view.id for view in (await harvests.list("default", 10)).harvests] == [ours]
    assert [view.id for view in (await harvests.list(None, 10)).harvests] == [theirs, ours]
    await rig.ledger.redis.delete("ms:harvests:default")  # as a former version left it
    await counted_anew(rig)
    assert [view.id for view in (await harvests.list("default", 10)).harvests] == [ours]


@having(**{"limits.capture_mib": 1})
async def test_what_a_harvest_writes_is_charged_until_it_is_deleted(rig: Rig) -> None:
    async def used() -> int:
        return (await rig.ledger.tenants.usage("default")).capture_bytes

    harvests = LedgerHarvests(rig.ledger)
    async with rig.worker() as runs:
        harvest = stored(rig, DOCUMENTS, SITES, row_bytes=1024, shards=HarvestShards(mib=1))
        await harvests.submit(harvest)
        working = asyncio.create_task(work(rig, runs, harvest.id))
        while not (view := await harvests.view(harvest.id)).reason:
            assert not working.done()
            await asyncio.sleep(0.01)
        assert "the limit is 1 MiB" in view.reason
        assert await used() == view.bytes >= 1 << 20
        with pytest.raises(MidstreamError, match="the limit is 1 MiB"):
            await harvests.submit(stored(rig, ["one"], SITES))
        await rig.ledger.tenants.put(Tenant(name="default", limits=Limits(capture_mib=0)))
        view = await working
        assert view.state == "succeeded"
        assert view.reason == ""
        assert await used() == view.bytes == checked(harvest.uri).manifest.bytes
        assert await counted_anew(rig) == []
        await rig.ledger.redis.hset("ms:usage", "default/bytes", 5)
        assert await counted_anew(rig) == [f"default/bytes: 5 instead of {view.bytes}"]
        assert (await harvests.stored(harvest.id)).source.lines == [""]
        assert await rig.ledger.redis.ttl(f"ms:harvest:{harvest.id}") == -1, (
            "its files are there: so is its record"
        )
        await harvests.forget(harvest.id)
        assert await used() == 0
        assert await counted_anew(rig) == []


def test_a_tenant_reads_only_the_folders_that_it_may(redis_url: str, tmp_path: Path) -> None:
    for name in ("vision", "speech"):
        (tmp_path / "corpora" / name).mkdir(parents=True)
        (tmp_path / "corpora" / name / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    root = str(tmp_path / "corpora")

    def body(path: str) -> dict[str, Any]:
        return {"model": "tiny", "source": {"path": path}, "layers": [0]}

    with asking(tmp_path, redis_url, harvest_sources=root) as api, Hand(api.settings) as hand:
        ada = Caller(api, hand, "ada")
        assert ada.http.post("/v1/harvests", json=body("speech/a.jsonl")).status_code == 202
        limits = f"{api.url}/v1/tenants/ada"
        refused(
            ada.http.put(limits, json={"harvest_sources": ["/etc"]}, headers=bearer(ADMIN)),
            400,
            "harvest_sources[0]",
        )
        assert (
            ada.http.put(
                limits, json={"harvest_sources": [f"{root}/vision"]}, headers=bearer(ADMIN)
            ).status_code
            == 200
        )
        refused(ada.http.post("/v1/harvests", json=body("speech/a.jsonl")), 400, "source.path")
        assert ada.http.post("/v1/harvests", json=body("a.jsonl")).status_code == 202
        assert ada.http.get("/v1/tenant").json()["usage"]["harvests"] == 2
