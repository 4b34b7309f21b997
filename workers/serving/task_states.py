"""Task events at the end of a worker's jobs: when they are sent.

(Their content: `broker.queue.task_events`.)

A job whose receipts are still on their way is no success yet, and neither is one that another
attempt has taken over. Such a task gives its place in the pool free and is STARTED until the ledger
says how the job ended; a thread looks once a second after all of those together.
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
#: Of that many jobs the end is awaited; Flower does not hear of what is beyond, and nothing else
#: hangs on it.
AWAITED = 20_000


class Told(Ignore):
    """The message is done. `state`: the job's outcome; None: reported elsewhere."""

    def __init__(self, state: State | None, why: str = ""):
        super().__init__(why)
        self.state, self.why = state, why


class Settling(Ignore):
    """The message is done; the job is not: its receipts, or another attempt, will end it."""


class PutBack(Ignore):
    """The message goes back to the queue.

    (Not Celery's `Reject`, which it logs as a warning with a traceback.)
    """

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


class JobRequest(Request):
    """Celery's side of one task; what it sends as events is what Flower shows."""

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        error = exc_info.exception
        error = getattr(error, "exc", error)  # Celery wraps what comes with a traceback
        if isinstance(error, Told) and error.state not in (None, State.QUEUED):
            return self.tell(error.state, None)  # acknowledges
        if isinstance(error, PutBack):
            self.reject(requeue=True)  # what follows acknowledges it no more
        done = super().on_failure(exc_info, send_failed_event, return_ok)
        if isinstance(error, Settling):
            self.task.app.settlements.wait_for(self)
        elif isinstance(error, PutBack):
            self.send_event("task-retried", exception=error.why, traceback="")
        elif isinstance(error, Told) and error.state is State.QUEUED:
            self.tell(State.QUEUED, None)
        return done

    def tell(self, state: State, problem: Problem | None) -> None:
        """Say how the job ended, or that it is queued again."""
        kind, fields = event_of(state, problem)
        if kind == REVOKED:
            self._announce_revoked(state.value, **fields)
            return
        if kind == SUCCEEDED:
            fields["runtime"] = time.time() - self.time_start
        self.send_event(kind, **fields)


class Settlements:
    """Tasks that are over here before their jobs are. From any thread."""

    def __init__(self, redis_url: str, dispatcher: Callable[[], Any]):
        """`dispatcher`: Celery's of the present connection, perhaps None; a task that is over keeps
        the one that it came with, whose connection may be lost.
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
            return  # there is no connection to send it on
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
            request.tell(standing.state, standing.problem)

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
            except Exception:  # the ends of the others are still to be reported
                logger.exception("could not report the outcome of a task that is still STARTED")
            with self._lock:
                if not self._waiting:
                    self._some.clear()
