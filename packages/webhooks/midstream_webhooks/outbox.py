"""Webhook outbox in Redis: deliveries and their state; filled by `lua/shared/announce.lua`.

Every delivery is leased to one sender at a time; if that sender dies, it is leased again, under the
same id, when the lease ends. All times come from `clock`, so that tests can simulate hours.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import UNSET

from midstream.broker.ledger.core.script_arguments import pack
from midstream.broker.ledger.core.tenants import refusal
from midstream.broker.ledger.jobs.ledger import Ledger, LedgerPart, of_each, reachable
from midstream.broker.ledger.results import pages
from midstream.schemas.access.webhooks import (
    DeliveryAttempt,
    DeliveryPage,
    DeliveryState,
    HookBody,
    HookData,
    WebhookDelivery,
)
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json, now, to_json
from midstream.schemas.base.states import CallbackEvent

#: Folder of the outbox's scripts, and the functions of the ledger that they use.
LUA = Path(__file__).parent / "lua"
PARTS = ("arguments", "announce")
#: Maximum number of deliveries under way in one lane (a tenant's receivers at one host), once it is
#: known to answer well.
LANE_ROOM = 16
#: An answer that took longer than this many seconds does not raise the receiver's concurrency.
QUICK_S = 2.0
#: Maximum number of lanes examined in one call: a tenant that has used its share may have thousands
#: of due lanes ahead of other tenants' lanes.
LANES_SCANNED = 20_000
#: Attempts kept per delivery: more than the retry schedule makes, because deliveries can also be
#: sent again by hand.
ATTEMPTS_KEPT = 50
#: Deliveries examined per script call after the clock was set back.
CLAMPED_AT_ONCE = 500
#: Deliveries read in total for one page.
PAGE_SCAN = 2000

FIELDS = ("job", "event", "tenant", "url", "state", "created", "next", "shown")


class DeliveryLease(NamedTuple):
    """A delivery that is this sender's until `ends`; first what `hooks_lease.lua` returns."""

    id: str  # the `webhook-id`
    job: str
    event: str
    tenant: str
    key: str  # id of the API key whose secret signs
    url: str
    created: str  # of the event, seconds since the epoch, as stored
    job_state: str
    attempt: int  # of the job
    model: str
    tries: int  # attempts before this one, since its retry schedule began
    detail: str  # the decision of a policy, as JSON; empty: there is none
    shown: str  # the job's id as the receiver may see it; empty: `job`
    token: str
    ends: float

    def body(self) -> bytes:
        """Return the body of the request: the same bytes in every attempt."""
        stamp = (
            datetime.fromtimestamp(float(self.created), UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        data = HookData(
            id=self.shown or self.job,
            state=self.job_state,
            attempt=self.attempt,
            model=self.model,
            decision=from_json(self.detail.encode(), dict[str, Any]) if self.detail else UNSET,
        )
        return to_json(HookBody(type=cast(CallbackEvent, self.event), timestamp=stamp, data=data))


class WebhookOutbox(LedgerPart):
    """The outbox in a ledger's Redis; `clock` returns seconds since the epoch.

    Belongs to the ledger's event loop.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = now) -> None:
        super().__init__(ledger)
        self._own = ledger.scripts_of(LUA, PARTS)
        self.clock = clock

    # --- the sender's side

    @reachable
    async def lease(
        self, limit: int, share: int, lease_s: float, under_way: Mapping[str, int]
    ) -> list[DeliveryLease]:
        """Lease up to `limit` due deliveries; of one tenant at most `share`, including those that
        this sender already has `under_way`.

        The job states in the deliveries are durable: they survive a kill of Redis.
        """
        at = self.clock()
        token = secrets.token_hex(8)
        arguments = pack(
            at,
            ends=repr(at + lease_s),
            token=token,
            limit=limit,
            share=share,
            scan=LANES_SCANNED,
            under_way=dict(under_way),
        )
        if rows := await self._own.hooks_lease(args=arguments):
            await self._ledger.written()
        stored = ([(part or b"").decode() for part in row] for row in rows)
        return [
            msgspec.convert([*values, token, at + lease_s], DeliveryLease, strict=False)
            for values in stored
        ]

    @reachable
    async def settle(
        self,
        lease: DeliveryLease,
        state: DeliveryState,
        attempt: DeliveryAttempt,
        again: float | None = None,
    ) -> str:
        """Record an attempt and the delivery's new state; `again`: when it is due if it stays
        `pending`.

        Returns the new state, `stale` if another sender has the delivery or it is settled,
        `unknown` if it is gone.
        """
        well = state == "delivered" and attempt.seconds <= QUICK_S
        at = self.clock()
        arguments = pack(
            at,
            id=lease.id,
            token=lease.token,
            verdict=state,
            attempt=to_json(attempt),
            due=repr(again or 0.0),
            pause=repr(max(0.0, (again or 0.0) - at)),
            kept=ATTEMPTS_KEPT,
            well=well,
            most=LANE_ROOM,
        )
        return cast(str, (await self._own.hooks_settle(args=arguments)).decode())

    @reachable
    async def clamp(self, lease_s: float) -> int:
        """After the clock was set back, limit each delivery's wait to its pause, and each lease to
        `lease_s`, from now; returns how many deliveries were due later.
        """
        at = self.clock()
        ids = [
            name.decode()
            for name in await self._redis.zrangebyscore("ms:hooks", f"({at!r}", "+inf")
        ]
        moved = [
            await self._own.hooks_clamp(
                args=pack(at, ids=ids[first : first + CLAMPED_AT_ONCE], lease=lease_s)
            )
            for first in range(0, len(ids), CLAMPED_AT_ONCE)
        ]
        return sum(map(int, moved))

    @reachable
    async def clean(self, ttl_s: float, limit: int = 1000) -> int:
        """Delete up to `limit` deliveries settled more than `ttl_s` ago; returns how many."""
        at = self.clock()
        return int(await self._own.hooks_clean(args=pack(at, before=repr(at - ttl_s), limit=limit)))

    @reachable
    async def depth(self) -> tuple[int, float | None]:
        """Return how many deliveries are pending, and when the first is due (past or future; None
        without any).
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zcard("ms:hooks").zrange("ms:hooks", 0, 0, withscores=True)
            count, first = await pipe.execute()
        return int(count), float(first[0][1]) if first else None

    @reachable
    async def dropped(self) -> int:
        """Return how many decisions of all tenants' policies got no webhook."""
        return sum(map(int, await self._redis.hvals("ms:hook-dropped")))

    # --- for users

    @reachable
    async def delivery(self, delivery_id: str, viewer: str | None = None) -> WebhookDelivery:
        """Return a delivery as the tenant `viewer` sees it (None: an admin). Raises not_found."""
        [result] = await self._read([delivery_id], viewer)
        if result is None:
            raise not_found(delivery_id)
        return result

    @reachable
    async def deliveries(
        self,
        tenant: str | None,
        job: str | None = None,
        state: DeliveryState | None = None,
        limit: int = 50,
        cursor: str | None = None,
        viewer: str | None = None,
    ) -> DeliveryPage:
        """Return a tenant's deliveries (None: all), newest first, as the tenant `viewer` sees them
        (None: an admin). `cursor`: a previous page's `next`.

        With a filter that few deliveries match, a page may be short and still have a `next`. Raises
        MidstreamError("invalid_request") for an invalid cursor.
        """

        async def older(place: pages.PageEnd) -> pages.Chunk:
            if job is None:
                index = "ms:hook-index" if tenant is None else f"ms:hook-index:{tenant}"
                return await pages.older(self._redis, index, place)
            ids = [name.decode() for name in await self._redis.smembers(f"ms:hook-job:{job}")]
            times = await of_each(
                self._redis, ids, lambda pipe, name: pipe.hget(f"ms:hook:{name}", "created")
            )
            rows = sorted(zip((float(raw or 0) for raw in times), ids, strict=True), reverse=True)
            return [(name, at) for at, name in rows if (at, name) < place][: pages.CHUNK]

        async def read(chunk: pages.Chunk) -> list[WebhookDelivery | None]:
            return await self._read([name for name, _ in chunk], viewer)

        def wanted(delivery: WebhookDelivery) -> bool:
            return (
                tenant in (None, delivery.tenant)
                and state in (None, delivery.state)
                and job in (None, delivery.job)
            )

        place = pages.parse_cursor(cursor)
        found, following = await pages.page(place, limit, older, read, wanted, PAGE_SCAN)
        return DeliveryPage(deliveries=found, next=following)

    async def _read(self, ids: Sequence[str], viewer: str | None) -> list[WebhookDelivery | None]:
        rows = await of_each(
            self._redis,
            ids,
            lambda pipe, name: pipe.hmget(f"ms:hook:{name}", *FIELDS).lrange(
                f"ms:hook-log:{name}", 0, -1
            ),
        )
        return [
            _delivery(name, values, log, viewer)
            for name, values, log in zip(ids, rows[::2], rows[1::2], strict=True)
        ]

    @reachable
    async def redeliver(self, delivery_id: str, viewer: str | None = None) -> WebhookDelivery:
        """Send a delivery in any state again, under its id; a pending one immediately.

        Raises not_found, and too_many_webhooks at its tenant's limit of pending ones. `viewer`: see
        `delivery`.
        """
        limit = self._settings.tuning.webhook_pending_limit
        outcome = await self._own.hooks_redeliver(
            args=pack(self.clock(), id=delivery_id, pending_limit=limit)
        )
        if outcome == b"unknown":
            raise not_found(delivery_id)
        if outcome == b"full":
            tenant = (await self.delivery(delivery_id)).tenant
            raise refusal(tenant, "webhooks_pending", limit, limit, 1, None)
        return await self.delivery(delivery_id, viewer)


def not_found(delivery_id: str) -> MidstreamError:
    return MidstreamError("not_found", f"unknown delivery {delivery_id}")


def _delivery(
    name: str, values: Sequence[bytes | None], log: Sequence[bytes], viewer: str | None
) -> WebhookDelivery | None:
    record = {
        field: value.decode()
        for field, value in zip(FIELDS, values, strict=True)
        if value is not None
    }
    if "state" not in record:
        return None
    return WebhookDelivery(
        id=name,
        job=record["job"] if viewer is None else record.get("shown", record["job"]),
        event=cast(CallbackEvent, record["event"]),
        tenant=record["tenant"],
        url=record["url"],
        # version 0.1 disabled receivers
        state=cast(DeliveryState, record["state"].replace("disabled", "failed")),
        created=float(record["created"]),
        next_attempt=float(record["next"]) if "next" in record else None,
        attempts=[from_json(raw, DeliveryAttempt) for raw in log],
    )
