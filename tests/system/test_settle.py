"""What does a receipt tell of its job, and how is a rank's stream of receipts counted?

(When receipts end a job, and that stale and repeated ones change nothing: `test_ledger_model.py`.)
"""

from typing import Any

import msgspec
import pytest
from ledger_kit import (
    BOOT,
    EPOCH,
    IDENTITY,
    MODEL,
    WORKER,
    claimed,
    error_of,
    make_job,
    open_ledger,
    outputs,
    receipt,
    running_job,
    sent,
    settler,
    state_of,
    worker_info,
)

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.ledger.named.probes import with_days
from midstream.broker.ledger.named.registry import Registry
from midstream.broker.ledger.named.steering import LedgerSteering
from midstream.broker.telemetry import metrics
from midstream.schemas.access.handling import Callback
from midstream.schemas.artifacts.conditions import Condition, StoredPolicy
from midstream.schemas.artifacts.probes import ProbeContent, ProbeScore, StoredProbe
from midstream.schemas.base.records import from_json, now, to_json
from midstream.schemas.jobs.jobs import CaptureResults, Job, State
from midstream.schemas.jobs.kinds import KINDS
from midstream.schemas.jobs.receipts import CapturedFile, Consumed, LostRange, Receipt
from midstream.schemas.requests.policies import POLICIES, Policy, PolicyRequest, PolicyVersion
from midstream_webhooks.outbox import WebhookOutbox


def counted(status: str) -> float:
    """How many receipts this process has counted as that, of all tests."""
    return metrics.RECEIPTS.labels(status)._value.get()


def file(path: str = "t/j/p0000.a1.pp0.safetensors", **changes: Any) -> CapturedFile:
    facts: dict[str, Any] = {
        "bytes": 64,
        "crc32": 123,
        "rows": 4,
        "positions": 2,
        "sites": {"post_block": [0, 1]},
    }
    return CapturedFile(path, **(facts | changes))


GUARD = StoredPolicy(
    name="guard",
    version=1,
    digest="d",
    registered=1.0,
    condition=Condition(at_least=1.0, latch="conversation", latch_s=60),
    actions=["flag", "webhook"],
    mode="active",
    acts=True,
)
HOOK = Callback(url="http://127.0.0.1:9/", events=["job.decided"], tenant="ops")


def policed(registered: float = 1.0, **changes: Any) -> Job:
    """A job of one conversation, with a policy that has a latch and a webhook."""
    policy = msgspec.structs.replace(GUARD, registered=registered)
    content = ProbeContent(hook="post_block", layer=0, tensors=[], labels=["x"], thresholds=[None])
    probe = StoredProbe(name="policy:guard", digest="d", content=content, policy=policy)
    return make_job(hooks={"guard": HOOK}, conversation="c", probes=[probe], **changes)


def decided(job: Job, request: int = 0, inherited: str = "") -> Receipt:
    """The receipt of a rank whose policy triggered, or only inherited its latch."""
    policy = msgspec.structs.replace(GUARD, inherited=inherited)
    crossed = [None if inherited else 2]
    triggers = int(not inherited)
    score = ProbeScore("", "d", ["x"], [2.0], 3, crossed, policy=policy, triggers=triggers)
    return receipt(job, request, scores=[score])


async def inherits(ledger: Ledger, job: Job) -> str:
    """The job whose latch a claim of `job` finds."""
    claim: Any = await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
    return str(claim.job.probes[0].policy.inherited)


async def receipts_told(ledger: Ledger, job: Job) -> list[str]:
    """What the events of the job say of its receipts."""
    events = await ledger.events(job.id)
    return [event.data["status"] for event in events if event.event == "receipt"]


