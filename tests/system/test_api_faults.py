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
from edge import MODEL, Api, Hand, model_info, running
from ports import free_port
from redis_kit import handed_over, hold_back, slow_disk

from midstream.api.context import open_context
from midstream.broker.ops import redis_server
from midstream.broker.queue.celery_app import lists_of, queue_of
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_json

BODY = {"model": MODEL, "prompts": ["hello there"]}


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[redis_server.RedisServer]:
    """A Redis that the test may kill."""
    # it is started on the same one again
    server = redis_server.start(tmp_path / "redis", port=free_port())
    yield server
    server.stop()


@pytest.fixture
def own_api(own_redis: redis_server.RedisServer, tmp_path: Path) -> Iterator[Api]:
    with running(tmp_path, own_redis.url) as api:
        yield api


@pytest.fixture
def own_hand(own_api: Api) -> Iterator[Hand]:
    hand = Hand(own_api.settings)
    hand.serve()
    yield hand
    hand.close()


@pytest.fixture
def on_slow_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ask for it before `own_redis`."""
    monkeypatch.setenv("LD_PRELOAD", slow_disk(tmp_path))


def again(server: redis_server.RedisServer) -> redis_server.RedisServer:
    return redis_server.start(server.directory, port=server.port)


# field case 39
def test_all_calls_are_503_while_redis_is_unreachable(
    own_redis: redis_server.RedisServer, own_api: Api, own_hand: Hand
) -> None:
    job_id = own_api.submit()
    own_redis.kill()
    assert own_api.http.get("/healthz").status_code == 200, "the process itself is well"
    ready = own_api.http.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert "redis" in ready.json()["missing"][0]
    for answer in (
        own_api.http.post("/v1/jobs", json=BODY),
        own_api.http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"}),
        own_api.http.get("/v1/jobs"),
        own_api.http.get(f"/v1/jobs/{job_id}", params={"wait": 20}),
        own_api.http.get(f"/v1/jobs/{job_id}/result"),
        own_api.http.post(f"/v1/jobs/{job_id}/cancel"),
    ):
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:midstream:unavailable"), (
            answer.text
        )
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["retry-after"]) >= 1
    assert own_api.http.get("/metrics").status_code == 200
    server = again(own_redis)
    try:
        assert own_hand.count_jobs() == 1, "what was refused is not there, what was accepted is"
        assert own_api.http.post("/v1/jobs", json=BODY).status_code == 202
    finally:
        server.stop()


# field case 37, 38
def test_a_held_answer_outlives_a_restart_of_redis(
    own_redis: redis_server.RedisServer, own_api: Api, own_hand: Hand
) -> None:
    with ThreadPoolExecutor(3) as pool:
        completion = pool.submit(
            own_api.http.post, "/v1/completions", json={"model": MODEL, "prompt": "hello"}
        )
        claim = own_hand.claim_next()
        poll = pool.submit(own_api.http.get, f"/v1/jobs/{claim.job.id}", params={"wait": 55})
        time.sleep(0.3)
        handed_over(own_redis.url)
        own_redis.kill()
        time.sleep(1.0)
        server = again(own_redis)
        try:
            own_hand.store(claim)
            assert completion.result(timeout=50).json()["choices"][0]["text"] == "hello world"
            assert poll.result(timeout=50).json()["state"] == "succeeded"
        finally:
            server.stop()


# field case 37
@pytest.mark.long
@pytest.mark.parametrize("promise", ["accepted", "over", "listed", "told"])
def test_answers_given_on_a_slow_disk_survive_a_redis_kill(
    on_slow_disk: None,
    own_redis: redis_server.RedisServer,
    own_api: Api,
    own_hand: Hand,
    promise: str,
) -> None:
    """A Redis whose last fsync still runs answers before it writes."""
    http = own_api.http
    job_id = own_api.submit()
    claim = own_hand.claim_next() if promise != "accepted" else None
    hold_back(own_redis.url)
    if claim is not None:
        own_hand.store(claim)
    match promise:
        case "accepted":
            job_id = own_api.submit()
        case "over":
            assert http.get(f"/v1/jobs/{job_id}").json()["state"] == "succeeded"
        case "listed":
            assert http.get("/v1/jobs").json()["jobs"][0]["state"] == "succeeded"
        case "told":
            assert "event: done" in http.get(f"/v1/jobs/{job_id}/events").text
    own_redis.kill()
    server = again(own_redis)
    try:
        assert own_api.view(job_id)["state"] == ("queued" if promise == "accepted" else "succeeded")
    finally:
        server.stop()


def test_unsynced_writes_are_503_when_redis_is_killed(
    on_slow_disk: None, own_redis: redis_server.RedisServer, own_api: Api, own_hand: Hand
) -> None:
    server = own_redis
    try:
        for _ in range(10):
            job_id = own_api.submit()
            hold_back(server.url)
            with ThreadPoolExecutor(1) as pool:
                cancelled = pool.submit(own_api.http.post, f"/v1/jobs/{job_id}/cancel")
                while not cancelled.done() and own_hand.view(job_id).state != "aborted":
                    time.sleep(0.01)
                server.kill()
                answer = cancelled.result()
            server = again(server)
            if answer.status_code != 202:
                break
            assert own_api.view(job_id)["state"] == "aborted", (
                "on a machine that is slower than this disk it may have been written"
            )
    finally:
        server.stop()
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:midstream:unavailable")
    assert answer.headers["retry-after"]


def test_a_wait_for_an_accepted_job_begins_even_while_redis_restarts(
    own_redis: redis_server.RedisServer, own_api: Api, own_hand: Hand
) -> None:
    job_id = own_api.submit()
    own_redis.kill()

    async def wait() -> str:
        async with open_context(own_api.settings) as edge:
            waiting = asyncio.create_task(edge.wait(job_id, lambda view: True, 60, patient=True))
            await asyncio.sleep(1)
            assert not waiting.done()
            server = await asyncio.to_thread(again, own_redis)
            try:
                return (await waiting).state
            finally:
                await asyncio.to_thread(server.stop)

    assert asyncio.run(wait()) == "queued"


def test_a_stream_outlives_a_restart_of_redis(
    own_redis: redis_server.RedisServer, own_api: Api, own_hand: Hand
) -> None:
    body = {"model": MODEL, "prompt": "hello", "stream": True}
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(own_api.http.post, "/v1/completions", json=body)
        claim = own_hand.claim_next()
        own_hand.say(claim, "hello")
        time.sleep(0.3)
        handed_over(own_redis.url)
        own_redis.kill()
        server = again(own_redis)
        try:
            own_hand.say(claim, " world")
            own_hand.store(claim)
            text = stream.result(timeout=30).text
        finally:
            server.stop()
    assert re.findall(r'"text":"([^"]*)"', text) == ["hello", " world", ""]
    assert text.endswith("data: [DONE]\n\n")


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
def test_a_stopped_api_answers_held_requests_and_exits(own_api: Api, own_hand: Hand) -> None:
    job_id = own_api.submit()
    with ThreadPoolExecutor(4) as pool:
        poll = pool.submit(own_api.http.get, f"/v1/jobs/{job_id}", params={"wait": 25})
        completion = pool.submit(
            own_api.http.post, "/v1/completions", json={"model": MODEL, "prompt": "hello"}
        )
        stream = pool.submit(
            own_api.http.post,
            "/v1/completions",
            json={"model": MODEL, "prompt": "hello", "stream": True},
        )
        events = pool.submit(own_api.http.get, f"/v1/jobs/{job_id}/events")
        deadline = time.monotonic() + 60
        while waiting(own_api) < 4:
            assert time.monotonic() < deadline, "all four are held"
            time.sleep(0.05)
        own_api.process.send_signal(signal.SIGTERM)
        assert poll.result().json()["state"] == "queued"
        assert completion.result().status_code == 202, "the job goes on: this is where to look"
        assert "server is stopping" in stream.result().text
        assert "event: done" not in events.result().text
        own_api.process.wait(30)
    assert "graceful shutdown exceeded" not in own_api.log(), "nobody had to be cut off"
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
    deadline = time.monotonic() + 60
    while not (sent := messages(hand)):
        assert time.monotonic() < deadline, (
            "its message is sent all the same, or it would be queued for ever"
        )
        time.sleep(0.02)
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
def test_held_responses_of_disconnected_clients_are_released(api: Api, hand: Hand) -> None:
    job_id = api.submit()

    def ask_and_leave(_: int) -> None:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.get(
                f"{api.url}/v1/jobs/{job_id}",
                params={"wait": 300},
                timeout=httpx2.Timeout(60, read=0.4),
            )

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask_and_leave, range(32)))
    deadline = time.monotonic() + 60
    while waiting(api) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert waiting(api) == 0


def waiting(api: Api) -> int:
    found = re.search(
        r"^midstream_held_responses (\S+)$", api.http.get("/metrics").text, re.MULTILINE
    )
    assert found
    return int(float(found[1]))


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


def test_readyz_is_503_with_the_reason_of_an_unhealthy_worker(api: Api, hand: Hand) -> None:
    assert api.http.get("/readyz").json()["models"] == [MODEL]
    hand.do(hand.ledger.heartbeat(hand.sign(healthy=False, detail="ranks disagree")))
    answer = api.http.get("/readyz")
    assert answer.status_code == 503
    assert "ranks disagree" in answer.json()["missing"][0]


def test_a_model_record_of_an_incompatible_version_is_reported_as_not_ready(
    api: Api, hand: Hand
) -> None:
    told = msgspec.structs.replace(model_info(), version="9.0.0", wire=9, oldest_wire=9)
    with hand._redis as client:
        client.hset("ms:models", MODEL, to_json(told))
    answer = api.http.get("/readyz")
    assert (answer.status_code, answer.json()["models"]) == (503, [])
    assert answer.json()["missing"][0].startswith(
        f"model {MODEL}: the worker of {MODEL!r} runs midstream 9.0.0 (wire 9"
    )


def test_without_a_live_worker_jobs_are_accepted_and_the_service_is_not_ready(
    api: Api, hand: Hand
) -> None:
    with hand._redis as client:
        client.delete(f"ms:alive:{hand.worker}")
    assert api.http.get("/readyz").status_code == 503
    assert api.http.post("/v1/jobs", json=BODY).status_code == 202


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
        self._port, self._word, self.is_mute = port, word, threading.Event()
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


def test_stopping_with_redis_hung_is_503_and_names_accepted_jobs(
    own_redis: redis_server.RedisServer, own_hand: Hand, tmp_path: Path
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
        wait_for_jobs(own_hand, 2)
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
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:midstream:unavailable"), (
            answer.text
        )
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["retry-after"]) >= 1
    begun = [answers[index].headers["x-midstream-job"] for index in (1, 2)]
    assert answers[2].headers["location"] == f"/v1/jobs/{begun[1]}"
    assert "may have been accepted" in answers[2].json()["detail"]
    assert [own_hand.view(job_id).id for job_id in begun] == begun, (
        "both are there, and their callers know it"
    )


def wait_for_jobs(hand: Hand, count: int) -> None:
    deadline = time.monotonic() + 60
    while hand.count_jobs() < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
            assert (
                answer.status_code,
                f"CONFIG SET {name} {right}" in answer.json()["missing"][0],
            ) == (503, True)
            metrics = api.http.get("/metrics").text
            assert "midstream_ledger_durable 0.0" in metrics
            assert "midstream_ledger_reachable 1.0" in metrics
        finally:
            client.config_set(name, right)
    assert "midstream_ledger_durable 1.0" in api.http.get("/metrics").text


def test_many_who_ask_the_ranks_at_once_ask_them_together(api: Api, hand: Hand) -> None:
    def asked() -> int:
        with hand._redis as client:
            return int(client.hget(f"ms:steering:{MODEL}", "ask") or 0)

    before = asked()
    with ThreadPoolExecutor(20) as pool:
        answers = list(
            pool.map(
                lambda _: httpx2.get(f"{api.url}/v1/steering/dynamic", timeout=60).status_code,
                range(20),
            )
        )
    assert answers == [200] * 20
    assert asked() - before <= 4, "those who come while the ranks are asked share the next question"
