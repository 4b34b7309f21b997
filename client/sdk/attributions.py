"""Calls on attributions: submit, follow, get the estimates beside exact values.

An attribution is a job, so the calls on jobs also work on it.
"""

from __future__ import annotations

from typing import Any, Unpack

from ...schemas.base.errors import invalid
from ...schemas.jobs.attributions import AttributionRequest
from ...schemas.jobs.jobs import JobView
from .answers.attribution import Attribution, attribution_of
from .answers.progress import Progress
from .calls import M, call
from .fields import AttributeFields
from .sweeps import Gridded, sweep_request
from .wire import JobLike

#: The fields of a pair that are arguments of the call.
_PAIR = ("clean", "corrupt", "answer", "foil")


def attribution_request(
    request: AttributionRequest | None, fields: dict[str, Any]
) -> AttributionRequest:
    """Build the body of an attribution from a struct or from keyword arguments, which may be those
    of one pair. Raises MidstreamError naming the field.
    """
    pair = {name: given for name in _PAIR if (given := fields.pop(name, None)) is not None}
    if pair and (fields.get("pairs") is not None or request is not None):
        raise invalid(next(iter(pair)), "is not valid with pairs, which have it")
    if pair:
        fields["pairs"] = [pair]
    return sweep_request(request, fields, AttributionRequest)


class Attributions(Gridded[M]):
    """Calls on attributions."""

    _kind = "attribution"

    @call
    async def submit(
        self,
        /,
        request: AttributionRequest | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Unpack[AttributeFields],
    ) -> JobView:
        """Submit an attribution, by struct or by its fields (`model=…, clean=…, corrupt=…,
        answer=…, foil=…, verify={}`); returns immediately. Safe to repeat.
        """
        body = attribution_request(request, dict(fields))
        return await self._submit("/v1/attributions", body, idempotency_key)

    @call
    async def run(
        self,
        /,
        request: AttributionRequest | None = None,
        *,
        progress: Progress | None = None,
        **fields: Unpack[AttributeFields],
    ) -> Attribution:
        """Submit an attribution, wait, and return its estimates beside the exact values.

        `clean`, `corrupt`, `answer` and `foil` are those of one pair, instead of `pairs`.
        `verify={}` computes the default cells exactly, and None none. `progress` is called with
        every event; interrupting the wait cancels the attribution.
        """
        job = await self.submit(request, **fields)
        return await self.result(job.id, progress, cancel=True)

    @call
    async def result(
        self, job_id: JobLike, progress: Progress | None = None, *, cancel: bool = False
    ) -> Attribution:
        """Wait for an attribution, and return its estimates beside the exact values. Raises its
        error if it failed, and `not_found` for a job that is not an attribution.

        `cancel`: interrupting the wait cancels the attribution.
        """
        return attribution_of(await self._awaited_result(job_id, progress, cancel))
