"""The page's login and feed over HTTP: who gets a session, which calls it opens, when it ends, and
whose jobs its feed has.
"""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import server_sent
from edge import Api, Hand, refused
from refusal_kit import refuses
from tenant_kit import ADMIN, Caller, asking, bearer, flushed
from wait_kit import wait_until

from midstream.api.__main__ import trusted_proxies
from midstream.api.web.auth import COOKIE, CSRF_HEADER
from midstream.api.web.wrong_keys import WRONG_PER_MINUTE
from midstream.broker.ledger.people import sessions
from midstream.broker.ledger.people.sessions import SESSION, SESSIONS, Sessions, name_of
from midstream.schemas.access.keys import CreatedKey, StoredKey
from midstream.schemas.access.sessions import SESSION_S, Session
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_msgpack, now, to_msgpack
from midstream.schemas.settings.settings import Settings, SettingsError
from midstream_ops.redis_server import RedisServer
from midstream_page.records import MAX_LOGIN_KEY
from midstream_page.session import MAX_BODY

#: Only ends what hangs.
LONG_S = 60.0
HERE = {"Sec-Fetch-Site": "same-origin"}
#: Limits of a tenant.
STREAMS = 10
CONNECTIONS = 12
#: What a browser says of a page of another site that reads.
READING = [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}]


@pytest.fixture(scope="module")
def api(redis_session: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    flushed(redis_session.url)
    limits = {
        "max_wait_s": LONG_S,
        "tuning.tenant_streams": STREAMS,
        "tuning.tenant_streams_per_minute": 120,
        "tuning.tenant_connections": CONNECTIONS,
    }
    with asking(tmp_path_factory.mktemp("session"), redis_session.url, **limits) as api:
        yield api


@pytest.fixture(scope="module")
def hand(api: Api) -> Iterator[Hand]:
    with Hand(api.settings) as worker:
        yield worker


class Browser:
    """Somebody who has logged in, as the page does it: a cookie, and the token in a header."""

    def __init__(self, api: Api, key: str) -> None:
        self.http = httpx2.Client(base_url=api.url, headers=HERE, timeout=LONG_S)
        self.answer = self.http.post("/session", json={"key": key})
        assert self.answer.status_code == 200, self.answer.text
        self.csrf = {CSRF_HEADER: self.answer.json()["csrf"]}
        self.id = self.http.cookies[COOKIE]
        self.kept = f"{SESSION}{name_of(self.id)}"

    def send(self, method: str, path: str, headers: dict[str, str]) -> httpx2.Response:
        """With the cookie and no header but these."""
        return httpx2.request(
            method,
            f"{self.http.base_url}{path}",
            headers={"Cookie": f"{COOKIE}={self.id}", **headers},
            timeout=LONG_S,
        )

    def signed_in(self) -> bool:
        return bool(self.http.get("/session").json()["signed_in"])


def log_in(api: Api, body: Any, **headers: str) -> httpx2.Response:
    return httpx2.post(f"{api.url}/session", json=body, headers=headers, timeout=LONG_S)


# --- The login
# --------------------------------------------------------------------------------------------------


def test_a_login_gives_a_cookie_that_scripts_and_other_sites_do_not_get(
    api: Api, hand: Hand
) -> None:
    browser = Browser(api, Caller(api, hand, "ada").key.key)
    cookie = browser.answer.headers["set-cookie"]
    assert re.match(rf"{COOKIE}=[0-9a-f]{{64}};", cookie)
    attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= attributes
    assert "secure" not in attributes, "this is plain HTTP"
    assert int(re.findall(r"max-age=(\d+)", cookie.lower())[0]) in (SESSION_S - 1, SESSION_S)
    assert browser.answer.headers["cache-control"] == "no-store"
    assert browser.http.get("/v1/jobs").status_code == 200


def test_behind_https_the_cookie_is_secure(redis_url: str, tmp_path: Path) -> None:
    with (
        asking(tmp_path, redis_url, public_url="https://lab.example") as behind,
        Hand(behind.settings) as hand,
    ):
        answer = log_in(
            behind, {"key": Caller(behind, hand, "ada").key.key}, Origin="https://lab.example"
        )
        assert answer.status_code == 200, answer.text
        assert "secure" in answer.headers["set-cookie"].lower(), answer.text


def test_redis_has_neither_the_cookie_nor_the_key(api: Api, hand: Hand) -> None:
    caller = Caller(api, hand, "ada")
    browser = Browser(api, caller.key.key)

    async def everything() -> str:
        redis = hand.ledger.redis
        read = {
            b"string": redis.get,
            b"hash": redis.hgetall,
            b"set": redis.smembers,
            b"list": lambda key: redis.lrange(key, 0, -1),
            b"zset": lambda key: redis.zrange(key, 0, -1),
            b"stream": redis.xrange,
        }
        kinds = {key: await redis.type(key) for key in await redis.keys("*")}
        return repr([(key, await read[kind](key)) for key, kind in kinds.items() if kind in read])

    kept = hand.do(everything())
    assert browser.kept in kept
    assert caller.key.id in kept
    assert browser.id not in kept
    assert caller.key.key.rpartition("_")[2] not in kept


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "key"),
        ({"key": ""}, 400, "key"),
        ({"key": 7}, 400, "key"),
        ({"key": "x" * (MAX_LOGIN_KEY + 1)}, 400, "key"),
        ([], 400, ""),
        ({"key": "x"}, 401, "key"),
        ({"key": "ms_000000000000_" + "0" * 64}, 401, "key"),
        ({"key": "\u00e9" * 100}, 401, "key"),
    ],
)
def test_a_wrong_login_names_the_field_and_gets_no_cookie(
    api: Api, hand: Hand, body: Any, status: int, field: str
) -> None:
    answer = log_in(api, body, **HERE)
    assert (refused(answer, status).get("field") or "") == field
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("chunked", [False, True])
def test_a_login_that_is_too_large_is_refused(api: Api, hand: Hand, chunked: bool) -> None:
    content = b'{"key": "' + b"x" * MAX_BODY + b'"}'
    body: Any = iter([content[:100], content[100:]]) if chunked else content
    answer = httpx2.post(
        f"{api.url}/session",
        content=body,
        headers={"Content-Type": "application/json", **HERE},
        timeout=LONG_S,
    )
    assert refused(answer, 413)["type"] == "urn:midstream:payload_too_large"


