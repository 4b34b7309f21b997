"""Does the job API keep its promises: accept durably, tell the truth about a job, hold answers,
never turn failure into success? Can a job be followed as it runs, without missing an event?
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import msgspec
import numpy as np
import pytest
import redis
from edge import MODEL, Api, Hand, refused, running
from midstream_fake_engine.watch_kit import lone_watch, put_scores
from server_sent import parse
from wait_kit import warn_if_late

from midstream.api.context import open_context
from midstream.api.responses import events
from midstream.broker.queue.celery_app import lists_of, queue_of
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import from_numpy

BODY = {"model": MODEL, "prompts": ["hello there"]}
#: Whoever waits looks by itself every 5 s (`POLL_S` of the watcher); an answer that came sooner was
#: told of the change.
TOLD_S = 4.0


def test_a_submitted_job_is_committed_queued_and_located(api: Api, hand: Hand) -> None:
    answer = api.http.post("/v1/jobs", json={**BODY, "metadata": {"who": "me"}})
    view = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{view['id']}"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["etag"] == f'"{view["version"]}"'
    assert view["state"] == "queued"
    assert view["metadata"] == {"who": "me"}
    with redis.Redis.from_url(api.settings.redis_url) as client:
        _, message = client.brpop(lists_of(queue_of(MODEL)), timeout=30)
    assert b"hello" not in message, "a message carries the job's id and nothing else"
    stored = hand.job(view["id"]).prompts[0]
    assert stored.token_ids == [1, 2, 3], "BOS as the tokenizer adds it, nothing truncated"
    assert stored.text == "hello there"


def test_prompts_are_taken_whole_as_text_and_as_token_ids(api: Api, hand: Hand) -> None:
    """The truncation that the tokenizer has saved cuts nothing."""
    long, ids = hand.job(api.submit(prompts=["a " * 10, [4, 5, 6]])).prompts
    assert len(long.token_ids) == 11
    assert ids.token_ids == [4, 5, 6]


def test_steering_and_capture_are_stored_resolved_per_prompt(api: Api, hand: Hand) -> None:
    ones = msgspec.to_builtins(from_numpy(np.ones(8, np.float32)))
    job_id = api.submit(
        prompts=["hello there", "a b c d"],
        capture={"layers": "1-2", "positions": [-1, 0], "tag": "run1"},
        steering=[{"layers": -1, "vector": ones, "scale": 2.0, "positions": [-2]}],
    )
    job = hand.job(job_id)
    assert [[stored.positions for stored in captures] for captures in job.captures] == [
        [[0, 2]],
        [[0, 4]],
    ]
    assert job.captures[0][0].sites == {"post_block": [1, 2]}
    assert [entries[0].positions for entries in job.steering] == [[1], [3]]
    assert job.steering[0][0].layers == [3]
    assert hand.do(hand.ledger.get_tensor(job.steering[0][0].tensors[0])).shape == [8]


# field case 40
def test_ids_are_long_random_and_never_the_clients(api: Api, hand: Hand) -> None:
    ids = {api.submit() for _ in range(20)}
    assert len(ids) == 20
    assert all(job_id.startswith("job_") and len(job_id) >= 4 + 26 for job_id in ids)
    assert len({job_id[-26:] for job_id in ids}) == 20
    refused(api.http.post("/v1/jobs", json={**BODY, "id": "job_mine"}), 400, "id")


def test_an_idempotency_key_is_one_job_also_of_concurrent_submissions(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    def submit(_: int) -> tuple[int, str]:
        answer = api.http.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k2"})
        return answer.status_code, answer.json()["id"]

    first = submit(0)
    assert {first, *pool.map(submit, range(16))} == {first}
    assert hand.count_jobs() == 1
    refused(
        api.http.post(
            "/v1/jobs", json={**BODY, "prompts": ["a"]}, headers={"Idempotency-Key": "k2"}
        ),
        422,
        "Idempotency-Key",
    )


def test_prefer_wait_answers_200_with_the_result_when_the_job_ends_in_time(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    held = pool.submit(api.http.post, "/v1/jobs", json=BODY, headers={"Prefer": "wait=20"})
    claim = hand.claim_next()
    time.sleep(0.2)
    assert not held.done()
    hand.store(claim)
    answer = held.result()
    assert answer.status_code == 200
    assert answer.headers["preference-applied"] == "wait=20"
    assert answer.json()["outputs"][0]["text"] == "hello world"


@pytest.mark.parametrize(
    ("prefer", "applied"),
    [
        ("respond-async, wait=1", "wait=1"),
        ("respond-async", None),
        ("handling=lenient", None),
        ("wait=soon", None),
    ],
)
def test_a_submission_is_202_after_the_wait_that_it_asks_for(
    api: Api, hand: Hand, prefer: str, applied: str | None
) -> None:
    before = time.monotonic()
    answer = api.http.post("/v1/jobs", json=BODY, headers={"Prefer": prefer})
    assert answer.status_code == 202
    assert answer.json()["state"] == "queued"
    assert answer.headers.get("preference-applied") == applied
    assert time.monotonic() - before > (0.9 if applied else 0.0)


# field case 39
def test_prefer_wait_on_a_job_that_fails_answers_its_problem_and_not_success(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    held = pool.submit(api.http.post, "/v1/jobs", json=BODY, headers={"Prefer": "wait=20"})
    claim = hand.claim_next()
    hand.fail(claim, MidstreamError("engine_failed", "out of memory").problem())
    answer = held.result()
    problem = refused(answer, 500, kind="engine_failed")
    assert problem["instance"] == f"/v1/jobs/{claim.job.id}"


def test_a_long_poll_returns_at_its_timeout_or_when_the_job_is_over(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    job_id = api.submit()
    before = time.monotonic()
    assert api.view(job_id, wait=0.5)["state"] == "queued"
    assert time.monotonic() - before > 0.4
    poll = pool.submit(api.view, job_id, wait=20)
    time.sleep(0.3)
    assert not poll.done()
    before = time.monotonic()
    hand.finish(job_id)
    assert poll.result()["state"] == "succeeded"
    warn_if_late(time.monotonic() - before, TOLD_S, "a message wakes the response")


def test_an_unchanged_job_is_304_and_a_changed_one_has_another_etag(api: Api, hand: Hand) -> None:
    job_id = api.submit()
    first = api.http.get(f"/v1/jobs/{job_id}")
    same = api.http.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": first.headers["etag"]})
    weak = api.http.get(
        f"/v1/jobs/{job_id}", headers={"If-None-Match": f'"x", W/{first.headers["etag"]}'}
    )
    assert same.status_code == 304
    assert same.content == b""
    assert weak.status_code == 304
    hand.finish(job_id)
    later = api.http.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": first.headers["etag"]})
    assert later.status_code == 200
    assert later.headers["etag"] != first.headers["etag"]


def test_a_long_poll_with_an_etag_returns_at_the_next_change(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    url = f"/v1/jobs/{api.submit()}"
    headers = {"If-None-Match": api.http.get(url).headers["etag"]}
    poll = pool.submit(api.http.get, url, params={"wait": 20}, headers=headers)
    time.sleep(0.3)
    assert not poll.done()
    hand.claim_next()
    assert poll.result().json()["state"] == "running"


def test_the_list_is_newest_first_pages_and_filters(api: Api, hand: Hand) -> None:
    ids = [api.submit() for _ in range(5)]
    hand.finish(ids[2])
    first = api.http.get("/v1/jobs", params={"limit": 3}).json()
    second = api.http.get("/v1/jobs", params={"limit": 3, "cursor": first["next"]}).json()
    assert [job["id"] for job in first["jobs"] + second["jobs"]] == ids[::-1]
    assert second["next"] is None
    over = api.http.get("/v1/jobs", params={"state": "succeeded"}).json()["jobs"]
    assert [job["id"] for job in over] == [ids[2]]
    assert api.http.get("/v1/jobs", params={"model": "other"}).json()["jobs"] == []


def test_the_result_is_409_until_the_job_is_over_and_410_past_its_retention(
    api: Api, hand: Hand
) -> None:
    job_id = api.submit()
    refused(api.http.get(f"/v1/jobs/{job_id}/result"), 409, kind="conflict")
    hand.finish(job_id)
    assert api.http.get(f"/v1/jobs/{job_id}/result").json()["outputs"][0]["text"] == "hello world"
    with redis.Redis.from_url(api.settings.redis_url) as client:
        # as if that time had passed
        client.hincrbyfloat(f"ms:job:{job_id}", "finished", -1 - api.settings.result_ttl_s)
    assert api.http.get(f"/v1/jobs/{job_id}/result").status_code == 410
    assert api.view(job_id)["state"] == "expired"


# field case 39
def test_the_result_of_a_failed_job_is_its_problem_with_its_status(api: Api, hand: Hand) -> None:
    job_id = api.submit(capture={"layers": [0]})
    claim = hand.claim(job_id)
    hand.store(claim)
    hand.receipt(claim, status="error", message="disk full")
    answer = api.http.get(f"/v1/jobs/{job_id}/result")
    refused(answer, 500, None, "disk full", kind="capture_failed")
    assert answer.headers["x-should-retry"] == "false"


def test_a_job_that_fails_itself_hides_no_decision_of_a_policy(api: Api, hand: Hand) -> None:
    """Its problem and the policy's webhook have it."""
    fields = {"model": MODEL, "probe": "p", "condition": {"at_least": 3}, "mode": "active"}
    hook = {"action": "webhook", "url": "https://hooks.example.com/x"}
    weight = msgspec.to_builtins(from_numpy(np.ones(8, np.float32)))
    for path, body in (
        ("artifacts/probes/p", {"model": MODEL, "weight": weight, "layer": 0}),
        ("artifacts/policies/guard", {**fields, "actions": ["flag", hook]}),
    ):
        answer = api.http.put(f"/v1/{path}", json=body)
        assert answer.is_success, answer.text
    claim = hand.claim(api.submit(policies=["guard"]))
    watch = lone_watch("r", claim.job.probes, 3)
    put_scores(watch, 0, slice(0, 1), np.array([[0], [0], [0], [9]], dtype=np.float32))
    scores, _ = watch.results(4)
    hand.receipt(claim, status="error", kind="edit_too_large", message="9 times", scores=scores)
    job_id = claim.job.id
    answer = api.http.get(f"/v1/jobs/{job_id}/result").json()
    (probe,) = answer["probes"]
    assert answer["type"] == "urn:midstream:edit_too_large"
    assert probe["flagged"] is True
    assert probe["decisions"] == [{"position": 3, "event": "trigger", "score": 9.0}]
    sent = api.http.get("/v1/webhooks/deliveries", params={"job": job_id}).json()["deliveries"]
    assert [each["event"] for each in sent] == ["job.decided"]


