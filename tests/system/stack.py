"""The whole service as separate processes on free loopback ports, for tests that kill, stop and
restart its parts.

    with Stack(tmp_path, engine="fake") as stack:
        job_id = stack.submit(["a prompt"])
        stack.kill("worker")
        stack.restart("worker")
        assert stack.wait(job_id).state == "succeeded"

Processes: `redis`, `relay`, `callbacks`, `worker` (also `worker-2`, … when asked for) and, with
`api=True`, `api`.
"""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import forks
import httpx2
import midstream_fake_engine
import msgspec
import pytest
import redis
from forks import Process
from ledger_kit import submit_unsent
from ports import free_port
from processes import Processes

from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.processes import leftovers
from midstream.broker.queue.celery_app import make_app
from midstream.client import Client
from midstream.schemas.base.errors import Problem
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import (
    TERMINAL,
    Job,
    JobView,
    Sampling,
    State,
    StoredPrompt,
)
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.schemas.settings.settings import load_settings, to_environment
from midstream_ops import redis_server
from midstream_ops.processes import birth

T = TypeVar("T")

MODULES = {
    "relay": "midstream.broker.relay",
    "callbacks": "midstream.broker.callbacks",
    "worker": "midstream.workers",
    "api": "midstream.api",
}
#: These only end what hangs: a machine with other things to do takes its time over a start.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 180.0
WAIT_TIMEOUT_S = 180.0
POLL_S = 0.05
#: What the shortest sleep takes, in microseconds.
SLEEP_US = 60
#: The begin of a record in a log; lines of a traceback belong to the record before them.
RECORD = re.compile(r"^(?=\d{4}-\d\d-\d\d )", re.MULTILINE)


def unsuccessful(views: Iterable[JobView]) -> dict[str, tuple[State, Problem | None]]:
    """Return state and error of each job that has not succeeded: a test that expects an empty dict
    says why it fails.
    """
    return {
        view.id: (view.state, view.error) for view in views if view.state is not State.SUCCEEDED
    }


def stack_with(beside: dict[str, dict[str, Any]] | None = None, **settings: Any) -> Any:
    """The fixture `stack` of a module: a stack with `settings`; and `beside` the processes that it
    starts itself, others (name → what differs for it).
    """

    @pytest.fixture(scope="module")
    def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
        with Stack(tmp_path_factory.mktemp("stack"), **settings) as running:
            for name, changed in (beside or {}).items():
                running.add(name, **changed)
            yield running

    return stack


