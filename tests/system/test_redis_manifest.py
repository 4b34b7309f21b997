"""Does the Redis of Compose and Kubernetes start after a power failure without half a transaction?

The script that both run, with folders and a port of the test, and this environment's server.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from ports import free_port
from wait_kit import wait_until

from midstream_ops.redis_server import executable

SCRIPT = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base" / "redis.sh"
TRANSACTION = "redis.call('SET', KEYS[1], 'first') redis.call('SET', KEYS[2], 'second')"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], "redis.Redis"]]:
    """Starts the server, after it has ended the one before, and returns its client."""
    commands = tmp_path / "bin"
    data = tmp_path / "data"
    commands.mkdir()
    data.mkdir()
    for name in ("redis-server", "redis-check-aof"):
        installed = shutil.which(name)
        (commands / name).symlink_to(installed or executable())
    (tmp_path / "redis_url").write_text("redis://:secret@redis:6379/0")
    port = free_port()
    text = SCRIPT.read_text()
    for fixed, own in (
        ("/run/secrets", str(tmp_path)),
        ("/tmp/redis.conf", f"{tmp_path}/redis.conf"),
        ("/data", str(data)),
        ("0.0.0.0 --port 6379", f"127.0.0.1 --port {port}"),
    ):
        assert fixed in text
        text = text.replace(fixed, own)
    (tmp_path / "redis.sh").write_text(text)
    running: list[subprocess.Popen[bytes]] = []

    def end() -> None:
        for process in running:
            process.terminate()
            process.wait()
        running.clear()

    def started() -> "redis.Redis":
        end()
        process = subprocess.Popen(
            ["sh", tmp_path / "redis.sh"],
            env={"PATH": f"{commands}:/usr/bin:/bin"},
            stdout=(tmp_path / "log").open("ab"),
        )
        running.append(process)
        client = redis.Redis(port=port, password="secret", retry=None)

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

        wait_until(answers)
        return client

    yield started
    end()


def log_of(folder: Path) -> Path:
    (log,) = folder.glob("data/*/*.incr.aof")
    return log


@pytest.mark.parametrize("lost", [1, 5, 30, 47])
@pytest.mark.parametrize("zeros", [0, 4096])
def test_a_transaction_that_was_cut_off_never_comes_back(
    start: Callable[[], "redis.Redis"], tmp_path: Path, lost: int, zeros: int
) -> None:
    client = start()
    client.set("before", "1")
    client.eval(TRANSACTION, 2, "a", "b")
    client.shutdown(nosave=True)
    log = log_of(tmp_path)
    whole = log.read_bytes()
    log.write_bytes(whole[:-lost] + bytes(zeros))
    start().set("after", "1")
    assert sorted(start().keys()) == [b"after", b"before"]
    assert [path.name[: len(log.name)] for path in log.parent.glob("*.cut-at-*")] == [log.name]


@pytest.mark.parametrize("size", [b"$19", b"$9999"], ids=["in a command", "beyond the end"])
def test_damage_in_the_middle_is_not_cut_off(
    start: Callable[[], "redis.Redis"], tmp_path: Path, size: bytes
) -> None:
    """A size beyond the end looks to Redis like a command that was cut off there."""
    client = start()
    client.set("first", "0123456789")
    client.set("second", "1")
    client.shutdown(nosave=True)
    log = log_of(tmp_path)
    damaged = log.read_bytes().replace(b"$10\r\n", size + b"\r\n")
    log.write_bytes(damaged)
    with pytest.raises(AssertionError, match="append only file"):
        start()
    assert log.read_bytes() == damaged
