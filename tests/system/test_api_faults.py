"""Does nothing accepted get lost, and does no client hang or hear a lie, when Redis or the API goes
away?
"""

import asyncio
import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import msgspec
import pytest
import redis
from edge import MODEL, Api, Hand, model_info, refused, running
from mortal_redis import Mortal, mortal
from redis_kit import handed_over, hold_back, slow_disk
from tenant_kit import flushed
from wait_kit import wait_until, warn_if_late

from midstream.api.context import open_context
from midstream.broker.queue.celery_app import lists_of, queue_of
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_json

BODY = {"model": MODEL, "prompts": ["hello there"]}


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortal]:
    with mortal(tmp_path_factory.mktemp("mortal")) as server:
        yield server


@pytest.fixture(scope="module")
def shared_api(shared_redis: Mortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running(tmp_path_factory.mktemp("over-mortal"), shared_redis.url) as api:
        yield api


@pytest.fixture
def own_redis(shared_redis: Mortal) -> Mortal:
    """One that is empty, and that the test may kill."""
    shared_redis.start()
    flushed(shared_redis.url)
    return shared_redis


@pytest.fixture
def own_api(own_redis: Mortal, shared_api: Api) -> Api:
    if shared_api.process.poll() is not None:
        shared_api.start()
    return shared_api


@pytest.fixture
def own_hand(own_api: Api) -> Iterator[Hand]:
    with Hand(own_api.settings) as hand:
        yield hand


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Mortal, Api, Hand]]:
    """A Redis on a slow disk, an API and a worker by hand."""
    monkeypatch.setenv("LD_PRELOAD", slow_disk(tmp_path))
    with (
        mortal(tmp_path / "redis") as server,
        running(tmp_path, server.url) as api,
        Hand(api.settings) as hand,
    ):
        yield server, api, hand


# field case 39
@pytest.mark.slow("every operation waits for Redis")
def test_all_calls_are_503_while_redis_is_unreachable(
    own_redis: Mortal, own_api: Api, own_hand: Hand
) -> None:
    http = own_api.http
    job_id = own_api.submit()
    own_redis.kill()
    assert http.get("/healthz").status_code == 200, "the process itself is well"
    ready = http.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["ready"] is False
    assert "redis" in ready.json()["missing"][0]
    for answer in (
        http.post("/v1/jobs", json=BODY),
        http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"}),
        http.get("/v1/jobs"),
        http.get(f"/v1/jobs/{job_id}", params={"wait": 20}),
        http.get(f"/v1/jobs/{job_id}/result"),
        http.post(f"/v1/jobs/{job_id}/cancel"),
    ):
        unavailable(answer)
    assert http.get("/metrics").status_code == 200
    own_redis.start()
    assert own_hand.count_jobs() == 1, "what was refused is not there, what was accepted is"
    assert http.post("/v1/jobs", json=BODY).status_code == 202


def test_readyz_answers_while_redis_is_silent_or_full(own_redis: Mortal, own_api: Api) -> None:
    def missing(within: float) -> str:
        began = time.monotonic()
        answer = own_api.http.get("/readyz")
        warn_if_late(time.monotonic() - began, within, "/readyz waits for Redis for 2 s at most")
        assert answer.status_code == 503
        return answer.json()["missing"][0]

    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", 1)
        try:
            assert "Redis refuses writes: " in missing(10)
        finally:
            client.config_set("maxmemory", 0)
    own_redis.server.process.send_signal(signal.SIGSTOP)
    try:
        assert "redis: no answer" in missing(2.5)
    finally:
        own_redis.server.process.send_signal(signal.SIGCONT)


def unavailable(answer: httpx2.Response) -> None:
    refused(answer, 503, kind="unavailable")
    assert int(answer.headers["retry-after"]) >= 1


