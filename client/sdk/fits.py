"""Calls on fits: jobs that learn a module from examples."""

from __future__ import annotations

from typing import Unpack

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.fits import FitRequest, FitResult
from ...schemas.jobs.jobs import JobView
from .. import values
from . import wire
from .calls import Awaits, Calls, M, call
from .fields import FitFields
from .jobs import Jobs
from .wire import Call, JobLike


class Fits(Calls[M]):
    """Calls on fits."""

    @call
    async def submit(
        self,
        /,
        request: FitRequest | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Unpack[FitFields],
    ) -> JobView:
        """Submit the fit of a module, by struct or by its fields (`model=…, name=…, method=…`);
        returns immediately. Safe to repeat.
        """
        body = values.request(request, dict(fields), FitRequest)
        headers = {"idempotency-key": idempotency_key or wire.idempotency_key()}
        headers["prefer"] = "respond-async"
        call = Call("POST", "/v1/modules/fit", body=body, headers=headers)
        return await self._ask_patiently(call, JobView)

    @call
    async def module(
        self, /, request: FitRequest | None = None, **fields: Unpack[FitFields]
    ) -> FitResult:
        """Fit a module, wait, and return its training record and its effect on held-out examples.

        Steer with it afterwards by its name: `steering={"module": name}`. Without a better effect
        than none it is registered only with `register="always"`; `reason` says so.
        """
        return await self.result(await self.submit(request, **fields))

    @call
    async def result(self, job_id: JobLike) -> FitResult:
        """Wait for a fit, and return its result. Raises the job's error if it failed, and
        `not_found` for a job that is not a fit.
        """
        jobs = Jobs[Awaits](self._io)
        await jobs.wait(job_id)
        result = (await jobs.result(job_id)).fit
        if not isinstance(result, FitResult):
            raise MidstreamError("not_found", f"job {wire.id_of(job_id)} is not a fit")
        return result
