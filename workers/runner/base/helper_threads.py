"""Runs code of other packages in a separate thread, so that neither its exceptions nor its
duration can stop the caller.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Question = TypeVar("Question")
ResultT = TypeVar("ResultT")


class LateError(Exception):
    """The code took too long, or is still busy with an abandoned call."""


# A Python thread cannot be stopped, but it can be abandoned.
class HelperThread(Generic[Question, ResultT]):
    """Runs one function in its own thread, one call at a time."""

    def __init__(
        self,
        name: str,
        call: Callable[[Question], ResultT],
        patience_s: float,
        over: str = "capture",
    ) -> None:
        """`patience_s`: seconds that a call may take. `over`: what messages name a call's subject,
        such as "capture".
        """
        self.patience_s = patience_s
        self._name = name
        self._call = call
        self._over = over
        self._turn = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Question, queue.SimpleQueue[ResultT | Exception]]] = (
            queue.SimpleQueue()
        )
        self._busy = threading.Event()
        self._since = 0.0  # start of the last call
        threading.Thread(target=self._run, name=f"midstream-{name}", daemon=True).start()

    def ask(self, question: Question) -> ResultT:
        """Call the function; return its result.

        Raises what the function raises (RuntimeError if that is no Exception), and LateError.
        """
        with self._turn:
            if self._busy.is_set():  # with an abandoned call
                raise LateError(
                    f"it has been busy with another {self._over} for "
                    f"{time.monotonic() - self._since:.0f} s"
                )
            answer: queue.SimpleQueue[ResultT | Exception] = queue.SimpleQueue()
            self._since = time.monotonic()
            self._busy.set()
            self._calls.put((question, answer))
            try:
                result = answer.get(timeout=self.patience_s)
            except queue.Empty:
                logger.error("%s takes longer than %g s", self._name, self.patience_s)
                raise LateError(f"it took longer than {self.patience_s:g} s") from None
        if isinstance(result, Exception):
            raise result
        return result

    def _run(self) -> None:
        while True:
            question, answer = self._calls.get()
            result = self._result(question)
            self._busy.clear()
            answer.put(result)
            del question, answer, result  # the rows' memory is not kept until the next call

    def _result(self, question: Question) -> ResultT | Exception:
        try:
            return self._call(question)
        except Exception as error:
            logger.exception("%s failed", self._name)
            return error.with_traceback(None)
        except BaseException as error:  # SystemExit must end neither this thread nor the caller's
            logger.exception("%s failed", self._name)
            return RuntimeError(f"it raised {error!r}")
