"""Helper processes: one answers questions over its standard input and output, so that what a
question takes in time or memory costs this process, and not the one that asks.

`HelperProcess` is the side that asks; `begin` and `answer_all` are the helper's side.
"""

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

from ...schemas.base.errors import MidstreamError, Problem, error_of
from ...schemas.base.records import Wire, from_msgpack, to_msgpack
from .orphans import die_with_parent

#: Exit status of a helper that ran out of memory.
OUT_OF_MEMORY = 75
#: What is added to a helper's niceness: its questions wait for processors, not small requests.
NICE = 10
#: Seconds that a helper which has closed its output gets to exit.
ENDING_S = 5.0
#: Size of a question after which a helper returns free memory to the system.
TRIM_BYTES = 64 * 1024
#: Bytes of a message's length, which precedes the message.
_LENGTH = 8


class HelperReply(Wire):
    """A helper's reply to a question."""

    at: str = ""  # the place at which it works; another reply follows
    problem: Problem | None = None
    answer: bytes = b""  # MessagePack; empty: the helper lacks what the question names


@dataclass(eq=False)
class HelperEnded(Exception):
    """A helper ended, or was ended, before its answer was complete."""

    status: int
    at: str  # where it worked, if it said so
    ready: bool  # it had started


class HelperProcess:
    """A process that runs a module, started when it is first asked and again after its end. It
    gets one question at a time, from any event loop: a thread waits for its answer.
    """

    def __init__(self, module: str, *arguments: object, **environment: str) -> None:
        """`environment`: variables besides those of this process."""
        self._command = ["-m", module, *map(str, arguments)]
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        # which has reported that it is ready: one that is being ended may do so late
        self._ready: subprocess.Popen[bytes] | None = None
        # Of its own: an answer may take minutes, and other work of the process has few threads. It
        # takes one question at a time.
        self._thread = ThreadPoolExecutor(1, "helper")

    async def ask(self, question: bytes, patience_s: float | None = None) -> bytes:
        """Return the answer to a question; empty if the helper lacks what the question names.

        Raises MidstreamError as the helper did, OSError if no process can be started, and
        HelperEnded, also after `patience_s`. If it is cancelled, the process is ended.
        """
        process = self.start()
        loop = asyncio.get_running_loop()
        exchange = loop.run_in_executor(self._thread, self._exchange, process, question)
        try:
            await asyncio.wait([exchange], timeout=patience_s)
        except asyncio.CancelledError:
            self._kill(process)
            exchange.cancel()  # nobody asks how it ends
            raise
        if not exchange.done():
            self._kill(process)
        reply = await exchange
        if reply.problem is not None:
            raise error_of(reply.problem)
        return reply.answer

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process, which ends the exchange with it."""
        if self.process is process:
            self.process = None
        process.kill()

    def _exchange(self, process: subprocess.Popen[bytes], question: bytes) -> HelperReply:
        """Send a question and wait for its answer. Raises HelperEnded."""
        assert process.stdin is not None
        assert process.stdout is not None
        reply = HelperReply()
        try:
            if self._ready is not process:
                _read(process.stdout)
                self._ready = process
            process.stdin.write(len(question).to_bytes(_LENGTH, "big"))
            process.stdin.write(question)
            process.stdin.flush()
            while (received := _read(process.stdout)).at:
                reply = received
        except (EOFError, OSError) as error:
            ready = self._ready is process
            raise HelperEnded(_ended(process, ENDING_S), reply.at, ready) from error
        return received

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process if it does not run; its first question need not wait for it then."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, *self._command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl+C is for this process, with which it ends
                env={**os.environ, **self._environment},
            )
        return self.process

    async def end(self) -> None:
        """Kill the process."""
        process = self.process
        self.process = None
        if process is not None:
            await asyncio.to_thread(_ended, process)


def _ended(process: subprocess.Popen[bytes], wait_s: float = 0.0) -> int:
    """Kill a process after `wait_s` seconds, in which it may exit; return its status."""
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _read(answers: IO[bytes]) -> HelperReply:
    """Read a reply. Raises EOFError."""
    size = int.from_bytes(_exactly(answers, _LENGTH), "big")
    return from_msgpack(_exactly(answers, size), HelperReply)


def _exactly(answers: IO[bytes], size: int) -> bytes:
    found = answers.read(size)
    if len(found) < size:
        raise EOFError
    return found


# --- The helper


def begin(niceness: int = NICE) -> list[str]:
    """Have this process end with its starter, and return its arguments."""
    *arguments, parent = sys.argv[1:]
    die_with_parent(int(parent))
    os.nice(niceness)
    return arguments


def limit_memory(most: int) -> None:
    """Limit this process's data to `most` bytes, or to what it may have if that is less."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


class HelperAnswers:
    """The helper's output. What libraries print goes to its standard error instead."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def show(self, place: str) -> None:
        """Say where the helper works, in case that this ends it."""
        self.send(HelperReply(at=place))

    def send(self, reply: HelperReply) -> None:
        raw = to_msgpack(reply)
        self._output.write(len(raw).to_bytes(_LENGTH, "big") + raw)
        self._output.flush()


def answer_all(
    answers: HelperAnswers,
    answer: Callable[[bytes], Any],
    *,
    seconds: float = 0.0,
    idle_s: float = 0.0,
) -> None:
    """Answer questions until the asker closes the input; `answer` returns None if it lacks what a
    question names.

    A question that takes more than `seconds` of processor time ends the process (SIGPROF), and so
    do too much memory, and `idle_s` without a question (SIGALRM); 0: no limit.
    """
    with suppress(BrokenPipeError):
        answers.send(HelperReply())  # it is ready
        while (question := _question(sys.stdin.buffer, idle_s)) is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            reply = _reply(answer, question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.send(reply)
            if len(question) > TRIM_BYTES:
                del question, reply
                with suppress(AttributeError, OSError):  # only glibc has it
                    ctypes.CDLL(None).malloc_trim(0)


def _question(questions: BinaryIO, idle_s: float) -> bytes | None:
    signal.setitimer(signal.ITIMER_REAL, idle_s)
    head = questions.read(_LENGTH)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return questions.read(int.from_bytes(head, "big")) if head else None


def _reply(answer: Callable[[bytes], Any], question: bytes) -> HelperReply:
    try:
        found = answer(question)
        return HelperReply(answer=b"" if found is None else to_msgpack(found))
    except MidstreamError as error:
        return HelperReply(problem=error.problem())
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        traceback.print_exc()
        failed = MidstreamError("internal", f"{type(error).__name__}: {error}")
        return HelperReply(problem=failed.problem())