async def test_a_job_succeeds_with_the_files_and_accounts_of_all_its_receipts(
    ledger: Ledger, settle: Settler
) -> None:
    # field case 18, 20: not with the first stage, not with the first prompt of a batch
    job = make_job(prompts=2, capture=True)
    other = make_job(capture=True)
    for each in (job, other):
        await claimed(ledger, each)
        await ledger.store_outputs(each.id, 1, outputs(len(each.prompts)))
    for request, rank in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        assert await state_of(ledger, job) is State.RUNNING
        checksum = f"{request}{rank}" * 8  # stages and requests may differ
        told = receipt(job, request, rank, pp=rank, files=[file()], checksum=checksum)
        settle.settle(WORKER, rank, EPOCH, [(request + 1, told)])
    result = await ledger.result(job.id)
    captured = result.capture_results
    assert result.state == State.SUCCEEDED
    assert captured.status == "ok"
    assert len(captured.files) == 4
    assert captured.bytes == 4 * 64
    assert captured.rows == 4 * 4
    assert [stage.pp for stage in result.determinism.stages] == [0, 1]
    assert await state_of(ledger, other) is State.RUNNING, "no job waits for another"


DIFFERENT = [{"checksum": "0000000000000001"}, {"actions": 4}, {"epoch": 1}, {"applied": 7}]


@pytest.mark.parametrize("changed", DIFFERENT)
async def test_ranks_of_a_stage_that_disagree_fail_the_job_at_once(
    redis_url: str, changed: dict[str, object]
) -> None:
    # field case 29
    async with open_ledger(redis_url, on_desync="fail") as ledger:
        job = await running_job(ledger, prompts=2, steer=True)
        settle = settler(redis_url, on_desync="fail")
        settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, 0, 0))])
        settle.settle(WORKER, 1, EPOCH, [(1, receipt(job, 0, 1, **changed))])
        error = await error_of(ledger, job)
        assert error.type == "urn:midstream:ranks_disagree"
        for part in ("rank 0", "rank 1", "fedcba9876543210"):
            assert part in error.detail
        assert ("ledger number 1" in error.detail) == ("epoch" in changed)
        assert ("7 edited rows" in error.detail) == ("applied" in changed)
        result = await ledger.result(job.id)
        assert not result.determinism.consistent
        assert {rank.checksum for rank in result.determinism.stages[0].ranks} == {
            "fedcba9876543210",
            changed.get("checksum", "fedcba9876543210"),
        }
        abandoned = await running_job(ledger, worker="w2", steer=True)
        assert await ledger.desync_release(abandoned.id, 1, "rank 1 differs") is State.FAILED


async def test_ranks_that_disagree_cost_the_job_one_attempt_and_the_next_says_why(
    ledger: Ledger, settle: Settler
) -> None:
    # field case 29, 30, 37
    job = await running_job(ledger, steer=True)
    disagreements = metrics.DISAGREEMENTS.labels(WORKER)._value
    before = disagreements.get()
    settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, 0, 0))])
    settle.settle(WORKER, 1, EPOCH, [(1, receipt(job, 0, 1, actions=4))])
    assert disagreements.get() - before == 1
    assert await receipts_told(ledger, job) == ["ok", "disagrees"]
    assert (await sent(ledger))[-1][:2] == (job.id, 1), "its message is sent in the same commit"
    assert await ledger.redis.hget("ms:desync", WORKER) is not None
    assert await ledger.claim(job.id, "w2", BOOT, 2, IDENTITY) is not None
    for rank in (0, 1):
        settle.settle("w2", rank, EPOCH, [(1, receipt(job, 0, rank, attempt=2, worker="w2"))])
    await ledger.store_outputs(job.id, 2, outputs())
    result = await ledger.result(job.id)
    assert result.state == State.SUCCEEDED
    assert result.attempt == 2
    assert result.determinism.consistent
    (reason,) = result.determinism.retried
    assert reason.startswith(
        "request 0, stage 0: rank 0 reports checksum fedcba9876543210 after 3 actions"
    )


async def test_late_receipts_of_ledgers_that_are_settled_do_not_mark_the_worker_again(
    ledger: Ledger, settle: Settler
) -> None:
    steering = LedgerSteering(ledger)

    async def disagree(seq: int, boot: str, epoch: int) -> bool:
        job = await running_job(ledger, steer=True)
        for rank in (0, 1):
            told = receipt(job, 0, rank, boot=boot, epoch=epoch, actions=3 + rank)
            settle.settle(WORKER, rank, EPOCH, [(seq, told)])
        return (await steering.look(MODEL, WORKER)).desync != ""

    assert await disagree(1, BOOT, 0)
    await steering.clear_desync(WORKER, BOOT, 1)
    assert not await disagree(2, BOOT, 0)
    assert await disagree(3, BOOT, 1)
    await steering.clear_desync(WORKER, BOOT, 2)
    await ledger.heartbeat(worker_info(boot="boot2"))
    assert not await disagree(4, BOOT, 7), "of a former start"
    assert await disagree(5, "boot2", 0)


