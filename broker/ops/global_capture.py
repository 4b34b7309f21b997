"""Global capture of a request's prompts: where it is skipped, with a log line and a metric.

No user requested these captures, so a request without room for them runs without them; this is
counted and logged.
"""

import logging
import time

import msgspec

from ...schemas.jobs.jobs import Job
from ...schemas.jobs.models import ModelInfo
from .metrics import GLOBAL_CAPTURE_SKIPPED

log = logging.getLogger(__name__)

#: The last part of a full quota is kept for what users ask for: what the operator captures of every
#: request is then left out.
QUOTA_SPARE = 16
#: Seconds between two lines of the log about the same reason.
LOG_EVERY_S = 60.0

_logged: dict[str, float] = {}


def left_out(reason: str, prompts: int, detail: str) -> None:
    """Count `prompts` under `reason`, and log `detail`, that once a minute at most.

    From any thread.
    """
    GLOBAL_CAPTURE_SKIPPED.labels(reason).inc(prompts)
    now = time.monotonic()
    if now >= _logged.get(reason, now):
        _logged[reason] = now + LOG_EVERY_S
        log.warning("global capture skipped for prompts of a job (count: %d): %s", prompts, detail)


def without(job: Job, model: ModelInfo, reason: str, detail: str) -> Job:
    """The job with only its user's captures."""
    tags = {spec.tag for spec in model.global_captures}
    captures = [
        [capture for capture in captures if capture.tag not in tags] for captures in job.captures
    ]
    left_out(reason, sum(map(len, job.captures)) - sum(map(len, captures)), detail)
    return msgspec.structs.replace(
        job, captures=captures if any(captures) else [], global_captures=[]
    )
