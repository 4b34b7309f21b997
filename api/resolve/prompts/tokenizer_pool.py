"""Helper processes that tokenise long texts and render long conversations, so that the event loop
can serve other calls.

(`tokenizers` holds the GIL for a part of its work: a second for 8 MiB of text.) A helper is started
when it is first needed, and again if it has died. `python -m
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import BinaryIO

import anyio
import msgspec
import numpy as np

from ....broker.processes.orphans import die_with_parent
from ....schemas.base import (
    MidstreamError,
    Problem,
    Translated,
    Wire,
    error_of,
    from_msgpack,
    to_msgpack,
)
from ....schemas.jobs.models import TokenizerBundle
from ....schemas.prompts.chat import PLAIN, PlainMessage, Rendering, characters_of
from ....schemas.settings.settings import Settings
from .tokenizer import Codec, Encoded, TooLong

log = logging.getLogger("midstream.api")

#: Characters sent to a helper per message, unless a single text has more.
BATCH_CHARACTERS = 256 * 1024
#: Requests that may wait for a helper; more are refused.
MAX_WAITING = 64
#: Wall time that a helper may take, in multiples of its limit of processor time: processors are
#: shared.
PATIENCE = 3
#: Seconds for a helper to start on a busy machine.
START_S = 30.0
#: Bytes of data that a helper may have: a text of 8 MiB takes up to one GiB.
MEMORY = 4 << 30
#: Tokenizers that a helper keeps.
KEPT = 4
#: Characters of a request after which a helper returns free memory to the system.
TRIM_CHARACTERS = 64 * 1024


class PoolRequest(Wire):
    tokenizer: str  # content hash of the bundle
    bundle: bytes  # empty: the helper has it cached
    texts: list[str]
    messages: list[PlainMessage]  # one conversation in place of texts
    special_tokens: bool
    limit: int  # tokens; for a longer text the answer has only their number
    offsets: bool = False  # whether the answer includes offsets
    rendering: Rendering = PLAIN  # of the conversation


class PoolAnswer(Wire):
    unknown: bool  # the bundle has to be sent along
    ids: list[bytes]  # int32, of each text
    text: str = ""  # of the conversation
    too_long: tuple[int, int] | None = None  # index of a text, its number of tokens
    problem: Problem | None = None
    offsets: list[bytes] = []  # int32 pairs, of each text; see `PoolRequest.offsets`


class Helpers:
    """The helper processes of one API."""

    def __init__(self, settings: Settings):
        self._seconds = settings.tuning.tokenizer_timeout_s
        self._free = anyio.CapacityLimiter(settings.tuning.tokenizer_processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()

    async def encode(
        self,
        tokenizer: str,
        fetch: Callable[[], Awaitable[bytes]],
        texts: Sequence[str],
        special_tokens: bool,
        limit: int,
        offsets: bool,
    ) -> list[Encoded]:
        """Return the tokens of each text. `fetch` reads the bundle for a helper that does not have
        it.

        Raises TooLong for a text of more than `limit` tokens; `invalid_request` when it takes too
        much processor time, `overloaded` when too many wait, `unavailable` when helpers die.
        """
        result: list[Encoded] = []
        for batch in _batches(texts):
            try:
                answer = await self._ask(
                    PoolRequest(tokenizer, b"", batch, [], special_tokens, limit, offsets), fetch
                )
            except TooLong as error:
                raise TooLong(len(result) + error.index, error.tokens) from None
            result += [
                Encoded(
                    np.frombuffer(ids, np.int32),
                    np.frombuffer(places, np.int32).reshape(-1, 2) if offsets else None,
                )
                for ids, places in zip_longest(answer.ids, answer.offsets, fillvalue=b"")
            ]
        return result

    async def encode_chat(
        self,
        tokenizer: str,
        fetch: Callable[[], Awaitable[bytes]],
        messages: Sequence[PlainMessage],
        rendering: Rendering,
        limit: int,
    ) -> tuple[np.ndarray, str]:
        """Return token ids and text of a conversation; raises like `encode`, and a 400 if the chat
        template rejects it.
        """
        answer = await self._ask(
            PoolRequest(tokenizer, b"", [], list(messages), False, limit, rendering=rendering),
            fetch,
        )
        return np.frombuffer(answer.ids[0], np.int32), answer.text

    async def close(self) -> None:
        for process in [*self._all]:
            await self._end(process)

    async def _ask(self, ask: PoolRequest, fetch: Callable[[], Awaitable[bytes]]) -> PoolAnswer:
        if self._free.statistics().tasks_waiting >= MAX_WAITING:
            raise MidstreamError(
                "overloaded", "too many long prompts are waiting to be tokenised: try again later"
            )
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
                    shown = "the conversation" if ask.messages else "the text"
                    detail = (
                        f"{shown} took more than {self._seconds:g} s to tokenise (setting "
                        "tokenizer_timeout_s)"
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
        return answer

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


@dataclass(frozen=True)
class BundleHelpers:
    """The helper processes, for one tokenizer."""

    helpers: Helpers
    tokenizer: str  # content hash of the bundle
    fetch: Callable[[], Awaitable[bytes]]  # reads the bundle

    async def encode(
        self, texts: Sequence[str], special_tokens: bool, limit: int, offsets: bool
    ) -> list[Encoded]:
        """Encode like `Helpers.encode`."""
        return await self.helpers.encode(
            self.tokenizer, self.fetch, texts, special_tokens, limit, offsets
        )

    async def encode_chat(
        self, messages: Sequence[PlainMessage], rendering: Rendering, limit: int
    ) -> tuple[np.ndarray, str]:
        """Encode like `Helpers.encode_chat`."""
        return await self.helpers.encode_chat(
            self.tokenizer, self.fetch, messages, rendering, limit
        )


async def _exchange(process: asyncio.subprocess.Process, ask: PoolRequest) -> PoolAnswer:
    assert process.stdin is not None
    assert process.stdout is not None
    raw = to_msgpack(ask)
    process.stdin.write(len(raw).to_bytes(8, "big"))
    process.stdin.write(raw)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(8), "big")
    return from_msgpack(await process.stdout.readexactly(size), PoolAnswer)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


# --- The helper


def answer(ask: PoolRequest, codecs: "OrderedDict[str, Codec]") -> PoolAnswer:
    if ask.bundle:
        codecs[ask.tokenizer] = Codec(from_msgpack(ask.bundle, TokenizerBundle))
        while len(codecs) > KEPT:
            codecs.popitem(last=False)
    codec = codecs.get(ask.tokenizer)
    if codec is None:
        return PoolAnswer(True, [])
    codecs.move_to_end(ask.tokenizer)
    texts = ask.texts
    if ask.messages:
        try:
            texts = [codec.render(ask.messages, ask.rendering)]
        except MidstreamError as error:
            return PoolAnswer(False, [], problem=error.problem())
    ids, offsets = [], []
    for index, result in enumerate(codec.encode_here(texts, ask.special_tokens, ask.offsets)):
        if len(result.ids) > ask.limit:
            return PoolAnswer(False, [], too_long=(index, len(result.ids)))
        ids.append(result.ids.tobytes())
        if result.offsets is not None:
            offsets.append(result.offsets.tobytes())
    return PoolAnswer(False, ids, texts[0] if ask.messages else "", offsets=offsets)


def _serve(questions: BinaryIO, answers: BinaryIO, seconds: float) -> None:
    """Answer questions until the API closes the pipe.

    A question that takes more than `seconds` of processor time ends the process (SIGPROF).
    """
    codecs: OrderedDict[str, Codec] = OrderedDict()
    while head := questions.read(8):
        ask = from_msgpack(questions.read(int.from_bytes(head, "big")), PoolRequest)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        raw = to_msgpack(answer(ask, codecs))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(raw).to_bytes(8, "big") + raw)
        answers.flush()
        if sum(map(len, ask.texts)) + characters_of(ask.messages) > TRIM_CHARACTERS:
            del ask, raw
            with suppress(AttributeError, OSError):  # only glibc has it
                ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    die_with_parent(int(sys.argv[2]))
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
