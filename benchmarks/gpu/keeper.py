"""Runs one program, and ends every process that came of it: when it has ended, and when the process
that started the keeper is gone.

    python keeper.py PID PROGRAM ARGUMENTS…

PID is the process that starts the keeper. A command limit may kill that one with SIGKILL, so that
it cannot end anything; the kernel then sends SIGTERM to the keeper. The keeper is the subreaper of
what it started: a process that outlives its parent becomes the keeper's child, whatever session it
is in.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: `prctl`, from <linux/prctl.h>.
_SIGNAL_AT_PARENTS_END = 1
_SUBREAPER = 36
_prctl: Callable[..., Any] = ctypes.CDLL(None).prctl
#: How long processes may take to end after SIGKILL: one with a GPU has memory to give back.
ENDING_S = 15.0


def end_with_parent(number: int) -> None:
    """The calling process gets this signal when the thread that started it ends."""
    _prctl(_SIGNAL_AT_PARENTS_END, number, 0, 0, 0)


def below(pid: int) -> list[int]:
    """The processes that `pid` started, theirs, and so on."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it ended
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


def end_all() -> None:
    """Kills and reaps all that this process started; gives up after `ENDING_S`."""
    until = time.monotonic() + ENDING_S
    while time.monotonic() < until:
        for pid in below(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    signal.signal(signal.SIGTERM, _stop)
    end_with_parent(signal.SIGTERM)
    _prctl(_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # it ended before the kernel knew whom to tell
        sys.exit(128 + signal.SIGTERM)
    program = subprocess.Popen(sys.argv[2:], preexec_fn=lambda: end_with_parent(signal.SIGKILL))
    try:
        code = program.wait()
    finally:
        end_all()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
