"""Does one command run the whole stack, keep it running, and leave nothing behind?"""

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
import redis
from receipt_rig import receipt
from up_kit import START_S, Up

from midstream.broker.ledger.people.keys import new_key
from midstream.broker.ops import redis_server
from midstream.broker.ops.install import basic
from midstream.broker.receipts.outbox import Outbox
from midstream.client import Client
from midstream.client.sdk.discovery import STATE_FILE
from midstream.client.stack.processes import birth
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import State


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    started = Up(tmp_path / "data")
    yield started
    started.close()


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    """As a user pastes it into another terminal, from another folder."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{plain['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        env={**plain, "PATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.long
def test_up_prints_addresses_and_ctrl_c_leaves_no_process(up: Up) -> None:
    url = up.ready()
    lines = [line for line in up.output().splitlines() if "ready:" in line]
    assert len(lines) == 1
    for part in (
        "api http://127.0.0.1:",
        "openapi ",
        "flower http://127.0.0.1:",
        "redis redis://:***@127.0.0.1:",
        "model fake",
        f"data {up.data}",
    ):
        assert part in lines[0]
    assert set(up.state()["processes"]) == {
        "redis",
        "relay",
        "worker",
        "api",
        "callbacks",
        "flower",
    }
    flower = lines[0].partition("flower ")[2].split()[0]
    assert httpx2.get(f"{url}/healthz").status_code == 200
    assert httpx2.get(f"{flower}/healthcheck").status_code == 200
    assert up.interrupt() == 0
    assert up.alive() == []
    assert not (up.data / STATE_FILE).exists()


@pytest.mark.long
def test_jobs_survive_a_stop_and_start_of_up(up: Up, tmp_path: Path) -> None:
    with Client(up.ready()) as client:
        done = client.run(model="fake", prompts=["hello"], sampling={"max_tokens": 4}, timeout=90)
    assert up.interrupt(signal.SIGTERM) == 0
    again = Up(tmp_path / "data")
    try:
        with Client(again.ready()) as client:
            assert client.result(done.id) == done
    finally:
        again.close()


@pytest.mark.matrix
def test_a_second_up_on_a_data_directory_is_refused(up: Up) -> None:
    url = up.ready()
    second = up.midstream("up")
    assert second.returncode == 1
    assert str(up.data) in second.stderr
    assert str(up.process.pid) in second.stderr
    assert url in second.stderr
    assert httpx2.get(f"{url}/readyz").status_code == 200
    assert up.state()["pid"] == up.process.pid


# field case 37
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "worker",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("redis", "relay", "api")),
    ],
)
def test_a_part_that_is_killed_is_started_again_and_the_job_completes(
    tmp_path: Path, name: str
) -> None:
    up = Up(
        tmp_path / "data",
        engine_options={"token_s": 0.1},
        lease_s=6,
        visibility_timeout_s=4,
        sweep_interval_s=0.5,
    )
    try:
        with Client(up.ready()) as client:
            capture = {"layers": "all", "positions": "all_prompt"}
            job = client.submit(
                model="fake", prompts=["hello"], sampling={"max_tokens": 20}, capture=capture
            )
            while client.jobs.get(job.id).state is State.QUEUED:
                time.sleep(0.05)
            killed = up.pid(name)
            os.kill(killed, signal.SIGKILL)
            ended = client.wait(job.id, timeout=120)
            assert ended.state is State.SUCCEEDED
            result = client.result(job.id)
            assert result.capture_results.status == "ok"
            assert len(result.capture_results.files) == 1
        up.until(lambda: f"{name} ended with" in up.output())
        up.until(lambda: up.state()["processes"].get(name, [killed])[0] != killed)
    finally:
        up.close()
    assert up.alive() == []


@pytest.mark.long
def test_up_exits_with_the_reason_of_a_failed_engine(tmp_path: Path) -> None:
    up = Up(tmp_path / "data", fault="start:reason=GPT-J is not supported")
    try:
        assert up.process.wait(START_S) == 1
    finally:
        up.close()
    last = up.output().strip().splitlines()[-1]
    assert last.startswith("error: worker ended with")
    assert "GPT-J is not supported" in last
    assert "worker.log" in last
    assert up.alive() == []


def test_ctrl_c_while_it_starts_leaves_no_process(tmp_path: Path) -> None:
    up = Up(tmp_path / "data", fault="slow_start:seconds=60")
    try:
        up.until(lambda: (up.data / STATE_FILE).exists() and "worker" in up.state()["processes"])
        up.note_sessions()
        time.sleep(1.0)
        began = time.monotonic()
        assert up.interrupt() == 0
        assert time.monotonic() - began < 50, "it does not wait for the worker's start"
    finally:
        up.close()
    assert up.alive() == []


@pytest.mark.long
def test_up_cleans_up_after_a_killed_up(up: Up, tmp_path: Path) -> None:
    up.ready()
    redis, born = up.state()["processes"]["redis"]
    up.process.kill()
    up.process.wait()
    assert birth(redis) == born, "Redis outlives a supervisor that is killed"
    again = Up(tmp_path / "data")
    try:
        again.ready()
        assert birth(redis) != born
        assert f"stopped redis (pid {redis})" in again.output()
    finally:
        again.close()
    assert again.alive() == []
    assert up.alive() == []


@pytest.mark.matrix
def test_everything_up_starts_is_private_to_the_account(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)  # as a former version left it
    up = Up(data, auth="keys")
    try:
        url = up.ready()
        assert f"{data} was readable by other accounts" in up.output()
        assert {
            stat.S_IMODE(path.stat().st_mode) & 0o077
            for path in [data, *data.rglob("*")]
            if not path.is_symlink()
        } == {0}
        # Redis asks for a password, which no command line and no line of ours shows
        password = (data / "secrets" / "redis.password").read_text().strip()
        port = urlsplit(up.state()["redis_url"]).port
        assert port is not None
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with redis.Redis(port=port, password=password) as ours:
            assert ours.ping()
        shown = [
            up.output(),
            (data / STATE_FILE).read_text(),
            *(path.read_text() for path in (data / "logs").glob("*.log")),
        ]
        shown += [
            Path(f"/proc/{pid}/cmdline").read_text() for pid, _ in up.state()["processes"].values()
        ]
        assert not any(password in text for text in shown)
        assert "redis://:***@127.0.0.1:" in up.output()
        # so does Flower
        auth = (data / "secrets" / "flower.auth").read_text().strip()
        assert str(data / "secrets" / "flower.auth") in up.output()
        assert auth not in up.output()
        flower = re.search(r"flower (http://\S+)", up.output())
        assert flower is not None
        assert httpx2.get(f"{flower[1]}/api/tasks").status_code == 401
        assert (
            httpx2.get(f"{flower[1]}/api/tasks", auth=tuple(auth.split(":", 1))).status_code == 200
        )  # type: ignore[arg-type]
        # and the relay: a forged receipt of a running job does not get in
        relay = up.environment["MIDSTREAM_RELAY_URL"]
        with Outbox(tmp_path / "forged", "w1", 0, relay) as forged:
            forged.append(receipt("job_x", 0, worker="w1"))
            assert not forged.flush(2.0)
            assert not forged.connected
        # callers need a key, and the command that is printed makes the first
        with pytest.raises(MidstreamError, match="no API key given"), Client(url) as client:
            client.models()
        command = re.search(r"create the first one: (MIDSTREAM_DATA_DIR=.*)", up.output())
        assert command is not None
        made = in_shell(command[1])
        assert made.returncode == 0, made.stderr
        with Client(url, made.stdout.strip()) as client:
            done = client.run(
                model="fake",
                prompts=["hello"],
                capture={"layers": "all", "positions": "last_prompt"},
                timeout=90,
            )
            assert client.result(done.id).capture_results.status == "ok"
        assert "redis" in up.midstream("doctor").stdout
    finally:
        up.close()


def test_flower_without_a_password_checks_the_host_name(up: Up) -> None:
    up.ready()
    flower = re.search(r"flower (http://\S+)", up.output())
    assert flower is not None
    assert httpx2.get(f"{flower[1]}/api/tasks", headers={"Host": "evil.example"}).status_code == 421
    assert (
        httpx2.get(f"{flower[1]}/metrics", headers={"Host": "evil.example:5555"}).status_code == 421
    )


@pytest.mark.matrix
def test_every_path_of_flower_needs_the_password(tmp_path: Path) -> None:
    """Also those that Flower itself leaves open.

    The observe key opens its metrics, and the API's, and nothing else.
    """
    key, admin, password = new_key(), new_key(), "ada:a pass:word"
    up = Up(
        tmp_path / "data",
        auth="keys",
        admin_key=admin,
        observe_key=key,
        flower_auth=f"{password},bob:x",
    )
    try:
        url = up.ready()
        flower = re.search(r"flower (http://\S+)", up.output())
        assert flower is not None

        def status(path: str, authorization: str | None, base: str = flower[1]) -> int:
            answer = httpx2.get(
                f"{base}{path}", headers={"Authorization": authorization} if authorization else {}
            )
            if answer.status_code == 401:
                assert "www-authenticate" in answer.headers
            return answer.status_code

        for path in (
            "/",
            "/metrics",
            "/healthcheck",
            "/tasks",
            "/api/tasks",
            "/api/workers",
            "/static/css/flower.css",
            "/login",
            "/x",
        ):
            for wrong in (
                None,
                basic("ada:wrong"),
                basic("ada"),
                "Basic x",
                "Bearer x",
                f"Bearer {admin}x",
            ):
                assert status(path, wrong) == 401, (path, wrong)
            assert status(path, basic(password)) != 401
        assert [
            status(path, f"Bearer {key}") for path in ("/metrics", "/api/tasks", "/healthcheck")
        ] == [200, 401, 401]
        assert [
            status(path, f"Bearer {key}", url) for path in ("/metrics", "/v1/status", "/v1/jobs")
        ] == [200, 200, 403]
    finally:
        up.close()


@pytest.mark.matrix
def test_a_failing_demo_stops_what_it_started(tmp_path: Path) -> None:
    demo = Up(
        tmp_path / "data", command=("demo", "--data", str(tmp_path / "data"))
    )  # the fake engine is not the demo's model: it has other layers
    try:
        demo.until(
            lambda: (demo.data / STATE_FILE).exists() and "flower" in demo.state()["processes"]
        )
        demo.note_sessions()
        assert demo.process.wait(START_S) == 1
    finally:
        demo.close()
    assert "stack up" in demo.output()
    assert "✗" in demo.output()
    assert demo.output().strip().splitlines()[-1].startswith("error: ")
    assert demo.alive() == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small ext4; needs the right to mount one."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (
        ["mkfs.ext4", "-q", "-m", "0", "-F", str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
    ):
        if (
            shutil.which(command[0]) is None
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file: Path) -> None:
    """Take all the room that is left, down to the last block."""
    for size in (1 << 20, 4096):
        with file.open("ab", buffering=0) as handle, contextlib.suppress(OSError):
            while True:
                handle.write(bytes(size))


def capture_job(url: str) -> httpx2.Response:
    body = {
        "model": "fake",
        "prompts": ["hello"],
        "sampling": {"max_tokens": 2},
        "capture": {"layers": "all", "positions": "all_prompt"},
    }
    return httpx2.post(f"{url}/v1/jobs", json=body, timeout=60)


def refused_for(url: str, trouble: str, deadline_s: float = START_S) -> httpx2.Response:
    """The first answer 503 that names `trouble`; every other answer until then is a problem of
    ours, and none a 500.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(httpx2.TransportError):  # it is being started again
            answer = capture_job(url)
            assert answer.status_code in (202, 503), answer.text
            if answer.status_code == 503:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["retry-after"]
                if trouble in answer.json()["detail"]:
                    return answer
        time.sleep(0.2)


