"""How much of Redis' memory a job may still take once it is accepted: its outputs, its events and
what its ranks report. The ledger keeps as much free until the job has ended.
"""

import math
from collections.abc import Iterator

from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.jobs.jobs import Job
from ....schemas.requests.specs import MEMORY_JOB_BYTES, StoredCapture
from ....schemas.settings.settings import Settings
from .tenants import MIB

#: Bytes of what every job adds: its claims, changes of state, and the keys of its end.
JOB = 1 << 12
#: Bytes of an output without its tokens, and of what the ranks report on a prompt.
OUTPUT = 1 << 8
RECEIPT = 1 << 11
#: Bytes of a token in an output: its id, its text, and the text again in a message with tools.
TOKEN = 24
#: Bytes of a log-probability, with its token and its text.
LOGPROB = 80
#: Bytes of an event, beside the tokens in it.
EVENT = 1 << 8
#: Bytes of a computed cell: its record and its event.
CELL = 1 << 9


def room_of(job: Job, settings: Settings) -> int:
    """Return the bytes that the job may still add to Redis, at most; an estimate where only its
    worker knows, as of the text of tokens.
    """
    return JOB + sum(_parts(job, settings).values())


def never_fits(job: Job, settings: Settings, allowed: int) -> MidstreamError:
    """Return the error for a job that may add more than `allowed` MiB, which is all that one job
    may add to an empty Redis. It names the field that adds most.
    """
    parts = _parts(job, settings)
    return invalid(
        max(parts, key=parts.__getitem__),
        f"the job may store {math.ceil(room_of(job, settings) / MIB)} MiB in Redis",
        allowed=f"at most {allowed} MiB (settings redis_maxmemory_mib, tuning.redis_fill_limit)",
        hint="submit its prompts as several jobs, or request fewer tokens or rows of each",
    )


def _parts(job: Job, settings: Settings) -> dict[str, int]:
    """Return the bytes that the job may add, by the field of a request that they come from."""
    prompts = len(job.prompts)
    sampling = job.sampling
    given = sum(len(prompt.token_ids) for prompt in job.prompts)
    generated = prompts * sampling.max_tokens
    copies = 2 if job.stream else 1  # events repeat the outputs
    parts = {
        "prompts": prompts * OUTPUT,
        "sampling.max_tokens": copies * TOKEN * generated,
        "sampling.logprobs": copies * _logprobs(generated, sampling.logprobs),
        "sampling.prompt_logprobs": copies * _logprobs(given, sampling.prompt_logprobs),
        "pairs": CELL * job.opened.facts.cells,
    }
    if job.echo:
        parts["echo"] = copies * TOKEN * given
    if job.stream:
        parts["stream"] = EVENT * min(generated, settings.tuning.event_limit)
    if job.wants_receipts:
        parts["capture"] = prompts * RECEIPT + _returned(job, settings)
    return parts


def _logprobs(tokens: int, alternatives: int | None) -> int:
    return 0 if alternatives is None else LOGPROB * tokens * (1 + alternatives)


def _returned(job: Job, settings: Settings) -> int:
    """Return the bytes of rows and readings in the job's result."""
    limit = settings.tuning.memory_limit_kib << 10
    total = sum(
        min(limit, sum(_sizes(job, tokens=len(prompt.token_ids), captures=captures, limit=limit)))
        for prompt, captures in zip(job.prompts, job.captures, strict=False)
    )
    return min(total, max(limit, MEMORY_JOB_BYTES))


def _sizes(job: Job, *, tokens: int, captures: list[StoredCapture], limit: int) -> Iterator[int]:
    for capture in captures:
        if capture.reading is not None:
            positions = capture.count_stored(tokens, job.sampling.max_tokens)
            yield capture.reading.size(positions, capture.num_sites)
        elif "memory" in capture.consumers:
            yield limit  # the size of a row is the model's
