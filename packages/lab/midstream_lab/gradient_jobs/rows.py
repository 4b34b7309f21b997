"""Jobs of gradient rows, as a kind of jobs that a gradient worker runs."""

from midstream.schemas.jobs.jobs import Output
from midstream.workers.serving.attempt import Attempt, Bench, Run
from midstream.workers.serving.prompts import answers

from ..gradients.protocol import GradientEngine


def run(bench: Bench[GradientEngine]) -> Run:
    async def rows(attempt: Attempt) -> list[Output]:
        every = (capture for captures in attempt.job.captures for capture in captures)
        names = sorted({name for capture in every for name in capture.tensors})
        async with bench.engine.holding_vectors(names, bench.fetch):
            attempt.check()
            return await answers(bench.ledger, bench.engine, attempt)

    return Run(rows)
