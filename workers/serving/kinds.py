"""The kinds of jobs that a worker runs."""

from collections.abc import Mapping
from typing import Any

from ...schemas.jobs.kinds import KINDS
from ...schemas.packages import part
from .attempt import Bench, Run


def runs_of(bench: Bench[Any]) -> Mapping[str, Run]:
    """Return kind of job → how a worker of the bench's queue runs it."""
    queue = bench.ledger.settings.queue
    paths = {kind: row.run[queue] for kind, row in KINDS.items() if queue in row.run}
    made = {path: part(path)(bench) for path in set(paths.values())}
    return {kind: made[path] for kind, path in paths.items()}
