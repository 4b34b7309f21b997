"""Does our own Redis start, hold its data through a kill, and say what is wrong when it cannot?"""

import stat
from pathlib import Path

import pytest
import redis
from redis_kit import handed_over

from midstream.broker import redis_server
from midstream.schemas.errors import MidstreamError


def test_what_was_written_is_there_after_kill_9_and_restart(tmp_path: Path) -> None:  # field case 37
    server = redis_server.start(tmp_path)
    with redis.Redis.from_url(server.url) as client:
        for number in range(200):
            client.rpush("list", number)
    handed_over(server.url)
    server.kill()
    again = redis_server.start(tmp_path, port=server.port, maxmemory_mib=64)
    try:
        with redis.Redis.from_url(again.url) as client:
            assert client.config_get("maxmemory")["maxmemory"] == str(64 << 20)
            assert client.llen("list") == 200
            assert client.config_get("appendonly")["appendonly"] == "yes"
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
            assert client.config_get("bind")["bind"] == "127.0.0.1"
    finally:
        again.stop()


def test_no_other_account_reads_what_redis_keeps(tmp_path: Path) -> None:
    server = redis_server.start(tmp_path / "data" / "redis")
    try:
        assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.directory.parent.stat().st_mode) & 0o077 != 0, "captures beside it may be others' to read"
    finally:
        server.stop()


def test_a_redis_that_syncs_always_has_on_disk_what_it_answered(tmp_path: Path) -> None:  # field case 37
    server = redis_server.start(tmp_path, appendfsync="always")
    with redis.Redis.from_url(server.url) as client:
        client.rpush("list", *range(200))
    server.kill()
    again = redis_server.start(tmp_path, appendfsync="always")
    with redis.Redis.from_url(again.url) as client:
        assert client.llen("list") == 200
        assert client.config_get("appendfsync")["appendfsync"] == "always"
    again.stop()


def test_half_a_transaction_that_a_power_failure_left_is_never_applied(tmp_path: Path) -> None:
    """Redis 6.2 drops the command that was cut off, keeps what stood before it in its transaction, and applies that a start later."""

    def start_and_add(times: int) -> list[bytes | None]:
        server = redis_server.start(tmp_path)
        with redis.Redis.from_url(server.url) as client:
            found: list[bytes | None] = client.mget("a", "b", "c")
            for _ in range(times):
                client.eval("for _, key in ipairs({'a', 'b', 'c'}) do redis.call('INCR', key) end", 0)
        server.stop()
        return found

    start_and_add(2)
    (file,) = (path for path in tmp_path.rglob("*.aof") if path.is_file())
    with file.open("rb+") as log:
        log.truncate(file.stat().st_size - 40)  # inside the second
    assert start_and_add(1) == [b"1", b"1", b"1"]
    assert start_and_add(0) == [b"2", b"2", b"2"]


def test_a_second_server_on_the_same_directory_is_refused_with_the_pid(tmp_path: Path) -> None:
    server = redis_server.start(tmp_path)
    try:
        with pytest.raises(MidstreamError, match=str(server.pid)) as caught:
            redis_server.start(tmp_path)
        assert caught.value.kind == "conflict"
    finally:
        server.stop()
    redis_server.start(tmp_path).stop()


def test_a_taken_port_is_an_error_with_the_log_and_not_a_hang(tmp_path: Path) -> None:
    first = redis_server.start(tmp_path / "first")
    try:
        with pytest.raises(MidstreamError) as caught:
            redis_server.start(tmp_path / "second", port=first.port)
        assert caught.value.kind == "unavailable"
        assert "in use" in caught.value.detail
    finally:
        first.stop()


def test_stop_may_be_repeated(tmp_path: Path) -> None:
    server = redis_server.start(tmp_path)
    server.stop()
    server.stop()
    assert server.process.returncode == 0
