"""Does one command run the whole stack, keep it running, and leave nothing behind?"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from up_kit import START_S, Up

from midstream.client import Client
from midstream.client.processes import birth
from midstream.client.supervisor import STATE_FILE
from midstream.schemas.jobs import State


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    started = Up(tmp_path / "data")
    yield started
    started.close()


def test_one_line_says_where_everything_is_and_ctrl_c_leaves_no_process(up: Up) -> None:
    url = up.ready()
    lines = [line for line in up.output().splitlines() if "ready:" in line]
    assert len(lines) == 1
    for part in (
        "api http://127.0.0.1:",
        "openapi ",
        "flower http://127.0.0.1:",
        "redis redis://127.0.0.1:",
        "model fake",
        f"data {up.data}",
    ):
        assert part in lines[0]
    assert set(up.state()["processes"]) == {"redis", "relay", "worker", "api", "callbacks", "flower"}
    flower = lines[0].partition("flower ")[2].split()[0]
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert httpx.get(f"{flower}/healthcheck").status_code == 200
    assert up.interrupt() == 0
    assert up.alive() == []
    assert not (up.data / STATE_FILE).exists()


def test_what_was_accepted_is_there_after_a_stop_and_another_start(up: Up, tmp_path: Path) -> None:
    with Client(up.ready()) as client:
        done = client.run(model="fake", prompts=["hello"], sampling={"max_tokens": 4}, timeout=90)
    assert up.interrupt(signal.SIGTERM) == 0
    again = Up(tmp_path / "data")
    try:
        with Client(again.ready()) as client:
            assert client.result(done.id) == done
    finally:
        again.close()


def test_a_second_up_on_the_same_data_directory_says_so_and_harms_nothing(up: Up) -> None:
    url = up.ready()
    second = up.midstream("up")
    assert second.returncode == 1
    assert str(up.data) in second.stderr
    assert str(up.process.pid) in second.stderr
    assert url in second.stderr
    assert httpx.get(f"{url}/readyz").status_code == 200
    assert up.state()["pid"] == up.process.pid


# field case 37
@pytest.mark.parametrize("name", ["worker", "relay", "api", "redis"])
def test_a_part_that_is_killed_is_started_again_and_the_job_completes(tmp_path: Path, name: str) -> None:
    up = Up(tmp_path / "data", fake_token_s=0.1, lease_s=6, visibility_timeout_s=4, sweep_interval_s=0.5)
    try:
        with Client(up.ready()) as client:
            capture = {"layers": "all", "positions": "all_prompt"}
            job = client.submit(model="fake", prompts=["hello"], sampling={"max_tokens": 20}, capture=capture)
            while client.job(job.id).state is State.QUEUED:
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


def test_an_engine_that_does_not_start_ends_up_with_its_reason(tmp_path: Path) -> None:
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


def test_an_up_that_was_killed_is_cleaned_up_by_the_next(up: Up, tmp_path: Path) -> None:
    up.ready()
    redis, born = up.state()["processes"]["redis"]
    up.process.kill()
    up.process.wait()
    assert birth(redis) == born, "Redis outlives a supervisor that is killed"
    again = Up(tmp_path / "data")
    try:
        again.ready()
        assert birth(redis) != born
        assert f"ended redis (pid {redis})" in again.output()
    finally:
        again.close()
    assert again.alive() == []
    assert up.alive() == []


def test_a_demo_that_falls_short_fails_and_stops_what_it_started(tmp_path: Path) -> None:
    demo = Up(
        tmp_path / "data", command=("demo", "--keep", str(tmp_path / "data"))
    )  # the fake engine is not the demo's model: it has other layers
    try:
        demo.until(lambda: (demo.data / STATE_FILE).exists() and "flower" in demo.state()["processes"])
        demo.note_sessions()
        assert demo.process.wait(START_S) == 1
    finally:
        demo.close()
    assert "stack up" in demo.output()
    assert "✗" in demo.output()
    assert demo.output().strip().splitlines()[-1].startswith("error: ")
    assert demo.alive() == []
