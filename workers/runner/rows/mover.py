"""Mover: a rank's background thread that copies the rows of steps out of their slabs, into memory
or files of their recordings, so that no step waits for it.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from .slabs import SlabPool
from .step_runs import Stretch

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Mover:
    """Runs submitted actions in order, in one thread."""

    def __init__(self, memory: SlabPool, begin: Callable[[], None] = lambda: None) -> None:
        """`memory`: of the copies; used only in the thread. `begin`: called first in the thread."""
        self.memory = memory
        self._given = self._taken = 0  # bytes of slabs, each written by one thread
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(begin,), name="midstream-mover", daemon=True
        )
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Return the bytes of slabs whose rows are not copied yet."""
        return self._given - self._taken

    def take(self, stretch: Stretch, *, spill: bool) -> None:
        """Have recorded rows copied to their recordings, into files if `spill`."""
        size = stretch.slab.nbytes
        new = self.memory.new_file if spill else self.memory.new_slab

        def copy() -> None:
            try:
                stretch.copy(new)
            finally:
                self._taken += size

        self._given += size
        self.submit(copy)

    def submit(self, action: Callable[[], T]) -> "Future[T]":
        """Queue an action; return the future of its result. An action whose future is cancelled
        before it starts is not run.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(action())
                except Exception as error:
                    logger.exception("captured rows could not be moved")
                    # the frames would keep the rows' memory
                    future.set_exception(error.with_traceback(None))

        self._queue.put(run)
        return future

    def close(self) -> None:
        """Run the queued actions and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self, begin: Callable[[], None]) -> None:
        begin()
        while (run := self._queue.get()) is not None:
            run()
            del run  # so that what it refers to is not kept until the next action
