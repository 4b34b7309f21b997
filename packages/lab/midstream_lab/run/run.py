"""Sweeps, and the exact cells of attributions, as the kinds of jobs that a vLLM worker runs."""

from midstream.schemas.jobs.jobs import Output
from midstream.workers.engine.protocol import GeneratingEngine
from midstream.workers.serving.attempt import Attempt, Bench, Run
from midstream.workers.serving.prompts import holding_artifacts

from .attempt import SweepAttempt


def run(bench: Bench[GeneratingEngine]) -> Run:
    limit = bench.ledger.settings.tuning.sweep_cells_in_flight
    cells = bench.slots(limit, "sweep", "attribution")  # of all of them

    async def sweep(attempt: Attempt) -> list[Output]:
        async with holding_artifacts(bench.engine, attempt.job):
            await SweepAttempt(bench, attempt, cells).run()
        return []  # its cells are stored

    return Run(sweep)
