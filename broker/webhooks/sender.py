"""Webhook sender: a loop in the `callbacks` process that leases due deliveries, sends them and
records the outcome.

Receivers do not wait for each other: each lane has its own room in the outbox, and no tenant has
all of a sender's slots. For a simulated clock see `clock_of` (a whole process) and `Sender.round`
(inside a test).
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

from ...schemas.access.webhooks import DeliveryAttempt, DeliveryState
from ...schemas.base.errors import MidstreamError
from ...schemas.base.faults import crash_point
from ...schemas.base.records import now
from ...schemas.base.settings import Settings
from ..ledger.jobs.ledger import Ledger
from ..ops import metrics
from .http import NoAnswer, Poster, TargetRefused
from .outbox import DeliveryLease, WebhookOutbox
from .secrets import WebhookSecrets

log = logging.getLogger(__name__)

#: Concurrent deliveries of one process, and how many of them may belong to one tenant.
SLOTS, TENANT_SLOTS = 128, 96
#: How often an idle sender looks for something due, in seconds.
POLL_S = 0.2
#: A loan is this many seconds longer than an attempt may take.
LEASE_SPARE_S = 10.0
#: How often what was settled long ago is forgotten and the outbox's depth is measured, in seconds.
HOUSEKEEPING_S = 5.0
#: Seconds by which the clock may fall behind between two looks at it before it counts as set back.
SET_BACK_S = 1.0
#: Seconds that attempts under way have to end when the sender is stopped; what does not is sent
#: again.
STOP_S = 3.0
GONE = 410
#: Seconds before each attempt, counted from the end of the one before: a little over three days in
#: all.
LADDER_S = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
#: A pause is longer by up to this share, so that what failed together does not come back together.
JITTER = 0.2
#: The longest pause that a receiver may wish for, in seconds.
RETRY_AFTER_MAX_S = 24 * 3600.0
#: The answers with which it may wish for one.
WISHING = frozenset({429, 503})

_CLOCK = re.compile(r"(?:^|[;,])webhooks:clock=([^;,]+)")


def clock_of(settings: Settings) -> Callable[[], float]:
    """Seconds since the epoch.

    For tests, `MIDSTREAM_FAULT=webhooks:clock=FILE` moves it on by the seconds that the file holds.
    """
    match = _CLOCK.search(settings.fault)
    if match is None:
        return now
    file = Path(match[1])
    return lambda: now() + float((file.exists() and file.read_text()) or 0)


class Sender:
    """Sends what `outbox` lends, at the outbox's time. `poster` is this sender's to close."""

    def __init__(
        self,
        outbox: WebhookOutbox,
        secrets: WebhookSecrets,
        poster: Poster,
        settings: Settings,
        chance: random.Random | None = None,
    ):
        self._outbox = outbox
        self._secrets = secrets
        self._poster = poster
        self._lease_s = settings.webhook_timeout_s + LEASE_SPARE_S
        self._ttl_s = settings.webhook_log_ttl_s
        self._chance = chance or random.Random()
        self._under_way: dict[asyncio.Task[None], str] = {}
        # seconds by which the outbox's clock was ahead of the monotonic one; before a first look:
        # as if set back
        self._ahead = math.inf

    @classmethod
    def over(cls, ledger: Ledger, clock: Callable[[], float] | None = None) -> "Sender":
        """A sender with the ledger's settings; `clock` defaults to the settings' clock."""
        settings = ledger.settings
        outbox = WebhookOutbox(ledger, clock or clock_of(settings))
        return cls(
            outbox,
            WebhookSecrets(ledger),
            Poster(settings.webhook_allow_private, settings.webhook_timeout_s),
            settings,
        )

    async def close(self) -> None:
        """Attempts under way get a moment to end; what is cut off is sent again by any caller that
        comes next.
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
        housekeeping, unreachable = 0.0, False
        while True:
            lent = 0
            try:
                lent = await self._borrow()
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
            if lent and len(self._under_way) < SLOTS:
                continue  # there may be more
            if self._under_way:
                await asyncio.wait(
                    self._under_way, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(POLL_S)

    async def round(self) -> int:
        """Everything that is due by the outbox's clock, sent and settled; returns the number of
        attempts. For simulated time:

        advance the clock to the earliest due time (`WebhookOutbox.depth`) and call this again.
        """
        count = 0
        while (lent := await self._borrow()) or self._under_way:
            count += lent
            if self._under_way:
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        return count

    async def housekeeping(self) -> None:
        """Forget old news; measure the outbox."""
        while await self._outbox.clean(self._ttl_s):
            pass
        depth, oldest = await self._outbox.depth()
        metrics.WEBHOOK_DEPTH.set(depth)
        metrics.WEBHOOK_OLDEST.set(
            0.0 if oldest is None else max(self._outbox.clock() - oldest, 0.0)
        )

    async def _borrow(self) -> int:
        """Begin as many attempts as there are slots and due deliveries; returns how many."""
        free = SLOTS - len(self._under_way)
        if not free:
            return 0
        await self._notice_clock()
        loans = await self._outbox.lend(
            free, TENANT_SLOTS, self._lease_s, Counter(self._under_way.values())
        )
        owners = {(loan.tenant, loan.key) for loan in loans}
        secrets = {
            owner: [known.secret for known in (await self._secrets.of(*owner)).secrets]
            for owner in owners
        }
        for loan in loans:
            task = asyncio.create_task(self._deliver(loan, secrets[loan.tenant, loan.key]))
            self._under_way[task] = loan.tenant
            task.add_done_callback(self._ended)
        return len(loans)

    async def _notice_clock(self) -> None:
        """Reschedule deliveries after the clock was set back, so that none waits for the old
        time.
        """
        ahead = self._outbox.clock() - time.monotonic()
        if ahead < self._ahead - SET_BACK_S and (moved := await self._outbox.clamp(self._lease_s)):
            log.warning("the clock was set back: %d webhooks are due earlier", moved)
        self._ahead = ahead

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("could not record a webhook attempt, so it will be repeated", exc_info=error)

    async def _deliver(self, loan: DeliveryLease, secrets: list[str]) -> None:
        """One attempt, signed with these, and its note."""
        at, started = self._outbox.clock(), time.monotonic()
        crash_point("webhook.lent")
        state, status, error, request = await self._attempt(loan, at, secrets)
        crash_point("webhook.sent")
        attempt = DeliveryAttempt(
            at=at, status=status, error=error, seconds=round(time.monotonic() - started, 6)
        )
        again = None
        if state == "pending":
            again = due_again(loan.tries + 1, self._outbox.clock(), request, self._chance)
            state = "failed" if again is None else "pending"
        metrics.WEBHOOK_ATTEMPTS.labels("retried" if state == "pending" else state).inc()
        log.log(  # of the URL only the host: what follows may be a password
            logging.DEBUG if state == "delivered" else logging.INFO,
            "webhook %s of job %s to %s: %s after attempt %d (%s)",
            loan.id,
            loan.job,
            urlsplit(loan.url).netloc,
            state,
            loan.tries + 1,
            status or error,
        )
        await self._note(loan, state, attempt, again)

    async def _attempt(
        self, loan: DeliveryLease, at: float, secrets: list[str]
    ) -> tuple[DeliveryState, int | None, str, float]:
        """(what the delivery is now, HTTP status, what went wrong, seconds that the receiver wishes
        to be left alone).
        """
        try:
            answer = await self._poster.post(loan.url, loan.id, int(at), loan.body(), secrets)
        except TargetRefused as refused:
            return "refused", None, str(refused), 0.0
        except NoAnswer as silence:
            return "pending", None, str(silence), 0.0
        except Exception as ours:
            # it climbs the ladder like any other failure, and does not come back with every lease
            log.exception("webhook %s could not be sent", loan.id)
            return "pending", None, f"the sender failed: {type(ours).__name__}", 0.0
        if 200 <= answer.status < 300:
            return "delivered", answer.status, "", 0.0
        if answer.status == GONE:
            return "disabled", GONE, "disabled by the receiver (410)", 0.0
        wrong = "redirects are not followed" if 300 <= answer.status < 400 else "not accepted"
        return "pending", answer.status, wrong, retry_after(answer.status, answer.retry_after, at)

    async def _note(
        self,
        loan: DeliveryLease,
        state: DeliveryState,
        attempt: DeliveryAttempt,
        again: float | None,
    ) -> None:
        """Record the result, retrying while the loan lasts: Redis may restart meanwhile.

        Raises MidstreamError("unavailable") after that.
        """
        while True:
            try:
                await self._outbox.settle(loan, state, attempt, again)
                return
            except MidstreamError:
                if self._outbox.clock() >= loan.ends:
                    raise
                await asyncio.sleep(POLL_S)


def due_again(
    tries: int, at: float, request: float = 0.0, chance: random.Random | None = None
) -> float | None:
    """When to send again after `tries` attempts (at least 1) of which the last ended at `at`; None:
    that was the last rung.

    `request`: seconds that the receiver asked to be left alone, at least. `at` and the answer in
    seconds since the epoch.
    """
    if tries >= len(LADDER_S):
        return None
    pause = LADDER_S[tries] * (1.0 + JITTER * (chance or random).random())
    return at + max(pause, request)


def retry_after(status: int, header: str | None, at: float) -> float:
    """Seconds that the answer asks us to wait (RFC 9110: a number, or an HTTP date), 0 when it does
    not; a day at most.
    """
    if status not in WISHING or header is None:
        return 0.0
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), RETRY_AFTER_MAX_S)
    try:
        moment = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):  # no date, or one outside of all calendars
        return 0.0
    return min(max(moment - at, 0.0), RETRY_AFTER_MAX_S)
