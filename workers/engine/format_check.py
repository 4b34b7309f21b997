"""Compiles constraints in a process of its own before the engine does, so that none can occupy the engine or its memory.

A few kilobytes of schema may take xgrammar minutes. `python -m midstream.workers.engine.format_check` is that process: it reads
constraints from standard input and answers each when it has compiled it, or ends when that takes too much.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import resource
import signal
import sys
from collections import OrderedDict
from typing import Any, BinaryIO

import msgspec

from ...schemas.base import to_json
from ...schemas.errors import MidstreamError, invalid

logger = logging.getLogger(__name__)

#: Bytes of data that the process may have: its imports take half a GiB.
MEMORY = 4 << 30
#: Seconds for the process to start and to answer, on a machine with other things to do.
PATIENCE_S = 180.0
#: Constraints that were compiled once and are not checked again.
KEPT = 1024


class FormatChecker:
    """Checks constraints for one model's tokenizer, one at a time. The process starts with the first."""

    def __init__(self, model: str, vocab_size: int, seconds: float, trust_remote_code: bool = False):
        """`model`: the tokenizer's folder or hub name. `seconds`: of processor time, for one constraint."""
        self._seconds = seconds
        self._arguments = [model, str(vocab_size), str(seconds), str(int(trust_remote_code))]
        self._process: asyncio.subprocess.Process | None = None
        self._passed: OrderedDict[str, None] = OrderedDict()
        self._one = asyncio.Lock()

    async def check(self, params: Any) -> None:
        """Raises a 400 when the constraint of `params`, vLLM's SamplingParams, takes too long to compile.

        One that does not compile at all passes: vLLM says why.
        """
        if params.structured_outputs is None:
            return
        constraint = {name: value for name, value in vars(params.structured_outputs).items() if value and not name.startswith("_")}
        raw = to_json(constraint)
        key = hashlib.sha256(raw).hexdigest()
        async with self._one:
            if key not in self._passed:
                await self._ask(raw)
                self._passed[key] = None
            self._passed.move_to_end(key)
            while len(self._passed) > KEPT:
                self._passed.popitem(last=False)

    async def _ask(self, raw: bytes) -> None:
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                process.stdin.write(raw + b"\n")
                await process.stdin.drain()
                if not await process.stdout.readline():
                    raise EOFError
        except (EOFError, OSError) as error:
            ended = await self._end()
            if ended in (-signal.SIGPROF, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV) or ended == 1:
                detail = f"takes more than {self._seconds:g} s (format_compile_s) of processor time or {MEMORY >> 30} GiB to compile"
                raise invalid("structured_outputs", detail, allowed="a smaller schema, grammar, expression or list of tools") from None
            raise MidstreamError("internal", f"the process that checks constraints ended with {ended}") from error
        except BaseException:  # cancelled, or out of time, before the answer was complete
            await self._end()
            raise

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", __name__, *self._arguments, stdin=pipe, stdout=pipe, limit=1 << 20
            )
        return self._process

    async def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(TimeoutError):  # a pipe breaks a moment before its process has ended
            await asyncio.wait_for(process.wait(), 1.0)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()

    async def close(self) -> None:
        await self._end()


# --- The process -----------------------------------------------------------------------------------------------------


def _compile(compiler: Any, asked: dict[str, Any]) -> None:
    """As vLLM's xgrammar backend does."""
    import xgrammar

    if asked.get("json"):
        schema = asked["json"]
        compiler.compile_json_schema(
            schema if isinstance(schema, str) else json.dumps(schema), any_whitespace=not asked.get("disable_any_whitespace")
        )
    elif asked.get("regex"):
        compiler.compile_regex(asked["regex"])
    elif asked.get("choice"):
        compiler.compile_grammar("root ::= " + " | ".join(map(json.dumps, asked["choice"])))
    elif asked.get("structural_tag"):
        compiler.compile_structural_tag(asked["structural_tag"])
    elif asked.get("grammar"):
        try:
            grammar = xgrammar.Grammar.from_ebnf(asked["grammar"])
        except RuntimeError:
            grammar = xgrammar.Grammar.from_lark(asked["grammar"])
        compiler.compile_grammar(grammar)


def _serve(questions: BinaryIO, answers: BinaryIO, compiler: Any, seconds: float) -> None:
    """Until the other side closes. Too much processor time (SIGPROF) or memory for one constraint ends the process."""
    while line := questions.readline():
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            _compile(compiler, msgspec.json.decode(line))
        except MemoryError:
            raise
        except Exception as error:  # vLLM compiles it again and says what is wrong
            logger.debug("a constraint does not compile: %s", error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        compiler.clear_cache()
        answers.write(b"\n")
        answers.flush()


def main() -> None:
    import xgrammar
    from transformers import AutoTokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the worker; this process ends when the worker closes the pipe
    model, vocab_size, seconds, trust = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=bool(int(trust)))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=int(vocab_size))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with contextlib.suppress(BrokenPipeError):
        _serve(sys.stdin.buffer, sys.stdout.buffer, xgrammar.GrammarCompiler(info, max_threads=1), float(seconds))


if __name__ == "__main__":
    main()
