"""The processes of a service under a test: all of them start, or none is left."""

import signal
import subprocess
import time
from typing import Any, Self

from forks import Process


class Processes:
    """`names`: the processes that start; `processes`: those that have."""

    names: tuple[str, ...] | list[str]
    processes: dict[str, Process]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        try:
            self._start_redis()
            for name in self.names:
                self.spawn(name)
            for name in self.names:
                self.wait_ready(name)
        except BaseException:
            self.stop()
            raise
        return self

    def add(self, name: str, **changed: Any) -> None:
        """Start a process with some settings changed, and wait until it is ready."""
        self.spawn(name, **changed)
        self.wait_ready(name)

    def _ended(self, name: str, timeout: float) -> int:
        """The exit code; a process that does not end in time is killed, which fails the test."""
        process = self.processes[name]
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # Celery answers with the stacks of all threads
            time.sleep(1)
            process.kill()
            process.wait()
            raise AssertionError(
                f"{name} did not end within {timeout} s of SIGTERM:\n{self.log(name)[-20000:]}"
            ) from None
