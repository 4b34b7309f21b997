"""Doses, as a kind of jobs that a vLLM worker runs."""

from midstream.workers.engine.protocol import GeneratingEngine
from midstream.workers.serving.attempt import Attempt, Bench, Run
from midstream.workers.serving.prompts import answer_prompts

from ..records.doses import DoseResult, DoseWork
from .dose_measures import measure


def run(bench: Bench[GeneratingEngine]) -> Run:
    async def dose(attempt: Attempt) -> DoseResult:
        outputs = await answer_prompts(bench, attempt)
        return measure(attempt.job.work_as(DoseWork).dose, outputs)

    return Run(dose)