# field case 37, 38
def test_held_answers_and_streams_outlive_a_restart_of_redis(
    own_redis: Mortal, own_api: Api, own_hand: Hand, pool: ThreadPoolExecutor
) -> None:
    body = {"model": MODEL, "prompt": "hello"}
    completion = pool.submit(own_api.http.post, "/v1/completions", json=body)
    claim = own_hand.claim_next()
    poll = pool.submit(own_api.http.get, f"/v1/jobs/{claim.job.id}", params={"wait": 55})
    stream = pool.submit(own_api.http.post, "/v1/completions", json={**body, "stream": True})
    streamed = own_hand.say_next("hello")
    own_api.until_held(3)
    handed_over(own_redis.url)
    own_redis.kill()
    own_redis.start()
    # first the API knows this Redis: an answer that waits longer than a restart takes may be a
    # 503, and on a busy machine any does
    wait_until(lambda: own_api.http.post("/v1/jobs", json=BODY).status_code == 202)
    own_hand.store(claim)
    own_hand.say(streamed, " world")
    own_hand.store(streamed)
    assert completion.result().json()["choices"][0]["text"] == "hello world"
    assert poll.result().json()["state"] == "succeeded"
    text = stream.result().text
    assert re.findall(r'"text":"([^"]*)"', text) == ["hello", " world", ""]
    assert text.endswith("data: [DONE]\n\n")


# field case 37
@pytest.mark.long
def test_answers_given_on_a_slow_disk_survive_a_redis_kill(slow: tuple[Mortal, Api, Hand]) -> None:
    """A Redis whose last fsync still runs answers before it writes."""
    server, api, hand = slow
    for promise in ("accepted", "over", "listed", "told"):
        job_id = api.submit()
        claim = hand.claim_next() if promise != "accepted" else None
        hold_back(server.url)
        if claim is not None:
            hand.store(claim)
        match promise:
            case "accepted":
                job_id = api.submit()
            case "over":
                assert api.view(job_id)["state"] == "succeeded"
            case "listed":
                assert api.http.get("/v1/jobs").json()["jobs"][0]["state"] == "succeeded"
            case "told":
                assert "event: done" in api.http.get(f"/v1/jobs/{job_id}/events").text
        server.kill()
        server.start()
        state = "queued" if promise == "accepted" else "succeeded"
        assert api.view(job_id)["state"] == state, promise


@pytest.mark.slow("Redis is killed and starts again")
def test_unsynced_writes_are_503_when_redis_is_killed(
    slow: tuple[Mortal, Api, Hand], pool: ThreadPoolExecutor
) -> None:
    server, api, hand = slow
    for _ in range(10):
        job_id = api.submit()
        hold_back(server.url)
        cancelled = pool.submit(api.http.post, f"/v1/jobs/{job_id}/cancel")
        wait_until(
            lambda: cancelled.done() or hand.view(job_id).state == "aborted",  # noqa: B023
            pause_s=0.01,
        )
        server.kill()
        answer = cancelled.result()
        server.start()
        if answer.status_code != 202:
            break
        assert api.view(job_id)["state"] == "aborted", (
            "on a machine that is slower than this disk it may have been written"
        )
    unavailable(answer)


async def test_a_wait_for_an_accepted_job_begins_even_while_redis_restarts(
    own_redis: Mortal, own_api: Api, own_hand: Hand
) -> None:
    job_id = own_api.submit()
    own_redis.kill()
    async with open_context(own_api.settings) as edge:
        waiting = asyncio.create_task(edge.waiting.outcome(job_id, lambda view: True, 60))
        await asyncio.sleep(1)
        assert not waiting.done()
        await asyncio.to_thread(own_redis.start)
        assert (await waiting).view.state == "queued"


# field case 37
def test_a_killed_api_loses_no_job_and_another_serves_it(own_api: Api, own_hand: Hand) -> None:
    ids = [own_api.submit() for _ in range(10)]
    own_api.kill()
    own_hand.finish(ids[3])
    own_api.start()
    listed = own_api.http.get("/v1/jobs").json()["jobs"]
    assert {job["id"] for job in listed} == set(ids)
    assert own_api.view(ids[3])["state"] == "succeeded"


# field case 38
def test_a_stopped_api_answers_held_requests_and_exits(
    own_api: Api, own_hand: Hand, pool: ThreadPoolExecutor
) -> None:
    http = own_api.http
    job_id = own_api.submit()
    mark = own_api.said
    body = {"model": MODEL, "prompt": "hello"}
    poll = pool.submit(http.get, f"/v1/jobs/{job_id}", params={"wait": 25})
    completion = pool.submit(http.post, "/v1/completions", json=body)
    stream = pool.submit(http.post, "/v1/completions", json={**body, "stream": True})
    events = pool.submit(http.get, f"/v1/jobs/{job_id}/events")
    own_api.until_held(4)
    own_api.process.send_signal(signal.SIGTERM)
    assert poll.result().json()["state"] == "queued"
    assert completion.result().status_code == 202, "the job goes on: this is where to look"
    assert "server is stopping" in stream.result().text
    assert "event: done" not in events.result().text
    own_api.process.wait(30)
    assert "graceful shutdown exceeded" not in own_api.log(mark), "nobody had to be cut off"
    assert own_hand.count_jobs() == 3


