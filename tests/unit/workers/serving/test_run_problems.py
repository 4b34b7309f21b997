"""Does an exception in a run become the problem that says most?"""

from midstream.schemas.base.errors import MidstreamError
from midstream.workers.serving.attempts import problem_of


def test_a_typed_error_keeps_kind_and_detail() -> None:
    problem = problem_of(MidstreamError("intervention_failed", "rank 1: no memory"))
    assert (problem.type, problem.detail) == (
        "urn:midstream:intervention_failed",
        "rank 1: no memory",
    )


def test_of_a_group_the_typed_error_counts() -> None:
    group = BaseExceptionGroup(
        "", [KeyError("x"), ExceptionGroup("", [MidstreamError("capture_failed", "disk full")])]
    )
    assert problem_of(group).type == "urn:midstream:capture_failed"


def test_anything_else_is_internal_and_named() -> None:
    problem = problem_of(ExceptionGroup("", [ZeroDivisionError("division by zero")]))
    assert (problem.status, problem.detail) == (500, "ZeroDivisionError: division by zero")
