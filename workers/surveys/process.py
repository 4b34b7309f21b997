"""The process in which a survey runs: its own, at the lowest priority and with a few threads, so
that neither the worker's event loop nor the model's threads wait for it.
"""

import asyncio
import os
import resource
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from ...schemas.base.errors import MidstreamError, Problem, error_of
from ...schemas.base.records import from_msgpack, to_msgpack
from ...schemas.jobs.surveys import SurveyEntry
from .work import SurveyWork

#: The share of the machine's cores that a survey uses, at most.
CORES_DIVISOR = 4
_LOWEST = 19


class Reply(msgspec.Struct, frozen=True):
    """The process's answer."""

    entry: SurveyEntry | None = None
    problem: Problem | None = None


def threads() -> int:
    return max(1, (os.cpu_count() or 1) // CORES_DIVISOR)


async def survey(work: SurveyWork) -> SurveyEntry:
    """Run a survey in its process; a cancelled call kills it. Raises MidstreamError."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        stdin=pipe,
        stdout=pipe,
        start_new_session=True,  # Ctrl-C is its worker's to handle
        env={**os.environ, "OMP_NUM_THREADS": str(work.threads)},
    )
    try:
        answer, _ = await process.communicate(to_msgpack(work))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        detail = f"the process of the survey ended with {process.returncode}"
        reason = "; the worker's log has the reason" if process.returncode > 0 else " (killed)"
        raise MidstreamError("internal", detail + reason)
    reply = from_msgpack(answer, Reply)
    if reply.problem is not None:
        raise error_of(reply.problem)
    assert reply.entry is not None
    return reply.entry


def main() -> None:
    import torch

    from ..runner.base.process import die_with_parent
    from .survey import run_survey

    die_with_parent()
    os.nice(_LOWEST)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        # if the machine runs out of memory, the kernel kills this process, not the worker
        Path("/proc/self/oom_score_adj").write_text("1000")
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get into the answer
    work = from_msgpack(sys.stdin.buffer.read(), SurveyWork)
    torch.set_num_threads(work.threads)
    try:
        reply = Reply(entry=run_survey(work))
    except MidstreamError as error:
        reply = Reply(problem=error.problem())
    except Exception as error:
        traceback.print_exc()
        reply = Reply(
            problem=MidstreamError("internal", f"{type(error).__name__}: {error}").problem()
        )
    output.write(to_msgpack(reply))
    output.flush()


if __name__ == "__main__":
    main()