@pytest.fixture(scope="module")
def http(stack: "Stack") -> Iterator[httpx2.Client]:
    """Asks the stack of the test's module."""
    with httpx2.Client(base_url=stack.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(stack: "Stack") -> Iterator[Client]:
    """The same, as users ask."""
    with Client(stack.url) as made:
        yield made


class Stack(Processes):
    """`settings` override those below; everything the stack writes lies in `directory`."""

    def __init__(
        self,
        directory: Path,
        *,
        api: bool = False,
        callbacks: bool = True,
        workers: int = 1,
        start_timeout_s: float = START_TIMEOUT_S,
        **settings: Any,
    ):
        chosen: dict[str, Any] = {
            "data_dir": str(directory),
            "relay_url": f"tcp://127.0.0.1:{free_port()}",
            "api_port": free_port(),
            "engine": "fake",
            "model": "fake-model",
            "worker_id": "w1",
            "lease_s": 3.0,
            "tuning.visibility_timeout_s": 4,
            "tuning.sweep_interval_s": 0.5,
            "tuning.worker_concurrency": 32,
        }
        self._chosen = chosen | settings
        midstream_fake_engine.install()
        self._redis_port = free_port()
        self._chosen["redis_url"] = f"redis://127.0.0.1:{self._redis_port}/0"
        self.directory = directory
        self.start_timeout_s = start_timeout_s
        self.processes: dict[str, Process] = {}
        self.sessions: dict[int, int] = {}  # of all that were started: pid -> birth
        self._redis: redis_server.RedisServer | None = None
        ours = ["worker", *[f"worker-{number}" for number in range(2, workers + 1)]][:workers]
        self.names = [
            "relay",
            *(["callbacks"] if callbacks else []),
            *ours,
            *(["api"] if api else []),
        ]
        self._loop = asyncio.new_event_loop()
        self._ledger: Ledger | None = None
        self.settings = load_settings({}, **self._chosen)
        self.app = make_app(self.settings)

    # Processes

    @property
    def url(self) -> str:
        """Where the API listens."""
        return f"http://127.0.0.1:{self.settings.api_port}"

    def stop(self) -> None:
        """End everything, the clients of a server before the server; whatever happens, nothing is
        left behind.
        """
        try:
            if self._ledger is not None:
                self._loop.run_until_complete(self._ledger.close())
                self._ledger = None
            for name in self.processes:
                if name != "relay":  # the others are its clients
                    self._terminate(name)
            for name in reversed(list(self.processes)):
                self._ended(name, STOP_TIMEOUT_S) if name != "relay" else self.end(name)
        finally:
            for process in self.processes.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if self._redis is not None:
                self._redis.stop()
            leftovers.remove_left(Path(self.settings.data_dir))
            self.app.close()
            self._loop.close()

    def end(self, name: str, timeout: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM and wait; returns the exit code.

        A process that does not end in time is killed, which fails the test.
        """
        self._terminate(name)
        return self._ended(name, timeout)

    def _terminate(self, name: str) -> None:
        process = self.processes[name]
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
            process.terminate()

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send `how`; for SIGKILL wait until the process is gone."""
        if name == "redis":
            self._redis.kill()
            return
        self.processes[name].send_signal(how)
        if how == signal.SIGKILL:
            self.processes[name].wait()

    def restart(self, name: str, **changed: Any) -> None:
        """Start a process that is gone, with some settings changed, and wait until it is ready."""
        if name == "redis":
            self._start_redis()
            return
        assert self.processes[name].poll() is not None, f"{name} still runs"
        self.add(name, **changed)

    def replace(self, name: str, **changed: Any) -> None:
        """End a process, and start it again with some settings changed."""
        self.end(name)
        self.restart(name, **changed)

    def crash(self, name: str, **changed: Any) -> None:
        """Kill a process, and start it again with some settings changed."""
        self.kill(name)
        self.restart(name, **changed)

    def exit_code(self, name: str, timeout: float = STOP_TIMEOUT_S) -> int:
        """Wait for a process to end by itself."""
        return self.processes[name].wait(timeout)

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def log(self, name: str) -> str:
        path = self.directory / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self, word: str) -> str:
        """The records that contain `word`, from the logs of all processes."""
        return "".join(
            f"{name}: {record}"
            for name in self.processes
            for record in RECORD.split(self.log(name))
            if word in record
        )

    def _start_redis(self) -> None:
        self._redis = redis_server.start(self.directory / "redis", port=self._redis_port)

    def load_redis(self, seconds: float) -> None:
        """Start a killed Redis that takes about `seconds` to load its log, and wait until it
        has.
        """
        files = [path for path in (self.directory / "redis").rglob("appendonly*") if path.is_file()]
        commands = sum(path.read_bytes().count(b"\r\n*") for path in files)
        pause = int(seconds * 1e6 / max(1, commands))
        delay = (
            pause - SLEEP_US if pause > SLEEP_US else -(SLEEP_US // max(1, pause))
        )  # below zero: one command in so many
        spawn = redis_server._spawn
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                redis_server,
                "_spawn",
                lambda *given: spawn(
                    *given[:4], given[4] | {"key-load-delay": str(delay)}, *given[5:]
                ),
            )
            self._start_redis()

    def await_loading(self, loads: Callable[[], bool]) -> None:
        """Until Redis answers that it loads its log, or it has: a busy machine may be too late.

        `loads`: whether it may still load it.
        """
        with redis.Redis.from_url(self.settings.redis_url, retry=None) as client:
            while loads():
                with contextlib.suppress(redis.ConnectionError):
                    if client.info("persistence")["loading"]:
                        return
                time.sleep(POLL_S)

    def spawn(self, name: str, *, suffix: bool = True, **changed: Any) -> None:
        """Start a process with some settings changed; `worker-2` gets its own worker id unless
        `suffix` is false.
        """
        values = dict(self._chosen) | changed
        kind, _, number = name.partition("-")
        if number and suffix:
            values["worker_id"] = f"{values['worker_id']}-{number}"
        environment = to_environment(load_settings({}, **values))
        log = self.directory / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            log.rename(log.with_suffix(f".{time.monotonic_ns()}.log"))
        # A module that is imported once keeps the folder for temporary files that there was then.
        forked = values["engine"] == "fake" and "TMPDIR" not in os.environ
        begin = forks.start if forked else forks.start_anew
        self.processes[name] = begin(MODULES[kind], environment, self.directory, log)
        pid = self.processes[name].pid
        self.sessions[pid] = birth(pid)

    def wait_ready(self, name: str) -> None:
        """Until the process has printed its ready line."""
        self.wait_log(name, f"{name.partition('-')[0]} ready")

    def wait_log(self, name: str, word: str) -> None:
        """Until `word` is in the log of a process, which must not end before."""
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            ended = (
                self.processes[name].poll() is not None
            )  # asked first: a log that is read after the end is whole
            if word in self.log(name):
                return
            if ended:
                raise AssertionError(
                    f"{name} ended with "
                    f"{self.processes[name].returncode}:\n{self.log(name)[-3000:]}"
                )
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{name} did not say {word!r} within {self.start_timeout_s} "
                    f"s:\n{self.log(name)[-3000:]}"
                )
            time.sleep(POLL_S)

    # Jobs, straight through the ledger

    def do(self, call: Callable[[Ledger], Awaitable[T]]) -> T:
        """`call(ledger)` on the stack's own loop."""

        async def run() -> T:
            if self._ledger is None:
                self._ledger = Ledger.connect(self.settings)
            return await call(self._ledger)

        return self._loop.run_until_complete(run())

    def submit(
        self,
        prompts: list[str],
        *,
        max_tokens: int = 8,
        ignore_eos: bool = False,
        capture: StoredCapture | None = None,
        steering: list[StoredSteering] | None = None,
        blobs: dict[str, Any] | None = None,
        stream: bool = False,
        send: bool = True,
        **more: Any,
    ) -> str:
        """Commit a job, as the API does; without `send` its message is lost.

        Token ids are the fake engine's (one per byte).

        `more`: other fields of the job.
        """
        from midstream_fake_engine.model import identity_of, make_tokenizer

        tokenizer = make_tokenizer()
        name = self.settings.served_model
        served = self.do(
            lambda ledger: ledger.model(name)
        )  # None before the first worker: then the fake engine's
        job = Job(
            id=new_job_id(),
            kind="generate",
            model=name,
            prompts=[
                StoredPrompt(token_ids=tokenizer.encode(text).ids, text=text) for text in prompts
            ],
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos),
            created=now(),
            stream=stream,
            captures=[[capture]] * len(prompts) if capture else [],
            steering=[steering] * len(prompts) if steering else [],
            **{"identity": served.identity if served else identity_of(self.settings)} | more,
        )
        accept = Ledger.submit if send else submit_unsent
        self.do(lambda ledger: accept(ledger, job, blobs or {}))
        return job.id

    def view(self, job_id: str) -> JobView:
        return self.do(lambda ledger: ledger.view(job_id))

    def result(self, job_id: str) -> JobResult:
        return self.do(lambda ledger: ledger.result(job_id))

    def wait(
        self,
        job_id: str,
        timeout: float = WAIT_TIMEOUT_S,
        until: Callable[[JobView], bool] | None = None,
    ) -> JobView:
        """The job's view once it is over, or once `until(view)` holds.

        If it is over and has not succeeded, its error and log records are printed, which pytest
        shows if the test fails.
        """
        deadline = time.monotonic() + timeout
        while True:
            view = self.view(job_id)
            if until(view) if until else view.state in TERMINAL:
                if view.state in TERMINAL and view.state is not State.SUCCEEDED:
                    print(f"{job_id} {view.state}: {view.error}\n{self.records(job_id)}")
                return view
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{job_id} after {timeout} s: "
                    f"{msgspec.json.encode(view).decode()}\n{self.log('worker')[-3000:]}"
                )
            time.sleep(POLL_S)

    def wait_running(self, job_id: str) -> JobView:
        return self.wait(job_id, until=lambda view: view.state is State.RUNNING)
