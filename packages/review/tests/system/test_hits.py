"""Is every hit kept once, as long as it is to be, and in bounds?"""

from pathlib import Path

import msgspec
import pytest
from ledger_kit import (
    EPOCH,
    MODEL,
    WORKER,
    claimed,
    claimed_again,
    open_ledger,
    outputs,
    settler,
)
from review_kit import GUARD, hit, policed, registered, told

from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.ledger.named.registry import Registry
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.jobs.receipts import CapturedFile
from midstream.schemas.requests.policies import POLICIES
from midstream_review.ledger import KeptHit, KeptText, LedgerHits, forget_texts
from midstream_review.records import Mark


def of_guard(ledger: Ledger) -> LedgerHits:
    return LedgerHits(ledger, MODEL, "guard")


async def kept(ledger: Ledger) -> list[KeptHit]:
    found, following = await of_guard(ledger).page(lambda _: True, 100, None)
    assert following is None
    return found


async def ids(ledger: Ledger) -> list[str]:
    return [each.id for each in await kept(ledger)]


async def test_a_hit_has_what_decided_it_and_the_tokens_around_it(
    ledger: Ledger, settle: Settler
) -> None:
    await registered(ledger)
    before = now()
    made = await hit(ledger, settle, 1, {"tenant": "users"}, score=2.5)
    (found,) = await kept(ledger)
    assert found.id == made
    assert before <= found.at <= now()
    assert found.tenant == "users"
    assert found.hit.version == 1
    assert found.hit.label == "x"
    assert found.hit.position == 2
    assert found.hit.score == 2.5
    assert found.hit.threshold == 1.0
    assert found.hit.mode == "shadow"
    assert not found.hit.acted
    assert found.hit.actions == ["flag"]
    assert await of_guard(ledger).texts([made]) == [KeptText([0, 1, 2, 3], 0, 3)]


async def test_a_hit_is_kept_once_however_often_it_is_told(ledger: Ledger, settle: Settler) -> None:
    """By another rank, a repeated receipt, another stream or a later attempt."""
    await registered(ledger)
    job = policed(prompts=2)
    await claimed(ledger, job)
    of_job = [told(job), told(job), msgspec.structs.replace(told(job), rank=1, tp=1)]
    settle.settle(WORKER, 0, EPOCH, [*enumerate(of_job, 1)])
    settle.settle(WORKER, 0, EPOCH, [*enumerate(of_job, 1)])
    await ledger.release(job.id, 1)
    again = await claimed_again(ledger, job)
    later = [
        msgspec.structs.replace(told(job, request, score=9.0), attempt=again) for request in (0, 1)
    ]
    settle.settle(WORKER, 0, "epoch2", [*enumerate(later, 1)])
    found = {each.id: each.hit.score for each in await kept(ledger)}
    assert found == {f"{job.id}_0": 2.0, f"{job.id}_1": 9.0}


async def test_no_hit_is_kept_of_a_latch_alone_or_a_policy_that_is_gone(
    ledger: Ledger, settle: Settler
) -> None:
    job = policed(prompts=3)
    await claimed(ledger, job)
    settle.settle(WORKER, 0, EPOCH, [(1, told(job, 0))])
    await registered(ledger)
    (score,) = told(job, 1).scores
    latched = msgspec.structs.replace(
        score, decisions=[], triggers=0, policy=msgspec.structs.replace(GUARD, inherited="job_x")
    )
    alone = msgspec.structs.replace(told(job, 1), scores=[latched])
    settle.settle(WORKER, 0, EPOCH, [(2, alone), (3, told(job, 2))])
    assert await ids(ledger) == [f"{job.id}_2"]
    await Registry(ledger, POLICIES).delete(MODEL, "guard")
    await registered(ledger)
    assert await ids(ledger) == []
    assert [name async for name in ledger.redis.scan_iter("ms:policy-hit*")] == []