def test_no_request_edits_what_a_policy_of_all_traffic_reads(api: Api, hand: Hand) -> None:
    """While the policy may act. It may itself, and so may requests if its setting allows it."""
    hand.serve()
    ones = msgspec.to_builtins(from_numpy(np.ones(8, np.float32)))
    early, late = ({"layers": [layer], "hook": "mlp_out", "vector": ones} for layer in (2, 3))
    module = [{"module": "early"}]
    probe = {"model": MODEL, "weight": ones, "layer": 2, "thresholds": 1.0}
    policy = {"model": MODEL, "probe": "p", "condition": {"at_least": 3}, "mode": "active"}
    policy |= {"actions": [{"action": "steer", "module": "early"}], "all_traffic": True}
    names = "artifacts/modules/early", "artifacts/probes/p", "artifacts/policies/guard"
    for name, body in zip(
        names, ({"model": MODEL, "steering": [early]}, probe, policy), strict=True
    ):
        answer = api.http.put(f"/v1/{name}", json=body)
        assert answer.is_success, answer.text
    prompt = {"prompt": "a"}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    dose = {
        "prompts": ["a"],
        "effect": {"target": " b"},
        "held_out": ["a b"],
        "scales": [2.0],
        "max_tokens": 4,
    }
    harvest = {"source": {"lines": ["a"]}, "layers": 1}
    for path, fields, field in (
        ("jobs", {"steering": [late, early]}, "steering[1]"),
        ("jobs", {"steering": [late | {"layers": "2-3", "hook": "post_block"}]}, "steering[0]"),
        ("jobs", {"steering": module}, "steering[0]"),
        ("jobs", {"steering": [early], "policies": ["guard"]}, "steering[0]"),
        ("jobs", {"probes": [{"probe": "p", "action": "steer", **module[0]}]}, "probes[0]"),
        (
            "jobs",
            {"patch": [{"layers": 0, "positions": [0], "source": {"zeros": True}}]},
            "patch[0]",
        ),
        ("completions", {"steering": [early], **prompt}, "steering[0]"),
        ("chat/completions", {"steering": [early], **chat}, "steering[0]"),
        ("doses", {"steering": [{"vector": ones}], "layers": "2-3", **dose}, "steering[0]"),
        ("harvests", {"steering": module, **harvest}, "steering[0]"),
    ):
        body = {"model": MODEL, **fields} | ({"prompts": ["a"]} if path == "jobs" else {})
        says = "'guard' of all traffic reads: post_block of layer 2"
        refused(api.http.post(f"/v1/{path}", json=body), 400, field, says)
    (entry,) = hand.job(api.submit()).steering[0]
    assert entry.gate == "policy:guard"
    assert api.submit(steering=[late])
    early = {"model": MODEL, "prompts": ["a"], "steering": [early]}
    for change, status in (
        ({"mode": "shadow"}, 202),
        ({"mode": "active"}, 400),
        ({"edits": "allow"}, 202),
    ):
        api.http.patch("/v1/artifacts/policies/guard", params={"model": MODEL}, json=change)
        assert api.http.post("/v1/jobs", json=early).status_code == status, change
    for name in names[::-1]:
        api.http.delete(f"/v1/{name}", params={"model": MODEL})


