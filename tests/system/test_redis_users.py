"""Does everything work over TLS, each part as a user of its own that may do no more than it
needs?
"""

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
import redis
from ledger_kit import receipt
from machines_rig import Machines, make_certificates
from ports import free_port
from wait_kit import wait_until

from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.queue.celery_app import UNACKED, make_app
from midstream.broker.redis_service.acl import OPERATOR, write_users
from midstream.schemas.settings.settings import SettingsError, load_settings
from midstream_ops.checks.redis_checks import default_user
from midstream_ops.redis_server import executable

ALL = ("relay", "callbacks", "worker", "api", "flower")
CAPTURE = {"layers": "all", "positions": "all"}
FLOWERS_AUTH = "somebody:a password"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    # Leases longer than a busy machine stands still: what is shown of a worker that is lost does
    # not wait for their end.
    times = {
        "engine_options": {"token_s": 0.02},
        "lease_s": 15.0,
        "tuning.visibility_timeout_s": 20,
    }
    with Machines(
        tmp_path_factory.mktemp("users"), names=ALL, flower_auth=FLOWERS_AUTH, **times
    ) as started:
        yield started


@pytest.fixture
def http(machines: Machines) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=machines.url, timeout=90) as client:
        yield client


def submit(http: httpx2.Client, tokens: int, **more: object) -> str:
    body = {
        "model": "fake-model",
        "prompts": ["hello", "there"],
        "sampling": {"max_tokens": tokens},
        **more,
    }
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def ended(http: httpx2.Client, job: str) -> dict[str, object]:
    return http.get(f"/v1/jobs/{job}", params={"wait": 60}).json()


def flower(machines: Machines, path: str) -> httpx2.Response:
    url = f"http://127.0.0.1:{machines.settings('flower').flower_port}{path}"
    return httpx2.get(url, auth=tuple(FLOWERS_AUTH.split(":")), timeout=60).raise_for_status()


def test_jobs_run_end_to_end_with_redis_users_and_tls(http: httpx2.Client) -> None:
    body = {
        "model": "fake-model",
        "prompt": "hello",
        "max_tokens": 4,
        "capture": CAPTURE,
        "capture_wait": True,
    }
    assert http.post("/v1/completions", json=body).json()["capture_results"]["status"] == "ok"
    assert ended(http, submit(http, 3))["state"] == "succeeded"
    with http.stream("GET", f"/v1/jobs/{submit(http, 3)}/events") as events:
        assert any(line.startswith("event: done") for line in events.iter_lines())


def test_cancel_reaches_the_worker_by_remote_control(http: httpx2.Client) -> None:
    job = submit(http, 2000)
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "running")
    http.post(f"/v1/jobs/{job}/cancel")
    assert ended(http, job)["state"] == "cancelled"


def test_flower_and_inspect_see_the_worker(machines: Machines, http: httpx2.Client) -> None:
    ended(http, submit(http, 2))
    wait_until(
        lambda: "celery@" in (told := flower(machines, "/workers?json=1").text) or "w1@" in told
    )
    with closing(make_app(machines.settings("api"))) as app:
        wait_until(
            lambda: (
                list((app.control.inspect(timeout=3).ping() or {}).values()) == [{"ok": "pong"}] * 2
            )
        )  # worker and callbacks


def test_jobs_of_a_killed_worker_are_rerun(machines: Machines, http: httpx2.Client) -> None:
    job = submit(http, 150)
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "running")
    machines.processes["worker"].kill()
    machines.processes["worker"].wait()
    machines.add("worker")
    view = ended(http, job)
    assert view["state"] == "succeeded"
    assert view["attempt"] == 2


def test_flower_shows_the_ends_of_jobs_that_end_by_receipts(
    machines: Machines, http: httpx2.Client
) -> None:
    """Their tasks are over before the relay, as its own Redis user, has the receipts."""
    wait_until(lambda: "w1@" in flower(machines, "/workers?json=1").text, why="it gets events")
    machines.end("relay")
    captured = {"capture": {"layers": "all", "positions": "all"}, "prompts": ["hello"]}
    jobs = [submit(http, 1, **captured) for _ in range(2)]

    def states() -> list[str]:
        tasks = flower(machines, "/api/tasks").json()
        return [tasks.get(job, {}).get("state") for job in jobs]

    wait_until(lambda: all(http.get(f"/v1/jobs/{job}").json().get("generated") for job in jobs))
    wait_until(lambda: states() == ["STARTED", "STARTED"])
    failed = receipt(jobs[1], worker="w1", world=1, status="error", message="the disk is full")
    with machines.client("relay") as client:
        Settler(client, machines.settings("relay")).settle("w1", 0, "another", [(1, failed)])
    wait_until(lambda: states() == ["STARTED", "FAILURE"])
    machines.add("relay")
    wait_until(lambda: states() == ["SUCCESS", "FAILURE"])


