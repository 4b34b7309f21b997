"""Does an exception in a run become the problem that says most?"""

import pytest

from midstream.schemas.base.errors import MidstreamError
from midstream.workers.serving.attempts import problem_of

FULL = MidstreamError("capture_failed", "disk full")


@pytest.mark.parametrize(
    ("error", "kind", "status", "detail"),
    [
        (
            MidstreamError("intervention_failed", "rank 1: no memory"),
            "intervention_failed",
            500,
            "rank 1: no memory",
        ),
        (
            BaseExceptionGroup("", [KeyError("x"), ExceptionGroup("", [FULL])]),
            "capture_failed",
            500,
            "disk full",
        ),
        (
            ExceptionGroup("", [ZeroDivisionError("division by zero")]),
            "internal",
            500,
            "ZeroDivisionError: division by zero",
        ),
    ],
    ids=["typed", "in a group", "any other"],
)
def test_a_typed_error_counts_and_any_other_is_internal_and_named(
    error: BaseException, kind: str, status: int, detail: str
) -> None:
    problem = problem_of(error)
    assert problem.type == f"urn:midstream:{kind}"
    assert problem.status == status
    assert problem.detail == detail