def test_a_queued_job_is_aborted_and_has_no_result(api: Api, hand: Hand) -> None:
    job_id = api.submit()
    cancel = api.http.post(f"/v1/jobs/{job_id}/cancel")
    assert cancel.status_code == 202
    assert cancel.json()["state"] == "aborted"
    assert api.http.get(f"/v1/jobs/{job_id}/result").status_code == 409
    refused(api.http.post(f"/v1/jobs/{job_id}/cancel"), 409)


def test_a_cancelled_running_job_is_cancelling_until_the_worker_confirms(
    api: Api, hand: Hand
) -> None:
    claim = hand.claim(api.submit())
    assert api.http.post(f"/v1/jobs/{claim.job.id}/cancel").json()["state"] == "cancelling"
    hand.do(hand.ledger.finish_cancel(claim.job.id, claim.attempt))
    assert api.view(claim.job.id)["state"] == "cancelled"


@pytest.mark.parametrize("path", ["", "/result", "/events", "/cancel"])
def test_an_unknown_job_is_404(api: Api, hand: Hand, path: str) -> None:
    method = "POST" if path == "/cancel" else "GET"
    refused(api.http.request(method, f"/v1/jobs/job_nobody{path}"), 404)


# field case 38
def test_a_held_response_ends_although_notifications_were_lost(api: Api, hand: Hand) -> None:
    job_id = api.submit()
    with ThreadPoolExecutor(1) as pool, redis.Redis.from_url(api.settings.redis_url) as client:
        poll = pool.submit(api.view, job_id, wait=25)
        time.sleep(0.3)
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        hand.finish(job_id)
        assert poll.result(timeout=20)["state"] == "succeeded"


