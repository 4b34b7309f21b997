"""Clients and commands find the stack of a data directory and no other, and can inspect and stop it
from another process.
"""

import json
import os
import re
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from ports import free_port
from up_kit import Up

from midstream import Client, ServerUnreachable
from midstream.client.sdk import discovery
from midstream.client.sdk.discovery import STATE_FILE
from midstream.client.stack.processes import birth


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MIDSTREAM_")]:
        monkeypatch.delenv(name)


def test_a_client_without_an_address_takes_the_stack_on_the_data_directory(
    up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_DATA_DIR", str(up.data))
    with Client() as client:
        assert (client.url, client.models()) == (up.ready(), ["fake"])
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
    assert discovery.find_url() == up.ready()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert discovery.running(up.data) is None
    with pytest.raises(ServerUnreachable, match=r"belongs to another user \(uid \d+\)"):
        discovery.find_url()


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
    assert (wrong.returncode, "did you mean 'worker'?" in wrong.stderr) == (1, True)


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
    assert (after.returncode, f"no stack is running on {up.data}" in after.stdout) == (3, True)
    again = up.midstream("down")
    assert (again.returncode, "no stack is running" in again.stdout) == (0, True)
    assert "worker ready" in up.midstream("logs", "worker").stdout
