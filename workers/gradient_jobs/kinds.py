"""The kinds of jobs that a gradient worker runs."""

from ...schemas.jobs.jobs import Output
from ..engine.protocol import GradientEngine
from ..serving.attempt import Attempt, Bench, Run
from ..serving.kinds import answers
from .attribution_attempt import AttributionAttempt
from .fit_attempt import FitAttempt


def gradient_runs_of(bench: Bench[GradientEngine]) -> dict[str, Run]:
    """Return kind of job → how a gradient worker runs it."""

    async def rows(attempt: Attempt) -> list[Output]:
        every = (capture for captures in attempt.job.captures for capture in captures)
        names = sorted({name for capture in every for name in capture.tensors})
        await bench.engine.hold_vectors(names, bench.fetch)
        try:
            attempt.check()
            return await answers(bench.ledger, bench.engine, attempt)
        finally:
            await bench.engine.release_vectors(names)

    return {
        "gradient": Run(rows),
        "attribution": Run(lambda attempt: AttributionAttempt(bench, attempt).run()),
        "fit": Run(lambda attempt: FitAttempt(bench, attempt).run()),
    }
