"""Webhook sender: a loop in the `callbacks` process that leases due deliveries, sends them and
records the outcome.

Receivers do not wait for each other: each lane (a tenant's receivers at one host) has its own limit
in the outbox, and no tenant gets all of a sender's slots. For a simulated clock see `clock_of`.
"""

import asyncio
import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.schemas.access.webhooks import DeliveryAttempt, DeliveryState
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.settings.faults import crash_point
from midstream.schemas.settings.settings import Settings

from . import metrics
from .http import NoAnswer, Poster, TargetRefused
from .outbox import DeliveryLease, WebhookOutbox
from .secrets import WebhookSecrets

log = logging.getLogger(__name__)

#: Concurrent deliveries of one process.
SLOTS = 128
#: How many of them may belong to one tenant.
TENANT_SLOTS = 96
#: Seconds between two polls of an idle sender.
POLL_S = 0.2
#: A lease is this many seconds longer than an attempt may take.
LEASE_SPARE_S = 10.0
#: Seconds between two passes that delete old deliveries and measure the outbox's depth.
HOUSEKEEPING_S = 5.0
#: Seconds by which the clock may fall behind between two checks before it counts as set back.
SET_BACK_S = 1.0
#: Seconds that attempts under way have to end when the sender is stopped; deliveries whose attempts
#: do not end are sent again.
STOP_S = 3.0
GONE = 410
#: Seconds before each attempt, counted from the end of the one before: a little over three days in
#: all.
LADDER_S = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
#: A pause is longer by up to this share, so that deliveries that failed together are not sent again
#: together.
JITTER = 0.2
#: The longest pause that a receiver may request with Retry-After, in seconds.
RETRY_AFTER_MAX_S = 24 * 3600.0
#: Statuses with which Retry-After is honoured.
RETRY_AFTER_STATUSES = frozenset({429, 503})

_CLOCK = re.compile(r"(?:^|[;,])webhooks:clock=([^;,]+)")


def clock_of(settings: Settings) -> Callable[[], float]:
    """Return the clock, in seconds since the epoch.

    For tests, `MIDSTREAM_FAULT=webhooks:clock=FILE` advances it by the seconds in the file.
    """
    if (match := _CLOCK.search(settings.fault)) is None:
        return now
    file = Path(match[1])
    return lambda: now() + float((file.exists() and file.read_text()) or 0)


