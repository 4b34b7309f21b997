"""Priorities and costs of jobs: what decides the order in which they reach the workers.

The ledger decides (`lua/dispatch.lua`): of a model and priority step only `dispatch_window` messages are sent and not claimed; the
other jobs wait in Redis, and every claim picks the next job of the tenant that has had the least and puts its message into the queue.
"""

from ...schemas.handling import Priority
from ...schemas.jobs import Job
from ...schemas.sweep_units import Units
from ..queue.celery_app import PRIORITY_OF_KIND, PRIORITY_STEPS

#: The lower the earlier.
URGENCY: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}
#: Kind of job → priority → step of the queue. `normal` is the default of the kind.
STEPS: dict[str, dict[Priority, int]] = {
    kind: {"high": PRIORITY_STEPS[0], "normal": step, "low": PRIORITY_STEPS[-1]} for kind, step in PRIORITY_OF_KIND.items()
}


def cost_of(job: Job) -> int:
    """What a job takes of its tenant's share: tokens of its prompts and the most that it may generate, of a sweep those of all requests
    that it comes to."""
    if job.sweep is not None:
        return Units(job.sweep).tokens
    return sum(len(prompt.token_ids) for prompt in job.prompts) + job.sampling.max_tokens * len(job.prompts)
