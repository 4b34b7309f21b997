"""Flower, the dashboard of the task queue: `python -m midstream.broker.flower`, configured by the
environment.

Flower gets secrets through its environment and the Celery app, never on a command line, which
everyone on the machine can read. It shows what events report, and what the ledger has where an
event was missed (`MissedEnds`). It is read-only, because a task revoked without the ledger would be
sent again. If a password is set, every path requires it; Flower itself leaves `/metrics` and
`/healthcheck` open. Without a password, calls under a foreign host name are refused, as in the API,
against DNS rebinding.
"""

import asyncio
import hmac
import logging
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import redis
from celery.states import READY_STATES, RETRY

from ..schemas.base import STATUS_OF_KIND, now
from ..schemas.jobs.jobs import TERMINAL, State
from ..schemas.settings.settings import (
    Settings,
    SettingsError,
    asks_for_keys,
    is_loopback,
    load_settings,
)
from .ledger.people import keys
from .processes.hosts import Hosts
from .processes.install import basic
from .queue.celery_app import make_app
from .queue.messages import job_of_task
from .queue.task_events import SUCCEEDED, JobEnding, endings, event_of
from .redis_service import opening as redis_open
from .redis_service.acl import jobs_url

log = logging.getLogger("midstream.broker.flower")  # not `__main__`

EXIT_BAD_SETTINGS = 2
#: Milliseconds between two saves of the tasks, which Flower keeps in memory: a killed Flower loses
#: little.
SAVE_EVERY_MS = 15_000
#: About 5 KiB each, in memory and in the file; older tasks are dropped.
TASKS_KEPT = 5_000
WORKERS_KEPT = 200
#: Columns of the tasks page: kind, job, state, times, queue (one per model), and the error.
COLUMNS = "name,args,state,received,runtime,routing_key,worker,exception"
#: Seconds for which a disconnected worker stays listed.
OFFLINE_KEPT_S = 3600
INSPECT_TIMEOUT_MS = 3000
MISDIRECTED, UNAUTHORIZED = STATUS_OF_KIND["misdirected"], STATUS_OF_KIND["unauthorized"]
#: The path that the key of the setting `observe_key` also opens.
METRICS = "/metrics"
#: Seconds between two looks.
LOOK_S = 1.0
#: Seconds for which the worker of a job that is found ended may still report it itself.
WORKER_S = 3.0
#: Maximum number of tasks whose jobs are queried in one look; if more are unfinished, they take
#: turns.
MAX_QUERIED = 2000
JOB_PREFIX = "job_"
#: Reported worker of a task whose worker is unknown.
UNKNOWN_WORKER = f"flower@{socket.gethostname()}"


class Door:
    """Admits every caller if there is no password, else callers with the password, or with the
    observe key for the metrics.
    """

    def __init__(self, settings: Settings) -> None:
        self._valid = [basic(pair).encode() for pair in settings.flower_auth.split(",") if pair]
        self._keys = keys.of_settings(settings)

    def admits(self, authorization: str, path: str) -> bool:
        if not self._valid:
            return True
        if any([hmac.compare_digest(authorization.encode(), valid) for valid in self._valid]):
            return True
        scheme, _, text = authorization.partition(" ")
        shown = keys.parse(text.strip()) if scheme.lower() == "bearer" and path == METRICS else None
        return shown is not None and keys.is_right(shown, self._keys.get(shown.id), now())


