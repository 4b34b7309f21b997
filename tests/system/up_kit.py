"""`midstream up` and the other commands as a user runs them, in processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import midstream_fake_engine
from ports import free_port

from midstream.client.sdk.discovery import STATE_FILE
from midstream_ops.processes import members

READY = re.compile(r"ready: api (\S+)")
MIDSTREAM = [sys.executable, "-m", "midstream.client.cli.main"]
START_S = 180.0


class Up:
    """A running `midstream up` with the fake engine on `data`; or another command of that kind.

    `settings` become MIDSTREAM_* variables; None: unset.
    """

    def __init__(self, data: Path, command: Sequence[str] = ("up",), **settings: object):
        midstream_fake_engine.install()
        self.data = data
        ports = {
            "api_port": free_port(),
            "flower_port": free_port(),
            "relay_url": f"tcp://127.0.0.1:{free_port()}",
        }
        chosen = {
            "data_dir": data,
            "engine": "fake",
            "model_name": "fake",
            "worker_id": "w1",
            **ports,
            **settings,
        }
        self.environment = {
            **os.environ,
            **{
                f"MIDSTREAM_{name.upper()}": json.dumps(value)
                if isinstance(value, dict)
                else str(value)
                for name, value in chosen.items()
                if value is not None
            },
        }
        self.environment.pop("MIDSTREAM_CONFIG", None)
        self._log = data.with_suffix(".up.log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*MIDSTREAM, *command],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sessions: set[int] = set()

    def output(self) -> str:
        return self._log.read_text()

    def ready(self, seconds: float = START_S) -> str:
        """The API's URL, once it is up."""
        self.until(lambda: READY.search(self.output()) is not None, seconds)
        self.note_sessions()
        found = READY.search(self.output())
        assert found is not None
        return found[1]

    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.data / STATE_FILE).read_text()))

    def pid(self, name: str) -> int:
        return int(self.state()["processes"][name][0])

    def until(self, condition: Any, seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, (
                f"`midstream up` ended with {self.process.returncode}:\n{self.output()}"
            )
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.output()}"
            time.sleep(0.05)

    def note_sessions(self) -> None:
        """Remember who runs now: every child leads a session of its own, also one that was started
        again.
        """
        self.sessions |= {pid for pid, _ in self.state()["processes"].values()}

    def alive(self) -> list[int]:
        """Pids of what it started, directly or not, and of itself."""
        return [pid for session in self.sessions | {self.process.pid} for pid in members(session)]

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ctrl-C; the exit code."""
        self.note_sessions()
        self.process.send_signal(number)
        return self.process.wait(90)

    def close(self) -> None:
        """For the end of a test, however it went."""
        if self.process.poll() is None:
            if (self.data / STATE_FILE).exists():
                self.note_sessions()
            self.process.terminate()
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def midstream(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command, in the same surroundings; it finds the API by the data directory."""
        environment = {**self.environment, "COLUMNS": "160"}
        return subprocess.run(
            [*MIDSTREAM, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
