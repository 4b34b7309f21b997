"""Starts and watches a child process, says how long to pause before its restart, diagnoses it from
its log, and stops it with its children.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from midstream.schemas.service.engine_errors import in_our_settings
from midstream.schemas.settings.instance import SESSION, STARTTIME, stat_of

from .engine_packages import advised

Announce = Callable[[str], None]

#: A log file above this size becomes `<name>.log.1`, also while its process runs.
LOG_LIMIT_BYTES = 32 << 20
#: Seconds before a dead child is restarted: the first pause, which doubles with each death, and the
#: default for the longest. After a child has run for `HEALTHY_AFTER_S`, its next pause is the first
#: pause again.
BACKOFF_S = (1.0, 4.0)
HEALTHY_AFTER_S = 10.0
#: Seconds in which a process that was left over must end, after each of two signals.
LEFTOVER_S = 20.0
#: Environment variable of every child and its descendants. Its value is the supervisor's data
#: directory, so that the next supervisor finds processes that were left running.
MARK = "SUPERVISED_BY_MIDSTREAM"

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: Matches a log line that may give the reason for a failure: `ValueError: …`, `error: …`, `… ERROR
#: …`.
_COMPLAINT = re.compile(r"\b\w*(error|exception|refused|fatal|failed)\b", re.IGNORECASE)
#: Lines without information that may follow the reason.
_NOISE = re.compile(
    (
        r"^(During handling|For further information visit|The above "
        r"exception|Traceback|\s*File |\s*\^|sys:1|.*ResourceWarning|.*leaked )"
    ),
    re.IGNORECASE,
)

#: What the model hub's client logs of a file for which all its tries failed, or are used up.
DOWNLOAD = re.compile(
    r"'(?P<why>.+)' thrown while requesting \w+ (?P<url>\S+)(?s:.*)\[Retry (\d+)/\3\]"
)

#: A worker's line about the end of its start.
SERVES = re.compile(r"^worker ready model=", re.MULTILINE)

#: How long a worker logs that its engine took to start, and for what.
STARTED = re.compile(r"engine started in ([\d.]+ s: (?:[a-z ]+ [\d.]+ s(?:, )?)+)")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A child process: its command, its log file, and how often it has died.

    It runs in its own session, so that Ctrl-C in the terminal reaches only the supervisor, which
    then stops everything in order; the kernel signals it if the supervisor is killed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        stop_timeout_s: float,
        longest_pause_s: float = BACKOFF_S[1],
    ):
        self.name = name
        self.command = list(command)
        self.environment = environment
        self.log = log
        self.stop_timeout_s = stop_timeout_s
        self.longest_pause_s = longest_pause_s
        self.process: subprocess.Popen[bytes] | None = None
        self._told = False  # to end
        self.rotated = False  # whether its output since the start is no longer all in its log
        self._log_start = 0  # where this start's output begins
        self._started = 0.0
        self._deaths = 0
        self._not_before = 0.0  # monotonic time of the next start

    def start(self) -> None:
        """Start the process. Its output is appended to its log, or discarded if the log cannot be
        opened.

        Raises OSError.
        """
        with self._open_log() as handle:
            self._log_start = handle.tell()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._told = False
        self.rotated = False
        self._started = time.monotonic()

    def _open_log(self) -> IO[bytes]:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            if self.log.exists() and self.log.stat().st_size > LOG_LIMIT_BYTES:
                self.log.rename(self.log.with_name(self.log.name + ".1"))
            return self.log.open("ab")
        except OSError:  # a disk that is full or read-only
            return open(os.devnull, "ab")

    def rotate(self) -> None:
        """Move the content of a log that is too large to `<name>.log.1`, while the process goes on
        writing to the same file. Raises OSError.

        A line of the instant between the last copy and the cut may be lost.
        """
        try:
            if self.log.stat().st_size <= LOG_LIMIT_BYTES:
                return
        except FileNotFoundError:
            return
        former = self.log.with_name(self.log.name + ".1")
        with self.log.open("rb+") as whole, former.open("wb") as kept:
            while part := whole.read(1 << 20):
                kept.write(part)
            whole.truncate(0)
        self._log_start = 0
        self.rotated = True

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def exit_code(self) -> int | None:
        """None while it runs or was never started."""
        return self.process.poll() if self.process else None

    @property
    def ending(self) -> str:
        """Exit code or name of the signal: `70`, `SIGKILL`."""
        return exit_name(self.exit_code)

    def output(self) -> str:
        """Return the output since the last start."""
        try:
            with self.log.open("rb") as handle:
                handle.seek(self._log_start)
                return _ANSI.sub("", handle.read().decode(errors="replace"))
        except OSError:
            return ""

    def last_words(self) -> str:
        """Return the log line that best explains the exit: the last error, otherwise the last line.

        For a killed process, return a text that says so.
        """
        if self.exit_code == -signal.SIGKILL:
            return "it was killed, possibly by the kernel for lack of memory"
        lines = [
            line.strip()
            for line in self.output().splitlines()
            if line.strip() and not _NOISE.match(line)
        ]
        complaints = [line for line in lines if _COMPLAINT.search(line)]
        words = (complaints or lines or ["no output"])[-1]
        return advised(in_our_settings(words)[:500])

    def died(self) -> float:
        """Record a death, or a start that failed; return the pause in seconds before the next
        start.
        """
        if time.monotonic() - self._started > HEALTHY_AFTER_S:
            self._deaths = 0
        pause: float = min(self.longest_pause_s, BACKOFF_S[0] * 2.0 ** min(self._deaths, 30))
        self._deaths += 1
        self._not_before = time.monotonic() + pause
        if self.process is not None:
            self.sweep_group()
        self.process = None
        return pause

    @property
    def due(self) -> bool:
        """Return whether the process is dead and its pause is over."""
        return self.process is None and time.monotonic() >= self._not_before

    def terminate(self) -> None:
        """Send SIGTERM, once."""
        if self.process is not None and self.process.poll() is None and not self._told:
            self._told = True
            self.process.terminate()

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Send SIGTERM, if it has not been sent, and wait; send SIGKILL after `stop_timeout_s`, or
        as soon as `hurry()` is true.

        Returns whether it exited without SIGKILL.
        """
        if self.process is None:
            return True
        self.terminate()
        exited = wait_for(
            lambda: self.process is None or self.process.poll() is not None,
            self.stop_timeout_s,
            hurry,
        )
        if not exited:
            self.process.kill()
        self.process.wait()
        self.sweep_group()
        self.process = None
        return exited

    def sweep_group(self) -> None:
        """Kill the processes that remain in the dead process's group (engine ranks, pool
        children).
        """
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            # the process leads its session, so its pid is its group's id
            os.killpg(self.process.pid, signal.SIGKILL)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_for(
    condition: Callable[[], bool],
    timeout: float,
    hurry: Callable[[], bool] = lambda: False,
    step: float = 0.05,
) -> bool:
    """Poll `condition` until it holds; False after `timeout` seconds, or as soon as `hurry()`."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline or hurry():
            return False
        time.sleep(step)
    return True


def birth(pid: int) -> int:
    """Return when the process was started, in clock ticks since boot; 0 if there is no such
    process.

    Pid and start time together identify a process, even after the pid is reused.
    """
    fields = stat_of(pid)
    return int(fields[STARTTIME]) if fields else 0


def members(session: int) -> list[int]:
    """Return the pids of a session's living processes."""
    return [pid for pid in _pids() if (fields := stat_of(pid)) and int(fields[SESSION]) == session]


