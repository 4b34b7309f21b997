"""Compiles and tries output constraints in a separate process before the engine does, so that no
constraint can occupy the engine or its memory.

A few kilobytes of schema may take xgrammar minutes, and matching thirty characters of a regular
expression may never end. `python -m midstream.workers.engine.prompts.format_check` is that process:
it answers each constraint when it has tried it, and ends when one takes too much time or memory.
"""

import contextlib
import hashlib
import json
import logging
import random
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from ....broker.processes.helper_process import (
    OUT_OF_MEMORY,
    HelperAnswers,
    HelperEnded,
    HelperProcess,
    answer_all,
    begin,
    limit_memory,
)
from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.recent import Recent
from ....schemas.base.records import from_msgpack, to_json
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
#: How the process ends when a constraint needs more processor time or memory.
TOO_MUCH = (
    OUT_OF_MEMORY,
    -signal.SIGPROF,
    -signal.SIGKILL,
    -signal.SIGABRT,
    -signal.SIGSEGV,
)
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
        self._helper = HelperProcess(
            __name__, model, vocab_size, seconds, int(trust_remote_code), memory
        )
        # digest of a constraint → why it is refused; empty: it passed
        self._known = Recent[str, str](KEPT)
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
            self._waiting -= Counter([(tenant, job)])  # drops what is 0

    async def begin(self) -> None:
        """Start the process before the first constraint arrives."""
        async with self._turns.turn(""):
            self._helper.start()

    async def _ask(self, raw: bytes) -> str:
        """Have the process check a constraint; returns why it is refused, or ""."""
        try:
            return from_msgpack(await self._helper.ask(raw, PATIENCE_S), str)
        except HelperEnded as error:
            if error.ready and error.status in TOO_MUCH:
                return f"takes more than {self._most} to compile and to match"
            raise MidstreamError(
                "internal", f"the process that checks constraints ended with {error.status}"
            ) from error

    async def close(self) -> None:
        await self._helper.end()


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


def _answer(compiler: Any, raw: bytes) -> str:
    """Return why a constraint is refused. Raises MemoryError, which ends the process."""
    try:
        return refusal(msgspec.json.decode(raw), compiler)
    except (RuntimeError, ValueError) as error:
        # from xgrammar: vLLM compiles the constraint again and reports what is wrong
        if "bad_alloc" in str(error):
            raise MemoryError from error
        logger.debug("a constraint does not compile: %s", error)
        return ""
    finally:
        compiler.clear_cache()


def main() -> None:
    model, vocab_size, seconds, trust, memory = begin()
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=bool(int(trust)))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=int(vocab_size))
    limit_memory(int(memory))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    answer_all(HelperAnswers(), partial(_answer, compiler), seconds=float(seconds))


if __name__ == "__main__":
    main()