class MissedEnds:
    """Emits the end events that no worker has sent.

    A worker sends none for a job that ends with its receipts, or in another attempt. And events are
    lossy: that of a killed worker is never sent, and one sent while Flower was down is lost. So the
    ledger is queried periodically for the jobs of all tasks that Flower considers unfinished. A job
    that ended by its receipts is reported at once; any other one when its worker has had its time
    to do so. A job may have several tasks, one per attempt: the last
    reports the job's end, the earlier ones that another attempt followed.

    Except for the round trip to Redis, everything runs on Flower's event loop, which alone touches
    Flower's state. `events`: that state, a flower.events.EventsState.
    """

    def __init__(self, events: Any, redis_url: str):
        self._events = events
        self._client = redis_open.client(
            jobs_url(redis_url), socket_timeout=5, socket_connect_timeout=5
        )
        # task whose job has ended → when that is reported, unless its worker does so
        self._found: dict[str, tuple[float, JobEnding]] = {}
        self._last_attempts: dict[str, int] = {}  # as of the current look
        self._turn = 0
        self._trouble = ""  # last error logged

    async def run(self) -> None:
        """Call `look` periodically, forever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
                self._trouble = ""
            except redis.RedisError as error:
                if str(error) != self._trouble:
                    log.warning(
                        "cannot read from the ledger how jobs without end events ended: %s", error
                    )
                self._trouble = str(error)
            except Exception:  # the ends of other tasks must still be reported
                log.exception("could not report the end of a task")

    async def look(self) -> None:
        """Query unfinished tasks; report those whose jobs have ended, unless workers may still do
        so.

        Raises redis.RedisError.
        """
        in_turn = self._in_turn(
            [task_id for task_id in self._unfinished() if task_id not in self._found]
        )
        result = (
            await asyncio.to_thread(
                endings, self._client, [job_of_task(task_id)[0] for task_id in in_turn]
            )
            if in_turn
            else []
        )
        unfinished, moment = self._unfinished(), time.monotonic()  # events came meanwhile
        for task_id, ending in zip(in_turn, result, strict=True):
            if ending.state in TERMINAL:
                due = moment if ending.settled else moment + WORKER_S
                self._found[task_id] = due, ending
        for task_id, (due, ending) in [*self._found.items()]:
            if task_id not in unfinished:
                del self._found[task_id]
            elif due <= moment:
                self._report(unfinished[task_id], ending)

    def _unfinished(self) -> dict[str, Any]:
        """Return the tasks whose end must still be reported, by id. A task in state RETRY needs no
        report once a later task continues its job.
        """
        result = {
            task_id: task
            for task_id, task in self._events.tasks.data.items()
            if task.state not in READY_STATES and task_id.startswith(JOB_PREFIX)
        }
        self._last_attempts = self._known_attempts() if result else {}
        return {
            task_id: task
            for task_id, task in result.items()
            if task.state != RETRY or not self._is_followed(task_id)
        }

    def _known_attempts(self) -> dict[str, int]:
        """Return job → its last attempt, for jobs with a task for an attempt after the first."""
        # sorted: the last attempt of a job replaces the earlier ones
        tasks = sorted(map(job_of_task, self._events.tasks.data))
        return {job_id: attempt for job_id, attempt in tasks if attempt > 0}

    def _is_followed(self, task_id: str) -> bool:
        job_id, attempt = job_of_task(task_id)
        return attempt < self._last_attempts.get(job_id, 0)

    def _in_turn(self, task_ids: list[str]) -> list[str]:
        if len(task_ids) <= MAX_QUERIED:
            return task_ids
        begin = self._turn % len(task_ids)
        self._turn = begin + MAX_QUERIED
        return (task_ids[begin:] + task_ids[:begin])[:MAX_QUERIED]

    def _report(self, task: Any, ending: JobEnding) -> None:
        state = State.QUEUED if self._is_followed(task.uuid) else ending.state
        kind, fields = event_of(state, ending.problem)
        ended_at = ending.finished or time.time()
        if kind == SUCCEEDED and task.started:
            fields["runtime"] = max(0.0, ended_at - task.started)
        worker = task.worker.hostname if task.worker else UNKNOWN_WORKER
        # Received time is unset, so that the worker does not count as alive.
        frame = {
            "type": kind,
            "uuid": task.uuid,
            "hostname": worker,
            "timestamp": ended_at,
            "local_received": None,
            "clock": task.clock,
        }
        self._events.event(frame | fields)
        log.info("%s: reported task %s, which had no event", kind, task.uuid)


def options(settings: Settings) -> dict[str, str]:
    """Return the environment variables with Flower's options.

    Raises SettingsError naming the setting.
    """
    if settings.flower_auth and not all(
        re.fullmatch(r"[^:]+:.+", pair) for pair in settings.flower_auth.split(",")
    ):
        raise SettingsError(
            "MIDSTREAM_FLOWER_AUTH: must be user:password; separate several with commas"
        )
    if not settings.flower_auth and not is_loopback(settings.flower_host):
        raise SettingsError(
            f"MIDSTREAM_FLOWER_HOST={settings.flower_host} is not loopback: "
            "MIDSTREAM_FLOWER_AUTH=user:password is required, "
            "because Flower shows the jobs of all tenants"
        )
    if not settings.flower_auth and asks_for_keys(settings):
        raise SettingsError(
            "MIDSTREAM_FLOWER_AUTH: user:password is required when the API requires keys, "
            "because Flower shows the jobs of all tenants"
        )
    result = {
        "FLOWER_ADDRESS": settings.flower_host,
        "FLOWER_PORT": str(settings.flower_port),
        "FLOWER_PERSISTENT": "true",
        "FLOWER_DB": str(Path(settings.data_dir).resolve() / "flower.db"),
        "FLOWER_STATE_SAVE_INTERVAL": str(SAVE_EVERY_MS),
        "FLOWER_MAX_TASKS": str(TASKS_KEPT),
        "FLOWER_MAX_WORKERS": str(WORKERS_KEPT),
        "FLOWER_TASKS_COLUMNS": COLUMNS,
        "FLOWER_PURGE_OFFLINE_WORKERS": str(OFFLINE_KEPT_S),
        "FLOWER_INSPECT_TIMEOUT": str(INSPECT_TIMEOUT_MS),
        "FLOWER_READ_ONLY": "true",
    }
    if settings.flower_auth:
        result["FLOWER_BASIC_AUTH"] = settings.flower_auth
    return result


def serve(settings: Settings) -> None:
    """Run Flower's own command until the process ends."""
    from flower import command
    from tornado.web import ErrorHandler

    hosts, door = Hosts(settings, settings.flower_host, bool(settings.flower_auth)), Door(settings)

    class Closed(ErrorHandler):
        def write_error(self, status_code: int, **more: Any) -> None:
            self.set_header("WWW-Authenticate", 'Basic realm="flower"')
            super().write_error(status_code, **more)

    class Flower(command.Flower):
        def find_handler(self, request: Any, **options: Any) -> Any:
            if not hosts.allows(request.headers.get_list("Host")):
                return self.get_handler_delegate(
                    request, ErrorHandler, {"status_code": MISDIRECTED}
                )
            if not door.admits(request.headers.get("Authorization", ""), request.path):
                return self.get_handler_delegate(request, Closed, {"status_code": UNAUTHORIZED})
            return super().find_handler(request, **options)

        def start(self) -> None:
            self.io_loop.add_callback(MissedEnds(self.events.state, settings.redis_url).run)
            super().start()

    command.Flower = Flower  # the class that the command starts
    make_app(settings).start(["flower"])


def main() -> int:
    """Run until stopped; returns the exit code."""
    try:
        settings = load_settings()
        if not settings.redis_url:
            raise SettingsError("MIDSTREAM_REDIS_URL: is required by Flower")
        os.environ.update(options(settings))
    except SettingsError as error:
        print(f"flower failed: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_SETTINGS
    Path(settings.data_dir).mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    serve(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
