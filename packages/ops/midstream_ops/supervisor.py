"""Runs the whole stack on one machine: Redis, relay, worker, API, callbacks and Flower as children
of one process.
"""

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NamedTuple, get_args
from urllib.parse import urlsplit, urlunsplit

import httpx2
import msgspec

from midstream.client.sdk.discovery import STATE_FILE, WrittenStack, reachable, written
from midstream.schemas.base.errors import MidstreamError, Translated
from midstream.schemas.base.records import now, to_json
from midstream.schemas.base.version import __version__, full_version
from midstream.schemas.settings.settings import (
    FILE_VARIABLE,
    PREFIX,
    ArtifactFolder,
    Settings,
    SettingsError,
    asks_for_keys,
    to_environment,
)
from midstream.storage.disk import disk_trouble, probe

from .processes import (
    BACKOFF_S,
    DOWNLOAD,
    MARK,
    SERVES,
    STARTED,
    Announce,
    Child,
    birth,
    end_leftover,
    exit_name,
    family_of,
    free_port,
    handling,
    holders,
    marked,
    members,
)
from .start_progress import StartProgress

if TYPE_CHECKING:
    from midstream.broker.ledger.jobs.fleet import Fleet
    from midstream.schemas.jobs.models import ModelInfo

    from .redis_server import RedisServer

#: Settings of a stack that runs beside others on this machine.
OWN: dict[str, Any] = {"api_port": 0, "flower_port": 0, "redis_url": "", "relay_url": ""}


class ChildSpec(NamedTuple):
    """Parameters of one child process."""

    module: str
    stop_s: float  # the longest that stopping may take, in seconds
    longest_pause_s: float = BACKOFF_S[1]  # the longest pause before a restart, in seconds


#: The children that are started after Redis, in this order.
MODULES = {
    "relay": ChildSpec("midstream.broker.relay", 15.0),
    # finishes the jobs it holds; each start loads the model
    "worker": ChildSpec("midstream.workers", 60.0, longest_pause_s=30.0),
    "api": ChildSpec("midstream.api", 15.0),
    "callbacks": ChildSpec("midstream.broker.callbacks", 15.0),
}
#: Child → what it does before it is ready again.
AFTER = dict.fromkeys(
    ("worker", "gradients"), "; it loads its model, which `midstream status` follows"
)
FLOWER = ChildSpec("midstream_ops.flower", 5.0, longest_pause_s=30.0)
#: Secret → the children that get it. The worker gets none, because it may run code that comes with
#: its model.
SECRET_HOLDERS = {
    f"{PREFIX}ADMIN_KEY": {"api"},
    f"{PREFIX}OBSERVE_KEY": {"api", "flower"},
    f"{PREFIX}FLOWER_AUTH": {"flower"},
}
#: Child → offset of its metrics port from `metrics_port`; the API serves its metrics at /metrics.
METRICS_OFFSETS = {"relay": 0, "worker": 1, "callbacks": 2, "gradients": 3}
#: All but the relay stop at the same time; then the relay, which receives the worker's receipts;
#: Redis stops last.
STOP_ORDER = ("api", "callbacks", "flower", "gradients", "worker", "relay")
#: Seconds that a worker gets to end while it loads its model: it holds no jobs.
LOADING_STOP_S = 1.5
#: Long, because loading and compiling a large model takes minutes.
READY_TIMEOUT_S = 1800.0
TICK_S = 0.2
#: Seconds between checks that the data directory is writable.
DISK_LOOK_S = 2.0
#: How often, a second apart, a Redis that the stack does not start is asked before the start fails.
REDIS_TRIES = 5
LOCK_FILE = "up.lock"
#: File of a data directory that `midstream restore` has begun: `{}` is the backup's id.
RESTORING = "restore.{}.jsonl"


