"""Sweeps, and the exact cells of attributions, as the kinds of jobs that a vLLM worker runs."""

from ....schemas.jobs.jobs import Output
from ...engine.protocol import GeneratingEngine
from ..attempt import Attempt, Bench, Run
from ..prompts import holding_artifacts
from .attempt import SweepAttempt


def run(bench: Bench[GeneratingEngine]) -> Run:
    limit = bench.ledger.settings.tuning.sweep_cells_in_flight
    cells = bench.slots(limit, "sweep", "attribution")  # of all of them

    async def sweep(attempt: Attempt) -> list[Output]:
        async with holding_artifacts(bench.engine, attempt.job):
            await SweepAttempt(bench, attempt, cells).run()
        return []  # its cells are stored

    return Run(sweep)