def test_every_redis_user_is_limited_to_its_role(machines: Machines) -> None:
    for role in ("worker", "relay", "callbacks", "flower"):
        with machines.client(role) as client, pytest.raises(redis.exceptions.NoPermissionError):
            client.hgetall("ms:keys")
    for role in ("worker", "relay", "flower"):
        with machines.client(role) as client, pytest.raises(redis.exceptions.NoPermissionError):
            client.hgetall("ms:hook-secret:default")
    for role in ("api", "worker", "relay", "callbacks", "flower"):
        with machines.client(role) as client:
            for forbidden in (
                ["KEYS", "*"],
                ["FLUSHALL"],
                ["CONFIG", "GET", "*"],
                ["SHUTDOWN"],
                ["SCRIPT", "FLUSH"],
                ["GET", "other"],
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*forbidden)
    with machines.client("relay") as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.hgetall(UNACKED)


def test_redis_acl_log_is_empty_after_the_tests(machines: Machines) -> None:
    # redis-py tells its name and version, which nobody needs; what the tests before asked for on
    # purpose comes last.
    asked_for = {
        "ms:keys",
        "ms:hook-secret:default",
        "keys",
        "flushall",
        "config",
        "shutdown",
        "script",
        "other",
        "hgetall",
        UNACKED,
    }
    with machines.client() as client:
        refused = {
            (entry["username"], entry["object"].partition("|")[0])  # Redis 7: `config|get`
            for entry in client.acl_log(1000)
        }
    assert {(user, what) for user, what in refused if what not in {"client", *asked_for}} == set()


def test_a_redis_with_a_wrong_certificate_is_refused(machines: Machines, tmp_path: Path) -> None:
    make_certificates(tmp_path, "127.0.0.1")
    url = machines.redis_url("api")
    with pytest.raises(redis.exceptions.ConnectionError, match="certificate verify failed"):
        redis.Redis.from_url(
            url.partition("?")[0] + f"?ssl_ca_certs={tmp_path / 'ca.pem'}", retry=None
        ).ping()
    elsewhere = url.replace("@127.0.0.1:", "@localhost:")  # the certificate is for 127.0.0.1
    with pytest.raises(redis.exceptions.ConnectionError, match="localhost"):
        redis.Redis.from_url(elsewhere, retry=None).ping()
    with (
        closing(make_app(load_settings({}, redis_url=elsewhere))) as app,
        pytest.raises(Exception, match=r"certificate verify failed|localhost"),
    ):
        app.connection_for_write().ensure_connection(max_retries=1, timeout=3, interval_start=0)


@pytest.mark.parametrize("role", ["api", "callbacks", "relay", "worker"])
def test_who_confirms_may_wait_for_replicas(machines: Machines, role: str) -> None:
    with machines.client(role) as client:
        assert client.wait(0, 1) == 0


def test_a_restart_keeps_what_scripts_and_transactions_wrote(tmp_path: Path) -> None:
    """From version 7 on, Redis loads its append-only file with the rights of the user `default`."""
    users, *_ = write_users(tmp_path / "acl")
    port = free_port()
    command = [executable(), "--port", str(port), "--dir", str(tmp_path), "--save", ""]
    command += ["--appendonly", "yes", "--aclfile", str(users)]
    password = (tmp_path / "acl" / f"{OPERATOR}.password").read_text().strip()
    for expected in (0, 4):
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(port=port, username=OPERATOR, password=password)
            wait_until(lambda client=client: answers(client))  # type: ignore[misc]
            assert client.dbsize() == expected
            client.eval("redis.call('SET', 'a', 1) redis.call('SET', 'b', 2)", 0)
            client.pipeline(transaction=True).set("c", 3).set("d", 4).execute()
            client.config_set("appendfsync", "always")
            client.set("a", 5)
            assert list(default_user(client, (7, 0))) == []
            client.execute_command("ACL", "SETUSER", "default", "reset")
            (found,) = default_user(client, (7, 0))
            assert found.level == "fail"
            assert found.about == "redis users"
        finally:
            server.kill()
            server.wait()


def answers(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def test_files_for_tls_without_tls_are_refused(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_text("")
    for url, says in (
        (f"redis://h/0?ssl_ca_certs={authority}", "nothing would be encrypted"),
        (f"rediss://h/0?ssl_ca_certs={tmp_path / 'gone.pem'}", r"gone\.pem.*no such file"),
    ):
        with pytest.raises(SettingsError, match=says):
            load_settings({}, redis_url=url)
    assert load_settings({}, redis_url=f"rediss://h/0?ssl_ca_certs={authority}")