class Supervisor:
    """The stack on this machine.

    `start()` returns when the stack is ready, `watch()` restarts processes that die, `stop()` ends
    the stack.

    `settings` may omit the model (the demo model is fetched), ports (0: free ports) and Redis (a
    private Redis is started). Raises SettingsError for an invalid setting,
    MidstreamError("conflict") if the data directory is in use, and MidstreamError with a child's
    last error line if the stack does not start. `fixed`: settings of ports that the user chose: if
    such a port is taken, or one that is not the default, no other is used.
    """

    def __init__(
        self,
        settings: Settings,
        say: Announce = print,
        waiting: Callable[[], None] = lambda: None,
        fixed: Collection[str] = (),
    ):
        self._print = say
        self._fixed = fixed
        self._waiting = waiting  # called several times a second while the stack starts
        self.data = Path(settings.data_dir).expanduser().resolve()
        self.settings = settings
        self._children: dict[str, Child] = {}
        self._model: ModelInfo | None = None  # that the worker serves, once it does
        self._redis: RedisServer | None = None
        self._redis_due = 0.0  # monotonic time of Redis' next start
        self._redis_pause = BACKOFF_S[0]  # seconds to wait if that start fails
        self._redis_trouble = ""  # why Redis' last start failed
        self._disk = ""  # why the data directory cannot be written
        self._disk_due = 0.0  # monotonic time of the next check
        self._unwritten = False  # the state file is not up to date
        self._own_redis = not settings.redis_url
        self._lock: IO[str] | None = None
        self._umask: int | None = None  # the umask before the start
        self._stopping = threading.Event()
        self._hurry = False
        self._started = now()
        self._sessions: set[int] = set()  # every child leads a session with its pid as id

    @property
    def url(self) -> str:
        """Address of the API."""
        return f"http://{reachable(self.settings.api_host)}:{self.settings.api_port}"

    @property
    def flower_url(self) -> str:
        return (
            f"http://{reachable(self.settings.flower_host)}:{self.settings.flower_port}"
            if "flower" in self._children
            else ""
        )

    def ready_line(self) -> str:
        """The line printed once everything is up: addresses, without secrets."""
        from midstream.broker.telemetry.logs import redacted

        model = self._model
        dtype = f" in {model.dtype} ({model.dtype_reason})" if model and model.dtype_reason else ""
        parts = [
            f"api {self.url}",
            f"openapi {self.url}/schema",
            f"flower {self.flower_url}" if self.flower_url else "",
            f"page {self.url}/",
            f"redis {redacted(self.settings.redis_url)}",
            f"model {self.settings.served_model}{dtype}",
            f"data {self.data}",
        ]
        return f"midstream {__version__} ready: " + " · ".join(part for part in parts if part)

    def __enter__(self) -> "Supervisor":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self) -> int:
        """Start, watch until SIGINT or SIGTERM, and stop in order; a second signal kills the
        remaining processes.

        Returns the exit code.
        """
        with handling(self._on_signal, signal.SIGINT, signal.SIGTERM):
            try:
                self.start()
                self.watch()
            except KeyboardInterrupt:
                pass  # a signal during the start: everything has already been stopped
            except MidstreamError:
                if not self._stopping.is_set():
                    # Ctrl-C also interrupts a download of the model, which then raises this error
                    raise
            finally:
                self.stop()
        return 0

    def start(self, timeout: float = READY_TIMEOUT_S) -> None:
        """Start everything and wait until a live worker serves the model.

        On any failure everything is stopped again.
        """
        from midstream.broker.processes.install import with_secrets
        from midstream.broker.processes.private_files import private_folder

        try:
            self._take_folder()
            self.settings = with_secrets(
                prepare(self.settings, self.data, self._say, self._fixed), self.data, self._say
            )
            logs = private_folder(self.data / "logs")
            for kind in get_args(ArtifactFolder):
                Path(self.settings.artifacts_of(kind)).mkdir(parents=True, exist_ok=True)
            self._say(
                f"midstream {__version__} starting with {self.settings.served_model}; loading a "
                f"model takes about a minute (logs: {logs})"
            )
            if self._own_redis:
                self._start_redis(self._while_starting)
            else:
                check_redis(self.settings.redis_url)
            self._children = {child.name: child for child in self._make_children()}
            for child in self._children.values():
                child.start()
            self._write_state()
            self._await_ready(timeout)
            self._say_how_to_make_a_key()
        except BaseException:
            self.stop()
            raise
        if self._model is not None:
            for caveat in self._model.caveats:
                self._say(f"caveat for {self.settings.served_model}: {caveat}")
        self._say(self.ready_line())
        self._say(self._took())
        self._say(f"Open {self.url}/ in a browser. Ctrl-C stops everything.")

    def _took(self) -> str:
        """Return how long the start took, and for what."""
        engine = STARTED.search(self._children["worker"].output())
        of_engine = f"; the engine after {engine[1]}" if engine else ""
        return f"ready after {now() - self._started:.1f} s{of_engine}"

    def _say_how_to_make_a_key(self) -> None:
        """Print the command that creates the first key, if keys are required and none exists."""
        from midstream.broker.ledger.people.keys import any_key
        from midstream.broker.telemetry.logs import redacted

        if not asks_for_keys(self.settings) or self.settings.admin_key:
            return
        try:
            if asyncio.run(any_key(self.settings)):
                return
        except MidstreamError:
            # Redis is unreachable: a missing hint must not fail the start
            return
        local = f"MIDSTREAM_DATA_DIR={shlex.quote(str(self.data))} " if self._own_redis else ""
        redis_url = "-" if self._own_redis else shlex.quote(redacted(self.settings.redis_url))
        self._say(
            f"no API key exists; create the first one: {local}midstream create key first "
            f"--set scopes=admin --set redis_url={redis_url}"
        )

    def watch(self) -> None:
        """Restart processes that died, after a growing pause, until a signal arrives."""
        while not self._stopping.wait(TICK_S):
            self.tend()

    def tend(self) -> None:
        """Check every child and the disk once; restart dead processes, and report them.

        A full disk does not stop the supervisor.
        """
        if (
            self._redis is not None
            and self._redis.process.poll() is not None
            and time.monotonic() >= self._redis_due
        ):
            self._restart_redis()
        self._tend_children()

    def _tend_children(self) -> None:
        self._look_at_disk()
        for child in self._children.values():
            if child.exit_code is not None:
                ending = child.ending
                words = child.last_words()
                pause = child.died()
                self._say(
                    f"{child.name} ended with {ending}; restarting in {pause:.0f} s ({words}; log: "
                    f"{child.log})"
                )
            elif child.due:
                try:
                    child.start()
                except OSError as error:  # such as no free pid or memory
                    self._say(
                        f"{child.name} could not be started; retrying in "
                        f"{child.died():.0f} s: {error}"
                    )
                    continue
                self._say(f"{child.name} restarted{AFTER.get(child.name, '')}")
                self._unwritten = True
        if self._unwritten:
            self._write_state()

    def _look_at_disk(self) -> None:
        """Report once that the data directory is unwritable, and once that it is writable again."""
        if time.monotonic() < self._disk_due:
            return
        self._disk_due = time.monotonic() + DISK_LOOK_S
        trouble = probe(self.data)
        if trouble and not self._disk:
            self._say(f"{trouble}: captures and receipts are on hold, and jobs may be rejected")
        elif self._disk and not trouble:
            self._say(f"{self.data} is writable again")
        self._disk = trouble
        for child in self._children.values():
            with contextlib.suppress(OSError):  # a full disk: there is no room for a copy
                child.rotate()

    def _restart_redis(self) -> None:
        """Try once to restart Redis; if that fails, `tend` retries after a growing pause. The other
        processes wait for Redis meanwhile, and lose nothing.
        """
        assert self._redis is not None
        if not self._redis_trouble:
            self._say(
                f"redis ended with {exit_name(self._redis.process.returncode)}; restarting it"
            )
        try:
            self._start_redis(self._while_redis_starts)
        except (MidstreamError, OSError) as error:
            trouble = disk_trouble(error) or str(error)
            if trouble != self._redis_trouble:
                self._say(f"redis did not start; will retry: {error}")
            self._redis_trouble = trouble
            self._redis_due = time.monotonic() + self._redis_pause
            self._redis_pause = min(BACKOFF_S[1], 2 * self._redis_pause)
        except KeyboardInterrupt:
            return  # `watch` then ends too
        else:
            self._say("redis restarted")
            self._redis_trouble = ""
            self._redis_pause = BACKOFF_S[0]

    def _while_starting(self) -> None:
        """Is called while the stack starts; raises KeyboardInterrupt if the start is aborted."""
        self._waiting()
        if self._stopping.is_set():
            raise KeyboardInterrupt

    def _while_redis_starts(self) -> None:
        """Tend the children while Redis loads its file, which may take minutes; raises
        KeyboardInterrupt on a signal.
        """
        self._tend_children()
        if self._stopping.is_set():
            raise KeyboardInterrupt

    def _say(self, line: str) -> None:
        """Print a line for the user; an output that fails (a full disk, a closed terminal) is
        ignored.
        """
        with contextlib.suppress(OSError, ValueError):
            self._print(line)

    def stop(self) -> None:
        """Stop all processes, the relay and Redis last. May be called again."""
        for name, started in self._children.items():
            if name != "relay":
                started.terminate()
        for name in STOP_ORDER:
            child = self._children.get(name)
            if child is None:
                continue
            loads = name in AFTER and not child.rotated and not SERVES.search(child.output())
            if loads:
                child.stop_timeout_s = LOADING_STOP_S
            if not child.stop(lambda: self._hurry) and not loads:
                why = (
                    "" if self._hurry else f": it did not stop within {child.stop_timeout_s:.0f} s"
                )
                self._say(f"{name} was killed{why}")
        if self._redis is not None:
            self._redis.stop()
            self._redis = None
        if self._umask is not None:
            os.umask(self._umask)
            self._umask = None
        if self._lock is not None:
            from midstream.broker.processes.leftovers import remove_left

            remove_left(self.data)
            with contextlib.suppress(OSError):  # a read-only disk
                (self.data / STATE_FILE).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def survivors(self) -> list[int]:
        """Return the pids of running processes that this stack started, directly or indirectly."""
        return sorted(pid for session in self._sessions for pid in members(session))

    def kill(self, name: str) -> None:
        """Kill a child as a crash would; `tend` restarts it."""
        process = self._children[name].process
        if process is not None:
            process.kill()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping.is_set():
            self._hurry = True
        else:
            self._say("stopping … (Ctrl-C again to kill)")
        self._stopping.set()

    def _take_folder(self) -> None:
        """Close the data directory to other accounts, and lock it.

        Raises MidstreamError("unavailable") if it cannot be written.
        """
        from midstream.broker.processes.folder_schema import claim_folder
        from midstream.broker.processes.install import close_folder

        try:
            self._umask = os.umask(close_folder(self.data, self._say))
            self._take_lock()
            self._refuse_half_restored()
            trouble = probe(self.data)
            if not trouble:
                claim_folder(self.data)
        except OSError as error:
            trouble = f"{disk_trouble(error) or error.strerror}: {self.data} cannot be written"
        if trouble:
            raise MidstreamError("unavailable", trouble, field="data_dir")

    def _refuse_half_restored(self) -> None:
        """Raise MidstreamError("conflict") for a data directory whose restore was cut off."""
        if any(self.data.glob(RESTORING.format("*"))):
            raise MidstreamError(
                "conflict",
                f"{self.data} is half restored",
                field="data_dir",
                hint="the same `midstream restore` goes on with it",
            )

    def _take_lock(self) -> None:
        """Lock the data directory for this supervisor, and stop processes left over from a killed
        supervisor.
        """
        lock = (self.data / LOCK_FILE).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            other = written(self.data, own=False)
            where = f"pid {other.pid or 'unknown'}, {other.url or 'not ready yet'}"
            raise MidstreamError(
                "conflict",
                f"{self.data} is in use by another `midstream up` ({where})",
                field="data_dir",
            ) from None
        self._lock = lock
        for name, pid, born in self._leftovers():
            if end_leftover(pid, born):
                self._say(f"stopped {name} (pid {pid}), left over from a killed `midstream up`")
        self._write_state()

    def _leftovers(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, pid, birth) of processes left over from a previous supervisor of this data
        directory, in the order in which to stop them.

        First those in its state file, then those that it had no time to record: children have
        `MARK` in their environment, and Redis, which clears its environment, has the lock file of
        its folder open.
        """
        state = written(self.data, own=False).processes
        for name in (*STOP_ORDER, "redis"):
            if name in state:
                yield name, *state[name]
        for pid in marked(str(self.data)):
            yield "a process", pid, birth(pid)
        for pid in holders(self.data / "redis" / "redis.lock"):
            yield "redis", pid, birth(pid)

    def _start_redis(self, waiting: Callable[[], None]) -> None:
        from midstream.broker.processes import install

        from . import redis_server

        port = self._redis.port if self._redis else urlsplit(self.settings.redis_url).port or 0
        limits = (self.settings.redis_maxmemory_mib, self.settings.redis_appendfsync)
        password = install.redis_password(self.data)
        self._redis = redis_server.start(
            self.data / "redis", port, *limits, password, say=self._say, waiting=waiting
        )
        self.settings = msgspec.structs.replace(self.settings, redis_url=self._redis.url)
        install.keep_redis_url(self._redis.url, self.data)
        self._write_state()

    def _make_children(self) -> Iterator[Child]:
        logs = self.data / "logs"
        parts = dict(MODULES)
        if importlib.util.find_spec("flower") is None:
            self._say("flower is not installed: no dashboard")
        else:
            parts["flower"] = FLOWER
        if self.settings.gradients:
            parts["gradients"] = MODULES["worker"]  # whose engine computes gradients
        for name, part in parts.items():
            yield Child(
                name,
                [sys.executable, "-P", "-m", part.module],
                self._environment(name),
                logs / f"{name}.log",
                part.stop_s,
                part.longest_pause_s,
            )

    def _environment(self, name: str) -> dict[str, str]:
        """Return a child's environment: its own metrics port, and no secrets of other children."""
        settings = self.settings
        if name == "gradients":
            settings = msgspec.structs.replace(
                settings,
                engine="gradients",
                worker_id=f"{settings.worker_id}-gradients" if settings.worker_id else "",
            )
        environment = (
            child_environment(settings) | self._metrics_port(name) | {MARK: str(self.data)}
        )
        return {
            variable: value
            for variable, value in environment.items()
            if name in SECRET_HOLDERS.get(variable, {name})
        }

    def _metrics_port(self, name: str) -> dict[str, str]:
        """Return the variable with the process's own metrics port; empty if it serves none."""
        if not self.settings.metrics_port or name not in METRICS_OFFSETS:
            return {}
        return {f"{PREFIX}METRICS_PORT": str(self.settings.metrics_port + METRICS_OFFSETS[name])}

    def _await_ready(self, timeout: float) -> None:
        from midstream.broker.ledger.jobs.fleet import Fleet  # here, while the children start

        deadline = time.monotonic() + timeout
        worker = self._children["worker"]

        def serves() -> bool:
            # `/readyz` may still see the heartbeat of a worker that has just ended
            self._model = asyncio.run(_model_of(Fleet.connect(self.settings), worker.pid))
            return self._model is not None

        told = False
        progress = StartProgress(self.settings.model, self._say)
        with httpx2.Client(timeout=5.0) as http:
            while not (answers(http, f"{self.url}/readyz") and serves()):
                for child in self._children.values():
                    if child.exit_code is not None:
                        detail = (
                            f"{child.name} ended with {child.ending} while starting: "
                            f"{child.last_words()} "
                            f"(log: {child.log})"
                        )
                        raise MidstreamError(
                            "engine_failed" if child is worker else "unavailable", detail
                        )
                if time.monotonic() > deadline:
                    raise MidstreamError(
                        "unavailable",
                        f"not ready after {timeout:.0f} s; logs: {self.data / 'logs'}",
                    )
                told = told or self._tell_of_download(worker)
                progress.look(worker.output())
                self._while_starting()
                self._stopping.wait(TICK_S)

    def _tell_of_download(self, worker: Child) -> bool:
        """Print why the model cannot be downloaded, once that is known; return whether it is."""
        refused = DOWNLOAD.search(worker.output())
        if refused:
            self._say(
                f"{refused['url']} cannot be downloaded: {refused['why']}; the worker goes on "
                "trying. A model in a folder needs no network: --model FOLDER"
            )
        return refused is not None

    def _write_state(self) -> None:
        """Write the running processes to the state file, for a second `up`, the CLI, and a later
        `up` that must clean up.
        """
        pids = {name: child.pid for name, child in self._children.items() if child.pid}
        if self._redis is not None:
            pids["redis"] = self._redis.pid
        self._sessions.update(pids.values())
        state = WrittenStack(
            pid=os.getpid(),
            version=full_version(),
            url=self.url if self._children else "",
            model=self.settings.served_model,
            redis_url=_without_password(self.settings.redis_url) if self._own_redis else "",
            started=self._started,
            processes={name: (pid, birth(pid)) for name, pid in pids.items()},
        )
        path = self.data / STATE_FILE
        try:
            path.with_suffix(".tmp").write_bytes(to_json(state))
            path.with_suffix(".tmp").rename(path)
        except OSError:
            self._unwritten = True  # retried by `tend`; `_look_at_disk` reports the reason
        else:
            self._unwritten = False