class WebhookSender:
    """Sends the deliveries that it leases from `outbox`, by the outbox's clock; closes `poster`."""

    def __init__(
        self,
        outbox: WebhookOutbox,
        secrets: WebhookSecrets,
        poster: Poster,
        settings: Settings,
    ):
        self._outbox = outbox
        self._secrets = secrets
        self._poster = poster
        self._lease_s = settings.tuning.webhook_timeout_s + LEASE_SPARE_S
        self._ttl_s = settings.tuning.webhook_log_ttl_s
        self._under_way: dict[asyncio.Task[None], str] = {}
        # seconds by which the outbox's clock was ahead of the monotonic one; infinite before the
        # first check, which therefore treats the clock as set back
        self._ahead = math.inf

    async def close(self) -> None:
        """Give attempts under way `STOP_S` to end, and cancel the others: the next sender repeats
        them.
        """
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=STOP_S)
        for task in list(self._under_way):
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)
        await self._poster.close()

    async def run(self) -> None:
        """Run until cancelled. An unreachable Redis or any other failure is logged and retried."""
        housekeeping = 0.0
        unreachable = False
        while True:
            begun = 0
            try:
                begun = await self._begin()
                if time.monotonic() >= housekeeping:
                    housekeeping = time.monotonic() + HOUSEKEEPING_S
                    await self.housekeeping()
                    unreachable = False
            except MidstreamError as error:
                if not unreachable:  # once, not every `POLL_S`
                    log.warning("webhooks suspended: %s", error.detail)
                unreachable = True
            except Exception:
                # The other deliveries still need the next round.
                log.exception("a round of webhooks failed; next one in %s s", POLL_S)
            if begun and len(self._under_way) < SLOTS:
                continue  # there may be more
            if self._under_way:
                await asyncio.wait(
                    self._under_way, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(POLL_S)

    async def housekeeping(self) -> None:
        """Delete old deliveries; measure the outbox."""
        while await self._outbox.clean(self._ttl_s):
            pass
        metrics.WEBHOOK_DROPPED.set(await self._outbox.dropped())
        depth, oldest = await self._outbox.depth()
        metrics.WEBHOOK_DEPTH.set(depth)
        metrics.WEBHOOK_OLDEST.set(
            0.0 if oldest is None else max(self._outbox.clock() - oldest, 0.0)
        )

    async def _begin(self) -> int:
        """Begin as many attempts as there are slots and due deliveries; returns how many."""
        if not (free := SLOTS - len(self._under_way)):
            return 0
        await self._notice_clock()
        leases = await self._outbox.lease(
            free, TENANT_SLOTS, self._lease_s, Counter(self._under_way.values())
        )
        owners = {(lease.tenant, lease.key) for lease in leases}
        secrets = {
            owner: [secret.secret for secret in (await self._secrets.of(*owner)).secrets]
            for owner in owners
        }
        for lease in leases:
            task = asyncio.create_task(self._deliver(lease, secrets[lease.tenant, lease.key]))
            self._under_way[task] = lease.tenant
            task.add_done_callback(self._ended)
        return len(leases)

    async def _notice_clock(self) -> None:
        """If the clock was set back, reschedule deliveries, so that none waits for the old time."""
        ahead = self._outbox.clock() - time.monotonic()
        if ahead < self._ahead - SET_BACK_S and (moved := await self._outbox.clamp(self._lease_s)):
            log.warning("the clock was set back: %d webhooks are due earlier", moved)
        self._ahead = ahead

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("could not record a webhook attempt, so it will be repeated", exc_info=error)

    async def _deliver(self, lease: DeliveryLease, secrets: list[str]) -> None:
        """Make one attempt, signed with `secrets`, and record it."""
        at = self._outbox.clock()
        started = time.monotonic()
        crash_point("webhook.lent")
        state, status, error, pause = await self._attempt(lease, at, secrets)
        crash_point("webhook.sent")
        attempt = DeliveryAttempt(
            at=at, status=status, error=error, seconds=round(time.monotonic() - started, 6)
        )
        again = None
        if state == "pending":
            again = due_again(lease.tries + 1, self._outbox.clock(), pause)
            state = "failed" if again is None else "pending"
        metrics.WEBHOOK_ATTEMPTS.labels("retried" if state == "pending" else state).inc()
        log.log(  # only the host of the URL: the rest may contain a password
            logging.DEBUG if state == "delivered" else logging.INFO,
            "webhook %s of job %s to %s: %s after attempt %d (%s)",
            lease.id,
            lease.job,
            urlsplit(lease.url).netloc,
            state,
            lease.tries + 1,
            status or error,
        )
        await self._record(lease, state, attempt, again)

    async def _attempt(
        self, lease: DeliveryLease, at: float, secrets: list[str]
    ) -> tuple[DeliveryState, int | None, str, float]:
        """Return (new state, HTTP status, error, seconds of pause that the receiver requests)."""
        try:
            answer = await self._poster.post(lease.url, lease.id, int(at), lease.body(), secrets)
        except TargetRefused as refused:
            return "refused", None, str(refused), 0.0
        except NoAnswer as error:
            return "pending", None, str(error), 0.0
        except Exception as error:
            # retried on schedule like any other failure, not again with every lease
            log.exception("webhook %s could not be sent", lease.id)
            return "pending", None, f"the sender failed: {type(error).__name__}", 0.0
        if 200 <= answer.status < 300:
            return "delivered", answer.status, "", 0.0
        if answer.status == GONE:
            return "failed", GONE, "gone: not sent again", 0.0
        wrong = "redirects are not followed" if 300 <= answer.status < 400 else "not accepted"
        return "pending", answer.status, wrong, retry_after(answer.status, answer.retry_after, at)

    async def _record(
        self,
        lease: DeliveryLease,
        state: DeliveryState,
        attempt: DeliveryAttempt,
        again: float | None,
    ) -> None:
        """Record the result, retrying while the lease lasts: Redis may restart meanwhile.

        Raises MidstreamError("unavailable") after that.
        """
        while True:
            try:
                await self._outbox.settle(lease, state, attempt, again)
                return
            except MidstreamError:
                if self._outbox.clock() >= lease.ends:
                    raise
                await asyncio.sleep(POLL_S)


async def keep_sending(settings: Settings) -> None:
    """Send webhooks until cancelled."""
    ledger = Ledger.connect(settings)
    sender = WebhookSender(
        WebhookOutbox(ledger, clock_of(settings)),
        WebhookSecrets(ledger),
        Poster(settings.webhook_allow_private, settings.tuning.webhook_timeout_s),
        settings,
    )
    try:
        await sender.run()
    finally:
        await sender.close()
        await ledger.close()


def due_again(
    tries: int, at: float, least_s: float = 0.0, chance: random.Random | None = None
) -> float | None:
    """Return when to send again after `tries` attempts (at least 1), the last of which ended at
    `at`; None after the last attempt.

    `least_s`: the shortest pause, as requested by the receiver. `at` and the result are in seconds
    since the epoch.
    """
    if tries >= len(LADDER_S):
        return None
    return at + max(LADDER_S[tries] * (1.0 + JITTER * (chance or random).random()), least_s)


def retry_after(status: int, header: str | None, at: float) -> float:
    """Return the seconds of pause that the response requests (RFC 9110: a number, or an HTTP date),
    at most a day; 0 if it requests none.
    """
    if status not in RETRY_AFTER_STATUSES or header is None:
        return 0.0
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), RETRY_AFTER_MAX_S)
    try:
        moment = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):  # no date, or a date out of range
        return 0.0
    return min(max(moment - at, 0.0), RETRY_AFTER_MAX_S)
