"""The table of checks: what each depth of examining a machine finds out.

`doctor --plan` computes, without starting anything; `doctor` looks at what runs, Redis directly and
all other parts through the API, and removes everything that it creates; `verify` runs both servers;
`verify` and `demo` count what is left at the end.
"""

from collections.abc import Callable, Iterator

from .. import plan
from ..measurements import costs, files, rows
from ..processes import wait_for
from ..promises import judge
from . import disk_checks, engine_checks, redis_checks, service_checks
from .finding import Check, Finding

#: Seconds that stopped processes may take to end: an engine frees gigabytes.
END_S = 10.0


def _left(pids: Callable[[], list[int]]) -> Iterator[Finding]:
    wait_for(lambda: not pids(), END_S)
    yield judge("processes", [len(pids())], "all that were started")


#: Of a `Plan`.
PLANNED = (Check("plan", plan.findings),)
#: Of a `Service`, in order of dependency.
RUNNING = (
    Check(
        "redis",
        redis_checks.redis_server,
        "start Redis, and check MIDSTREAM_REDIS_URL, its user and password, and the network",
    ),
    Check(
        "api",
        service_checks.api,
        "start the API (`midstream up`, or `python -m midstream.api`), or give --url",
    ),
    Check(
        "service",
        service_checks.parts,
        "fix the problems above, or use a key with scope observe",
    ),
    Check("vllm", engine_checks.vllm, "install an unchanged build (docs/vllm-versions.md)"),
    Check(
        "extensions",
        engine_checks.extensions,
        "install the package where the worker runs, or remove it from the setting extensions",
    ),
    Check("disk", disk_checks.data_disk, "make it writable by the worker's user"),
    Check("artifact store", disk_checks.store, "docs/object-storage.md explains each reason"),
)
#: Of a `Rig`, in the order in which they are taken.
MEASURED = (
    Check("certificate", rows.certificate),
    Check("idle, capture, steer, patch", costs.costs),
    Check("neighbour", rows.neighbour),
    Check("noise", rows.noise),
    Check("receipts", files.receipts),
    Check("durability", files.durability),
)
#: Of a function that lists processes, after they were stopped.
STOPPED = (Check("processes", _left),)
