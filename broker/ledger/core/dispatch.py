"""Priorities and costs of jobs, which decide the order in which they reach the workers.

The ledger decides (`lua/shared/dispatch.lua`). Per model, queue and priority step, at most
`dispatch_window` messages are in the queue, sent but not claimed; the other jobs wait in Redis.
Every claim picks the next job, of the tenant that has received the least, and sends its message.
"""

from ....schemas.access.handling import Priority
from ....schemas.jobs.jobs import Job
from ....schemas.jobs.sweep_units import Units
from ...queue.celery_app import PRIORITY_STEPS

#: Clients of the OpenAI-style endpoints wait for an answer; batch jobs are not urgent.
PRIORITY_OF_KIND = {
    "chat": 3,
    "completion": 3,
    "generate": 6,
    "sweep": 6,
    "attribution": 6,
    "fit": 6,
    "dose": 6,
    "harvest": 9,
}
#: Lower is earlier.
URGENCY: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}
#: Kind of job → priority → step of the queue. `normal` is the default of the kind.
STEPS: dict[str, dict[Priority, int]] = {
    kind: {"high": PRIORITY_STEPS[0], "normal": step, "low": PRIORITY_STEPS[-1]}
    for kind, step in PRIORITY_OF_KIND.items()
}


def cost_of(job: Job) -> int:
    """Return the cost of a job in tokens, charged to its tenant's share: its prompts and the most
    that it may generate; for a sweep, the tokens of all its requests; for a fit or a part of a
    harvest, an estimate of the tokens of its units.
    """
    if job.harvest is not None:
        return job.harvest.tokens
    if job.fit is not None:
        return job.fit.tokens
    if job.sweep is not None:
        return Units(job.sweep).tokens
    return sum(len(prompt.token_ids) for prompt in job.prompts) + job.sampling.max_tokens * len(
        job.prompts
    )