async def test_the_newest_hits_are_kept_and_beside_them_those_with_a_mark(redis_url: str) -> None:
    async with open_ledger(redis_url, hits_kept=2) as ledger:
        settle = settler(redis_url, hits_kept=2)
        await registered(ledger)
        mark = Mark(verdict="right")
        made = [await hit(ledger, settle, 1, {})]
        await of_guard(ledger).mark(made[0], mark)
        made += [await hit(ledger, settle, number, {}) for number in (2, 3, 4)]
        assert await ids(ledger) == [made[3], made[2], made[0]]
        await of_guard(ledger).mark(made[2], mark)
        with pytest.raises(MidstreamError, match="2 hits of this policy are marked"):
            await of_guard(ledger).mark(made[3], mark)
        await of_guard(ledger).mark(made[0], Mark(verdict="false_alarm"))  # in place of its mark
        await of_guard(ledger).mark(made[0], None)
        await hit(ledger, settle, 5, {})
        assert len(await ids(ledger)) == 3
        assert made[0] not in await ids(ledger)


async def test_a_hit_expires_with_its_mark_and_its_text(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        await registered(ledger)
        made = await hit(ledger, settler(redis_url, hits_ttl_s=100), 1, {})
        await of_guard(ledger).mark(made, Mark(verdict="right"))
        left = await ledger.redis.ttl(f"ms:policy-hit:{MODEL}:guard:{made}")
        assert 0 < left <= 100
        await ledger.redis.delete(f"ms:policy-hit:{MODEL}:guard:{made}")  # as then
        assert await ids(ledger) == []
        assert await of_guard(ledger).precision(lambda _: True) == []
        with pytest.raises(MidstreamError, match="unknown hit"):
            await of_guard(ledger).mark(made, Mark(verdict="right"))


async def test_none_are_kept_where_the_operator_keeps_none(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        await registered(ledger)
        await hit(ledger, settler(redis_url, hits_kept=0), 1, {})
        assert await ids(ledger) == []


async def test_the_texts_of_a_job_go_with_its_captures_or_when_asked(
    ledger: Ledger, settle: Settler, tmp_path: Path
) -> None:
    (tmp_path / "captures").mkdir()
    await registered(ledger)
    job = policed(capture=True)
    await claimed(ledger, job, 1)
    file = CapturedFile("t/j/p0000.a1.pp0.safetensors", bytes=64, crc32=1, rows=2)
    settle.settle(
        WORKER, 0, EPOCH, [(1, msgspec.structs.replace(told(job), files=[file], world=1))]
    )
    await ledger.store_outputs(job.id, 1, outputs(1))
    others = [await hit(ledger, settle, n, {"tenant": of}) for n, of in ((2, "a"), (3, "b"))]
    await LedgerCaptures(ledger).delete(job.id)
    every = [f"{job.id}_0", *others]
    has_text = [text is not None for text in await of_guard(ledger).texts(every)]
    assert has_text == [False, True, True]
    assert await forget_texts(ledger, MODEL, lambda each: each.tenant == "a") == 1
    has_text = [text is not None for text in await of_guard(ledger).texts(every)]
    assert has_text == [False, False, True]
    assert len(await ids(ledger)) == 3


async def test_precision_is_that_of_the_marks_of_each_version(
    ledger: Ledger, settle: Settler
) -> None:
    await registered(ledger)
    verdicts = {1: "right", 2: "right", 3: "false_alarm", 4: "unsure", 5: "unsure"}
    for number, verdict in verdicts.items():
        made = await hit(ledger, settle, number, {}, version=1 if number < 5 else 2)
        await of_guard(ledger).mark(made, msgspec.convert({"verdict": verdict}, Mark))
    await hit(ledger, settle, 6, {}, version=3)
    second, first = await of_guard(ledger).precision(lambda _: True)
    assert first.version == 1
    assert first.right == 2
    assert first.false_alarm == 1
    assert first.unsure == 1
    assert first.precision == 2 / 3
    assert second.version == 2
    assert second.unsure == 1
    assert second.precision is None