# field case 38
def test_a_client_disconnect_during_submission_leaves_a_running_job(api: Api, hand: Hand) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    raw = b'{"model":"tiny","prompts":["hello there"]}'
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            (
                b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                b"application/json\r\nContent-Length: %d\r\n\r\n"
            )
            % len(raw)
            + raw
        )
    sent = wait_until(
        lambda: messages(hand),
        why="its message is sent all the same, or it would be queued for ever",
    )
    claim = hand.claim_next()
    assert sent == [claim.job.id]
    hand.store(claim)
    assert api.view(claim.job.id)["state"] == "succeeded"


def messages(hand: Hand) -> list[str]:
    """Ids of the jobs whose messages wait for a worker."""
    with hand._redis as client:
        raw = [
            message for name in lists_of(queue_of(MODEL)) for message in client.lrange(name, 0, -1)
        ]
    return [json.loads(message)["headers"]["id"] for message in raw]


def test_a_client_disconnect_mid_body_creates_no_job(api: Api, hand: Hand) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    mark = api.said
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            b'application/json\r\nContent-Length: 500\r\n\r\n{"model":'
        )
    time.sleep(0.3)
    assert hand.count_jobs() == 0
    assert "Traceback" not in api.log(mark)


# field case 38
def test_held_responses_of_disconnected_clients_are_released(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    job_id = api.submit()

    def ask_and_leave(_: int) -> None:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.get(
                f"{api.url}/v1/jobs/{job_id}",
                params={"wait": 300},
                timeout=httpx2.Timeout(60, read=0.4),
            )

    list(pool.map(ask_and_leave, range(8)))
    api.until_held(0)


def test_a_job_whose_queue_takes_no_message_is_accepted_and_left_to_the_sweeper(
    api: Api, hand: Hand
) -> None:
    """The ledger is the truth: what it has committed is accepted, with or without a message."""
    with hand._redis as client:
        for name in lists_of(queue_of(MODEL)):
            client.set(name, "not a list")  # every push fails
        answer = api.http.post("/v1/jobs", json=BODY)
        assert answer.status_code == 202
        for name in lists_of(queue_of(MODEL)):
            client.delete(name)
        assert client.zscore("ms:live", answer.json()["id"]) <= time.time(), (
            "the next sweep looks for its message"
        )
    assert hand.view(answer.json()["id"]).state == "queued"


def test_without_a_healthy_worker_jobs_are_accepted_and_the_service_is_not_ready(
    api: Api, hand: Hand
) -> None:
    assert api.http.get("/readyz").json()["models"] == [MODEL]
    hand.do(hand.ledger.heartbeat(hand.sign(healthy=False, detail="ranks disagree")))
    answer = api.http.get("/readyz")
    assert answer.status_code == 503
    assert "ranks disagree" in answer.json()["missing"][0]
    hand.do(hand.ledger.redis.delete(f"ms:alive:{hand.worker}"))
    assert api.http.get("/readyz").status_code == 503
    assert api.http.post("/v1/jobs", json=BODY).status_code == 202


def test_a_model_record_of_an_incompatible_version_is_reported_as_not_ready(
    api: Api, hand: Hand
) -> None:
    told = msgspec.structs.replace(model_info(), version="9.0.0", wire=9, oldest_wire=9)
    with hand._redis as client:
        client.hset("ms:models", MODEL, to_json(told))
    answer = api.http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["models"] == []
    assert answer.json()["missing"][0].startswith(
        f"model {MODEL}: the worker of {MODEL!r} runs midstream 9.0.0 (wire 9"
    )


def test_failures_that_a_worker_reports_keep_their_status(api: Api, hand: Hand) -> None:
    for kind, status in [("receipts_timed_out", 504), ("worker_lost", 500), ("engine_failed", 500)]:
        claim = hand.claim(api.submit())
        hand.fail(claim, MidstreamError(kind, "so it was").problem())
        assert api.http.get(f"/v1/jobs/{claim.job.id}/result").status_code == status


def test_a_second_api_on_the_same_port_says_which_setting_is_wrong(
    api: Api, tmp_path: Path
) -> None:
    port = int(api.url.rpartition(":")[2])
    with (
        pytest.raises(AssertionError, match="MIDSTREAM_API_PORT"),
        running(tmp_path, api.settings.redis_url, api_port=port),
    ):
        pass


class Muted:
    """A way to Redis that brings everything there, and no answer back once `word` came by: Redis
    hangs just after it wrote.
    """

    def __init__(self, port: int, word: bytes):
        self._port = port
        self._word = word
        self.is_mute = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                there, _ = self._listening.accept()
                redis_side = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._pump, args=(there, redis_side), daemon=True).start()
                threading.Thread(
                    target=self._pump, args=(redis_side, there, True), daemon=True
                ).start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool = False) -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                if not answers and self._word in data:
                    self.is_mute.set()
                if not (answers and self.is_mute.is_set()):
                    target.sendall(data)


