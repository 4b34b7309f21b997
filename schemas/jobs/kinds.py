"""The kinds of jobs: a row for each, with what every process knows of its jobs.

What a job itself says is in `works`. How a worker runs jobs of a kind is in `workers.serving.kinds`
and `workers.gradient_jobs.kinds`, how a stored outcome becomes a result in
`broker.ledger.results.outcomes`.
"""

from typing import Annotated, NamedTuple

import msgspec

from .queues import GRADIENTS, Queue


class JobKind(NamedTuple):
    # step of the queue for priority `normal`: clients of the OpenAI-style endpoints wait for an
    # answer; batch jobs are not urgent
    step: int = 6
    path: str | None = None  # where it is submitted, if that is one place
    queue: Queue = ""  # that its jobs enter first
    # its worker reads the receipts from the ticket: they neither count towards the job nor fail it
    reads_receipts: bool = False
    grid: bool = False  # it is computed in units, and read as a grid of cells
    slow: bool = False  # it takes as long as there is to compute, so its time is no latency


#: Kind of a job → its row, as pages list them.
KINDS: dict[str, JobKind] = {
    "generate": JobKind(path="/v1/jobs"),
    "completion": JobKind(3, "/v1/completions"),
    "chat": JobKind(3, "/v1/chat/completions"),
    "sweep": JobKind(path="/v1/sweeps", reads_receipts=True, grid=True, slow=True),
    "attribution": JobKind(
        path="/v1/attributions", queue=GRADIENTS, reads_receipts=True, grid=True, slow=True
    ),
    "fit": JobKind(queue=GRADIENTS, reads_receipts=True, slow=True),
    "dose": JobKind(slow=True),
    "gradient": JobKind(path="/v1/jobs", queue=GRADIENTS),
    "harvest": JobKind(9, reads_receipts=True, slow=True),
}
KindName = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(KINDS)})$")]


def kind_of(name: str) -> JobKind:
    """Return the row of a kind; a job of a later version may have one that is not known here."""
    return KINDS.get(name, JobKind())
