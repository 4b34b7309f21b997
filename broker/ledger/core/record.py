"""A job's record, the hash `ms:job:{id}`: its fields, and how each is encoded.

Text and numbers are stored as text, truth values as 0 and 1, everything else as JSON; an absent
field has the default of its type. Scripts add what only they read, such as `spec` and `lease`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import msgspec

from ....schemas.access.handling import Callback, Priority
from ....schemas.artifacts.loras import use_of
from ....schemas.base.errors import shortened
from ....schemas.base.records import JsonObject, from_json, to_json
from ....schemas.base.version import __version__
from ....schemas.jobs.jobs import Job, JobView, State
from ....schemas.jobs.queues import Queue
from ....schemas.requests.specs import CaptureStatus
from .script_arguments import binary

#: Characters of a prompt, and of an output, that the page's table shows.
SHOWN = 160
#: Fields of a view that are not stored (`views.view` derives them).
DERIVED = {"id", "steered", "receipts_expected", "callback_url"}


class JobRecord(JobView):
    """The fields that views and results read: those of a view as stored, and those from which the
    other fields of a view are derived.
    """

    captures: bool = False
    steers: bool = False  # its own steering or its adapter edits it
    everyone: bool = False  # global steering edits it, in the version at its start
    expected: int = 0  # number of receipts
    callback: Callback | None = None
    retried: str | None = None  # what ranks of an earlier attempt disagreed on


#: Type of a field → its decoder; fields of other types are JSON.
TEXT: dict[Any, Callable[[bytes], Any]] = {
    **dict.fromkeys((str, str | None, CaptureStatus, Priority, Queue), bytes.decode),
    **dict.fromkeys((int, int | None), int),
    float: float,
    float | None: float,
    bool: lambda value: value == b"1",
    State: lambda value: State(value.decode()),
}
DECODERS = {
    field.name: TEXT.get(field.type) or partial(from_json, kind=field.type)
    for field in msgspec.structs.fields(JobRecord)
    if field.name not in DERIVED
}
#: The fields of `ms:job:{id}` that views and results need; not `spec`, which may be large.
FIELDS = [*DECODERS]
#: Those that a list needs: see `views.listed`.
LIST_FIELDS = ["prompt", *FIELDS]
#: Fields that are stored unchanged from `Job`.
AS_IN_JOB = sorted({*FIELDS} & {*Job.__struct_fields__} - {"prompts", "captures"})


def decode(job_id: str, values: Sequence[bytes | None]) -> JobRecord | None:
    """Decode `values` as HMGET returns them for `FIELDS`; None if there is no such job."""
    fields = {
        name: decoder(value)
        for (name, decoder), value in zip(DECODERS.items(), values, strict=True)
        if value is not None
    }
    return JobRecord(id=job_id, **fields) if "state" in fields else None


def accepted(job: Job, request: bytes) -> dict[str, Any]:
    """Return the encoded record of a job when it is accepted; `submit.lua` adds fields.

    `request`: the body as JSON; empty: it is not kept.
    """
    captures = any(job.captures) or bool(job.global_captures) or job.opened.facts.cells > 0
    fields = {
        **{name: getattr(job, name) for name in AS_IN_JOB},
        "state": State.QUEUED,
        "attempt": 0,
        "version": 1,
        "prompts": len(job.prompts) + job.opened.facts.requests,  # a bound on request numbers
        "asked": _asked_requests(job),
        "captures": int(captures),
        "capture_status": "pending" if captures else "not_requested",
        "steers": int(any(job.steering) or job.lora is not None),
        "probed": 1 if job.probes else None,  # readers check for its presence
        "receipts": 0,
        "expected": 0,
        "cells": 0,
        "cells_expected": job.opened.facts.cells,
        "lora": use_of(job.lora),
        # the key names the secret that signs the job's webhooks
        "callback": job.callback and msgspec.structs.replace(job.callback, key=job.key),
        "policies": _policies(job) or None,
        "cost": job.cost,
        "side": None if job.opened.facts.side is None else 1,
        "request": msgspec.Raw(request) if request else None,
        "prompt": shortened(_prompt(job), SHOWN),
        "written_by": __version__,
    }
    return {
        name: value if isinstance(value, int | str) else binary(to_json(value))
        for name, value in fields.items()
        if value is not None
    }


def _prompt(job: Job) -> str:
    """Return the text by which people recognise the job."""
    first = job.prompts[0].text if job.prompts else None
    return job.opened.facts.title or job.title or first or ""


def _policies(job: Job) -> dict[str, JsonObject]:
    """Return what scripts need of the policies that act on the job: the seconds that a latch of its
    conversation lasts, the registration that the latch is of, and the webhook of decisions.
    """
    result: dict[str, JsonObject] = {name: {"hook": job.hooks[name]} for name in job.hooks}
    for policy in (probe.policy for probe in job.probes if job.conversation):
        if policy is not None and policy.acts and policy.condition.latch == "conversation":
            entry = {"latch_s": policy.condition.latch_s, "registered": f"{policy.registered:.6f}"}
            result.setdefault(policy.name, {}).update(entry)
    return result


def _asked_requests(job: Job) -> int:
    """Return how many of the job's prompts have an intervention, a capture, a probe or an adapter,
    and so get a receipt from every rank. (0 if its prompts are not in `prompts`: its worker reads
    the receipts.)
    """
    if job.lora is not None or job.probes:
        return len(job.prompts)
    return sum(
        1 for captures, steering in zip_longest(job.captures, job.steering) if captures or steering
    )
