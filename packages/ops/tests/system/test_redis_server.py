"""Does our own Redis start, hold its data through a kill, and say what is wrong when it cannot?"""

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_kit import handed_over
from refusal_kit import refuses
from wait_kit import wait_until

from midstream.schemas.base.errors import MidstreamError
from midstream_ops import redis_server


@pytest.mark.parametrize("appendfsync", ["everysec", "always"])
def test_what_was_written_is_there_after_kill_9_and_restart(
    tmp_path: Path, appendfsync: str
) -> None:
    # field case 37
    folder = tmp_path / "data" / "redis"
    server = redis_server.start(folder, appendfsync=appendfsync)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) & 0o077 != 0, (
        "captures beside it may be others' to read"
    )
    with redis.Redis.from_url(server.url) as client:
        client.rpush("list", *range(200))
    if appendfsync != "always":  # then it is on the disk when it is answered
        handed_over(server.url)
    server.kill()
    again = redis_server.start(folder, server.port, appendfsync=appendfsync, maxmemory_mib=64)
    options = {
        "maxmemory": str(64 << 20),
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": appendfsync,
        "bind": "127.0.0.1",
    }
    with redis.Redis.from_url(again.url) as client:
        assert client.llen("list") == 200
        assert {name: client.config_get(name)[name] for name in options} == options
    for _ in range(2):  # to stop it may be repeated
        again.stop()
    assert again.process.returncode == 0


def test_a_taken_folder_or_port_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    server = redis_server.start(tmp_path / "first")
    try:
        with refuses(match=str(server.pid), kind="conflict"):
            redis_server.start(tmp_path / "first")
        with refuses(match="in use", kind="unavailable"):
            redis_server.start(tmp_path / "second", port=server.port)
    finally:
        server.stop()
    redis_server.start(tmp_path / "first").stop()


def test_a_server_that_was_killed_while_it_rewrote_its_log_starts_again(tmp_path: Path) -> None:
    """The child that rewrites it lives on, and holds the lock of the folder."""
    server = redis_server.start(tmp_path)
    with redis.Redis.from_url(server.url) as client:
        client.mset(dict.fromkeys(map(str, range(1000)), "x"))
        handed_over(server.url)
        client.config_set("rdb-key-save-delay", 50_000)
        client.bgrewriteaof()
        wait_until(lambda: client.info("persistence")["aof_rewrite_in_progress"])
    server.kill()
    again = redis_server.start(tmp_path, server.port)
    try:
        with redis.Redis.from_url(again.url) as client:
            assert client.dbsize() == 1000
    finally:
        again.stop()


def test_a_truncated_aof_transaction_is_not_applied(tmp_path: Path) -> None:
    """Redis 6.2 drops the command that was cut off, keeps what stood before it in its transaction,
    and applies that a start later.
    """

    def start_and_add(times: int) -> list[bytes | None]:
        server = redis_server.start(tmp_path)
        with redis.Redis.from_url(server.url) as client:
            found: list[bytes | None] = client.mget("a", "b", "c")
            for _ in range(times):
                client.eval(
                    "for _, key in ipairs({'a', 'b', 'c'}) do redis.call('INCR', key) end", 0
                )
        server.stop()
        return found

    start_and_add(2)
    (file,) = (path for path in tmp_path.rglob("*.aof") if path.is_file())
    with file.open("rb+") as log:
        log.truncate(file.stat().st_size - 40)  # inside the second
    assert start_and_add(1) == [b"1", b"1", b"1"]
    assert start_and_add(0) == [b"2", b"2", b"2"]


def test_a_server_with_known_faults_is_named_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(redis_server, "advisory", lambda _: "it has known faults")
    redis_server.start(tmp_path, say=said.append).stop()
    assert said == ["it has known faults"]


def rewrite(client: "redis.Redis") -> None:
    """Let the append-only file begin with a snapshot."""
    client.bgrewriteaof()

    def rewritten() -> bool:
        told = client.info("persistence")
        return not (told["aof_rewrite_in_progress"] or told["aof_rewrite_scheduled"])

    wait_until(rewritten)


def write_some(folder: Path, *, rewritten: bool = False) -> Path:
    """Ten keys in an append-only file, which is returned.

    `rewritten`: it begins with a snapshot.
    """
    server = redis_server.start(folder)
    with redis.Redis.from_url(server.url) as client:
        for number in range(10):
            client.set(f"key{number}", bytes(range(256)) + bytes(64))
            if rewritten and number == 4:
                rewrite(client)
    server.stop()
    return redis_server._written_file(folder)