def end_leftover(pid: int, born: int) -> bool:
    """Stop a process left over from a killed supervisor, and its session.

    Returns whether the process was still running.
    """
    if not born or birth(pid) != born:
        return False
    _signal(pid, signal.SIGTERM)
    if not wait_for(lambda: birth(pid) != born, LEFTOVER_S):
        _signal(pid, signal.SIGKILL)
        wait_for(lambda: birth(pid) != born, LEFTOVER_S)
    for member in members(pid):
        _signal(member, signal.SIGKILL)
    return True


def holders(path: Path) -> list[int]:
    """Return the pids of other processes that have the file open; other accounts' processes only if
    this one runs as root.
    """
    try:
        file = path.stat()
    except OSError:
        return []
    return [pid for pid in _other_pids() if _has_open(pid, file)]


def marked(value: str) -> list[int]:
    """Return the pids of other processes whose environment has `MARK` with this value."""
    line = f"{MARK}={value}".encode()
    result = []
    for pid in _other_pids():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another account
            if line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                result.append(pid)
    return result


def _other_pids() -> list[int]:
    return [pid for pid in _pids() if pid != os.getpid()]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _has_open(pid: int, file: os.stat_result) -> bool:
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another account
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(entry.path), file):
                    return True
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def exit_name(code: int | None) -> str:
    """Return an exit code as text: `70`, or the name of the signal that ended the process."""
    return next((known.name for known in signal.Signals if code == -known), str(code))


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(family_of(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals
) -> Iterator[None]:
    """Have `handler` called for these signals inside the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def sigterm_as_interrupt() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM raise KeyboardInterrupt, like Ctrl-C, so that the stack is stopped."""
    return handling(signal.default_int_handler, signal.SIGTERM)