def test_the_sessions_of_a_key_are_limited(
    api: Api, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have ended make room.

    (As the API of a process: the limit of the other one is too many logins for a test.)
    """
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    key, other = (Caller(api, hand, "ada").key for _ in range(2))
    stored = Sessions(hand.ledger)
    made = []

    def create(created: CreatedKey) -> None:
        packed = hand.do(hand.ledger.redis.hget("ms:keys", created.id))
        made.append(hand.do(stored.create(from_msgpack(packed, StoredKey))))

    for _ in range(3):
        create(key)
    with refuses(kind="too_many_sessions", status=429):
        create(key)
    create(other)
    hand.do(stored.end(str(name_of(made[0].id)), key.id))
    create(key)
    hand.do(hand.ledger.redis.zadd(f"{SESSIONS}{key.id}", {str(name_of(made[1].id)): now() - 1}))
    create(key)
    with pytest.raises(MidstreamError):
        create(key)


@pytest.mark.long
@pytest.mark.parametrize(("proxies", "others"), [("", 429), ("127.0.0.1, 10.0.0.0/8", 401)])
def test_wrong_keys_are_limited_and_right_ones_never(
    redis_url: str, tmp_path: Path, proxies: str, others: int
) -> None:
    """At the login and in the header alike, by the address that the connection or a trusted proxy
    has.
    """
    with (
        asking(tmp_path, redis_url, trusted_proxies=proxies) as behind,
        Hand(behind.settings) as hand,
    ):
        right = Caller(behind, hand, "ada").key.key
        wrong = "ms_000000000000_" + "0" * 64

        def tried(key: str, address: str = "198.51.100.1") -> set[int]:
            """Of the login, and of a call."""
            forwarded = {"X-Forwarded-For": address}
            login = log_in(behind, {"key": key}, **HERE, **forwarded)
            call = behind.http.get("/v1/tenant", headers=bearer(key) | forwarded)
            for answer in (login, call):
                if answer.status_code == 429:
                    assert refused(answer, 429)["type"] == "urn:midstream:rate_limited"
                    assert 0 < int(answer.headers["retry-after"]) <= 61
            return {login.status_code, call.status_code}

        for _ in range(WRONG_PER_MINUTE // 2):
            assert tried(right) == {200}
            assert tried(wrong) == {401}
        assert tried(wrong) == {429}
        assert tried(wrong, "198.51.100.2") == {others}
        assert tried(right) == {200}, "a right one is never refused"
        assert behind.http.get("/v1/tenant").status_code == 401, "no key is no wrong key"


@pytest.mark.parametrize("proxies", ["proxy.example", "10.0.0.1/8", "*", "127.0.0.1;10.0.0.1"])
def test_a_trusted_proxy_is_an_address_or_a_network(proxies: str) -> None:
    with pytest.raises(
        SettingsError, match=r"MIDSTREAM_TRUSTED_PROXIES.*valid: addresses and networks"
    ):
        trusted_proxies(Settings(trusted_proxies=proxies))


# --- Which calls it opens
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        *READING,
        {"Origin": "null"},
        {"Sec-Fetch-Site": "same-site"},  # another port of this machine
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_pages_of_other_sites_can_neither_log_in_nor_act_nor_read(
    api: Api, hand: Hand, headers: dict[str, str]
) -> None:
    caller = Caller(api, hand, "ada")
    assert refused(log_in(api, {"key": caller.key.key}, **headers), 403)["field"] == "Origin"
    browser = Browser(api, caller.key.key)
    job_id = caller.submit()
    for method, path in (("POST", f"/v1/jobs/{job_id}/cancel"), ("DELETE", "/session")):
        assert refused(browser.send(method, path, browser.csrf | headers), 403)["field"] == "Origin"
    assert caller.http.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"
    assert browser.signed_in()
    if headers in READING:
        for path in ("/v1/jobs", "/v1/feed"):
            assert refused(browser.send("GET", path, headers), 403)["field"] == "Origin"


def test_what_changes_something_needs_the_token_of_the_session(api: Api, hand: Hand) -> None:
    caller = Caller(api, hand, "ada")
    browser = Browser(api, caller.key.key)
    other = Browser(api, caller.key.key)
    job_id = caller.submit()
    cancel = f"/v1/jobs/{job_id}/cancel"
    for token in ({}, {CSRF_HEADER: ""}, {CSRF_HEADER: "0" * 64}, other.csrf):
        assert refused(browser.send("POST", cancel, HERE | token), 403)["field"] == CSRF_HEADER
    assert refused(browser.send("POST", cancel, browser.csrf), 403)["field"] == "Origin", (
        "nothing says where it comes from"
    )
    assert caller.http.get(f"/v1/jobs/{job_id}").json()["state"] == "queued"
    assert browser.send("POST", cancel, HERE | browser.csrf).status_code in (200, 202)
    assert caller.http.get(f"/v1/jobs/{job_id}").json()["state"] == "aborted"


def test_a_session_has_the_scopes_of_its_key(api: Api, hand: Hand) -> None:
    browser = Browser(api, Caller(api, hand, "ada", "read").key.key)
    answer = browser.http.post(
        "/v1/jobs", json={"model": "tiny", "prompts": ["hello"]}, headers=browser.csrf
    )
    assert refused(answer, 403)["type"] == "urn:midstream:forbidden"
    assert browser.http.get("/session").json()["scopes"] == ["read"]


def test_a_key_in_the_header_counts_and_not_the_cookie(api: Api, hand: Hand) -> None:
    browser = Browser(api, Caller(api, hand, "ada").key.key)
    other = Caller(api, hand, "bob")
    assert browser.send("GET", "/v1/jobs", bearer("ms_wrong")).status_code == 401
    assert browser.send("GET", "/v1/tenant", bearer(other.key.key)).json()["name"] == "bob"
    assert browser.send("GET", "/v1/tenant", {}).json()["name"] == "ada"


def test_what_a_session_shows_is_not_written_to_a_browsers_disk(api: Api, hand: Hand) -> None:
    caller = Caller(api, hand, "ada")
    browser = Browser(api, caller.key.key)
    job_id = caller.submit()
    for path in (
        "/v1/jobs",
        f"/v1/jobs/{job_id}",
        f"/v1/jobs/{job_id}/request",
        f"/v1/jobs/{job_id}/result",
        "/v1/tenant",
        "/v1/jobs/x",
    ):
        assert browser.http.get(path).headers.get_list("cache-control") == ["no-store"], path
    with browser.http.stream("GET", "/v1/feed") as stream:
        assert stream.headers.get_list("cache-control") == ["no-store"]
    assert caller.http.get(f"/v1/jobs/{job_id}").headers["cache-control"] == "no-cache", (
        "programs ask again by ETag"
    )


# --- When it ends
# --------------------------------------------------------------------------------------------------


def test_a_logout_ends_this_session_alone(api: Api, hand: Hand) -> None:
    key = Caller(api, hand, "ada").key.key
    browser = Browser(api, key)
    other = Browser(api, key)
    answer = browser.send("DELETE", "/session", HERE | browser.csrf)
    assert answer.status_code == 204
    assert "max-age=0" in answer.headers["set-cookie"].lower()
    assert [each.signed_in() for each in (browser, other)] == [False, True]
    assert refused(browser.send("GET", "/v1/jobs", {}), 401)["field"] == COOKIE
    assert browser.send("DELETE", "/session", HERE).status_code == 204, "it may be repeated"


def expired(raw: bytes) -> bytes:
    return to_msgpack(msgspec.structs.replace(from_msgpack(raw, Session), expires=now() - 1))


@pytest.mark.parametrize(
    "change",
    [expired, lambda raw: b"\x81", lambda raw: None],
    ids=["expired", "of another version", "removed"],
)
def test_a_session_that_is_over_opens_nothing(api: Api, hand: Hand, change: Any) -> None:
    browser = Browser(api, Caller(api, hand, "ada").key.key)
    redis = hand.ledger.redis
    assert browser.signed_in()
    after = change(hand.do(redis.get(browser.kept)))
    if after is not None:
        hand.do(redis.set(browser.kept, after, keepttl=True))
    else:
        hand.do(redis.delete(browser.kept))
    assert refused(browser.http.get("/v1/jobs"), 401)["field"] == COOKIE
    for value in (browser.id, "", "x", "../" * 30):  # this session's, and those of nobody
        for path, status in (("/v1/jobs", 401), ("/session", 200)):
            cookie = {"Cookie": f"{COOKIE}={value}"}
            answer = httpx2.get(f"{api.url}{path}", headers=cookie, timeout=LONG_S)
            assert answer.status_code == status
            assert answer.json().get("signed_in", False) is False
    hand.do(redis.delete(browser.kept))


def test_a_session_ends_with_its_key_at_the_latest(api: Api, hand: Hand) -> None:
    browser = Browser(api, Caller(api, hand, "ada", expires_in=600.0).key.key)
    assert (
        0
        < int(re.findall(r"max-age=(\d+)", browser.answer.headers["set-cookie"].lower())[0])
        <= 600
    )
    assert 0 < hand.do(hand.ledger.redis.pttl(browser.kept)) <= 600_000


# --- The feed
# --------------------------------------------------------------------------------------------------


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """As they come."""
    block = ""
    for line in lines:
        block += f"{line}\n"
        if not line:
            yield from server_sent.parse(block)
            block = ""


def jobs_until(found: Iterator[dict[str, Any]], job_id: str) -> set[str]:
    """Ids of all jobs up to the first event that has this one."""
    seen: set[str] = set()
    for event in found:
        if event["event"] == "jobs":
            seen |= {job["id"] for job in event["data"]["jobs"]}
        if job_id in seen:
            return seen
    raise AssertionError(f"the feed ended without {job_id}")


def test_a_feed_has_the_jobs_of_its_tenant_alone(api: Api, hand: Hand) -> None:
    ada = Caller(api, hand, "ada")
    bob = Caller(api, hand, "bob")
    browser = Browser(api, ada.key.key)
    operator = Browser(api, ADMIN)
    before = {ada: ada.submit(), bob: bob.submit()}
    with (
        browser.http.stream("GET", "/v1/feed") as stream,
        operator.http.stream("GET", "/v1/feed") as whole,
    ):
        found = events(stream.iter_lines())
        all_of_them = events(whole.iter_lines())
        seen = jobs_until(found, before[ada])
        everything = jobs_until(all_of_them, before[ada])  # the newest come first, and in one event
        history = next(all_of_them)
        assert history["event"] == "history"
        assert len(history["data"]["points"][-1]) == 3
        assert next(found)["event"] == "service", "her key may not observe"
        assert before[bob] in everything
        after = {bob: bob.submit(), ada: ada.submit()}  # his comes first
        seen |= jobs_until(found, after[ada])
        assert not seen & {before[bob], after[bob]}
        assert jobs_until(all_of_them, after[bob])
    for path in (
        "/v1/feed?tenant=bob",
        "/v1/feed?limit=0",
        "/v1/feed?limit=5001",
        "/v1/feed?limit=x",
    ):
        assert refused(browser.http.get(path), 403 if "tenant" in path else 400)["field"] in (
            "tenant",
            "limit",
        )


@pytest.mark.parametrize("how", ["the key is revoked", "logged out"])
def test_a_feed_ends_with_its_session(api: Api, hand: Hand, how: str) -> None:
    caller = Caller(api, hand, "ada")
    browser = Browser(api, caller.key.key)
    other = Browser(api, Caller(api, hand, "ada").key.key)
    with (
        browser.http.stream("GET", "/v1/feed", timeout=LONG_S) as stream,
        other.http.stream("GET", "/v1/feed", timeout=LONG_S) as stays,
    ):
        found = events(stream.iter_lines())
        others = events(stays.iter_lines())
        assert next(found)["event"] == next(others)["event"] == "jobs"
        if how == "logged out":
            assert browser.send("DELETE", "/session", HERE | browser.csrf).status_code == 204
        else:
            assert (
                api.http.delete(f"/v1/keys/{caller.key.id}", headers=bearer(ADMIN)).status_code
                == 204
            )
        *_, last = found  # until the server ends it
        assert last["event"] == "error"
        assert last["data"]["type"] == "urn:midstream:unauthorized"
        job_id = Caller(api, hand, "ada").submit()
        assert job_id in jobs_until(others, job_id)
    wait_until(lambda: not browser.signed_in())  # a process remembers a key for seconds
    if how == "the key is revoked":
        assert refused(log_in(api, {"key": caller.key.key}, **HERE), 401)["field"] == "key"


# --- Limits of what a tenant has open
# ------------------------------------------------------------------------------------


def limited(answer: httpx2.Response, kind: str, setting: str) -> None:
    """The answer is the refusal of this kind; it names the setting and says when to try again."""
    refused(answer, 429, None, f"(setting {setting})", kind=kind)
    assert int(answer.headers["retry-after"]) >= 5


def until_open(api: Api, caller: Caller, path: str) -> None:
    """Until a place has become free, which a client that has left had, and the rate allows a
    stream.
    """

    def opens() -> bool:
        with caller.http.stream("GET", path) as answer:
            return answer.status_code == 200

    wait_until(opens, LONG_S, why="the place of a client that has left is not free", pause_s=0.2)


def test_the_event_streams_of_a_tenant_are_limited_and_freed_on_disconnect(
    api: Api, hand: Hand
) -> None:
    caller = Caller(api, hand, "carol")
    other = Caller(api, hand, "dave")
    browser = Browser(api, caller.key.key)
    job_id = caller.submit()
    lines = []  # kept: a stream whose lines are forgotten is closed
    with ExitStack() as streams:
        for number in range(STREAMS):  # of the page and of jobs, with the session and with the key
            http, path = (
                (browser.http, "/v1/feed")
                if number % 2
                else (caller.http, f"/v1/jobs/{job_id}/events")
            )
            answer = streams.enter_context(http.stream("GET", path))
            lines.append(answer.iter_lines())
            assert answer.status_code == 200
            assert next(lines[-1]) == "retry: 3000"
        for path in ("/v1/feed", f"/v1/jobs/{job_id}/events", "/v1/harvests/h/events"):
            limited(browser.http.get(path), "too_many_streams", "tuning.tenant_streams")
        assert caller.http.get(f"/v1/jobs/{job_id}").status_code == 200
        until_open(api, other, "/v1/feed")
    until_open(api, caller, "/v1/feed")


def test_a_tenant_that_opens_streams_again_and_again_is_slowed_down(api: Api, hand: Hand) -> None:
    caller = Caller(api, hand, "erin")
    answers = []
    while not answers or answers[-1].status_code == 200:
        with caller.http.stream("GET", "/v1/feed") as answer:
            answers.append(answer)
            if answer.status_code != 200:
                answer.read()
        assert len(answers) < 1000
    assert len(answers) > STREAMS, "a burst is accepted"
    limited(answers[-1], "too_many_streams", "tuning.tenant_streams_per_minute")
    until_open(api, Caller(api, hand, "dave"), "/v1/feed")


def test_the_open_requests_of_a_tenant_are_limited_and_freed_on_disconnect(
    api: Api, hand: Hand
) -> None:
    caller = Caller(api, hand, "frank")
    path = f"/v1/jobs/{caller.submit()}?wait=60"
    headers = bearer(caller.key.key)
    host, port = api.url.removeprefix("http://").split(":")
    lines = [f"GET {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    request = "\r\n".join([*lines, "", ""]).encode()
    deadline = time.monotonic() + LONG_S
    with ExitStack() as held:
        # One that arrives while a short call has a place may be refused: more are opened until the
        # places are taken.
        while (answer := caller.http.get("/v1/models")).status_code == 200:
            assert time.monotonic() < deadline
            held.enter_context(socket.create_connection((host, int(port)))).sendall(request)
        limited(answer, "too_many_connections", "tuning.tenant_connections")
        assert api.http.get("/healthz").status_code == 200
        assert Caller(api, hand, "dave").http.get("/v1/models").status_code == 200
    while caller.http.get("/v1/models").status_code != 200:
        assert time.monotonic() < deadline, "the requests of clients that have left still count"
