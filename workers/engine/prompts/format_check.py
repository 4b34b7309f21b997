"""Compiles and tries output constraints in a separate process before the engine does, so that no
constraint can occupy the engine or its memory.

A few kilobytes of schema may take xgrammar minutes, and matching thirty characters of a regular
expression may never end. `python -m midstream.workers.engine.prompts.format_check` is that process:
it reads constraints from standard input and answers each when it has tried it; it ends when a
constraint takes too much time or memory.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import random
import resource
import signal
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from ....broker.processes.orphans import die_with_parent
from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.records import to_json
from ..admission import FairTurns
from ..protocol import NotYet

logger = logging.getLogger(__name__)

#: Kind of constraint → most rules of the grammar that xgrammar makes of it before compiling. A
#: member of a schema becomes one or a few rules; so does a repeated group of a regular expression,
#: where the work grows with the square of the rules or faster.
RULES = {"json": 2000, "structural_tag": 2000, "regex": 128, "choice": 128, "grammar": 128}
#: How many tokens, drawn at random, are tried with a constraint.
WALKED = 64
#: How many repeats of the longest one are tried.
REPEATED = 512
#: The process's RLIMIT_DATA in bytes; its imports take half a GiB.
MEMORY = 4 << 30
#: What is added to its niceness: constraints wait for processors, not the engine.
NICE = 10
#: Exit status of the process when a constraint needs more.
OUT_OF_MEMORY = 75
#: Seconds for the process to start and to answer, on a busy machine.
PATIENCE_S = 180.0
#: Number of constraints whose result, passed or refused, is remembered.
KEPT = 1024
#: Default number of jobs that may wait for a check.
JOBS = 64
_SMALLER = "a smaller schema, grammar, expression or list of tools"


class FormatsBusy(NotYet):
    """The queue for format checks is full: the job frees its place in the worker."""


class FormatChecker:
    """Checks constraints for one model's tokenizer, one at a time; tenants take turns.

    The process starts with the first constraint, or with `begin`.
    """

    def __init__(
        self,
        model: str,
        vocab_size: int,
        seconds: float,
        trust_remote_code: bool = False,
        memory: int = MEMORY,
        jobs: int = JOBS,
    ) -> None:
        """`model`: the tokenizer's folder or hub name. `seconds`: processor time for one
        constraint. `memory`: bytes of data of the process. `jobs`: how many jobs may wait; at most
        half of them may belong to one tenant.
        """
        self._most = (
            f"{seconds:g} s (format_compile_s) of processor time or {memory / (1 << 30):g} GiB"
        )
        self._arguments = [
            model,
            str(vocab_size),
            str(seconds),
            str(int(trust_remote_code)),
            str(memory),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False  # whether the process has reported that it is ready
        # digest of a constraint → why it is refused; empty: it passed
        self._known: OrderedDict[str, str] = OrderedDict()
        self._turns = FairTurns()
        # (tenant, job) → number of its waiting requests
        self._jobs = jobs
        self._waiting = Counter[tuple[str, str]]()

    async def check(self, params: Any, tenant: str = "", job: str = "") -> None:
        """Raises a 400 when the constraint of `params`, vLLM's SamplingParams, is too large or
        takes too long to compile or match.

        A constraint that does not compile at all passes, because vLLM reports why. Constraints that
        were checked before are answered immediately; for others, raises FormatsBusy when too many
        jobs wait.
        """
        if params.structured_outputs is None:
            return
        constraint = {
            name: value
            for name, value in vars(params.structured_outputs).items()
            if value and not name.startswith("_")
        }
        raw = to_json(constraint)
        key = hashlib.sha256(raw).hexdigest()
        if key not in self._known:
            with self._place(tenant, job):
                async with self._turns.turn(tenant):
                    if key not in self._known:  # another request may have checked it meanwhile
                        self._known[key] = await self._ask(raw)
        self._known.move_to_end(key)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        if refused := self._known[key]:
            raise invalid("structured_outputs", refused, allowed=_SMALLER)

    @contextlib.contextmanager
    def _place(self, tenant: str, job: str) -> Iterator[None]:
        """Count a job as waiting inside the block.

        Raises FormatsBusy if too many jobs, or too many of its tenant, wait already.
        """
        of_tenant = sum(of == tenant for of, _ in self._waiting)
        if (tenant, job) not in self._waiting and (
            len(self._waiting) >= self._jobs or 2 * of_tenant >= self._jobs
        ):
            raise FormatsBusy(
                f"{of_tenant} jobs of the tenant wait until their formats are checked, and "
                f"{len(self._waiting)} in all"
            )
        self._waiting[tenant, job] += 1
        try:
            yield
        finally:
            self._waiting[tenant, job] -= 1
            if not self._waiting[tenant, job]:
                del self._waiting[tenant, job]

    async def begin(self) -> None:
        """Start the process before the first constraint arrives."""
        async with self._turns.turn(""):
            await self._started()

    async def _ask(self, raw: bytes) -> str:
        """Have the process check a constraint; returns why it is refused, or ""."""
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                self._ready = self._ready or await process.stdout.readline() != b""
                if not self._ready:
                    raise EOFError
                process.stdin.write(raw + b"\n")
                await process.stdin.drain()
                if not (answer := await process.stdout.readline()):
                    raise EOFError
        except (EOFError, OSError) as error:
            ready = self._ready
            ended = await self._end()
            if ready and ended in (
                OUT_OF_MEMORY,
                -signal.SIGPROF,
                -signal.SIGKILL,
                -signal.SIGABRT,
                -signal.SIGSEGV,
            ):
                return f"takes more than {self._most} to compile and to match"
            raise MidstreamError(
                "internal", f"the process that checks constraints ended with {ended}"
            ) from error
        except BaseException:  # cancelled, or out of time, before the answer was complete
            await self._end()
            raise
        return msgspec.json.decode(answer, type=str)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._ready = False
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                *self._arguments,
                str(os.getpid()),
                stdin=pipe,
                stdout=pipe,
                limit=1 << 20,
            )
        return self._process

    async def _end(self) -> int:
        process = self._process
        self._process = None
        if process is None:
            return 0
        with contextlib.suppress(TimeoutError):
            # a pipe breaks a moment before its process ends
            await asyncio.wait_for(process.wait(), 1.0)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()

    async def close(self) -> None:
        await self._end()


# --- The process


def _grammar(request: dict[str, Any]) -> tuple[str, Any]:
    """Returns the kind of a constraint and xgrammar's grammar for it, as vLLM's backend makes it;
    "" and None for a kind without a limit.
    """
    import xgrammar

    if schema := request.get("json"):
        spaces = not request.get("disable_any_whitespace")
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return "json", xgrammar.Grammar.from_json_schema(text, any_whitespace=spaces)
    if request.get("regex"):
        return "regex", xgrammar.Grammar.from_regex(request["regex"])
    if request.get("choice"):
        return "choice", xgrammar.Grammar.from_ebnf(
            "root ::= " + " | ".join(map(json.dumps, request["choice"]))
        )
    if request.get("structural_tag"):
        return "structural_tag", xgrammar.Grammar.from_structural_tag(request["structural_tag"])
    if request.get("grammar"):
        try:
            return "grammar", xgrammar.Grammar.from_ebnf(request["grammar"])
        except RuntimeError:
            return "grammar", xgrammar.Grammar.from_lark(request["grammar"])
    return "", None


def refusal(request: dict[str, Any], compiler: Any) -> str:
    """Return why the constraint is refused; empty if it is not."""
    kind, grammar = _grammar(request)
    if grammar is None:
        return ""
    rules = len(json.loads(grammar.serialize_json())["rules"])
    if rules > RULES[kind]:
        return f"needs {rules} rules of a grammar; at most {RULES[kind]} are allowed (kind: {kind})"
    _walk(compiler.compile_grammar(grammar))
    return ""


def _walk(compiled: Any) -> None:
    """Match tokens as the engine will: a constraint that compiles quickly, such as nested
    repetitions, may take forever to match.

    The first pass draws tokens at random, from a fixed seed; the second repeats the longest token,
    which finds constraints that get slower with each token.
    """
    import numpy as np
    import xgrammar

    info = compiled.tokenizer_info
    lengths = np.fromiter(map(len, info.decoded_vocab), np.int64, info.vocab_size)
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    draw = random.Random(0)
    for tokens, repeats in ((WALKED, False), (REPEATED, True)):
        matcher = xgrammar.GrammarMatcher(compiled)
        token = -1
        for _ in range(tokens):
            masked = matcher.fill_next_token_bitmask(mask)
            bits = (
                np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: info.vocab_size]
                if masked
                else np.ones_like(lengths, np.uint8)
            )
            bits[list(matcher.stop_token_ids)] = 0  # do not end: matching gets harder with length
            allowed = np.flatnonzero(bits)
            if len(allowed) and not (repeats and token >= 0 and bits[token]):
                token = int(allowed[lengths[allowed].argmax()] if repeats else draw.choice(allowed))
            if not len(allowed) or not matcher.accept_token(token):
                matcher.reset()


def _serve(questions: BinaryIO, answers: BinaryIO, compiler: Any, seconds: float) -> None:
    """Answer constraints until the input is closed.

    Too much processor time (SIGPROF) or memory for one constraint ends the process.
    """
    answers.write(b"ready\n")
    answers.flush()
    while line := questions.readline():
        refused = ""
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            refused = refusal(msgspec.json.decode(line), compiler)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except (RuntimeError, ValueError) as error:
            # from xgrammar: vLLM compiles the constraint again and reports what is wrong
            if "bad_alloc" in str(error):
                os._exit(OUT_OF_MEMORY)
            logger.debug("a constraint does not compile: %s", error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        compiler.clear_cache()
        answers.write(to_json(refused) + b"\n")
        answers.flush()


def main() -> None:
    model, vocab_size, seconds, trust, memory, parent = sys.argv[1:]
    die_with_parent(int(parent))
    os.nice(NICE)
    import xgrammar
    from transformers import AutoTokenizer

    # Ctrl+C is for the worker, with which this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=bool(int(trust)))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=int(vocab_size))
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    with contextlib.suppress(BrokenPipeError):
        _serve(
            sys.stdin.buffer,
            sys.stdout.buffer,
            xgrammar.GrammarCompiler(info, max_threads=1),
            float(seconds),
        )


if __name__ == "__main__":
    main()
