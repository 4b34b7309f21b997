"""Did a call succeed on every rank? Every answer is looked at; state advances only when all succeeded."""

from collections.abc import Sequence

from ..schemas.errors import MidstreamError


def check_apply_results(action: str, results: Sequence[tuple[bool, str]], world: int) -> None:
    """`results`: one `(ok, message)` of each rank, in rank order.

    Raises MidstreamError("intervention_failed") naming every rank that failed and why.
    """
    if len(results) != world:
        raise MidstreamError("intervention_failed", f"{action}: {len(results)} of {world} ranks answered")
    failures = [f"rank {rank}: {message}" for rank, (ok, message) in enumerate(results) if not ok]
    if failures:
        raise MidstreamError("intervention_failed", f"{action} failed on {'; '.join(failures)}")