# field case 21, 38
def test_a_job_that_fails_before_anything_was_registered_ends_the_wait_at_once(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    job_id = api.submit(capture={"layers": "all"})
    poll = pool.submit(api.view, job_id, wait=25)
    claim = hand.claim(job_id)
    before = time.monotonic()
    hand.fail(claim, MidstreamError("intervention_failed", "rank 0: no such vector").problem())
    assert poll.result()["error"]["detail"] == "rank 0: no such vector"
    warn_if_late(time.monotonic() - before, TOLD_S, "a message wakes the response")


def test_held_responses_do_not_block_each_other(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    ids = [api.submit() for _ in range(30)]
    polls = [pool.submit(api.view, job_id, wait=50) for job_id in ids]
    for job_id in reversed(ids):
        hand.finish(job_id)
    assert {poll.result()["state"] for poll in polls} == {"succeeded"}


def test_two_apis_return_the_same_job(
    api: Api, hand: Hand, tmp_path_factory: pytest.TempPathFactory, pool: ThreadPoolExecutor
) -> None:
    with running(tmp_path_factory.mktemp("replica"), api.settings.redis_url) as replica:
        job_id = api.submit()
        poll = pool.submit(replica.view, job_id, wait=20)
        hand.finish(job_id)
        assert poll.result()["state"] == "succeeded"
        assert replica.view(job_id) == api.view(job_id)


def test_a_model_shows_what_is_absent_and_its_certificate(api: Api, hand: Hand) -> None:
    card = api.http.get(f"/v1/models/{MODEL}").json()
    assert card["id"] == MODEL
    assert card["certificate"] is None
    assert card["absent"] == {}
    assert api.http.get("/v1/models/nobody").status_code == 404


# --- Events ---------------------------------------------------------------------------------------


KINDS_OF_A_CAPTURE = ["state", "state", "output", "receipt", "state", "done"]


def test_the_events_of_a_job_come_in_order_and_end_after_done(api: Api, hand: Hand) -> None:
    job_id = api.submit(capture={"layers": [0]})
    hand.finish(job_id)
    answer = api.http.get(f"/v1/jobs/{job_id}/events")
    told = parse(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [event["event"] for event in told] == KINDS_OF_A_CAPTURE
    assert told[-1]["data"] == {"state": "succeeded", "attempt": 1}
    assert [event["data"]["state"] for event in told if event["event"] == "state"] == [
        "queued",
        "running",
        "succeeded",
    ]


def test_events_arrive_while_the_job_runs(api: Api, hand: Hand) -> None:
    job_id = api.submit()
    with httpx2.stream("GET", f"{api.url}/v1/jobs/{job_id}/events", timeout=60) as answer:
        lines = answer.iter_lines()
        assert (
            next(line for line in lines if line.startswith("data"))
            == 'data: {"state":"queued","attempt":0}'
        )
        claim = hand.claim(job_id)
        assert "running" in next(line for line in lines if line.startswith("data"))
        hand.say(claim, "hello")
        assert '"text":"hello"' in next(line for line in lines if line.startswith("data"))
        hand.store(claim)
        assert [line for line in lines if line.startswith("event")][-1] == "event: done"


def test_a_broken_connection_resumes_behind_the_last_event_seen(api: Api, hand: Hand) -> None:
    job_id = api.submit(capture={"layers": [0]})
    hand.finish(job_id)
    url = f"/v1/jobs/{job_id}/events"
    whole = parse(api.http.get(url).text)
    for number, event in enumerate(whole, 1):
        rest = api.http.get(url, headers={"Last-Event-ID": event["id"]})
        assert parse(rest.text) == whole[number:]
    assert rest.status_code == 204, "there is nothing behind `done`"
    ids = [[int(part) for part in event["id"].split("-")] for event in whole]
    assert ids == sorted(ids)


async def test_event_streams_send_keepalives_and_end_despite_a_lost_done(
    api: Api, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PING_S", 0.2)
    job_id = api.submit()
    async with open_context(api.settings) as edge, asyncio.timeout(60):
        batches = events.follow(edge, job_id, events.BEGINNING)
        seen = [[event.event for event in await anext(batches)] for _ in range(3)]
        await asyncio.to_thread(hand.finish, job_id)
        # as if they were trimmed before we read on
        await edge.ledger.redis.delete(f"ms:events:{job_id}")
        rest = [[event.event for event in batch] async for batch in batches]
    assert seen + rest == [["state"], [], []]


# field case 38
def test_disconnected_event_followers_leave_no_waiters(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    job_id = api.submit()

    def follow_and_leave(_: int) -> None:
        with httpx2.stream("GET", f"{api.url}/v1/jobs/{job_id}/events", timeout=60) as answer:
            next(answer.iter_lines())

    list(pool.map(follow_and_leave, range(8)))
    api.until_held(0)
    hand.finish(job_id)
    assert api.view(job_id)["state"] == "succeeded"


def test_many_followers_of_a_job_cost_redis_as_much_as_one(api: Api, hand: Hand) -> None:
    followers = 20
    job_id = api.submit()
    url = f"{api.url}/v1/jobs/{job_id}/events"

    def reads() -> int:
        with hand._redis as client:
            return int(client.info("commandstats")["cmdstat_xrange"]["calls"])

    def each_reads(word: str) -> None:
        for lines in streams:
            assert word in next(line for line in lines if line.startswith("data"))

    with ExitStack() as opened:
        streams = [
            opened.enter_context(httpx2.stream("GET", url, timeout=60)).iter_lines()
            for _ in range(followers)
        ]
        each_reads('{"state":"queued","attempt":0}')
        claim = hand.claim(job_id)
        each_reads("running")
        time.sleep(0.5)  # all wait again
        before = reads()
        hand.say(claim, "hello")
        each_reads('"text":"hello"')
        assert reads() - before < followers, "each would read for itself, more than once"