def keys_after_start(folder: Path, said: list[str]) -> int:
    server = redis_server.start(folder, say=said.append)
    try:
        with redis.Redis.from_url(server.url) as client:
            return int(client.dbsize())
    finally:
        server.stop()


HALF = b"*3\r\n$3\r\nSET\r\n$5\r\nkey10\r\n$999\r\nwhat was"
OPEN = b"*1\r\n$5\r\nMULTI\r\n*3\r\n$3\r\nSET\r\n$4\r\nkeyA\r\n$1\r\n1\r\n"


@pytest.mark.parametrize(
    ("tail", "rewritten"),
    [(bytes(3 << 20), True), (HALF + bytes(5000), True), (OPEN + bytes(100), False)],
    ids=["zeros", "half a command", "half a transaction"],
)
def test_an_aof_that_ends_in_zeros_is_repaired(
    tmp_path: Path, tail: bytes, rewritten: bool
) -> None:
    """As ext4 leaves it: blocks that were allocated, and never written when the machine failed."""
    file = write_some(tmp_path, rewritten=rewritten)
    whole = file.read_bytes()
    file.write_bytes(whole + tail)
    said: list[str] = []
    assert keys_after_start(tmp_path, said) == 10
    assert f"{len(tail)} bytes from byte {len(whole)} were cut off" in said[0]
    (kept,) = file.parent.glob("*.cut-at-*")
    assert str(kept) in said[0]
    assert kept.read_bytes() == tail
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_aof_damage_in_the_middle_is_not_truncated(tmp_path: Path) -> None:
    """The command that is named instead exists here, and does what it says."""
    file = write_some(tmp_path)
    whole = file.read_bytes()
    middle = len(whole) // 2
    length = whole.index(b"$320\r\n", middle)
    for damaged in (
        whole[:middle] + bytes(40) + whole[middle + 40 :],
        whole[:length] + b"$99320\r\n" + whole[length + 6 :],  # beyond the end of the file
    ):
        file.write_bytes(damaged)
        with pytest.raises(MidstreamError, match="Nothing was changed") as caught:
            redis_server.start(tmp_path)
        assert file.read_bytes() == damaged
    command = re.search(r"`(cp .*?)`", caught.value.detail)
    assert command is not None
    subprocess.run(command[1], shell=True, input=b"y\n", check=True, capture_output=True)
    assert 0 < keys_after_start(tmp_path, []) < 10


def test_redis_loading_may_take_long_while_it_progresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_some(tmp_path, rewritten=True)
    server = redis_server.start(tmp_path)
    with redis.Redis.from_url(server.url) as client:
        # it says how far it is every 2 MB
        client.mset({f"more{number}": os.urandom(100_000) for number in range(300)})
        rewrite(client)
    server.stop()
    spawn = redis_server._spawn

    def slowly(
        binary: str, directory: Path, port: int, lock: int, asked: dict[str, str], password: str
    ) -> Any:
        return spawn(binary, directory, port, lock, asked | {"key-load-delay": "10000"}, password)

    monkeypatch.setattr(redis_server, "_spawn", slowly)
    monkeypatch.setattr(redis_server, "STALLED_S", 2.0)
    monkeypatch.setattr(redis_server, "PROGRESS_S", 0.2)
    said: list[str] = []
    assert keys_after_start(tmp_path, said) == 310
    assert any(
        re.match(r"redis is loading its data: [\d.]+ %, about \d+ s left", line) for line in said
    )


def test_a_redis_start_without_progress_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "redis-server"
    stuck.write_text("#!/bin/sh\nexec sleep 600\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(redis_server, "executable", lambda: str(stuck))
    monkeypatch.setattr(redis_server, "STALLED_S", 0.5)
    with pytest.raises(MidstreamError, match="no progress"):
        redis_server.start(tmp_path / "data")


def test_a_redis_that_cannot_write_to_its_disk_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers PING with an error then, as a write; whoever started it would end, and with it the
    stack.
    """

    def refused(_: redis.Redis) -> None:
        raise redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")

    monkeypatch.setattr(redis.Redis, "ping", refused)
    server = redis_server.start(tmp_path / "redis")
    try:
        assert server.process.poll() is None
    finally:
        server.stop()
