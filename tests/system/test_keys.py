"""Does the API let in those who have a key, for what its scopes say, and nobody else?"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import server_sent
from edge import MODEL, Api, Hand, running
from hypothesis import HealthCheck, example, given, reject, settings, strategies as st
from ports import free_port
from refusal_kit import refuses
from tenant_kit import ADMIN, Caller, asking, bearer, flushed
from typer.testing import CliRunner
from wait_kit import wait_until, warn_if_late

from midstream.api.responses.events import PING_S
from midstream.api.web.auth import KNOWN_S
from midstream.broker.ledger.people.keys import LedgerKeys, is_right, new_key, parse
from midstream.client import Client
from midstream.client.cli.main import app as cli
from midstream.schemas.access.keys import SCOPES, Scope
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import JobView
from midstream.schemas.settings.settings import Settings, to_environment
from midstream_ops.redis_server import RedisServer

REFUSED_AFTER_S = 5.0  # what the documentation says


@pytest.fixture(scope="module")
def api(redis_session: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    flushed(redis_session.url)
    with asking(
        tmp_path_factory.mktemp("keys"),
        redis_session.url,
        max_wait_s=60.0,
        trusted_proxies="127.0.0.1",
    ) as api:
        yield api


@pytest.fixture(scope="module")
def hand(api: Api) -> Iterator[Hand]:
    with Hand(api.settings) as worker:
        yield worker


def status(api: Api, header: str | None, path: str = "/v1/jobs") -> int:
    return api.http.get(
        path, headers={} if header is None else {"Authorization": header}
    ).status_code


# --- Who is let in
# --------------------------------------------------------------------------------------------------


def test_without_a_key_every_call_is_refused_and_told_how_to_get_one(api: Api, hand: Hand) -> None:
    answer = api.http.get("/v1/jobs")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="midstream"'
    problem = answer.json()
    assert problem["type"] == "urn:midstream:unauthorized"
    assert problem["field"] == "Authorization"
    assert "midstream create key" in problem["hint"]


def test_openais_client_gets_in_with_a_key_and_is_refused_in_its_words(
    api: Api, hand: Hand
) -> None:
    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0)

    key = Caller(api, hand, "acme").key.key
    assert [model.id for model in client(key).models.list()] == [MODEL]
    with pytest.raises(openai.AuthenticationError, match="the API key is not valid"):
        client("sk-other").completions.create(model=MODEL, prompt="hello")


def test_an_unknown_id_costs_the_same_work_as_a_wrong_secret(
    api: Api, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(
        "midstream.broker.ledger.people.keys.hmac.compare_digest",
        lambda one, other: compared.append((one, other)) or False,
    )
    shown = parse(new_key())
    assert shown is not None
    for key in (hand.do(LedgerKeys(hand.ledger).get(Caller(api, hand, "acme").key.id)), None):
        assert not is_right(shown, key)
    assert [len(other) for _, other in compared] == [64, 64]


def test_an_expired_key_is_refused(api: Api, hand: Hand) -> None:
    caller = Caller(api, hand, "acme", expires_in=1.0)
    assert caller.key.expires is not None
    time.sleep(max(0.0, caller.key.expires - now()) + 0.05)
    assert caller.http.get("/v1/jobs").status_code == 401


def test_a_revoked_key_is_refused_within_five_seconds(api: Api, hand: Hand) -> None:
    caller = Caller(api, hand, "acme")
    assert caller.http.get("/v1/jobs").status_code == 200
    assert api.http.delete(f"/v1/keys/{caller.key.id}", headers=bearer(ADMIN)).status_code == 204
    wait_until(lambda: caller.http.get("/v1/jobs").status_code == 401, timeout=REFUSED_AFTER_S)
    assert KNOWN_S < REFUSED_AFTER_S


def test_held_responses_end_when_their_key_is_revoked(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    caller = Caller(api, hand, "held")
    other = Caller(api, hand, "held")
    job_id = caller.submit()

    def held(**body: Any) -> httpx2.Response:
        return caller.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "hello", **body}, timeout=90
        )

    def waits(path: str) -> httpx2.Response:
        return caller.http.get(path, timeout=90)

    paths = (f"/v1/jobs/{job_id}/events", f"/v1/jobs/{job_id}?wait=50")
    kept = pool.submit(lambda: other.http.get(paths[0], timeout=120).text)
    asked = [
        pool.submit(held),
        pool.submit(held, stream=True),
        *(pool.submit(waits, path) for path in paths),
    ]
    wait_until(lambda: api.http.get("/v1/status", headers=bearer(ADMIN)).json()["held"] >= 5)
    began = time.monotonic()
    api.http.delete(f"/v1/keys/{caller.key.id}", headers=bearer(ADMIN))
    whole, streamed, events, looked = (call.result() for call in asked)
    warn_if_late(
        time.monotonic() - began,
        PING_S - 4,
        "they ended when they were looked at for another reason",
    )
    hand.finish(job_id)
    assert "event: done" in kept.result(), "another key of the tenant is not concerned"
    assert [(answer.status_code, answer.json()["type"]) for answer in (whole, looked)] == [
        (401, "urn:midstream:unauthorized")
    ] * 2
    assert whole.json()["instance"].startswith("/v1/jobs/job_"), "the job goes on, and is told"
    error = json.loads(streamed.text.rpartition("data: ")[2])["error"]
    assert error["code"] == "unauthorized"
    assert error["problem"]["status"] == 401
    told = server_sent.parse(events.text)[-1]
    assert told["event"] == "error"
    assert told["id"] is None
    assert told["data"]["type"] == "urn:midstream:unauthorized"
    assert "revoked" in told["data"]["detail"]


def test_a_stream_that_waits_for_receipts_only_ends_when_its_key_is_revoked(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    caller = Caller(api, hand, "receipts")
    capture = {"capture": {"layers": [0], "positions": "all_prompt"}, "capture_wait": True}
    body = {"model": MODEL, "prompt": "hello", "stream": True, **capture}

    def jobs() -> list[JobView]:
        return hand.do(hand.ledger.list(tenant="receipts")).jobs

    streamed = pool.submit(caller.http.post, "/v1/completions", json=body)
    wait_until(lambda: jobs() != [])
    claim = hand.claim(jobs()[0].id)
    hand.store(claim)
    api.http.delete(f"/v1/keys/{caller.key.id}", headers=bearer(ADMIN))
    try:
        text = streamed.result(timeout=PING_S - 4).text
    finally:
        hand.receipts(claim)
    assert "urn:midstream:unauthorized" in text


def test_a_key_is_stored_as_a_hash_alone(api: Api, hand: Hand) -> None:
    key = Caller(api, hand, "acme").key.key
    raw = hand.do(hand.ledger.redis.hvals("ms:keys"))
    assert raw
    assert not any(key.rpartition("_")[2].encode() in packed for packed in raw)
    assert key not in str(api.http.get("/v1/keys", headers=bearer(ADMIN)).json())


def test_two_authorization_headers_are_refused(api: Api, hand: Hand) -> None:
    answer = httpx2.get(
        f"{api.url}/v1/jobs",
        headers=[("Authorization", f"Bearer {ADMIN}"), ("Authorization", "Bearer x")],
        timeout=60,
    )
    assert answer.status_code == 401


def printable(most: int) -> st.SearchStrategy[bytes]:
    """What HTTP lets stand in a header."""
    return st.binary(max_size=most).map(
        lambda raw: bytes(byte for byte in raw if byte >= 32 and byte != 127)
    )


almost = st.builds(
    lambda prefix, at, letter: (prefix + ADMIN[:at] + letter + ADMIN[at + 1 :]).encode("latin-1"),
    st.sampled_from(["Bearer ", "bearer  ", "Bearer\t", "", "Bearer ms_"]),
    st.integers(0, len(ADMIN) - 1),
    st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"),
)


ADDRESSES = itertools.count()


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(header=b"")
@example(header=b"Bearer")
@example(header=b"Basic YTpi")
@example(header=f"bearer {ADMIN}".encode())
@example(header=f"bearer{ADMIN}".encode())
@example(header=f"Bearer {ADMIN}x y".encode())
@given(header=printable(200) | printable(40).map(lambda raw: b"Bearer ms_" + raw) | almost)
def test_any_authorization_header_but_the_key_is_401(api: Api, header: bytes) -> None:
    address = f"192.0.2.{next(ADDRESSES) % 256}".encode()  # wrong keys are limited by address
    try:
        answer = api.http.get(
            "/v1/jobs", headers=[(b"authorization", header), (b"x-forwarded-for", address)]
        )
    except httpx2.LocalProtocolError:  # what HTTP does not let stand there
        reject()
    scheme, _, key = header.strip().partition(b" ")
    right = scheme.lower() == b"bearer" and key.strip(b" ") == ADMIN.encode()
    assert answer.status_code == (200 if right else 401), (header, answer.status_code)


# --- What a key may
# --------------------------------------------------------------------------------------------------

#: A call that each scope is needed for, and that fails for another reason where it is allowed.
CALLS: dict[Scope, tuple[str, str]] = {
    "submit": ("POST", "/v1/jobs"),
    "read": ("GET", "/v1/jobs/job_none"),
    "steer-global": ("PUT", "/v1/steering/global"),
    "observe": ("GET", "/v1/status"),
    "admin": ("GET", "/v1/keys"),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_is_limited_to_its_scope(api: Api, hand: Hand, scope: Scope) -> None:
    caller = Caller(api, hand, "acme", scope)
    for needed, (method, path) in CALLS.items():
        answer = caller.http.request(method, path)
        allowed = needed == scope or scope == "admin"
        assert (answer.status_code == 403) is not allowed, (needed, answer.text)
        if not allowed:
            assert repr(needed) in answer.json()["detail"]
            assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]


def test_a_key_that_may_not_list_models_is_told_what_a_submission_needs(
    api: Api, hand: Hand
) -> None:
    """A submission that names no model asks for them first."""
    answer = Caller(api, hand, "acme", "observe").http.get("/v1/models")
    assert answer.status_code == 403
    assert answer.json()["hint"] == (
        "a submission, which may ask for this, needs the scope 'submit'"
    )


def test_metrics_need_scope_observe(api: Api, hand: Hand) -> None:
    assert Caller(api, hand, "acme").http.get("/metrics").status_code == 403
    assert Caller(api, hand, "ops", "observe").http.get("/metrics").status_code == 200
    assert api.http.get("/metrics").status_code == 401


def test_unauthenticated_readyz_gives_no_reasons(api: Api, hand: Hand) -> None:
    hand.do(hand.ledger.heartbeat(hand.sign(healthy=False, detail="out of memory")))
    try:
        told = api.http.get("/readyz", headers=bearer(ADMIN))
        stranger = api.http.get("/readyz")
    finally:
        hand.serve()
    assert stranger.status_code == told.status_code
    assert stranger.json()["missing"] == ["relay", "worker"]
    for reason in (hand.worker, MODEL):
        assert reason in told.text
        assert reason not in stranger.text


# --- Keys over HTTP and from a terminal
# ------------------------------------------------------------------------------


def test_a_key_is_created_listed_and_revoked_over_http(api: Api, hand: Hand) -> None:
    with Client(api.url, ADMIN) as admin:
        made = admin.keys.create("ci", tenant="acme", scopes=["read"])
        assert made.key.startswith(f"ms_{made.id}_")
        assert [
            (key.name, key.tenant, key.scopes) for key in admin.keys.list() if key.id == made.id
        ] == [("ci", "acme", ["read"])]
        with Client(api.url, made.key) as reader:
            assert reader.jobs.list().jobs == []
            assert reader.tenants.get().name == "acme"
        admin.keys.delete(made.id)
        assert made.id not in [key.id for key in admin.keys.list()]
        with refuses(match="unknown key", kind="not_found"):
            admin.keys.delete(made.id)


def test_the_client_takes_its_key_from_the_environment(
    api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Client(api.url) as client, pytest.raises(MidstreamError, match="no API key given"):
        client.jobs.list()
    monkeypatch.setenv("MIDSTREAM_API_KEY", ADMIN)
    with Client(api.url) as client:
        client.jobs.list()
    monkeypatch.delenv("MIDSTREAM_API_KEY")
    (tmp_path / "key").write_text(f"{ADMIN}\n")
    monkeypatch.setenv("MIDSTREAM_API_KEY_FILE", str(tmp_path / "key"))
    with Client(api.url) as client:
        client.jobs.list()


def test_the_first_key_is_made_without_an_api(api: Api, hand: Hand) -> None:
    done = CliRunner().invoke(
        cli,
        [
            "create",
            "key",
            "first",
            "--set=scopes=admin",
            f"--set=redis_url={api.settings.redis_url}",
        ],
    )
    assert done.exit_code == 0, done.output
    assert status(api, f"Bearer {done.stdout.strip()}") == 200


def test_keys_and_tenants_are_managed_from_a_terminal(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_API_KEY", ADMIN)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> str:
        done = CliRunner().invoke(cli, [*words, "--url", api.url])
        assert done.exit_code == 0, done.output
        return done.stdout

    key = run("create", "key", "laptop", "--set=tenant=lab", "--set=expires_in=90d").strip()
    assert "lab" in run("list", "keys")
    run("put", "tenant", "lab", "--set=jobs_in_flight=7", "--set=weight=3")
    assert "0 / 7" in run("get", "tenant", "lab")
    assert "lab" in run("list", "tenants")
    assert "deleted" in run("delete", "key", key.split("_")[1])


def test_a_wrong_scope_is_named_before_anything_is_sent() -> None:
    done = CliRunner().invoke(cli, ["create", "key", "x", "--set", "scopes=write"])
    assert isinstance(done.exception, MidstreamError)
    assert done.exception.field == "scopes[0]"
    assert done.exception.allowed == ", ".join(SCOPES)


# --- Where the API listens
# --------------------------------------------------------------------------------------------

EVERYWHERE = "0.0.0.0"


def started(settings: Settings) -> subprocess.Popen[str]:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("MIDSTREAM_")
    }
    return subprocess.Popen(
        [sys.executable, "-m", "midstream.api"],
        env=environment | to_environment(settings),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_off_loopback_the_api_needs_a_key_to_start(
    redis_session: RedisServer, api: Api, hand: Hand
) -> None:
    empty = f"{redis_session.url.rpartition('/')[0]}/9"
    process = started(Settings(redis_url=empty, api_host=EVERYWHERE, api_port=0))
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "midstream create key" in said
    assert "MIDSTREAM_ADMIN_KEY" in said
    assert "MIDSTREAM_AUTH=open" in said


def test_off_loopback_auth_open_must_be_explicit_and_warns(
    api: Api, hand: Hand, tmp_path: Path
) -> None:
    with running(tmp_path, api.settings.redis_url, api_host=EVERYWHERE, auth="open") as public:
        assert (
            httpx2.get(
                f"{public.url.replace(EVERYWHERE, '127.0.0.1')}/v1/jobs", timeout=60
            ).status_code
            == 200
        )
        assert "MIDSTREAM_AUTH=open on 0.0.0.0" in public.log()


def test_the_api_admits_no_one_while_redis_is_down_at_start(tmp_path: Path) -> None:
    from midstream_ops import redis_server

    port = free_port()
    process = started(
        Settings(redis_url=f"redis://127.0.0.1:{port}/0", api_host=EVERYWHERE, api_port=0)
    )
    assert process.stdout is not None
    lines = iter(process.stdout)
    url = (
        next(line for line in lines if "api ready" in line)
        .split()[-1]
        .replace(EVERYWHERE, "127.0.0.1")
    )
    try:
        assert httpx2.get(f"{url}/v1/jobs", timeout=60).status_code == 401
        server = redis_server.start(tmp_path, port=port)
        try:
            assert process.wait(60) == 2
            assert "midstream create key" in "".join(lines)
        finally:
            server.stop()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_malformed_key_in_the_settings_stops_the_start(tmp_path: Path) -> None:
    process = started(Settings(redis_url="redis://127.0.0.1:1/0", admin_key="hunter2", api_port=0))
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "MIDSTREAM_ADMIN_KEY" in said
    assert "midstream create admin-key" in said
    assert "hunter2" not in said


def test_on_loopback_keys_are_optional_but_checked(api: Api, hand: Hand, tmp_path: Path) -> None:
    caller = Caller(api, hand, "acme")
    with running(tmp_path, api.settings.redis_url) as local:
        assert local.http.get("/v1/tenant", headers=bearer("EMPTY")).json()["name"] == "default"
        assert local.http.get("/v1/tenant", headers=bearer(caller.key.key)).json()["name"] == "acme"
        assert local.http.get("/v1/keys", headers=bearer(caller.key.key)).status_code == 403
