"""Runs an echo in a worker."""

from midstream.workers.engine.protocol import GeneratingEngine
from midstream.workers.serving.attempt import Attempt, Bench, Run
from midstream.workers.serving.prompts import answer_prompts

from .records import EchoResult, EchoWork


def run(bench: Bench[GeneratingEngine]) -> Run:
    async def echo(attempt: Attempt) -> EchoResult:
        await answer_prompts(bench, attempt)  # for their rows
        texts = [prompt.text or "" for prompt in attempt.job.prompts]
        return EchoResult(layer=attempt.job.work_as(EchoWork).layer, texts=texts)

    return Run(echo)