@pytest.mark.parametrize(
    ("asked", "told", "expected"),
    [
        ({"capture": True}, {}, "capture_failed"),
        ({"capture": True}, {"status": 'fine"'}, "capture_failed"),  # not known: an error
        ({"steer": True}, {}, "intervention_failed"),
        ({"capture": True, "steer": True}, {}, "capture_failed"),
        ({"capture": True, "steer": True}, {"kind": "intervention_failed"}, "intervention_failed"),
    ],
)
async def test_an_error_of_one_rank_fails_the_job_with_rank_and_reason(
    ledger: Ledger, settle: Settler, asked: Any, told: dict[str, str], expected: str
) -> None:
    # field case 19, 29
    job = await running_job(ledger, prompts=2, **asked)
    said = {"status": "error", "message": 'disk "full" \\ é'} | told
    settle.settle(WORKER, 1, EPOCH, [(1, receipt(job, 1, 1, **said)), (2, receipt(job, 0, 1))])
    error = await error_of(ledger, job)
    assert error.type == f"urn:midstream:{expected}"
    assert error.status == 500
    assert error.detail == 'request 1, rank 1 (stage 0): disk "full" \\ é'
    assert await receipts_told(ledger, job) == ["error"]


async def test_a_gap_holds_the_mark_until_it_is_filled(ledger: Ledger, settle: Settler) -> None:
    job = await running_job(ledger, ranks=1, prompts=4, capture=True)
    told = {seq: (seq, receipt(job, seq - 1)) for seq in range(1, 5)}
    before = {status: counted(status) for status in ("ok", "duplicate", "beyond_gap")}
    assert settle.mark(WORKER, 0, EPOCH) == 0
    assert settle.settle(WORKER, 0, EPOCH, [told[1], told[3], told[4]]) == 1
    assert counted("beyond_gap") - before["beyond_gap"] == 2
    assert (await ledger.view(job.id)).receipts == 1
    assert settle.settle(WORKER, 0, EPOCH, [told[4], told[2], told[3]]) == 4
    assert settle.mark(WORKER, 0, EPOCH) == 4
    assert settle.mark(WORKER, 1, EPOCH) == 0
    assert (await ledger.view(job.id)).receipts == 4
    assert settle.settle(WORKER, 0, EPOCH, [told[2], told[1]]) == 4
    assert counted("ok") - before["ok"] == 4
    assert counted("duplicate") - before["duplicate"] == 2


@pytest.mark.parametrize(
    ("receipts", "size", "calls"),
    [(700, 0, 3), (20, 1 << 20, 3)],
    ids=["many receipts", "many bytes"],
)
async def test_a_long_batch_is_settled_whole_in_several_script_calls(
    ledger: Ledger, settle: Settler, receipts: int, size: int, calls: int
) -> None:
    job = await running_job(ledger, ranks=1, prompts=receipts, capture=True)
    await ledger.store_outputs(job.id, 1, outputs(receipts))
    settle.settle(WORKER, 0, EPOCH, [(1, receipt("job_unknown"))])  # the script is loaded
    rows = [Consumed(name="memory", rows=bytes(size))]
    told = [(2 + place, receipt(job, place, consumed=rows)) for place in range(receipts)]

    async def called() -> int:
        return int((await ledger.redis.info("commandstats"))["cmdstat_evalsha"]["calls"])

    before = await called()
    assert settle.settle(WORKER, 0, EPOCH, told) == 1 + receipts
    assert await called() - before == calls
    assert await state_of(ledger, job) is State.SUCCEEDED


MEMORY = Consumed("memory", rows=b"\x00\xffrows")
KAFKA = Consumed("kafka", ok=False, message="no broker")


