"""Repair of Flower's task list: tasks without an end event whose jobs have ended.

Events are lossy: no process reports the end of a task whose worker was killed while receipts were
in flight, or that ended while Flower was down. Flower's process therefore queries the ledger
periodically for the jobs of all tasks that it considers unfinished, and emits the events that their
workers would have sent. A job may have several tasks, one per attempt: the last reports the job's
end, the earlier ones that another attempt followed.

Except for the round trip to Redis, everything runs on Flower's event loop, which alone touches
Flower's state.
"""

import asyncio
import logging
import socket
import time
from typing import Any

import redis
from celery.states import READY_STATES, RETRY

from ...schemas.jobs.jobs import TERMINAL, State
from ..ops import redis_open
from ..ops.acl import jobs_url
from .messages import job_of_task
from .task_events import SUCCEEDED, JobEnding, event_of, standings

log = logging.getLogger(__name__)

#: Seconds between two looks. A job found ended in one look is reported in the next, unless its
#: worker has reported it meanwhile.
LOOK_S = 3.0
#: Maximum number of tasks whose jobs are queried in one look; if more are unfinished, they take
#: turns.
ASKED = 2000
JOB_PREFIX = "job_"
#: Reported worker of a task whose worker is unknown.
TELLER = f"flower@{socket.gethostname()}"


class MissedEnds:
    """Emits missed end events. `events`: Flower's state, a flower.events.EventsState."""

    def __init__(self, events: Any, redis_url: str):
        self._events = events
        self._client = redis_open.client(
            jobs_url(redis_url), socket_timeout=5, socket_connect_timeout=5
        )
        self._over: dict[str, JobEnding] = {}  # by task, as found by the previous look
        self._last_attempts: dict[str, int] = {}  # as of the current look
        self._turn = 0
        self._trouble = ""  # last error logged

    async def run(self) -> None:
        """Look periodically, forever."""
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
            except Exception:  # the ends of the others are still to be reported
                log.exception("could not report the end of a task")

    async def look(self) -> None:
        """Report tasks that had ended by the previous look and have not been reported since; query
        the others.

        Raises redis.RedisError.
        """
        over, self._over = self._over, {}
        unfinished = self._unfinished()
        for task_id in unfinished.keys() & over.keys():
            self._tell(unfinished.pop(task_id), over[task_id])
        in_turn = self._in_turn(list(unfinished))
        if in_turn:
            result = await asyncio.to_thread(
                standings, self._client, [job_of_task(task_id)[0] for task_id in in_turn]
            )
            self._over = {
                task_id: standing
                for task_id, standing in zip(in_turn, result, strict=True)
                if standing.state in TERMINAL
            }

    def _unfinished(self) -> dict[str, Any]:
        """Tasks whose end is still to be reported, by id; excludes those put back whose job
        continued in a later task.
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
        """Job → its last attempt, for jobs with a task for a later attempt than the first."""
        last: dict[str, int] = {}
        for task_id in self._events.tasks.data:
            job_id, attempt = job_of_task(task_id)
            if attempt > last.get(job_id, 0):
                last[job_id] = attempt
        return last

    def _is_followed(self, task_id: str) -> bool:
        job_id, attempt = job_of_task(task_id)
        return attempt < self._last_attempts.get(job_id, 0)

    def _in_turn(self, task_ids: list[str]) -> list[str]:
        if len(task_ids) <= ASKED:
            return task_ids
        begin = self._turn % len(task_ids)
        self._turn = begin + ASKED
        return (task_ids[begin:] + task_ids[:begin])[:ASKED]

    def _tell(self, task: Any, standing: JobEnding) -> None:
        state = State.QUEUED if self._is_followed(task.uuid) else standing.state
        kind, fields = event_of(state, standing.problem)
        told_at = standing.finished or time.time()
        if kind == SUCCEEDED and task.started:
            fields["runtime"] = max(0.0, told_at - task.started)
        worker = task.worker.hostname if task.worker else TELLER
        # Received time is unset, so that the worker does not count as alive.
        frame = {
            "type": kind,
            "uuid": task.uuid,
            "hostname": worker,
            "timestamp": told_at,
            "local_received": None,
            "clock": task.clock,
        }
        self._events.event(frame | fields)
        log.info("%s: reported task %s, which had no event", kind, task.uuid)
