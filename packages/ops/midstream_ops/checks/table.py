"""The one list of checks of a machine, with the depth at which each is taken.

`midstream doctor --plan` computes, without starting anything; `doctor` looks at what runs, Redis
directly and all other parts through the API, and removes everything that it creates; `--deep`
starts both servers and measures. What `--deep` and `midstream demo` started is counted at the end.
"""

from collections.abc import Callable, Iterator

from ..processes import wait_for
from . import (
    costs,
    disk_checks,
    engine_checks,
    facts,
    files,
    plan,
    redis_checks,
    rows,
    service_checks,
)
from .finding import Check, CheckFinding, Depth
from .promises import judge

#: Seconds that stopped processes may take to end: an engine frees gigabytes.
END_S = 10.0


def of(depth: Depth) -> list[Check]:
    """Return the checks of one depth, in the order in which they are taken."""
    return [check for check in CHECKS if depth in check.depths]


def _left(pids: Callable[[], list[int]]) -> Iterator[CheckFinding]:
    wait_for(lambda: not pids(), END_S)
    yield judge("processes", [len(pids())], "all that were started")


CHECKS = (
    # of a `Plan`
    Check(("plan",), "plan", plan.findings),
    # of a `Service` or a `Rig`
    Check(("quick", "deep"), "machine", facts.machine),
    Check(("quick", "deep"), "settings", facts.settings),
    # of a `Service`, in order of dependency
    Check(
        ("quick",),
        "redis",
        redis_checks.redis_server,
        "start Redis; if it runs, check its log and disk, MIDSTREAM_REDIS_URL with user and "
        "password, and the network",
    ),
    Check(
        ("quick",),
        "api",
        service_checks.api,
        "start the API (`midstream up`, or `python -m midstream.api`), or give --url",
    ),
    Check(
        ("quick",),
        "service",
        service_checks.parts,
        "fix the problems above, or use a key with scope observe",
    ),
    Check(
        ("quick",),
        "vllm",
        engine_checks.vllm,
        "install an unchanged build (docs/vllm.md)",
    ),
    Check(
        ("quick",),
        "extensions",
        engine_checks.extensions,
        "install the package where the worker runs, or remove it from the setting extensions",
    ),
    Check(
        ("quick",),
        "disk",
        disk_checks.data_disk,
        "free space on it, or make it writable by the worker",
    ),
    Check(
        ("quick",),
        "artifact store",
        disk_checks.store,
        "docs/machines.md explains each reason",
    ),
    # of a `Rig`
    Check(("deep",), "model", facts.model),
    Check(("deep",), "certificate", rows.certificate),
    Check(("deep",), "idle, capture, steer, patch", costs.costs),
    Check(("deep",), "neighbour", rows.neighbour),
    Check(("deep",), "noise", rows.noise),
    Check(("deep",), "receipts", files.receipts),
    Check(("deep",), "durability", files.durability),
    # of a function that lists processes, after they were stopped
    Check(("end",), "processes", _left),
)
