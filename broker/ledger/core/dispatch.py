"""Priorities of jobs, which with their costs decide the order in which they reach the workers.

The ledger decides (`lua/shared/dispatch.lua`). Per model, queue and priority step, at most
`dispatch_window` messages are in the queue, sent but not claimed; the other jobs wait in Redis.
Every claim picks the next job, of the tenant that has received the least, and sends its message.
"""

from ....schemas.access.handling import Priority
from ....schemas.jobs.kinds import KINDS
from ...queue.celery_app import PRIORITY_STEPS

#: Lower is earlier.
URGENCY: dict[Priority, int] = {"high": 0, "normal": 1, "low": 2}
#: Kind of job → priority → step of the queue. `normal` is the default of the kind.
STEPS: dict[str, dict[Priority, int]] = {
    kind: {"high": PRIORITY_STEPS[0], "normal": row.step, "low": PRIORITY_STEPS[-1]}
    for kind, row in KINDS.items()
}
