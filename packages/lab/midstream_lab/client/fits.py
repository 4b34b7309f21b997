"""Calls that learn modules from examples, or compute Jacobian lenses."""

from __future__ import annotations

from typing import Any, TypeVar, Unpack

from midstream.client.sdk import wire
from midstream.client.sdk.calls import Awaits, Calls, M, call
from midstream.client.sdk.jobs import Jobs
from midstream.client.sdk.wire import JobLike
from midstream.schemas.artifacts.jacobian_lenses import JacobianLens
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import JobView

from ..records.fits import FitOutcome, FitRequest, FitResult, LensFitRequest, LensFitResult
from .fields import FitFields, LensFitFields

B = TypeVar("B", FitRequest, LensFitRequest)


class Fits(Calls[M]):
    """Jobs that learn modules from examples (docs/learn.md#learn-steering-from-examples) or compute
    Jacobian lenses (docs/read.md#fit-a-lens).
    """

    @call
    async def submit(
        self, request: FitRequest | LensFitRequest, *, idempotency_key: str | None = None
    ) -> JobView:
        """Submit the fit of a module or of a Jacobian lens; returns immediately. Safe to repeat."""
        path = "/v1/modules/fit" if isinstance(request, FitRequest) else "/v1/jacobians/fit"
        return await self._submit(path, request, idempotency_key)

    @call
    async def module(
        self, /, request: FitRequest | None = None, **fields: Unpack[FitFields]
    ) -> FitResult:
        """Fit a module, by struct or by its fields (`model=…, name=…, method=…`); wait, and return
        its training record and its effect on held-out examples.

        Steer with it afterwards by its name: `steering={"module": name}`. Without a better effect
        than none it is registered only with `register="always"`; `reason` says so.
        """
        result = await self._fitted(request, dict(fields), FitRequest)
        assert isinstance(result, FitResult)
        return result

    @call
    async def lens(
        self, /, request: LensFitRequest | None = None, **fields: Unpack[LensFitFields]
    ) -> JacobianLens:
        """Fit a Jacobian lens, by struct or by its fields (`model=…, name=…, prompts=…`); wait, and
        return it as it is registered: `fit` states the prompts used and the error of each layer of
        a sketch (`rank`).

        Read through it afterwards by its name: `client.lens(prompt, jacobian=name)`.
        """
        result = await self._fitted(request, dict(fields), LensFitRequest)
        assert isinstance(result, LensFitResult)
        return result.lens

    async def _fitted(self, request: B | None, fields: dict[str, Any], kind: type[B]) -> FitOutcome:
        return await self.result(await self.submit(await self._body(request, fields, kind)))

    @call
    async def result(self, job_id: JobLike) -> FitOutcome:
        """Wait for a fit, and return its result. Raises the job's error if it failed, and
        `not_found` for a job that is not a fit.
        """
        result = (await Jobs[Awaits](self._io)._ended(job_id)).fit
        if not isinstance(result, FitResult | LensFitResult):
            raise MidstreamError("not_found", f"job {wire.id_of(job_id)} is not a fit")
        return result