@pytest.mark.parametrize(
    ("told", "status", "detail"),
    [
        pytest.param(  # whatever the rank calls it
            {"files": [file(dropped=[4, 5, 6, 9])]},
            "partial",
            "request 0, rank 0: positions dropped under overload: 4-6, 9 (4 in total)",
            id="dropped rows",
        ),
        pytest.param(
            {"files": [file()], "consumed": [Consumed("filesystem"), KAFKA]},
            "partial",
            "request 0, rank 0: consumer kafka failed: no broker",
            id="a consumer that failed",
        ),
        pytest.param(
            {"files": [file(dropped=[4])], "status": "partial", "message": "position 4 is gone"},
            "partial",
            "request 0, rank 0: position 4 is gone",
            id="its own words",
        ),
        pytest.param(
            {"files": [file(reused=3)]},
            "ok",
            "rows computed by an earlier request: 3 of 4",
            id="reused rows",
        ),
        pytest.param({"pp": 1, "consumed": [MEMORY]}, "ok", "", id="returned rows"),
        pytest.param(
            {"files": [file(tag="t", layout="segment", offset=4096)]}, "ok", "", id="a segment"
        ),
    ],
)
async def test_the_result_says_what_the_receipt_says_of_its_rows(
    ledger: Ledger, settle: Settler, told: dict[str, Any], status: str, detail: str
) -> None:
    # field case 19
    job = await running_job(ledger, ranks=1, capture=True)
    settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, **told))])
    await ledger.store_outputs(job.id, 1, outputs())
    results = (await ledger.result(job.id)).capture_results
    assert results.status == status
    assert results.detail == detail
    for shown, said in zip(results.files, told.get("files", []), strict=True):
        for name in ("sites", "tag", "layout", "offset", "dropped", "reused"):
            assert getattr(shown, name) == getattr(said, name)
    for report, consumed in zip(results.consumers, told.get("consumed", []), strict=True):
        assert report.request == 0
        assert report.pp == told.get("pp", 0)
        for name in ("name", "ok", "message", "rows"):
            assert getattr(report, name) == getattr(consumed, name)
    assert from_json(to_json(results), CaptureResults) == results, "bytes survive JSON"


async def test_a_receipt_from_before_there_were_other_hooks_means_post_block(
    ledger: Ledger, settle: Settler
) -> None:
    job = await running_job(ledger, ranks=1, capture=True)
    settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, files=[file(sites={}, layers=[0, 1])]))])
    (entry,) = (await ledger.result(job.id)).capture_results.files
    assert entry.sites == {"post_block": [0, 1]}


async def test_only_prompts_with_a_capture_or_steering_are_waited_for(
    ledger: Ledger, settle: Settler
) -> None:
    """What the operator captures may leave short prompts alone."""
    job = make_job(prompts=2, capture=True)
    job = msgspec.structs.replace(job, captures=[[], job.captures[1]])
    await claimed(ledger, job, ranks=1)
    await ledger.store_outputs(job.id, 1, outputs(2))
    view = await ledger.view(job.id)
    assert view.receipts_expected == 1
    assert view.state == State.RUNNING
    settle.settle(WORKER, 0, EPOCH, [(1, receipt(job, request=1))])
    assert await state_of(ledger, job) is State.SUCCEEDED


async def test_receipts_of_an_unknown_job_or_request_are_acknowledged_and_counted(
    ledger: Ledger, settle: Settler
) -> None:
    job = await running_job(ledger, ranks=1, prompts=1, capture=True)
    told = [(1, receipt("job_unknown")), (2, receipt(job, request=1))]
    before = counted("unknown")
    assert settle.settle(WORKER, 0, EPOCH, told) == 2
    assert counted("unknown") - before == 2
    assert (await ledger.view(job.id)).receipts == 0


async def test_only_a_trigger_sets_a_latch_and_attempts_decide_alike(
    ledger: Ledger, settle: Settler
) -> None:
    """Of one registration of the policy; a later attempt has the latches of the first claim,
    whatever was set or has expired since.
    """
    before = policed()
    first = policed()
    heir = policed()
    late = policed()
    renewed = policed(2.0)
    for job in (before, first, heir, late, renewed):
        await ledger.submit(job, {})
    assert await inherits(ledger, before) == ""
    assert await inherits(ledger, first) == ""
    settle.settle(WORKER, 0, EPOCH, [(1, decided(first))])
    assert await inherits(ledger, heir) == first.id
    assert await inherits(ledger, renewed) == ""
    (latch,) = await ledger.redis.keys("ms:latch:*")
    assert await ledger.redis.ttl(latch) in (59, 60)
    await ledger.release(before.id, 1)
    assert await inherits(ledger, before) == "", "another request set it since"
    await ledger.redis.delete(latch)  # as it expires
    settle.settle(WORKER, 0, EPOCH, [(2, decided(heir, inherited=first.id))])
    assert await ledger.redis.keys("ms:latch:*") == [], "a request that only had it set it again"
    await ledger.release(heir.id, 1)
    assert await inherits(ledger, heir) == first.id
    assert await inherits(ledger, late) == ""


