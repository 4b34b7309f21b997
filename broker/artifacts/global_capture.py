"""Skips global capture for prompts, with a log line and a metric.

No user requested these captures, so a request without room for them runs without them.
"""

import logging

import msgspec

from ...schemas.jobs.jobs import Job
from ...schemas.jobs.models import ModelInfo
from ..telemetry.logs import Complaints
from ..telemetry.metrics import GLOBAL_CAPTURE_SKIPPED

log = logging.getLogger(__name__)

#: The last 1/16 of the capture quota is reserved for captures that users request: global capture is
#: skipped there.
QUOTA_SPARE = 16
#: Seconds between two log lines about the same reason.
LOG_EVERY_S = 60.0

_complaints = Complaints(LOG_EVERY_S)  # by reason


def count_skipped(reason: str, prompts: int, detail: str) -> None:
    """Count `prompts` under `reason`, and log `detail` at most once a minute per reason.

    From any thread.
    """
    GLOBAL_CAPTURE_SKIPPED.labels(reason).inc(prompts)
    if _complaints.due(reason):
        log.warning("global capture skipped for prompts of a job (count: %d): %s", prompts, detail)


def without(job: Job, model: ModelInfo, reason: str, detail: str) -> Job:
    """Return the job with only its user's captures; counts the prompts that lose others."""
    tags = {spec.tag for spec in model.global_captures}
    captures = [
        [capture for capture in captures if capture.tag not in tags] for captures in job.captures
    ]
    count_skipped(reason, sum(map(len, job.captures)) - sum(map(len, captures)), detail)
    return msgspec.structs.replace(
        job, captures=captures if any(captures) else [], global_captures=[]
    )
