"""Is every end that somebody asked for told once, signed, as often as it takes, and only to whom it
may be told?

The receiver is a real HTTP server, its signatures are checked by an implementation that is not
ours, Redis is real; the clock is moved.
"""

import asyncio
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpcore2
import pytest
from hook_kit import OK, Receiver
from ledger_kit import (
    BOOT,
    IDENTITY,
    MODEL,
    WORKER,
    claimed,
    make_job,
    open_ledger,
    outputs,
    queued_job,
)
from mortal_redis import mortal
from redis_kit import hold_back, slow_disk
from refusal_kit import refuses
from standardwebhooks.webhooks import WebhookVerificationError

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.schemas.access.handling import Callback
from midstream.schemas.access.webhooks import DeliveryAttempt, WebhookDelivery
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.base.states import ENDS, CallbackEvent
from midstream.schemas.jobs.jobs import Job, State
from midstream_webhooks.http import CheckedBackend, NoAnswer, Poster, TargetRefused
from midstream_webhooks.outbox import WebhookOutbox
from midstream_webhooks.secrets import WebhookSecrets
from midstream_webhooks.sender import LADDER_S, WebhookSender

ALL: list[CallbackEvent] = ["job.running", *ENDS]


class Service:
    """A ledger, an outbox whose clock is moved by hand, and the real sender over both."""

    def __init__(self, ledger: Ledger, **sender: Any):
        self.ledger = ledger
        self.ahead = 0.0
        self.outbox = WebhookOutbox(ledger, lambda: now() + self.ahead)
        self.secrets = WebhookSecrets(ledger)
        self.poster = Poster(
            ledger.settings.webhook_allow_private,
            ledger.settings.tuning.webhook_timeout_s,
            sender.get("resolve"),
        )
        self.sender = WebhookSender(self.outbox, self.secrets, self.poster, ledger.settings)

    async def job(self, url: str, events: Sequence[CallbackEvent] = ENDS, **changes: Any) -> Job:
        """One that has succeeded."""
        job = make_job(callback=Callback(url=url, events=list(events)), **changes)
        attempt = await claimed(self.ledger, job)
        assert await self.ledger.store_outputs(job.id, attempt, outputs())
        return job

    async def round(self) -> int:
        """Send and settle everything that is due by the clock; the number of attempts."""
        count = 0
        while (begun := await self.sender._begin()) or self.sender._under_way:
            count += begun
            if self.sender._under_way:
                await asyncio.wait(self.sender._under_way, return_when=asyncio.FIRST_COMPLETED)
        return count

    async def told(self, url: str) -> Job:
        """One whose end is sent in the next round."""
        job = await self.job(url)
        await self.round()
        return job

    async def only(self) -> WebhookDelivery:
        [delivery] = (await self.outbox.deliveries("default")).deliveries
        return delivery

    async def run_out(self) -> int:
        """Everything, however long it takes on the clock; the number of attempts."""
        attempts = 0
        while (due := (await self.outbox.depth())[1]) is not None:
            self.ahead += max(due - self.outbox.clock(), 0.0)
            attempts += await self.round()
            assert attempts < 1000, "the ladder has no end"
        return attempts


@asynccontextmanager
async def service(url: str, resolve: Any = None, **settings: Any) -> AsyncIterator[Service]:
    async with open_ledger(url, **({"webhook_allow_private": True} | settings)) as ledger:
        made = Service(ledger, resolve=resolve)
        try:
            yield made
        finally:
            await made.sender.close()