async def test_a_policys_prompts_are_counted_by_day_while_it_is_registered(
    ledger: Ledger, settle: Settler
) -> None:
    """Once each, the days of a month, and until the policy is deleted."""
    jobs = [policed(prompts=2) for _ in range(3)]
    for job in jobs:
        await claimed(ledger, job, 1)
    content = PolicyRequest(probe="p", condition=GUARD.condition, actions=[])
    probe = jobs[0].probes[0]
    version = PolicyVersion(
        version=1,
        digest="d",
        created=1.0,
        content=content,
        probe=probe,
        modules=[],
        identity=IDENTITY,
        tenant="",
        key="",
    )
    guard = Policy("guard", MODEL, "d", 1.0, versions=[version])

    async def counted(policy: str = "guard") -> list[list[int]]:
        (found,) = await with_days(ledger, [msgspec.structs.replace(guard, name=policy)])
        return [[day.prompts, day.triggered, day.acted] for day in found.days]

    settle.settle(WORKER, 0, EPOCH, [(1, decided(jobs[0]))])
    assert await counted() == [], "it is not registered"
    policies = Registry(ledger, POLICIES)
    await policies.put(MODEL, "guard", lambda _: guard, {})
    (score,) = decided(jobs[1]).scores
    in_shadow = msgspec.structs.replace(GUARD, acts=False)
    shadow, quiet = (
        receipt(job, scores=[msgspec.structs.replace(score, **changes)])
        for job, changes in ((jobs[0], {"policy": in_shadow}), (jobs[2], {"crossed": [None]}))
    )
    told = [decided(jobs[1]), msgspec.structs.replace(shadow, request=1), quiet, decided(jobs[1])]
    settle.settle(WORKER, 0, EPOCH, [*enumerate(told, 2)])
    assert await counted() == [[3, 2, 1]]
    hits = {view.id: view.triggered for view in (await ledger.list(policy="guard")).jobs}
    assert hits == {jobs[0].id: {"guard": True}, jobs[1].id: {"guard": True}}
    old = {number: f"[{int(now() // 86400) - number},1,1,1]" for number in (30, 29)}
    await ledger.redis.hset(f"ms:policy-days:{MODEL}:old", mapping=old)
    assert await counted("old") == [[1, 1, 1]]
    await policies.delete(MODEL, "guard")
    assert await counted() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verdicts", [("error", "error"), ("ok", "error")])
async def test_a_failed_prompt_is_counted_once_whatever_its_ranks_report(
    ledger: Ledger, settle: Settler, kind: str, verdicts: tuple[str, str]
) -> None:
    """Each rank of a stage has the decisions up to the failure."""
    job = policed(kind=kind)
    await claimed(ledger, job)
    key = f"ms:policies:{MODEL}"
    await ledger.redis.hset(key, "guard", b"")
    for rank, verdict in enumerate(verdicts):
        told = msgspec.structs.replace(decided(job), rank=rank, tp=rank, status=verdict)
        settle.settle(WORKER, rank, EPOCH, [(1, told)])
    (counted,) = await ledger.redis.hvals(f"ms:policy-days:{MODEL}:guard")
    assert from_json(counted, list[int])[1:] == [1, 1, 1]


async def test_a_failed_prompts_scores_are_shown_and_measured_once(
    ledger: Ledger, settle: Settler
) -> None:
    job = policed(capture=True)
    measured = metrics.PROBED.labels("", "")
    before = measured._value.get()
    await claimed(ledger, job)
    for rank, verdict in enumerate(("ok", "error")):
        told = msgspec.structs.replace(decided(job), rank=rank, tp=rank, status=verdict)
        settle.settle(WORKER, rank, EPOCH, [(1, told)])
    assert await state_of(ledger, job) is State.FAILED
    assert len((await ledger.result(job.id)).probes) == 1
    assert measured._value.get() == before + 1


