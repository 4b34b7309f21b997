"""In which order do jobs come to the workers, and who sends their messages?

The ledger decides (`lua/dispatch.lua`): of a model and priority step only `dispatch_window` messages are under way, sent and not
claimed; the other jobs wait in Redis, and every claim picks the next of the tenant that has had the least. A script that picks
jobs names them, and whoever called it sends their messages. What is picked and not sent is found by the sweeper.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from celery import Celery

from ...schemas.faults import crash_point
from ...schemas.handling import Priority
from ...schemas.jobs import Job
from ...schemas.sweep_units import Units
from ..queue.celery_app import PRIORITY_OF_KIND, PRIORITY_STEPS
from ..queue.messages import post

log = logging.getLogger(__name__)

#: The lower the earlier.
URGENCY: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}
#: Kind of job → priority → step of the queue. `normal` is what the kind has by itself.
STEPS: dict[str, dict[Priority, int]] = {
    kind: {"high": PRIORITY_STEPS[0], "normal": step, "low": PRIORITY_STEPS[-1]} for kind, step in PRIORITY_OF_KIND.items()
}
#: Seconds that an ending process gives to the messages that it has still to send.
CLOSE_S = 2.0
#: Messages that Redis refused are sent again after a pause, for so many seconds; then the sweeper has found that they are missing.
RETRY_S, RETRY_FOR_S = 0.5, 8.0


class Message(NamedTuple):
    """That a job waits, as the scripts name it."""

    job_id: str
    kind: str
    model: str
    attempt: int  # how many were made
    step: int  # one of PRIORITY_STEPS


Send = Callable[[list[Message]], None]


def messages_of(flat: Sequence[bytes | int]) -> list[Message]:
    """The messages at the end of a script's reply."""
    found = []
    for at in range(0, len(flat), 5):
        job_id, kind, model, attempt, step = flat[at : at + 5]
        found.append(Message(_text(job_id), _text(kind), _text(model), int(attempt), int(step)))
    return found


def _text(raw: bytes | int) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)


def cost_of(job: Job) -> int:
    """What a job takes of its tenant's share: tokens of its prompts and the most that it may generate, of a sweep those of all requests
    that it comes to."""
    if job.sweep is not None:
        return Units(job.sweep).tokens
    return sum(len(prompt.token_ids) for prompt in job.prompts) + job.sampling.max_tokens * len(job.prompts)


class Dispatcher:
    """Sends messages on a thread of its own, in order, so that nobody waits for it. Belongs to one process; thread-safe."""

    def __init__(self, app: Celery, sent: str = "") -> None:
        """`sent`: the crash point behind each sending."""
        self._app = app
        self._sent = sent
        self._outgoing: queue.SimpleQueue[list[Message] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self._starting = threading.Lock()
        self._started = False

    def send(self, messages: list[Message]) -> None:
        """Have them sent soon; returns at once."""
        with self._starting:
            if not self._started:
                self._started = True
                self._thread.start()
        self._outgoing.put(messages)

    def close(self, timeout: float = CLOSE_S) -> None:
        """Send what is left, for so many seconds. What is not is sent by the sweeper."""
        if self._started:
            self._outgoing.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        going = True
        unsent: list[Message] = []
        give_up = 0.0
        while going:
            waiting = [self._next(RETRY_S if unsent else None)]
            while not self._outgoing.empty():  # what came while the last were on their way goes together
                waiting.append(self._outgoing.get())
            messages = unsent + [message for some in waiting if some is not None for message in some]
            going = None not in waiting
            if not messages:
                continue
            if send_now(self._app, messages):
                unsent = []
                crash_point(self._sent)
            else:
                give_up = give_up if unsent else time.monotonic() + RETRY_FOR_S
                unsent = messages if time.monotonic() < give_up else []

    def _next(self, timeout: float | None) -> list[Message] | None:
        """What is to be sent next; nothing when nothing comes in time."""
        try:
            return self._outgoing.get(timeout=timeout)
        except queue.Empty:
            return []


def send_now(app: Celery, messages: Sequence[Message]) -> int:
    """Send them on this thread; returns how many: none when Redis does not take them."""
    try:
        post(app, messages)
    except Exception as error:  # whatever the transport raises: it is told, it is mended, and the next messages come
        log.warning("the messages of %d jobs, from %s on, could not be sent yet: %r", len(messages), messages[0].job_id, error)
        return 0
    return len(messages)
