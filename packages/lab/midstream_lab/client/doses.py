"""Calls that weigh the effect of steering against its damage."""

from __future__ import annotations

from typing import Any

from midstream.client.sdk.calls import Awaits, Calls, M, call
from midstream.client.sdk.jobs import Jobs
from midstream.schemas.jobs.results import JobResult

from ..records.doses import DoseRequest


class Doses(Calls[M]):
    """Measurements of steering: effect against damage
    (docs/learn.md#choose-layer-token-and-scale).
    """

    @call
    async def run(
        self, /, request: DoseRequest | None = None, *, progress: bool = True, **fields: Any
    ) -> JobResult:
        """Run a dose, by struct or by the fields of `DoseRequest`: effect against damage of
        steering, by layer and scale. Wait, and return the result, whose `dose` has the cells.

        `progress`: as for `run`. `model` may be omitted if the server serves only one.
        """
        body = await self._body(request, fields, DoseRequest)
        view = await self._submit("/v1/doses", body, None)
        return await Jobs[Awaits](self._io)._watched(view, progress)
