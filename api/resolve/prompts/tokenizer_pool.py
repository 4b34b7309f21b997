"""Helper processes that tokenise long texts, render long or many conversations and find spans in
them, so that the API can serve other calls.

(`tokenizers` holds the GIL for a part of its work: a second for 8 MiB of text. Templates hold it
throughout.) A helper is started when it is first needed, and again if it has died. `python -m
midstream.api.resolve.prompts.tokenizer_pool` runs a helper: it reads `PoolRequest`s from standard
input and writes `PoolAnswer`s to standard output.
"""

import asyncio
import ctypes
import logging
import os
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import BinaryIO

import anyio
import msgspec

from ....broker.processes.orphans import die_with_parent
from ....schemas.base.errors import MidstreamError, Problem, Translated, error_of
from ....schemas.base.records import Wire, from_msgpack, to_msgpack
from ....schemas.jobs.models import TokenizerBundle
from ....schemas.settings.settings import Settings
from .tokenizer import Codec, CodecAnswer, CodecQuestion, TooLong

log = logging.getLogger("midstream.api")

#: Requests that may wait for a helper; more are refused.
MAX_WAITING = 64
#: Wall time that a helper may take, in multiples of its limit of processor time: processors are
#: shared.
PATIENCE = 3
#: Seconds for a helper to start on a busy machine.
START_S = 30.0
#: Bytes of data that a helper may have: a text of 8 MiB takes up to one GiB.
MEMORY = 4 << 30
#: What is added to a helper's niceness: long texts wait for processors, not small requests.
NICE = 10
#: Tokenizers that a helper keeps.
KEPT = 4
#: Size of a request after which a helper returns free memory to the system.
TRIM_BYTES = 64 * 1024


class PoolRequest(Wire):
    tokenizer: str  # content hash of the bundle
    bundle: bytes  # empty: the helper has it cached
    question: CodecQuestion


class PoolAnswer(Wire):
    unknown: bool = False  # the bundle has to be sent along
    answer: CodecAnswer = CodecAnswer()
    too_long: tuple[int, int] | None = None  # index of a text, its number of tokens
    problem: Problem | None = None


class Helpers:
    """The helper processes of one API."""

    def __init__(self, settings: Settings):
        self._seconds = settings.tuning.tokenizer_timeout_s
        self._free = anyio.CapacityLimiter(settings.tuning.tokenizer_processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()

    async def close(self) -> None:
        for process in [*self._all]:
            await self._end(process)

    async def ask(
        self, tokenizer: str, fetch: Callable[[], Awaitable[bytes]], question: CodecQuestion
    ) -> CodecAnswer:
        """Return what `Codec.answer` returns. `tokenizer`: content hash of the bundle; `fetch`
        reads it for a helper that does not have it.

        Raises what that raises; `invalid_request` when it takes too much processor time,
        `overloaded` when too many wait, `unavailable` when helpers die.
        """
        if self._free.statistics().tasks_waiting >= MAX_WAITING:
            raise MidstreamError(
                "overloaded", "too many long prompts are waiting to be tokenised: try again later"
            )
        ask = PoolRequest(tokenizer, b"", question)
        async with self._free:
            process = await self._start()
            try:
                with anyio.fail_after(START_S + self._seconds * PATIENCE):
                    answer = await _exchange(process, ask)
                    if answer.unknown:
                        answer = await _exchange(
                            process, msgspec.structs.replace(ask, bundle=await fetch())
                        )
            except (TimeoutError, EOFError, OSError) as error:
                ended = await self._end(process)
                if ended == -signal.SIGPROF:
                    detail = (
                        f"the prompts took more than {self._seconds:g} s to tokenise or to find "
                        "spans in (setting tokenizer_timeout_s)"
                    )
                    raise MidstreamError(
                        "invalid_request", detail, hint="send shorter texts or conversations"
                    ) from None
                log.warning("a tokeniser process ended with %s: %r", ended, error)
                raise MidstreamError(
                    "unavailable", "tokenising failed or took too long: try again"
                ) from None
            except BaseException:  # cancelled before the answer was complete
                await self._end(process)
                raise
            self._idle.append(process)
        if answer.too_long is not None:
            raise TooLong(*answer.too_long)
        if answer.problem is not None:
            raise error_of(answer.problem)
        return answer.answer

    async def _start(self) -> asyncio.subprocess.Process:
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
            self._all.discard(process)
        pipe = asyncio.subprocess.PIPE
        with Translated(
            OSError,
            lambda error: MidstreamError(
                "unavailable", f"cannot start a tokeniser process: {error.strerror}"
            ),
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                str(self._seconds),
                str(os.getpid()),
                stdin=pipe,
                stdout=pipe,
                limit=1 << 20,
            )
        self._all.add(process)
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> int:
        """Return the process's exit status; kill the process if it has not ended."""
        with anyio.CancelScope(shield=True):
            with suppress(TimeoutError):  # a pipe breaks a moment before its process has ended
                await asyncio.wait_for(process.wait(), 0.2)
            with suppress(ProcessLookupError):
                process.kill()
            self._all.discard(process)
            await process.wait()
        return process.returncode or 0


async def _exchange(process: asyncio.subprocess.Process, ask: PoolRequest) -> PoolAnswer:
    assert process.stdin is not None
    assert process.stdout is not None
    raw = to_msgpack(ask)
    process.stdin.write(len(raw).to_bytes(8, "big"))
    process.stdin.write(raw)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(8), "big")
    return from_msgpack(await process.stdout.readexactly(size), PoolAnswer)


# --- The helper


def answer(ask: PoolRequest, codecs: "OrderedDict[str, Codec]") -> PoolAnswer:
    if ask.bundle:
        codecs[ask.tokenizer] = Codec(from_msgpack(ask.bundle, TokenizerBundle))
        while len(codecs) > KEPT:
            codecs.popitem(last=False)
    codec = codecs.get(ask.tokenizer)
    if codec is None:
        return PoolAnswer(unknown=True)
    codecs.move_to_end(ask.tokenizer)
    try:
        return PoolAnswer(answer=codec.answer(ask.question))
    except TooLong as error:
        return PoolAnswer(too_long=(error.index, error.tokens or 0))
    except MidstreamError as error:
        return PoolAnswer(problem=error.problem())


def _serve(questions: BinaryIO, answers: BinaryIO, seconds: float) -> None:
    """Answer questions until the API closes the pipe.

    A question that takes more than `seconds` of processor time ends the process (SIGPROF).
    """
    codecs: OrderedDict[str, Codec] = OrderedDict()
    while head := questions.read(8):
        size = int.from_bytes(head, "big")
        ask = from_msgpack(questions.read(size), PoolRequest)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        raw = to_msgpack(answer(ask, codecs))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(raw).to_bytes(8, "big") + raw)
        answers.flush()
        if size > TRIM_BYTES:
            del ask, raw
            with suppress(AttributeError, OSError):  # only glibc has it
                ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    os.nice(NICE)
    # Ctrl+C is for the API, with which this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard),
    )
    with suppress(BrokenPipeError):
        _serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))


if __name__ == "__main__":
    main()
