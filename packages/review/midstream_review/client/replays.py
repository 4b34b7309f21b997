"""Calls on replays."""

from __future__ import annotations

from typing import Any

from midstream.client.sdk import wire
from midstream.client.sdk.calls import Awaits, Calls, M, call
from midstream.client.sdk.jobs import Jobs
from midstream.client.sdk.wire import HttpCall, JobLike
from midstream.schemas.jobs.jobs import JobView

from ..replays import ReplayRequest, ReplayView


class Replays(Calls[M]):
    """Replays: prompts of the past under another version of a policy, before it acts
    (docs/probes.md#review). They generate nothing and take no action.
    """

    @call
    async def submit(self, policy: str, /, model: str | None = None, **fields: Any) -> JobView:
        """Submit a replay, by the fields of `ReplayRequest`, and return its job without waiting.
        Requires the scope `steer-global`.
        """
        body = wire.checked(wire.given(**fields), ReplayRequest, "")
        path = wire.path("policies", policy, "replays")
        return await self._ask(HttpCall("POST", path, body, wire.given(model=model)), JobView)

    @call
    async def get(self, policy: str, job: JobLike) -> ReplayView:
        """Return a replay: the prompts that one version turns on at and the other does not."""
        return await self._get(
            wire.path("policies", policy, "replays", wire.id_of(job)), ReplayView
        )

    @call
    async def run(
        self, policy: str, /, model: str | None = None, *, progress: bool = True, **fields: Any
    ) -> ReplayView:
        """Replay prompts and wait: `version=2`, or `condition={"at_least": 3}`, against the current
        version; `of="hits"`, `last=500`. `progress`: as for `run`.
        """
        job = await self.submit(policy, model, **fields)
        await Jobs[Awaits](self._io)._watched(job, progress)
        return await self.get(policy, job)