def check_redis(redis_url: str) -> None:
    """Raise SettingsError if no Redis answers there within seconds; one that loads its log or
    refuses the command does answer.
    """
    from redis import exceptions
    from redis.backoff import ConstantBackoff
    from redis.retry import Retry

    from midstream.broker.redis_service import opening

    with (
        Translated(
            (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.InvalidResponse),
            lambda error: SettingsError(
                f"redis_url: Redis cannot be opened: {error}; start it, or leave the setting out: "
                "`midstream up` then starts its own"
            ),
        ),
        contextlib.suppress(exceptions.BusyLoadingError, exceptions.ResponseError),
        opening.client(
            redis_url,
            socket_timeout=2.0,
            socket_connect_timeout=1.0,
            retry=Retry(ConstantBackoff(1.0), REDIS_TRIES - 1),
        ) as client,
    ):
        client.ping()


def prepare(settings: Settings, data: Path, say: Announce, fixed: Collection[str] = ()) -> Settings:
    """Return the settings with absolute folders, free ports and a model. `fixed`: as for
    `Supervisor`.

    Raises SettingsError that names the setting.
    """
    changes: dict[str, Any] = {"data_dir": str(data)}
    if settings.gradients and settings.engine != "vllm":
        raise SettingsError(
            f"gradients=true with engine={settings.engine!r}: a gradient worker needs workers of "
            "engine='vllm', whose rows its own are compared with"
        )
    if settings.engine != "vllm":
        changes["model_name"] = settings.served_model or settings.engine
    elif not settings.model:
        say("no model is set (MIDSTREAM_MODEL, --model): using the demo model")
        from .demo_model import fetch_demo_model

        changes["model"] = str(fetch_demo_model(Path(settings.cache_dir), say))
    else:
        changes["model"] = _checkpoint("model", settings.model, say)
    if settings.draft_model:
        changes["draft_model"] = _checkpoint("draft_model", settings.draft_model, say)
    for name, host in (("api_port", settings.api_host), ("flower_port", settings.flower_host)):
        port = getattr(settings, name)
        may_move = name not in fixed and port == getattr(Settings(), name)
        changes[name] = _available_port(name, host, port, say if may_move else None)
    if not settings.relay_url:
        changes["relay_url"] = f"tcp://127.0.0.1:{free_port()}"
    return msgspec.structs.replace(settings, **changes)


