"""Compatibility between versions of Midstream: wire numbers, and the error for a mismatch.

`WIRE` grows with every change to what API, workers, relay and callbacks exchange that a process
with the previous number could misunderstand: a field with a new meaning, a key in Redis that every
process must maintain. `OLDEST_WIRE` is the oldest number with which this version still works. A new
field needs no new number if a sender omits it while it is unused, and an older process rejects a
message that has it.
"""

import msgspec

from ..base.errors import MidstreamError
from ..base.version import __version__
from ..jobs.models import ModelInfo, WorkerInfo

#: 0: versions that did not report a number.
#: 2: jobs carry the identity of their model; workers reject a job without one.
WIRE = 2
OLDEST_WIRE = 2


def disagreement(who: str, version: str, wire: int, oldest: int) -> MidstreamError | None:
    """Return the error if `who`, which runs Midstream `version`, and this process are incompatible;
    otherwise None.
    """
    if wire >= OLDEST_WIRE and oldest <= WIRE:
        return None
    older = "the other" if wire < WIRE else "this process"
    return MidstreamError(
        "version_mismatch",
        f"{who} runs midstream {version} (wire {wire}, works with {oldest} and newer); "
        f"this process runs midstream {__version__} "
        f"(wire {WIRE}, works with {OLDEST_WIRE} and newer): upgrade {older}",
    )


def misfit_of(info: ModelInfo | WorkerInfo) -> MidstreamError | None:
    """Return the error if this process is incompatible with the worker that reported `info`;
    otherwise None.
    """
    who = (
        f"the worker of {info.name!r}"
        if isinstance(info, ModelInfo)
        else f"the worker {info.worker!r}"
    )
    return disagreement(who, info.version, info.wire, info.oldest_wire)


def judged(worker: WorkerInfo) -> WorkerInfo:
    """Return the worker's report; a worker with an incompatible version is marked as unhealthy."""
    trouble = misfit_of(worker)
    return (
        worker
        if trouble is None
        else msgspec.structs.replace(worker, healthy=False, detail=trouble.detail)
    )