def missing_of(url: str) -> str:
    """What `/readyz` says is missing."""
    with contextlib.suppress(httpx2.TransportError):  # it is being started again
        readiness = httpx2.get(f"{url}/readyz", timeout=30)
        assert readiness.status_code == 503
        return " ".join(readiness.json()["missing"])
    return ""


@pytest.mark.matrix
def test_up_outlives_a_full_disk_and_a_read_only_one(disk: Path) -> None:
    up = Up(disk, lease_s=6, sweep_interval_s=0.5)
    try:
        url = up.ready()
        fill(disk / "filler")
        up.until(lambda: "disk full" in up.output())
        refused_for(url, "disk full")
        up.until(lambda: "outbox: disk full" in missing_of(url))  # each part notices by itself
        os.kill(up.pid("api"), signal.SIGKILL)
        refused_for(url, "")
        os.kill(up.pid("redis"), signal.SIGKILL)
        up.until(lambda: "redis ended with" in up.output())
        refused_for(url, "")
        (disk / "filler").unlink()
        up.until(lambda: "is writable again" in up.output())
        up.until(lambda: httpx2.get(f"{url}/readyz", timeout=30).status_code == 200)
        with Client(url) as client:
            result = client.result(client.wait(capture_job(url).json()["id"], timeout=120).id)
            assert result.capture_results.status == "ok"
        assert up.output().count("disk full") == 1, up.output()
        up.until(
            lambda: (
                set(up.state()["processes"])
                == {"redis", "relay", "worker", "api", "callbacks", "flower"}
            )
        )

        # as the kernel does after an error of the disk
        subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)
        up.until(lambda: "disk read-only" in up.output())
        refused_for(url, "disk read-only")
        up.sessions |= {up.pid(name) for name in up.state()["processes"]}
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(90) == 0
        assert up.output().count("disk read-only") == 1
    finally:
        up.close()
    assert up.alive() == []


def test_an_up_on_a_read_only_disk_says_so(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    up = Up(disk)
    try:
        assert up.process.wait(START_S) == 1
    finally:
        up.close()
    assert (
        up.output().strip().splitlines()[-1]
        == f"error: data_dir: disk read-only: {disk} cannot be written"
    )


@pytest.mark.matrix
def test_a_redis_that_was_orphaned_while_it_loaded_is_ended_by_the_next_up(tmp_path: Path) -> None:
    """Its pid is in no state file yet; it holds the lock of its folder."""
    data = tmp_path / "data"
    server = redis_server.start(data / "redis")
    (data / "redis" / "redis.pid").write_text("1")
    up = Up(data)
    try:
        up.ready()
        assert f"stopped redis (pid {server.pid})" in up.output()
        assert server.process.wait(60) is not None
    finally:
        server.kill()
        up.close()
    assert up.alive() == []