def _checkpoint(name: str, value: str, say: Announce) -> str:
    """Return a setting's folder as an absolute path; return a hub name unchanged, and say so.

    Raises SettingsError.
    """
    folder = Path(value).expanduser().resolve()
    if (folder / "config.json").is_file():
        return str(folder)
    if value.startswith(("/", "./", "../", "~")):
        raise SettingsError(f"{name}={value!r}: no checkpoint found (no config.json in {folder})")
    say(f"{name}={value!r} is no folder here: the worker asks the Hugging Face Hub for it")
    return value


def child_environment(settings: Settings) -> dict[str, str]:
    """Return this process's environment with exactly these settings, so that a child reads no
    settings file.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(PREFIX) and name != FILE_VARIABLE
    }
    # `api_key` is a client's credential
    environment |= to_environment(msgspec.structs.replace(settings, api_key=""))
    # neither the children nor their processes import modules from the working directory
    environment |= {"PYTHONSAFEPATH": "1"}
    environment |= {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if all(Path(item).is_dir() for item in (settings.model, settings.draft_model) if item):
        # the models are local folders: an unreachable hub must not delay the start
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _available_port(name: str, host: str, port: int, say: Announce | None) -> int:
    """Return `port` if it can be bound, and for 0 a free port.

    Otherwise says that a free port is used, and returns it; without `say`, raises SettingsError.
    """
    if not port:
        return free_port(host)
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = f"{name} {port} is not available ({error.strerror})"
            if say is None:
                raise SettingsError(f"{taken}: 0 takes any free port") from None
            free = free_port(host)
            say(f"{taken}: using {free}")
            return free
    return port


async def _model_of(fleet: "Fleet", pid: int | None) -> "ModelInfo | None":
    """Return the model that this machine's worker with this pid serves; None: it does not yet."""
    try:
        here = (socket.gethostname(), pid)
        serving = [each.model for each in await fleet.workers() if (each.host, each.pid) == here]
        return await fleet.model(serving[0]) if serving else None
    except MidstreamError:  # Redis is unreachable
        return None
    finally:
        await fleet.close()


def answers(http: httpx2.Client, url: str) -> bool:
    try:
        return http.get(url).status_code == 200
    except httpx2.TransportError:
        return False
