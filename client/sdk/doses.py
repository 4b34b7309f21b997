"""Calls on doses: jobs that weigh the effect of steering against its damage."""

from __future__ import annotations

from typing import Any

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.doses import DoseRequest, DoseResult
from ...schemas.jobs.jobs import JobView
from .. import values
from . import wire
from .calls import Awaits, Calls, M, call
from .jobs import Jobs
from .wire import JobLike


class Doses(Calls[M]):
    """Calls on doses."""

    @call
    async def submit(self, request: DoseRequest, *, idempotency_key: str | None = None) -> JobView:
        """Submit a dose; returns immediately. Safe to repeat."""
        return await self._submit("/v1/doses", request, idempotency_key)

    @call
    async def run(self, /, request: DoseRequest | None = None, **fields: Any) -> DoseResult:
        """Run a dose, by struct or by the fields of `DoseRequest`; wait, and return its cells."""
        body = values.request(request, fields, DoseRequest)
        return await self.result(await self.submit(body))

    @call
    async def result(self, job_id: JobLike) -> DoseResult:
        """Wait for a dose, and return its result. Raises the job's error if it failed, and
        `not_found` for a job that is not a dose.
        """
        jobs = Jobs[Awaits](self._io)
        await jobs.wait(job_id)
        result = (await jobs.result(job_id)).dose
        if not isinstance(result, DoseResult):
            raise MidstreamError("not_found", f"job {wire.id_of(job_id)} is not a dose")
        return result
