"""When a worker sends the task events that end its jobs; `broker.queue.task_events` has their
content.

A job whose receipts are still on their way has not succeeded yet, nor has one that another attempt
has taken over. Such a task frees its place in the pool and stays STARTED until the ledger has the
job's outcome; one thread checks all such tasks once a second.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from celery.exceptions import Ignore
from celery.worker.request import Request

from ...broker.ops import redis_open
from ...broker.queue.task_events import REVOKED, SUCCEEDED, endings, event_of
from ...schemas.base.errors import Problem
from ...schemas.jobs.jobs import State

logger = logging.getLogger(__name__)

LOOK_S = 1.0
#: Jobs whose end is awaited at most; beyond it the oldest are dropped, and only Flower misses them.
AWAITED = 20_000


class Told(Ignore):
    """The message is done. `state`: the job's state to report; None: unknown, not reported."""

    def __init__(self, state: State | None, why: str = ""):
        super().__init__(why)
        self.state, self.why = state, why


class Settling(Ignore):
    """The message is done, but not the job: its receipts, or another attempt, will end it."""


class PutBack(Ignore):
    """The message goes back to the queue.

    Celery's own `Reject` is not used, because Celery logs it as a warning with a traceback.
    """

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


class JobRequest(Request):
    """Celery's side of one task; it sends the events that Flower shows."""

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        error = exc_info.exception
        error = getattr(error, "exc", error)  # Celery wraps what comes with a traceback
        if isinstance(error, Told) and error.state not in (None, State.QUEUED):
            return self.report(error.state, None)  # a revocation, which acknowledges the message
        if isinstance(error, PutBack):
            self.reject(requeue=True)  # keeps `on_failure` from acknowledging the message
        done = super().on_failure(exc_info, send_failed_event, return_ok)
        if isinstance(error, Settling):
            self.task.app.settlements.wait_for(self)
        elif isinstance(error, PutBack):
            self.send_event("task-retried", exception=error.why, traceback="")
        elif isinstance(error, Told) and error.state is State.QUEUED:
            self.report(State.QUEUED, None)
        return done

    def report(self, state: State, problem: Problem | None) -> None:
        """Send the event for the job's outcome, or for its return to the queue."""
        kind, fields = event_of(state, problem)
        if kind == REVOKED:
            self._announce_revoked(state.value, **fields)
            return
        if kind == SUCCEEDED:
            fields["runtime"] = time.time() - self.time_start
        self.send_event(kind, **fields)


class Settlements:
    """Tasks that ended before their jobs; thread-safe."""

    def __init__(self, redis_url: str, dispatcher: Callable[[], Any]):
        """`dispatcher` returns Celery's event dispatcher of the present connection, or None: the
        dispatcher of a task's request may belong to a lost connection.
        """
        self._dispatcher = dispatcher
        self._client = redis_open.client(redis_url, socket_timeout=5, socket_connect_timeout=5)
        self._lock = threading.Lock()
        self._waiting: dict[str, JobRequest] = {}  # by the task's id
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def wait_for(self, request: JobRequest) -> None:
        with self._lock:
            if len(self._waiting) >= AWAITED:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[request.id] = request
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="settlements", daemon=True)
                self._thread.start()
        self._some.set()

    def look(self) -> None:
        """Report the end of every ended job. Raises redis.RedisError."""
        dispatcher = self._dispatcher()
        if dispatcher is None or not dispatcher.enabled:
            return  # there is no connection to send events on
        with self._lock:
            waiting = dict(self._waiting)
        result = endings(self._client, [request.args[0] for request in waiting.values()])
        for (task_id, request), standing in zip(waiting.items(), result, strict=True):
            if standing.state in (State.RUNNING, State.CANCELLING):
                continue
            with self._lock:
                if self._waiting.get(task_id) is request:
                    del self._waiting[task_id]
            request.eventer = dispatcher
            request.report(standing.state, standing.problem)

    def _run(self) -> None:
        while True:
            self._some.wait()
            time.sleep(LOOK_S)
            try:
                self.look()
            except redis.RedisError as error:
                logger.info(
                    "could not report the outcomes of tasks that are still STARTED; will retry: %s",
                    error,
                )
            except Exception:  # the other tasks' outcomes are still to be reported
                logger.exception("could not report the outcome of a task that is still STARTED")
            with self._lock:
                if not self._waiting:
                    self._some.clear()
