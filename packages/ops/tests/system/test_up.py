"""Does one command run the whole stack, keep it running, and leave nothing behind?"""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import redis
from ports import free_port
from receipt_rig import receipt
from tree import ROOT
from up_kit import START_S, Up
from wait_kit import wait_until

from midstream import Client, ServerUnreachable
from midstream.broker.ledger.people.keys import new_key
from midstream.broker.processes.install import basic
from midstream.broker.receipts.outbox import Outbox
from midstream.client.sdk import discovery
from midstream.client.sdk.discovery import STATE_FILE
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import State
from midstream.schemas.settings.settings import load_settings
from midstream_ops.processes import birth

#: What `midstream up` runs.
PARTS = {"redis", "relay", "worker", "api", "callbacks", "flower"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Start `midstream up` with some settings, on the same data each time; nothing it started may
    outlive the test.
    """
    started: list[Up] = []

    def begin(data: Path = tmp_path / "data", **settings: Any) -> Up:
        started.append(Up(data, **settings))
        return started[-1]

    yield begin
    for up in started:
        up.close()
        assert up.alive() == []


@pytest.mark.long
def test_up_prints_addresses_and_ctrl_c_leaves_no_process(start: Callable[..., Up]) -> None:
    up = start()
    url = up.ready()
    (line,) = (line for line in up.output().splitlines() if "ready:" in line)
    for part in (
        "api http://127.0.0.1:",
        "openapi ",
        "flower http://127.0.0.1:",
        "redis redis://:***@127.0.0.1:",
        "model fake",
        f"data {up.data}",
    ):
        assert part in line
    assert set(up.state()["processes"]) == PARTS
    assert httpx2.get(f"{url}/healthz").status_code == 200
    assert httpx2.get(f"{flower_of(up)}/healthcheck").status_code == 200
    assert up.interrupt() == 0
    assert up.alive() == []
    assert not (up.data / STATE_FILE).exists()


def flower_of(up: Up) -> str:
    found = re.search(r"flower (http://\S+)", up.output())
    assert found is not None
    return found[1]


@pytest.mark.long
def test_jobs_survive_a_stop_and_start_of_up(start: Callable[..., Up]) -> None:
    up = start()
    with Client(up.ready()) as client:
        done = client.run(model="fake", prompts=["hello"], sampling={"max_tokens": 4}, timeout=90)
    assert up.interrupt(signal.SIGTERM) == 0
    with Client(start().ready()) as client:
        assert client.result(done.id) == done


@pytest.mark.long
def test_the_documented_drain_ends_every_queued_job(start: Callable[..., Up]) -> None:
    up = start(**{"tuning.worker_concurrency": 2}, engine_options={"token_s": 0.02})
    with Client(up.ready()) as client:
        jobs = [client.submit(model="fake", prompts=["a"], max_tokens=20).id for _ in range(40)]
    page = (ROOT / "docs" / "operations.md").read_text().partition("\n### Draining\n")[2]
    commands = re.findall(r"^\$ (.+)$", page.partition("```console\n")[2].partition("```")[0], re.M)
    script = "\n".join(commands).replace("8399", str(free_port())).replace("sleep 5", "sleep 0.5")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", script],
        env={**up.environment, "PATH": path},
        cwd=up.data.parent,
        check=True,
        timeout=START_S,
    )
    with Client(start().ready()) as client:
        views = [client.jobs.get(job) for job in jobs]
    assert {view.state for view in views} == {State.SUCCEEDED}


# field case 37
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
    start: Callable[..., Up], name: str
) -> None:
    times = {"lease_s": 6, "tuning.visibility_timeout_s": 4, "tuning.sweep_interval_s": 0.5}
    up = start(engine_options={"token_s": 0.1}, **times)
    with Client(up.ready()) as client:
        capture = {"layers": "all", "positions": "all_prompt"}
        job = client.submit(model="fake", prompts=["hello"], max_tokens=20, capture=capture)
        wait_until(lambda: client.jobs.get(job.id).state is not State.QUEUED)
        killed = up.pid(name)
        os.kill(killed, signal.SIGKILL)
        assert client.wait(job.id, timeout=120).state is State.SUCCEEDED
        captured = client.result(job.id).capture_results
    assert captured.status == "ok"
    assert len(captured.files) == 1
    up.until(lambda: f"{name} ended with" in up.output())
    up.until(lambda: up.state()["processes"].get(name, [killed])[0] != killed)


@pytest.mark.long
def test_up_exits_with_the_reason_of_a_failed_engine(start: Callable[..., Up]) -> None:
    up = start(fault="start:reason=GPT-J is not supported")
    assert up.process.wait(START_S) == 1
    last = up.output().strip().splitlines()[-1]
    assert last.startswith("error: worker ended with")
    assert "GPT-J is not supported" in last
    assert "worker.log" in last


def test_ctrl_c_while_it_starts_leaves_no_process(start: Callable[..., Up]) -> None:
    up = start(fault="slow_start:seconds=600")
    up.until(lambda: (up.data / STATE_FILE).exists() and "worker" in up.state()["processes"])
    up.note_sessions()
    assert up.interrupt() == 0


@pytest.mark.long
def test_up_cleans_up_after_a_killed_up(start: Callable[..., Up]) -> None:
    up = start()
    up.ready()
    redis, born = up.state()["processes"]["redis"]
    up.process.kill()
    up.process.wait()
    assert birth(redis) == born, "Redis outlives a supervisor that is killed"
    again = start()
    again.ready()
    assert birth(redis) != born
    assert f"stopped redis (pid {redis})" in again.output()


@pytest.mark.matrix
def test_everything_up_starts_is_private_to_the_account(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)  # as a former version left it
    up = start(auth="keys")
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
    shown = [data / STATE_FILE, *(data / "logs").glob("*.log")]
    shown += [Path(f"/proc/{pid}/cmdline") for pid, _ in up.state()["processes"].values()]
    assert not any(password in text for text in [up.output(), *(p.read_text() for p in shown)])
    assert "redis://:***@127.0.0.1:" in up.output()
    # so does Flower
    auth = (data / "secrets" / "flower.auth").read_text().strip()
    assert str(data / "secrets" / "flower.auth") in up.output()
    assert auth not in up.output()
    tasks = f"{flower_of(up)}/api/tasks"
    user, _, word = auth.partition(":")
    assert httpx2.get(tasks).status_code == 401
    assert httpx2.get(tasks, auth=(user, word)).status_code == 200
    # and the relay: a forged receipt of a running job does not get in
    with Outbox(tmp_path / "forged", "w1", 0, up.environment["MIDSTREAM_RELAY_URL"]) as forged:
        forged.append(receipt("job_x", 0, worker="w1"))
        assert not forged.flush(2.0)
        assert not forged._sender.connected
    # callers need a key, and the command that is printed makes the first
    with pytest.raises(MidstreamError, match="no API key given"), Client(url) as client:
        client.models()
    command = re.search(r"create the first one: (MIDSTREAM_DATA_DIR=.*)", up.output())
    assert command is not None
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{plain['PATH']}"
    key = subprocess.check_output(  # in another terminal, from another folder
        ["bash", "-c", command[1]], env=plain | {"PATH": path}, cwd="/", text=True, timeout=120
    )
    with Client(url, key.strip()) as client:
        done = client.run(model="fake", prompts=["hello"], capture={"layers": "all"}, timeout=90)
        assert done.capture_results.status == "ok"
    assert "redis" in up.midstream("doctor").stdout


@pytest.mark.matrix
def test_every_path_of_flower_needs_the_password(start: Callable[..., Up]) -> None:
    """Also those that Flower itself leaves open.

    The observe key opens its metrics, and the API's, and nothing else.
    """
    key = new_key()
    admin = new_key()
    password = "ada:a pass:word"
    keys = {"admin_key": admin, "observe_key": key, "flower_auth": f"{password},bob:x"}
    up = start(auth="keys", **keys)
    url = up.ready()

    def status(path: str, authorization: str | None, base: str = flower_of(up)) -> int:
        headers = {"Authorization": authorization} if authorization else {}
        answer = httpx2.get(f"{base}{path}", headers=headers)
        assert "www-authenticate" in answer.headers or answer.status_code != 401
        return answer.status_code

    wrong = [None, basic("ada:wrong"), basic("ada"), "Basic x", "Bearer x", f"Bearer {admin}x"]
    paths = ["/", "/metrics", "/healthcheck", "/tasks", "/api/tasks", "/api/workers"]
    for path in (*paths, "/static/css/flower.css", "/login", "/x"):
        assert {status(path, authorization) for authorization in wrong} == {401}, path
        assert status(path, basic(password)) != 401
    observing = f"Bearer {key}"
    of_flower = [status(path, observing) for path in ("/metrics", "/api/tasks", "/healthcheck")]
    of_api = [status(path, observing, url) for path in ("/metrics", "/v1/status", "/v1/jobs")]
    assert of_flower == [200, 401, 401]
    assert of_api == [200, 200, 403]


@pytest.mark.matrix
def test_a_failing_demo_stops_what_it_started(start: Callable[..., Up], tmp_path: Path) -> None:
    """The fake engine is not the demo's model: it has other layers."""
    demo = start(command=("demo", "--data", str(tmp_path / "data")))
    demo.until(lambda: (demo.data / STATE_FILE).exists() and "flower" in demo.state()["processes"])
    demo.note_sessions()
    assert demo.process.wait(START_S) == 1
    assert "stack up" in demo.output()
    assert "fail " in demo.output()
    assert ", failures: " in demo.output().strip().splitlines()[-1]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small ext4; needs the right to mount one."""
    image = tmp_path / "image"
    folder = tmp_path / "disk"
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


def submitted(url: str) -> httpx2.Response:
    capture = {"layers": "all", "positions": "all_prompt"}
    body = {"model": "fake", "prompts": ["hello"], "sampling": {"max_tokens": 2}}
    return httpx2.post(f"{url}/v1/jobs", json=body | {"capture": capture}, timeout=60)


def refused_for(url: str, trouble: str) -> bool:
    """Is a job refused for this trouble? Other answers are problems of ours, and none a 500."""
    with contextlib.suppress(httpx2.TransportError):  # it is being started again
        answer = submitted(url)
        assert answer.status_code in (202, 503), answer.text
        if answer.status_code == 503:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["retry-after"]
            return trouble in answer.json()["detail"]
    return False


def missing_of(url: str) -> str:
    """What `/readyz` says is missing."""
    with contextlib.suppress(httpx2.TransportError):  # it is being started again
        readiness = httpx2.get(f"{url}/readyz", timeout=30)
        assert readiness.status_code == 503
        return " ".join(readiness.json()["missing"])
    return ""


@pytest.mark.matrix
def test_up_outlives_a_full_disk_and_a_read_only_one(start: Callable[..., Up], disk: Path) -> None:
    up = start(disk, lease_s=6, **{"tuning.sweep_interval_s": 0.5})
    url = up.ready()
    fill(disk / "filler")
    up.until(lambda: "disk full" in up.output())
    up.until(lambda: refused_for(url, "disk full"))
    up.until(lambda: "outbox: disk full" in missing_of(url))  # each part notices by itself
    status = up.midstream("status")
    assert status.returncode == 1
    assert "is not ready: disk full" in status.stdout
    assert "first remove by hand" in up.midstream("doctor").stdout
    os.kill(up.pid("api"), signal.SIGKILL)
    up.until(lambda: refused_for(url, ""))
    os.kill(up.pid("redis"), signal.SIGKILL)
    up.until(lambda: "redis ended with" in up.output())
    up.until(lambda: refused_for(url, ""))
    (disk / "filler").unlink()
    up.until(lambda: "is writable again" in up.output())
    up.until(lambda: httpx2.get(f"{url}/readyz", timeout=30).status_code == 200)
    with Client(url) as client:
        result = client.result(client.wait(submitted(url).json()["id"], timeout=120).id)
        assert result.capture_results.status == "ok"
    assert up.output().count("disk full") == 1, up.output()
    up.until(lambda: set(up.state()["processes"]) == PARTS)

    # as the kernel does after an error of the disk
    subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)
    up.until(lambda: "disk read-only" in up.output())
    up.until(lambda: refused_for(url, "disk read-only"))
    up.sessions |= {up.pid(name) for name in up.state()["processes"]}
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(90) == 0
    assert up.output().count("disk read-only") == 1


def test_an_up_on_a_read_only_disk_says_so(start: Callable[..., Up], disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    up = start(disk)
    assert up.process.wait(START_S) == 1
    last = up.output().strip().splitlines()[-1]
    assert last == f"error: data_dir: disk read-only: {disk} cannot be written"


# --- Clients and commands of other processes ------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MIDSTREAM_")]:
        monkeypatch.delenv(name)


def test_a_client_without_an_address_takes_the_stack_on_the_data_directory(
    up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_DATA_DIR", str(up.data))
    with Client() as client:
        assert client.url == up.ready()
        assert client.models() == ["fake"]
    stack = discovery.running(up.data)
    assert stack is not None
    assert httpx2.get(f"{client.url}/healthz").json()["instance"] == stack.instance


def test_an_idle_data_directory_is_an_error_and_no_other_stack_is_used(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_DATA_DIR", str(tmp_path / "other"))
    with pytest.raises(
        ServerUnreachable, match=r"the stack on .*other is not running; `midstream up` starts it"
    ):
        Client()


@pytest.mark.parametrize("lie", ["a dead process", "another process"])
def test_a_stale_state_file_is_ignored(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """As after a crash, or when the port went to another stack."""
    state = up.state() | {"pid": os.getpid() if lie == "another process" else 2**22 + 1}
    (tmp_path / STATE_FILE).write_text(json.dumps(state))
    monkeypatch.setenv("MIDSTREAM_DATA_DIR", str(tmp_path))
    words = "the stack at" if lie == "another process" else "is not running"
    with pytest.raises(ServerUnreachable, match=words):
        Client()


def test_a_stack_of_another_user_is_not_used(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_API_PORT", str(httpx2.URL(up.ready()).port))
    monkeypatch.chdir(up.data.parent)
    assert discovery.find_url(load_settings()) == up.ready()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert discovery.running(up.data) is None
    with pytest.raises(ServerUnreachable, match=r"belongs to another user \(uid \d+\)"):
        discovery.find_url(load_settings())


def test_status_names_processes_ports_and_disk(up: Up) -> None:
    done = up.midstream("status")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{up.ready()} is ready" in done.stdout
    for word in (
        "model fake",
        f"data  {up.data}",
        "redis",
        "relay",
        "worker",
        "callbacks",
        str(up.pid("worker")),
        "disk: ",
        " free",
    ):
        assert word in done.stdout
    status = json.loads(up.midstream("status", "--json").stdout)
    assert status["processes"]["api"] == {
        "pid": up.pid("api"),
        "ports": [httpx2.URL(up.ready()).port],
    }
    assert status["disk"]["bytes"]["logs"] > 0
    assert status["trouble"] == ""


def test_flower_without_a_password_checks_the_host_name(up: Up) -> None:
    flower = re.search(r"flower (http://\S+)", up.output())
    assert flower is not None
    for path, host in (("/api/tasks", "evil.example"), ("/metrics", "evil.example:5555")):
        assert httpx2.get(f"{flower[1]}{path}", headers={"Host": host}).status_code == 421


def test_logs_of_one_process_or_all(up: Up) -> None:
    assert "worker ready" in up.midstream("logs", "worker").stdout
    both = up.midstream("logs", "worker", "relay", "-n", "1")
    assert [line.split(" | ")[0].strip() for line in both.stdout.splitlines()] == [
        "worker",
        "relay",
    ]
    wrong = up.midstream("logs", "worke")
    assert wrong.returncode == 1
    assert "did you mean 'worker'?" in wrong.stderr


@pytest.mark.long
def test_down_stops_everything_and_status_says_that_nothing_runs(tmp_path: Path) -> None:
    with closing(Up(tmp_path / "data", api_port=free_port())) as up:
        up.ready()
        pids = up.state()["processes"].values()
        done = up.midstream("down")
        assert done.returncode == 0, done.stderr
        assert f"stopped the stack on {up.data}" in done.stdout
        assert [pid for pid, born in pids if birth(pid) == born] == [], (
            "it returns when all has ended"
        )
        assert up.process.wait(60) == 0
    after = up.midstream("status")
    assert after.returncode == 3
    assert f"no stack is running on {up.data}" in after.stdout
    again = up.midstream("down")
    assert again.returncode == 0
    assert "no stack is running" in again.stdout
    assert "worker ready" in up.midstream("logs", "worker").stdout
