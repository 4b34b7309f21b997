"""Doses, as a kind of jobs that a vLLM worker runs."""

from ...schemas.jobs.doses import DoseResult, DoseWork
from ..engine.doses import measure
from ..engine.protocol import GeneratingEngine
from .attempt import Attempt, Bench, Run
from .prompts import answer_prompts


def run(bench: Bench[GeneratingEngine]) -> Run:
    async def dose(attempt: Attempt) -> DoseResult:
        outputs = await answer_prompts(bench, attempt)
        return measure(attempt.job.work_as(DoseWork).dose, outputs)

    return Run(dose)
