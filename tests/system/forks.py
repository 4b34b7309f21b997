"""Starts the service's processes in a short time: for each module that they run, one process
imports what it needs once, and each is a fork of it that goes on as `python -m MODULE` would.

    process = start("midstream.api", to_environment(settings), folder, log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0

An import of the API takes more than a second of a slow core, and the system tests start hundreds of
processes. `tests/system/test_up.py`, the walks and the demo start them as users do.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import uuid
from functools import cache
from pathlib import Path
from typing import Any

#: Module that runs → what is imported for it: a package's own module `__main__` does so, and a
#: worker imports its engine only when it is at work.
IMPORTS = {
    "midstream.api": ("midstream.api.__main__",),
    "midstream.workers": (
        "midstream.workers.__main__",
        "midstream.workers.engines",
        "midstream_fake_engine",
    ),
}


class Fork:
    """As much of `subprocess.Popen` as the tests use. The process is a child of the nursery, which
    says how it ended.
    """

    def __init__(self, nursery: "Nursery", pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._end = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._end)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, of a signal as a negative number. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = self._nursery.ask(end=self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = Fork | subprocess.Popen[bytes]


class Nursery:
    """The process that is forked to run a module; it ends with this one."""

    def __init__(self, module: str) -> None:
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), module],
            env={key: text for key, text in os.environ.items() if key != "TMPDIR"}
            | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, "the nursery ended"
        return int(answer)


@cache
def nursery(module: str) -> Nursery:
    return Nursery(module)


def start(module: str, environment: dict[str, str], directory: Path, log: Path) -> Fork:
    """Start `python -m module` as the leader of a session, in `directory`; it appends to `log`.

    `environment`: beside the variables of this process that are no settings.
    """
    request = {
        "environment": beside(environment),
        "directory": str(directory),
        "log": str(log),
    }
    return Fork(nursery(module), nursery(module).ask(**request))


def start_anew(
    module: str, environment: dict[str, str], directory: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start it by the interpreter, as a user would: what imports torch cannot be forked."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            env=beside(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=directory,
            start_new_session=True,
        )


def beside(environment: dict[str, str]) -> dict[str, str]:
    others = {key: text for key, text in os.environ.items() if not key.startswith("MIDSTREAM_")}
    return others | {"PYTHONUNBUFFERED": "1"} | environment


# -- in the nursery and its forks


def await_birth() -> dict[str, Any]:
    """Answer requests; return in each fork, with what it is to run."""
    with os.fdopen(os.dup(1), "w") as answers:
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            if "end" in request:
                _, status = os.waitpid(request["end"], 0)
                answer = os.waitstatus_to_exitcode(status)
            else:
                answer = os.fork()
                if answer == 0:
                    return request
            print(answer, file=answers, flush=True)
    sys.exit()


def become(birth: dict[str, Any]) -> None:
    """Make this fork look like a process that was started by itself."""
    os.setsid()
    os.chdir(birth["directory"])
    output = os.open(birth["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 64)
    os.environ.clear()
    os.environ.update(birth["environment"])
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [birth["directory"], *(name for name in folders if name not in sys.path)]
    boot = uuid.uuid4().hex  # otherwise that of the nursery, which was made by an import
    for module in list(sys.modules.values()):
        if "BOOT" in vars(module):
            vars(module)["BOOT"] = boot


if __name__ == "__main__":
    (wanted,) = sys.argv[1:]
    for name in IMPORTS.get(wanted, (wanted,)):
        importlib.import_module(name)
    del sys.modules[IMPORTS.get(wanted, (wanted,))[0]]  # it runs anew, under the name `__main__`
    assert threading.active_count() == 1, "a fork has no other thread than the one that forks"
    assert "torch" not in sys.modules, "its threads would not survive a fork"
    become(await_birth())
    del sys.argv[1:]
    runpy.run_module(wanted, run_name="__main__", alter_sys=True)
