"""Helper processes that tokenise long texts, render long or many conversations and find spans in
them, so that the API can serve other calls.

(`tokenizers` holds the GIL for a part of its work: a second for 8 MiB of text. Templates hold it
throughout.) `python -m midstream.api.resolve.prompts.tokenizer_pool` runs a helper: it answers
`PoolRequest`s with `PoolAnswer`s.
"""

import logging
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import msgspec

from ....broker.processes.helper_process import (
    HelperAnswers,
    HelperEnded,
    HelperProcess,
    answer_all,
    begin,
    limit_memory,
)
from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.base.recent import Recent
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
#: Tokenizers that a helper keeps.
KEPT = 4


class PoolRequest(Wire):
    tokenizer: str  # content hash of the bundle
    bundle: bytes  # empty: the helper has it cached
    question: CodecQuestion


class PoolAnswer(Wire):
    answer: CodecAnswer = CodecAnswer()
    too_long: tuple[int, int] | None = None  # index of a text, its number of tokens


class Helpers:
    """The helper processes of one API."""

    def __init__(self, settings: Settings):
        self._seconds = settings.tuning.tokenizer_timeout_s
        number = settings.tuning.tokenizer_processes
        self._free = anyio.CapacityLimiter(number)
        self._all = [HelperProcess(__name__, self._seconds) for _ in range(number)]
        self._idle = [*self._all]  # the last one that was used last

    async def close(self) -> None:
        for helper in self._all:
            await helper.end()

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
        request = PoolRequest(tokenizer, b"", question)
        async with self._free:
            helper = self._idle.pop()
            try:
                raw = await self._exchange(helper, request)
                if not raw:
                    bundle = await fetch()
                    raw = await self._exchange(
                        helper, msgspec.structs.replace(request, bundle=bundle)
                    )
            finally:
                self._idle.append(helper)
        answer = from_msgpack(raw, PoolAnswer)
        if answer.too_long is not None:
            raise TooLong(*answer.too_long)
        return answer.answer

    async def _exchange(self, helper: HelperProcess, request: PoolRequest) -> bytes:
        with Translated(
            OSError,
            lambda error: MidstreamError(
                "unavailable", f"cannot start a tokeniser process: {error.strerror}"
            ),
        ):
            try:
                return await helper.ask(to_msgpack(request), START_S + self._seconds * PATIENCE)
            except HelperEnded as error:
                if error.status == -signal.SIGPROF:
                    detail = (
                        f"the prompts took more than {self._seconds:g} s to tokenise or to find "
                        "spans in (setting tokenizer_timeout_s)"
                    )
                    raise MidstreamError(
                        "invalid_request", detail, hint="send shorter texts or conversations"
                    ) from None
                log.warning("a tokeniser process ended with %s: %r", error.status, error.__cause__)
                raise MidstreamError(
                    "unavailable", "tokenising failed or took too long: try again"
                ) from None


# --- The helper


def answer(codecs: Recent[str, Codec], raw: bytes) -> PoolAnswer | None:
    """Return the answer to a `PoolRequest`; None if the helper does not have the tokenizer."""
    ask = from_msgpack(raw, PoolRequest)
    if ask.bundle:
        codecs[ask.tokenizer] = Codec(from_msgpack(ask.bundle, TokenizerBundle))
    codec = codecs.get(ask.tokenizer)
    if codec is None:
        return None
    codecs.move_to_end(ask.tokenizer)
    try:
        return PoolAnswer(codec.answer(ask.question))
    except TooLong as error:
        return PoolAnswer(too_long=(error.index, error.tokens or 0))


def main() -> None:
    (seconds,) = begin()
    limit_memory(MEMORY)
    answer_all(HelperAnswers(), partial(answer, Recent[str, Codec](KEPT)), seconds=float(seconds))


if __name__ == "__main__":
    main()
