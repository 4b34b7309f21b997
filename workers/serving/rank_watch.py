"""Looks after a worker's ranks beside its jobs: answers, reports, and resyncs.

The watch polls Redis every `POLL_S`: it checks with the ranks whether they could apply
global steering that is proposed or in force, and reports on them. A job begins only while the
worker is `serving`. When ranks of a stage disagree, or may, the worker takes no jobs, stops those
that have interventions or captures, resets every rank, and compares the ranks. Then it serves
again; if the resync fails, the engine is given up.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from ...broker.ledger.core.reachable import Unreachable
from ...broker.ledger.named.steering import LedgerSteering
from ...broker.telemetry.logs import Complaints
from ...schemas.base.errors import KindError, MidstreamError, Translated
from ...schemas.base.records import now
from ...schemas.base.tensors import Tensor, content_hash
from ...schemas.requests.steering import (
    GlobalSteering,
    RankSteering,
    WorkerState,
    WorkerSteering,
)
from ...schemas.settings.settings import Settings
from ..engine.protocol import Engine
from ..engine.ranks.collective import Quarantined
from ..engine.ranks.control import disagreement
from .redis_retry import patiently

logger = logging.getLogger(__name__)

#: How often Redis is asked for changes to global steering and for queries about the ranks.
POLL_S = 0.25
#: How often the ranks are compared, in addition to every receipt, and the worker reports without
#: being asked.
COMPARE_S = 5.0
#: Retry interval for global steering that the ranks refused, or that could not be read.
RETRY_S = 1.0
#: The least time between ERROR log lines on ranks that disagree.
COMPLAINT_S = 60.0
VERSION_MISMATCH = "version_mismatch"
#: A resync waits this long for the engine to let go of the requests that it stopped.
DRAIN_S = 30.0
DRAIN_CHECK_S = 0.02


class ResyncFailed(KindError):
    """The resync of the ranks failed: the engine must be restarted."""

    KIND = "engine_failed"


class RankWatch:
    """Watches an engine's ranks.

    `publish` is called when the worker starts or stops serving; it may raise Unreachable.

    `stop_runs(why)` asks every attempt with interventions or captures to end, and returns whether
    one is left, or is being claimed; `Attempts` sets it.
    """

    def __init__(
        self,
        broker: LedgerSteering,
        engine: Engine,
        settings: Settings,
        boot: str,
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        self._broker = broker
        self._engine = engine
        self._boot = boot
        self._publish = publish
        self._worker = settings.worker_id
        self._model = settings.served_model
        self.stop_runs: Callable[[str], bool] = lambda why: False
        self.state: WorkerState = "serving"
        self.detail = ""  # why it does not serve
        self.desyncs = self.resyncs = 0
        self.last_desync = ""
        self.last_desync_at = cast("float | None", None)
        self.ranks: list[RankSteering] = []  # their last reports
        self._open = asyncio.Event()  # serving, or closed for good
        self._closed = False
        self._wake = asyncio.Event()
        self._version = -1  # of the global steering that the ranks have checked; -1: none yet
        self._answered: set[str] = set()  # open checks
        self._ask = ""  # id of the last request for a report
        self._published = ("", "", "")  # state, detail, and the engine's trouble
        self._out_of_step = ""  # why a resync is due
        self._compared = -math.inf
        self._retried = -math.inf
        self._complaints = Complaints(COMPLAINT_S)
        engine.on_quarantine = self.quarantine

    # -- For attempts

    @property
    def serving(self) -> bool:
        return self._open.is_set() and not self._closed

    async def may_begin(self, patience_s: float) -> bool:
        """Wait until a job may begin; return False if the worker does not serve within
        `patience_s`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._open.wait()
        return self.serving

    def quarantine(self, why: str) -> None:
        """Begin no job until a resync has made the ranks equal. `why`: why they may differ."""
        if self.state != "resyncing":
            self._stop_serving("quarantined", why)
            self._out_of_step = self._out_of_step or why
            self._wake.set()

    def close(self) -> None:
        """Release all waiting callers, because the engine is dead."""
        self._closed = True
        self._open.set()

    # -- The loop

    async def start(self) -> None:
        """Check the ranks before the first job.

        Desync marks of a previous start are cleared: their ranks no longer exist.
        """
        await patiently(self._broker.clear_desync, self._worker, self._boot)
        await patiently(self._look)

    async def run(self) -> str:
        """Run until cancelled; returns, with the reason, only if the engine must be abandoned."""
        unreachable = False
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._look()
                unreachable = False
            except ResyncFailed as error:
                return str(error)
            except Quarantined as error:
                self.quarantine(error.detail)
            except Unreachable as error:
                if not unreachable:
                    logger.warning(
                        "cannot poll for checks and queries, Redis unreachable: %s", error
                    )
                unreachable = True
            except MidstreamError as error:
                if error.kind != "engine_failed":
                    raise
                # `EngineHost` watches for the engine's death
                logger.warning("the ranks do not respond: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _look(self) -> None:
        if self._out_of_step:
            await self._resync(self._out_of_step)
            if self._out_of_step:
                return
        look = await self._broker.look(self._model, self._worker)
        if look.desync:
            await self._resync(look.desync)
            return
        self._answered.intersection_update(look.checks)
        for check in look.checks:
            if check not in self._answered:
                await self._answer(check)
                self._answered.add(check)
        retry = self.state == "quarantined" and time.monotonic() - self._retried >= RETRY_S
        if look.version != self._version or retry:
            await self._check_current()
        due = time.monotonic() - self._compared >= COMPARE_S
        if due or look.ask != self._ask:
            ranks = self.ranks = await self._engine.steering_status()
            self._compared = time.monotonic()
            await self._publish_changes()
            if why := disagreement(ranks):
                await self._resync(why)
                return
            self._ask = look.ask
            await self._report(ranks)

    async def _report(self, ranks: list[RankSteering]) -> None:
        await self._broker.report(
            WorkerSteering(
                worker=self._worker,
                boot=self._boot,
                model=self._model,
                state=self.state,
                detail=self.detail,
                at=now(),
                ask=self._ask,
                waiting=self._engine.waiting,
                desyncs=self.desyncs,
                resyncs=self.resyncs,
                ranks=ranks,
            )
        )

    # -- Global steering

    async def _answer(self, check: str) -> None:
        """Answer whether the ranks could apply what is proposed."""
        try:
            steering = GlobalSteering(entries=await self._broker.checked_entries(check))
            refusal = await self._refusal(steering, check)
        except MidstreamError as error:
            if error.kind != VERSION_MISMATCH:
                raise
            refusal = error.detail
        await self._broker.answer(check, self._boot, refusal)

    async def _check_current(self) -> None:
        """Serve only if the ranks can apply the global steering in force: they would fail every
        job. This worker may have started, or been away, when it was proposed.
        """
        self._retried = time.monotonic()
        try:
            current = await self._broker.current(self._model)
            if refusal := await self._refusal(current):
                refusal = f"global steering version {current.version}: {refusal}"
            self._version = current.version
        except MidstreamError as error:
            if error.kind != VERSION_MISMATCH:
                raise
            refusal = error.detail  # a restart would not help
        if refusal:
            self._stop_serving("quarantined", refusal)
        elif not self._out_of_step:  # no resync is due
            self._serve()
        await self._publish_changes()

    async def _refusal(self, steering: GlobalSteering, check: str = "") -> str:
        """Return which ranks cannot apply `steering`, and why; "" if all can."""
        if not steering.entries:
            return ""
        try:
            await self._engine.check_global(steering, partial(self._fetch, check))
        except MidstreamError as error:
            if error.kind != "intervention_failed" or isinstance(error, Quarantined):
                raise
            return error.detail
        return ""

    async def _fetch(self, check: str, name: str) -> Tensor:
        tensor = await self._broker.get_tensor(name, check)
        if content_hash(tensor) != name:
            raise MidstreamError(
                "intervention_failed", f"tensor {name[:12]}: content does not match its hash"
            )
        return tensor

    # -- Resync

    async def _resync(self, why: str) -> None:
        """Reset all ranks to the same state; an interrupted resync begins again at the next look.

        Raises ResyncFailed when that is impossible.
        """
        if self.state != "resyncing":
            self.desyncs += 1
            self.last_desync = why
            self.last_desync_at = now()
            self._complain(why)
        self._stop_serving("resyncing", why)
        self._out_of_step = why
        await self._publish_changes()
        await self._report(await self._engine.steering_status())
        with Translated(
            Quarantined, lambda error: ResyncFailed(f"resync of the ranks failed: {error.detail}")
        ):
            await self._drain(why)
            # Checksums are cumulative: after one difference, ranks never agree again, and what else
            # differs is unknown. A reset takes moments; a new engine would load its weights.
            await self._engine.restart_ledgers()
            ranks = await self._engine.steering_status()
            if unequal := disagreement(ranks):
                raise ResyncFailed(f"after a resync {unequal}")
            if not await self._engine.same_content():
                raise ResyncFailed("after a resync the ranks' tables differ")
            epoch = max(rank.epoch for rank in ranks)
            await self._broker.clear_desync(self._worker, self._boot, epoch)
            # if Redis is away from here on, the next look serves
            self._out_of_step = ""
            self._version = -1
            self.resyncs += 1
            logger.warning(
                "the ranks are in the same state again, with empty ledgers (epoch %d)", epoch
            )
            await self._check_current()
        await self._report(ranks)

    async def _drain(self, why: str) -> None:
        """Stop attempts with interventions or captures, including those being claimed now.

        Attempts record their end in the ledger before they end, so that the ledger rejects what
        reset ranks report about them.
        """
        deadline = time.monotonic() + DRAIN_S
        while self.stop_runs(why):
            await asyncio.sleep(DRAIN_CHECK_S)
            if time.monotonic() > deadline:
                # raises Unreachable while Redis is, when no job can end
                await self._broker.look(self._model, self._worker)
                raise ResyncFailed(
                    f"could not stop requests within {DRAIN_S:.0f} s to resync: {why}"
                )

    def _complain(self, why: str) -> None:
        """Log an ERROR, at most once per `COMPLAINT_S`: every request may cause the same error."""
        if self._complaints.due(self._worker):
            logger.error("ranks diverged; no job begins until they are resynced: %s", why)
        else:
            logger.info("ranks diverged again (count since the start: %d): %s", self.desyncs, why)

    # -- Serving

    def _serve(self) -> None:
        if not self._closed:
            self.state = "serving"
            self.detail = ""
            self._open.set()

    def _stop_serving(self, state: WorkerState, why: str) -> None:
        self.state = state
        self.detail = why
        if not self._closed:
            self._open.clear()

    async def _publish_changes(self) -> None:
        """Publish the worker's state immediately when it has changed."""
        found = self.state, self.detail, self._engine.trouble
        if self._published != found:
            await self._publish()
            self._published = found
            self._compared = float("-inf")  # report on it now