async def test_a_policys_webhooks_are_bounded_and_charged_to_nobody(redis_url: str) -> None:
    """Those of its receiver's host. Its owner gets no ids of other tenants' jobs, and may submit as
    before.
    """
    async with open_ledger(redis_url, **{"tuning.webhook_pending_limit": 30}) as ledger:
        outbox = WebhookOutbox(ledger)
        job = policed(prompts=300, tenant="users")
        await claimed(ledger, job)
        found = [decided(job, number, f"job_{number}") for number in range(300)]
        settler(redis_url).settle(WORKER, 0, EPOCH, [*enumerate(found, 1)])
        for url in (HOOK.url, "http://127.0.0.2:9/"):
            callback = Callback(url=url, events=["job.succeeded"])
            ended = make_job(tenant="ops", callback=callback)
            assert await ledger.store_outputs(ended.id, await claimed(ledger, ended), outputs())

        log = (await outbox.deliveries("ops", limit=300, viewer="ops")).deliveries
        assert sorted(each.event for each in log) == ["job.decided"] * 256 + ["job.succeeded"] * 2
        assert await outbox.dropped() == 300 - 256
        assert (await outbox.deliveries("ops", job.id, viewer="ops")).deliveries == []
        [first, *_] = [each for each in log if each.event == "job.decided"]
        assert (await outbox.delivery(first.id)).job == job.id, "for an admin"
        await ledger.redis.hset("ms:hook-room", "ops|127.0.0.1:9", 256)
        leases = await outbox.lease(300, 300, 30.0, {})
        told = to_json(log) + b"".join([lease.id.encode() + lease.body() for lease in leases])
        assert job.id.removeprefix("job_").encode() not in told
        words = (b'"inherited":"other_', b'"data":{"id":"other_')
        assert [told.count(word) for word in words] == [256, 256]


async def test_a_lost_range_fails_its_jobs_and_passes_the_mark(
    ledger: Ledger, settle: Settler
) -> None:
    hit, elsewhere, again, over = [make_job(capture=True) for _ in range(3)] + [make_job()]
    for job, worker in ((hit, WORKER), (elsewhere, "w2"), (again, WORKER), (over, WORKER)):
        await claimed(ledger, job, worker=worker)
    await ledger.store_outputs(over.id, 1, outputs())
    await ledger.release(again.id, 1)
    assert await ledger.claim(again.id, WORKER, "boot-2", 2, IDENTITY) is not None
    settle.settle(WORKER, 1, EPOCH, [(1, receipt("job_unknown"))])
    lost_jobs = [f"{job.id}.1" for job in (hit, elsewhere, again, over)]
    lost_jobs += ["job_unknown.1", hit.id]
    lost = LostRange(first=2, last=5, jobs=lost_jobs, message="database is malformed")
    beyond = LostRange(first=3, last=5, jobs=[f"{hit.id}.1"])
    assert settle.lost(WORKER, 1, EPOCH, beyond) == 1, "a gap before the range is a gap"
    assert await state_of(ledger, hit) is State.RUNNING
    failed = metrics.LOST.labels(WORKER)._value
    before = failed.get()
    for _ in range(2):
        assert settle.lost(WORKER, 1, EPOCH, lost) == 5
    assert failed.get() - before == 1
    detail = (await error_of(ledger, hit)).detail
    for part in ("rank 1", "2 to 5", "database is malformed"):
        assert part in detail
    assert await state_of(ledger, elsewhere) is State.RUNNING
    assert await state_of(ledger, again) is State.RUNNING, "they were of a former attempt"
    assert await state_of(ledger, over) is State.SUCCEEDED
    assert settle.lost(WORKER, 1, EPOCH, LostRange(6, 6, jobs=[f"{again.id}.2"])) == 6
    assert await state_of(ledger, again) is State.FAILED
    assert settle.settle(WORKER, 1, EPOCH, [(7, receipt("job_unknown"))]) == 7
