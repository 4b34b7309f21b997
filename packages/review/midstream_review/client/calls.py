"""Calls on the hits of policies: read, mark, and use them as examples."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, TypedDict, Unpack

from midstream.client.sdk import wire
from midstream.client.sdk.calls import Calls, M, call, stream
from midstream.client.sdk.wire import HttpCall, JobLike
from midstream.schemas.artifacts.conditions import Mode
from midstream.schemas.base.errors import invalid
from midstream.schemas.base.limits import MAX_PAGE

from ..records import Hit, HitPage, HitVerdict, MarkedText, MarkRequest, PrecisionList


class HitFields(TypedDict, total=False):
    """Which hits; all by default."""

    model: str | None
    label: str | None
    version: int | None
    mode: Mode | None
    mark: HitVerdict | Literal["none"] | None
    at_least: float | None
    below: float | None
    tenant: str | None


def _path(policy: str, *more: str) -> str:
    """Return `/v1/policies/<policy>/<more>`."""
    return wire.path("policies", policy, *more)


class Hits(Calls[M]):
    """Hits of policies, their marks and the precision of versions (docs/probes.md#review). Admins
    see the hits of all tenants, others their own.
    """

    @call
    async def list(
        self,
        policy: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
        tokens: bool | None = None,
        **chosen: Unpack[HitFields],
    ) -> HitPage:
        """Return one page of a policy's hits, newest first; its `next` is the next `cursor`.

        `at_least`, `below`: of the score. `tokens`: with the ids of the tokens up to each hit's.
        """
        query = {"limit": limit, "cursor": cursor, "tokens": tokens, **chosen}
        return await self._get(_path(policy, "hits"), HitPage, **query)

    @stream
    async def every(
        self, policy: str, *, tokens: bool | None = None, **chosen: Unpack[HitFields]
    ) -> AsyncIterator[Hit]:
        """Yield all hits of a policy, newest first."""
        cursor: str | None = None
        while True:
            query = {"limit": MAX_PAGE, "cursor": cursor, "tokens": tokens, **chosen}
            page = await self._get(_path(policy, "hits"), HitPage, **query)
            for hit in page.hits:
                yield hit
            cursor = page.next
            if cursor is None:
                return

    @call
    async def get(
        self, policy: str, hit: str, *, model: str | None = None, tokens: bool | None = None
    ) -> Hit:
        """Return one hit. Raises `not_found`."""
        return await self._get(_path(policy, "hits", hit), Hit, model=model, tokens=tokens)

    @call
    async def mark(
        self,
        policy: str,
        hit: str,
        verdict: HitVerdict | str,
        note: str = "",
        model: str | None = None,
    ) -> Hit:
        """Mark a hit as `right`, as a `false_alarm`, or as `unsure`; replaces an earlier mark.
        Requires the scope `steer-global`.
        """
        body = wire.checked({"verdict": verdict, "note": note}, MarkRequest)
        path = _path(policy, "hits", hit, "mark")
        return await self._ask(HttpCall("PUT", path, body, wire.given(model=model)), Hit)

    @call
    async def unmark(self, policy: str, hit: str, model: str | None = None) -> None:
        """Take back the mark of a hit."""
        path = _path(policy, "hits", hit, "mark")
        await self._do(HttpCall("DELETE", path, params=wire.given(model=model)))

    @call
    async def precision(self, policy: str, **chosen: Unpack[HitFields]) -> PrecisionList:
        """Return what the marks say of each version: right / (right + false alarms)."""
        return await self._get(_path(policy, "precision"), PrecisionList, **chosen)

    @call
    async def delete_texts(
        self, *, job: JobLike | None = None, tenant: str | None = None, model: str | None = None
    ) -> None:
        """Delete the texts of a job's or a tenant's hits, by default of those of the key's tenant.
        The hits and their marks stay.
        """
        of = None if job is None else wire.id_of(job)
        query = wire.given(job=of, tenant=tenant, model=model)
        await self._do(HttpCall("DELETE", "/v1/hits/texts", params=query))

    @call
    async def examples(self, policy: str, **chosen: Unpack[HitFields]) -> Sequence[MarkedText]:
        """Return the hits that are marked as right or as false alarms, with their tokens, to train
        a probe with. Hits whose text is not kept from its beginning are left out.

        Raises a 400 unless there are hits of both kinds with texts.
        """
        marked = [
            hit
            async for hit in self.every(policy, tokens=True, **chosen)
            if hit.mark is not None and hit.mark.verdict != "unsure"
        ]
        found = [
            MarkedText(
                id=hit.id,
                token_ids=hit.token_ids,
                label=hit.label,
                right=hit.mark.verdict == "right",
            )
            for hit in marked
            if hit.token_ids is not None and hit.mark is not None
        ]
        right = sum(example.right for example in found)
        if not 0 < right < len(found):
            raise invalid(
                "hits",
                f"{len(marked)} hits of policy {policy!r} are marked as right or as false alarms, "
                f"and {len(found)} of them have a whole text: {right} right, "
                f"{len(found) - right} false alarms",
                allowed="hits of both kinds, with texts",
                hint="mark more (`midstream mark`); texts are kept of hits since the policy has "
                "`keep_texts`",
            )
        return found