@pytest.mark.slow("calls wait for a hung Redis")
def test_stopping_with_redis_hung_is_503_and_names_accepted_jobs(
    own_redis: Mortal, own_hand: Hand, tmp_path: Path
) -> None:
    way = Muted(own_redis.port, b"mute from here")
    (tmp_path / "stopped").mkdir()
    with (
        running(tmp_path / "stopped", way.url) as api,
        httpx2.Client(base_url=api.url, timeout=60) as http,
        ThreadPoolExecutor(5) as pool,
    ):
        known = api.submit()
        held = [
            pool.submit(http.get, f"/v1/jobs/{known}", params={"wait": 55}),
            pool.submit(http.post, "/v1/jobs", json=BODY, headers={"Prefer": "wait=55"}),
        ]
        wait_until(lambda: own_hand.count_jobs() >= 2)
        late = [
            pool.submit(http.post, "/v1/jobs", json={**BODY, "metadata": {"a": "mute from here"}})
        ]
        assert way.is_mute.wait(60)
        late.append(pool.submit(http.get, f"/v1/jobs/{known}"))
        time.sleep(0.5)
        api.process.terminate()
        answers = [call.result(timeout=50) for call in (*held, *late)]
        assert api.process.wait(60) == -signal.SIGTERM, (
            "uvicorn ends by the signal, once it is done"
        )
    way.close()
    for answer in answers:
        unavailable(answer)
    begun = [answers[index].headers["x-midstream-job"] for index in (1, 2)]
    assert answers[2].headers["location"] == f"/v1/jobs/{begun[1]}"
    assert "may have been accepted" in answers[2].json()["detail"]
    assert [own_hand.view(job_id).id for job_id in begun] == begun, (
        "both are there, and their callers know it"
    )


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("appendonly", "no", "yes"), ("maxmemory-policy", "allkeys-lru", "noeviction")],
)
def test_a_redis_that_is_made_lossy_makes_the_service_not_ready(
    api: Api, hand: Hand, name: str, wrong: str, right: str
) -> None:
    assert "midstream_ledger_durable 1.0" in api.http.get("/metrics").text
    with hand._redis as client:
        client.config_set(name, wrong)
        try:
            answer = api.http.get("/readyz")
            assert answer.status_code == 503
            assert f"CONFIG SET {name} {right}" in answer.json()["missing"][0]
            metrics = api.http.get("/metrics").text
            assert "midstream_ledger_durable 0.0" in metrics
            assert "midstream_ledger_reachable 1.0" in metrics
        finally:
            client.config_set(name, right)
    assert "midstream_ledger_durable 1.0" in api.http.get("/metrics").text


def test_many_who_ask_the_ranks_at_once_ask_them_together(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    def asked() -> int:
        with hand._redis as client:
            return int(client.hget(f"ms:steering:{MODEL}", "ask") or 0)

    before = asked()
    answers = list(
        pool.map(
            lambda _: httpx2.get(f"{api.url}/v1/steering/dynamic", timeout=60).status_code,
            range(20),
        )
    )
    assert answers == [200] * 20
    assert asked() - before <= 4, "those who come while the ranks are asked share the next question"
