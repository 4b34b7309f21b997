"""Jobs as the API describes them, made by hand."""

from typing import Any

import msgspec

from midstream.schemas.jobs.jobs import (
    CaptureResults,
    JobView,
    ListedJob,
    Output,
    State,
)
from midstream.schemas.jobs.results import JobResult


def job_view(**given: Any) -> JobView:
    known: dict[str, Any] = {
        "id": "job_1",
        "kind": "generate",
        "model": "m",
        "state": State.SUCCEEDED,
        "attempt": 1,
        "version": 1,
        "created": 1.0,
    }
    return JobView(**known | given)


def listed_job(*, prompt: str = "", **given: Any) -> ListedJob:
    return ListedJob(**msgspec.structs.asdict(job_view(**given)), prompt=prompt)


def job_result(*texts: str, **given: Any) -> JobResult:
    """With an output for each text."""
    outputs = [
        Output(index=number, text=text, token_ids=[1], finish_reason="length", prompt_tokens=1)
        for number, text in enumerate(texts)
    ]
    known: dict[str, Any] = {
        "id": "job_1",
        "model": "m",
        "state": State.SUCCEEDED,
        "outputs": outputs,
        "capture_results": CaptureResults(status="not_requested", job="job_1"),
        "determinism": None,
        "attempt": 1,
    }
    return JobResult(**known | given)