@pytest.fixture
async def made(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    """With proxies in the environment, which nobody asks."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with service(redis_url) as started:
        yield started


# What is told


async def test_each_start_and_end_is_one_webhook(made: Service, receiver: Receiver) -> None:
    job = make_job(callback=Callback(url=receiver.url(), events=ALL))
    assert await claimed(made.ledger, job) == 1
    assert await made.ledger.claim(job.id, WORKER, BOOT, 2, IDENTITY) is None
    await made.ledger.release(job.id, 1)
    assert await made.ledger.claim(job.id, WORKER, BOOT, 2, IDENTITY)
    for _ in range(3):
        await made.ledger.store_outputs(job.id, 2, outputs())
    assert await made.round() == 3
    bodies = [got.body for got in receiver.got]
    assert sorted((body.type, body.data.attempt) for body in bodies) == [
        ("job.running", 1), ("job.running", 2), ("job.succeeded", 2),
    ]  # fmt: skip
    assert {(body.data.id, body.data.model) for body in bodies} == {(job.id, MODEL)}
    assert len({got.id for got in receiver.got}) == 3
    assert await made.round() == 0


@pytest.mark.slow("its disk is slow, and Redis starts again")
async def test_an_end_delivered_while_the_disk_is_slow_survives_a_kill_of_redis(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, receiver: Receiver
) -> None:
    monkeypatch.setenv("LD_PRELOAD", slow_disk(tmp_path))
    with mortal(tmp_path / "redis") as server:
        async with service(server.url) as made:
            job = await queued_job(
                made.ledger, callback=Callback(url=receiver.url(), events=list(ENDS))
            )
            await asyncio.to_thread(hold_back, server.url)
            await made.ledger.request_cancel(job.id)
            assert await made.round() == 1
            assert [got.body.type for got in receiver.got] == ["job.aborted"]
            server.kill()
            server.start()
            assert (await made.ledger.view(job.id)).state is State.ABORTED


async def test_only_subscribed_ends_are_webhooks(made: Service, receiver: Receiver) -> None:
    callbacks = [
        Callback(url=receiver.url("/not"), events=["job.succeeded"]),
        None,
        Callback(url=receiver.url(), events=list(ENDS)),
    ]
    problem = MidstreamError("engine_failed", "out of memory").problem()
    for callback in callbacks:
        failed, cancelled, aborted = (make_job(callback=callback) for _ in range(3))
        await made.ledger.fail(failed.id, await claimed(made.ledger, failed), problem)
        await claimed(made.ledger, cancelled)
        await made.ledger.submit(aborted, {})
        for job in (cancelled, aborted):
            await made.ledger.request_cancel(job.id)
        await made.ledger.finish_cancel(cancelled.id, 1)
        await made.ledger.redis.delete(f"ms:job:{failed.id}")  # its webhook outlives it
    await made.round()
    assert {got.path for got in receiver.got} == {"/hook"}
    assert sorted(got.body.type for got in receiver.got) == [
        "job.aborted", "job.cancelled", "job.failed",
    ]  # fmt: skip


# How it is sent


# field case 41
async def test_an_independent_verifier_accepts_a_webhooks_signature_and_no_other(
    made: Service, receiver: Receiver
) -> None:
    await made.told(receiver.url())
    secret = (await made.secrets.of("default", "")).secrets[0].secret
    [got] = receiver.got
    got.verify(secret)
    assert got.headers["content-type"] == "application/json"
    assert got.headers["user-agent"].startswith("midstream/")
    assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
    for wrong in (
        got._replace(raw=got.raw + b" "),
        got._replace(headers={**got.headers, "webhook-id": "msg_other"}),
    ):
        with pytest.raises(WebhookVerificationError):
            wrong.verify(secret)


async def test_all_attempts_have_one_id_and_one_body_and_each_its_own_time(
    made: Service, receiver: Receiver
) -> None:
    # field case 41: a redirect is a failure, and is not followed
    elsewhere = {"location": receiver.url("/inner")}
    receiver.replies["/hook"] = [(500, {}, b"not now"), (307, elsewhere, b""), OK]
    await made.job(receiver.url())
    assert await made.run_out() == 3
    assert len({(got.path, got.id, got.raw) for got in receiver.got}) == 1
    times = [int(got.headers["webhook-timestamp"]) for got in receiver.got]
    assert times[1] - times[0] >= 5
    assert times[2] - times[1] >= 300
    delivery = await made.only()
    assert delivery.state == "delivered"
    assert delivery.id == receiver.got[0].id
    assert delivery.next_attempt is None
    assert [attempt.status for attempt in delivery.attempts] == [500, 307, 204]


async def test_a_receiver_that_never_accepts_gets_every_retry_before_the_delivery_fails(
    made: Service, receiver: Receiver
) -> None:
    receiver.replies["/hook"] = [(500, {}, b"")]
    await made.job(receiver.url())
    await made.run_out()
    failed = await made.only()
    times = [attempt.at for attempt in failed.attempts]
    assert failed.state == "failed"
    assert len(times) == len(LADDER_S)
    for pause, before, after in zip(LADDER_S[1:], times, times[1:], strict=False):
        assert pause <= after - before <= pause * 1.2 + 5
    receiver.replies["/hook"] = [OK]
    for _ in range(2):  # once more by hand, also when it was delivered
        assert (await made.outbox.redeliver(failed.id)).state == "pending"
        await made.round()
        assert (await made.only()).state == "delivered"
    assert {got.id for got in receiver.got} == {failed.id}
    assert len(receiver.got) == len(LADDER_S) + 2


async def test_a_receiver_that_asks_for_a_pause_gets_it(made: Service, receiver: Receiver) -> None:
    receiver.replies["/hook"] = [(429, {"retry-after": "1800"}, b""), OK]
    await made.told(receiver.url())
    assert (await made.only()).next_attempt == pytest.approx(made.outbox.clock() + 1800, abs=5)
    made.ahead += 1700
    assert await made.round() == 0
    made.ahead += 200
    assert await made.round() == 1


async def test_a_webhook_answered_with_410_is_not_sent_again(
    made: Service, receiver: Receiver
) -> None:
    receiver.replies["/hook"] = [(410, {}, b""), OK]
    await made.told(receiver.url())
    assert (await made.only()).state == "failed"
    assert await made.run_out() == 0
    await made.told(receiver.url())
    assert len(receiver.at("/hook")) == 2, "the next job's is sent"


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_clock_that_is_set_back_delays_no_webhook(
    made: Service, receiver: Receiver, restarted: bool
) -> None:
    """Neither a retry, nor a new delivery, nor one that was lent to a sender that is gone."""
    receiver.replies["/retried"] = [(500, {}, b""), OK]
    await made.told(receiver.url("/retried"))
    await made.job(receiver.url("/lost", "localhost"))  # another lane
    assert len(await made.outbox.lease(1, 1, 30.0, {})) == 1
    made.ahead = 100.0
    await made.job(receiver.url("/new"))
    made.ahead = -7200.0
    if restarted:
        made.sender = WebhookSender(made.outbox, made.secrets, made.poster, made.ledger.settings)
    await made.round()
    assert len(receiver.at("/new")) == 1
    made.ahead += 40.0  # a pause of at most 6 s, and a lease of 30
    await made.round()
    assert [len(receiver.at(path)) for path in ("/retried", "/lost")] == [2, 1]
    assert (await made.outbox.depth())[0] == 0


async def test_the_pending_webhooks_of_a_tenant_are_limited(
    redis_url: str, receiver: Receiver
) -> None:
    """Beyond, jobs that would send more are refused, and others are not."""
    receiver.replies["/hook"] = [(500, {}, b""), OK]
    async with service(redis_url, **{"tuning.webhook_pending_limit": 2}) as made:
        for _ in range(2):
            await made.job(receiver.url())
        limit = "the limit is 2 (setting tuning.webhook_pending_limit)"
        with refuses(limit, kind="too_many_webhooks", status=429):
            await made.job(receiver.url())
        await made.job(receiver.url(), tenant="other")
        await made.ledger.submit(make_job(), {})
        await made.round()  # one is delivered, another is to be sent again
        await made.job(receiver.url())
        await made.run_out()
        assert await made.ledger.redis.keys("ms:hook-pending:*") == []
        first, second, third = (await made.outbox.deliveries("default")).deliveries
        for delivery in (first, second, second):  # a pending one is sent now, and counts once
            assert (await made.outbox.redeliver(delivery.id)).state == "pending"
        with refuses(kind="too_many_webhooks"):
            await made.outbox.redeliver(third.id)
        assert (await made.outbox.delivery(third.id)).state == "delivered"
        await made.run_out()
        assert (await made.outbox.redeliver(third.id)).state == "pending"


async def test_a_receiver_that_does_not_answer_does_not_hold_up_another(
    redis_url: str, receiver: Receiver
) -> None:
    stuck = threading.Event()
    receiver.on_call = lambda got: got.path != "/slow" or not stuck.wait(120)

    async with service(redis_url, **{"tuning.webhook_timeout_s": 150}) as made:
        for _ in range(30):
            await made.job(receiver.url("/slow"))
        for _ in range(10):
            await made.job(receiver.url("/quick", host="localhost"))
        running = asyncio.create_task(made.sender.run())
        try:
            await asyncio.to_thread(receiver.wait, 10, "/quick")
            assert len(await asyncio.to_thread(receiver.wait, 1, "/slow")) <= 4, (
                "of one host nothing is known yet, so it gets few at once"
            )
        finally:
            stuck.set()
            await asyncio.to_thread(receiver.wait, 30, "/slow")
            running.cancel()


async def test_a_sender_past_its_lease_may_only_report_delivery(made: Service) -> None:
    await made.job("http://hooks.example/")
    [late] = await made.outbox.lease(8, 8, 30.0, {})
    made.ahead += 31.0
    [present] = await made.outbox.lease(8, 8, 30.0, {})
    assert present.id == late.id
    assert present.token != late.token
    attempt = DeliveryAttempt(at=made.outbox.clock())
    assert await made.outbox.settle(late, "failed", attempt) == "stale"
    assert (await made.only()).state == "pending"
    assert await made.outbox.settle(late, "delivered", attempt) == "delivered"
    assert await made.outbox.settle(present, "failed", attempt) == "stale"
    assert (await made.only()).state == "delivered"


async def test_many_receivers_do_not_delay_another_tenants_webhooks(made: Service) -> None:
    for number in range(40):
        await made.job(f"http://h{number}.example/", tenant="many")
    await made.job("http://h0.example/", tenant="other")
    lent = await made.outbox.lease(4, 12, 30.0, {"many": 12})
    assert [loan.tenant for loan in lent] == ["other"], (
        "the other has its slots, and something to send"
    )


@pytest.mark.parametrize("what", ["never answers", "drips its headers"])
async def test_an_attempt_ends_in_time_whatever_the_receiver_does(
    what: str,
) -> None:  # field case 41
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while what == "drips its headers":
            writer.write(
                b"HTTP/1.1 200 OK\r\n"
                if not writer.transport.get_write_buffer_size()
                else b"x: y\r\n"
            )
            await asyncio.sleep(0.05)
        await asyncio.sleep(120)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    poster = Poster(allow_private=True, timeout_s=0.4)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(NoAnswer):
        async with asyncio.timeout(60):
            await poster.post(f"http://127.0.0.1:{port}/", "msg_1", 1, b"{}", [])
    await poster.close()
    server.close()


async def test_an_endless_webhook_response_is_cut_and_counts() -> None:
    sent = 0
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-type: text/plain\r\n\r\n"
        )
        try:
            while True:
                writer.write(b"\0" * 65536)
                await writer.drain()
                sent += 65536
        except ConnectionError:
            done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    poster = Poster(allow_private=True, timeout_s=60)
    port = server.sockets[0].getsockname()[1]
    assert (await poster.post(f"http://127.0.0.1:{port}/", "msg_1", 1, b"{}", [])).status == 200
    await asyncio.wait_for(done.wait(), 60)
    assert sent < 32 * 1024 * 1024, "what lies in the sockets' buffers, and no more"
    await poster.close()
    server.close()


# Where it is sent


async def named(*addresses: str) -> Sequence[str]:
    return addresses


@pytest.mark.parametrize(
    "addresses", [["1.1.1.1", "127.0.0.1"], ["::ffff:127.0.0.1"], ["10.0.0.1"]]
)
async def test_a_host_with_any_private_address_is_not_called(
    redis_url: str, receiver: Receiver, addresses: list[str]
) -> None:
    # field case 41
    async with service(
        redis_url, resolve=lambda host, port: named(*addresses), webhook_allow_private=False
    ) as made:
        await made.told(f"http://hooks.example:{receiver.port}/hook")
        delivery = await made.only()
    assert delivery.state == "refused"
    assert receiver.got == []
    assert "hooks.example resolves to an address that is " in delivery.attempts[0].error


async def test_webhooks_connect_to_the_checked_address() -> None:  # field case 41
    answers = [["93.184.215.14"], ["127.0.0.1"]]
    reached: list[str] = []

    async def rebind(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    class Network(httpcore2.AsyncNetworkBackend):
        async def connect_tcp(
            self, host: str, *rest: Any, **named: Any
        ) -> httpcore2.AsyncNetworkStream:
            reached.append(host)
            raise httpcore2.ConnectError("there is no network here")

    backend = CheckedBackend(allow_private=False, resolve=rebind)
    backend._backend = Network()  # type: ignore[assignment]
    with pytest.raises(httpcore2.ConnectError):
        await backend.connect_tcp("hooks.example", 80)
    with pytest.raises(TargetRefused):  # the next attempt looks again, and checks again
        await backend.connect_tcp("hooks.example", 80)
    assert reached == ["93.184.215.14"]


CERTIFICATE = """
    req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -keyout key.pem
    -out cert.pem -subj /CN=hooks.example -addext subjectAltName=DNS:hooks.example
"""


async def test_webhook_tls_verifies_the_host_name(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to an address, and the certificate is the name's all the same."""
    await asyncio.to_thread(
        subprocess.run, ["openssl", *CERTIFICATE.split()], cwd=tmp_path, check=True
    )
    receiver.secure(tmp_path / "cert.pem", tmp_path / "key.pem")

    async def post(host: str) -> int:
        url = f"https://{host}:{receiver.port}/hook"
        poster = Poster(allow_private=True, timeout_s=60, resolve=lambda *_: named("127.0.0.1"))
        try:
            return (await poster.post(url, "msg_1", 1, b"{}", [])).status
        finally:
            await poster.close()

    with pytest.raises(NoAnswer, match="certificate"):  # of an authority that nobody knows
        await post("hooks.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    assert await post("hooks.example") == 204
    with pytest.raises(NoAnswer, match="certificate"):
        await post("other.example")
    assert [got.headers["host"] for got in receiver.got] == [f"hooks.example:{receiver.port}"]


# Secrets and records


async def test_during_rotation_both_secrets_sign(made: Service, receiver: Receiver) -> None:
    first = (await made.secrets.of("default", "")).secrets[0].secret
    turned = await made.secrets.rotate("default", "", keep_former_s=3600)
    second = turned.secrets[0].secret
    assert [secret.secret for secret in turned.secrets] == [second, first]
    await made.told(receiver.url())
    for secret in (first, second):
        receiver.got[0].verify(secret)
    third = (await made.secrets.rotate("default", "", keep_former_s=0)).secrets[0].secret
    await made.told(receiver.url())
    receiver.got[1].verify(third)
    for secret in (first, second):
        with pytest.raises(WebhookVerificationError):
            receiver.got[1].verify(secret)


async def test_settled_webhooks_expire_and_pending_ones_do_not(
    redis_url: str, receiver: Receiver
) -> None:
    receiver.replies["/later"] = [(503, {"retry-after": "86400"}, b"")]

    async with service(redis_url, **{"tuning.webhook_log_ttl_s": 100}) as made:
        gone = await made.job(receiver.url())
        kept = await made.told(receiver.url("/later"))
        made.ahead += 60
        await made.sender.housekeeping()
        assert len((await made.outbox.deliveries(None)).deliveries) == 2
        made.ahead += 50
        await made.sender.housekeeping()
        assert [delivery.job for delivery in (await made.outbox.deliveries(None)).deliveries] == [
            kept.id
        ]
        keys = [key.decode() for key in await made.ledger.redis.keys("ms:hook*")]
        assert not [key for key in keys if gone.id.removeprefix("job_") in key]
        assert await made.ledger.redis.zcard("ms:hook-index:default") == 1


async def test_delivery_pages_are_complete_and_per_tenant(made: Service) -> None:
    mine = {(await made.job("http://127.0.0.1:1/", tenant="mine")).id for _ in range(7)}
    await made.job("http://127.0.0.1:1/", tenant="theirs")
    seen: list[str] = []
    cursor = None
    while True:
        page = await made.outbox.deliveries("mine", limit=3, cursor=cursor)
        seen += [delivery.job for delivery in page.deliveries]
        if (cursor := page.next) is None:
            break
    assert len(seen) == 7
    assert set(seen) == mine
    assert (await made.outbox.deliveries("theirs", job=seen[0])).deliveries == []
    assert len((await made.outbox.deliveries("mine", job=seen[0])).deliveries) == 1
