"""Convergence of the ranks to the desired global steering, and resync when they diverge.

The reconciler polls Redis every `steering_poll_s`: it prepares what is proposed, applies what was
decided (global steering, named modules), and reports. A job begins only while the worker is
`serving`, and keeps the global steering that is applied then to its end. When ranks of a stage
disagree, or may, the worker takes no jobs, stops those that have interventions or captures, resets
every rank, applies the desired state again, and compares the ranks. Then it serves again; if the
resync fails, the engine is given up.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, cast

from ...broker.ledger.named.steering import Steering
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import now
from ...schemas.base.settings import Settings
from ...schemas.base.tensors import Tensor, content_hash
from ...schemas.requests.steering import (
    Desired,
    GlobalSteering,
    Module,
    Proposal,
    RankApplied,
    RankSteering,
    WorkerState,
    WorkerSteering,
)
from ..engine.protocol import Engine
from ..engine.ranks.collective import Quarantined, Refused, refusals
from ..engine.ranks.control import disagreement
from .redis_retry import UNAVAILABLE, patiently
from .steering_leases import AppliedSteering, SteeringLease

logger = logging.getLogger(__name__)

#: How often the ranks are compared, in addition to every receipt, and the worker reports without
#: being asked.
COMPARE_S = 5.0
#: Retry interval for global steering that the ranks refused, and for tensors that were not stored.
RETRY_S = 1.0
VERSION_MISMATCH = "version_mismatch"
#: Rounds of a resync; after the first, they leave out what some ranks rejected and others did not.
RESYNC_ROUNDS = 3
#: A resync waits this long for the engine to let go of the requests that it stopped.
DRAIN_S = 30.0
DRAIN_CHECK_S = 0.02


class ResyncFailed(MidstreamError):
    """The resync of the ranks failed: the engine must be restarted."""

    def __init__(self, detail: str) -> None:
        super().__init__("engine_failed", detail)


class Trouble(NamedTuple):
    """A module that is not on the ranks."""

    digest: str
    why: str
    lasting: bool  # the ranks refused this content: it is not tried again


class _Answer:
    """Answer to the last proposal."""

    def __init__(
        self, proposal: str = "", applied: list[RankApplied] | None = None, refusal: str = ""
    ) -> None:
        self.proposal, self.applied, self.refusal = proposal, applied or [], refusal
        self.held: list[str] = []


class SteeringReconciler:
    """Steering on an engine's ranks, and its convergence to the desired state.

    `publish` is called when the worker starts or stops serving; it may raise `unavailable`.

    `stop_runs(why)` asks every attempt with interventions or captures to end; `Attempts` sets it.
    """

    def __init__(
        self,
        broker: Steering,
        engine: Engine,
        settings: Settings,
        boot: str,
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        self._broker, self._engine, self._settings, self._boot, self._publish = (
            broker,
            engine,
            settings,
            boot,
            publish,
        )
        self._worker, self._model = settings.worker_id, settings.served_model
        self.stop_runs: Callable[[str], None] = lambda why: None
        self.state: WorkerState = "serving"
        self.detail = ""  # why it does not serve
        self.desyncs = self.resyncs = 0
        self.last_desync, self.last_desync_at = "", cast("float | None", None)
        self.ranks: list[RankSteering] = []  # their last reports
        self._open = asyncio.Event()  # serving, or closed for good
        self._closed = False
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()  # replaced with every look
        self._global = AppliedSteering(GlobalSteering())
        self._replaced: list[AppliedSteering] = []  # attempts may still run under these
        self._modules: dict[str, Module] = {}
        self._answer = _Answer()
        self._last: list[RankApplied] = []  # answers to the last prepare or commit
        self._version = 0  # of the `Desired` that is reconciled
        # version, proposal and commit of the last look that was followed
        self._followed: tuple[int, str, str] | None = None
        self._ask = ""  # id of the last request for a report
        self._published = ("", "")  # state and detail
        self._troubles: dict[str, Trouble] = {}  # by module
        self._out_of_step = ""  # why a resync is due
        self._compared = self._retried = self._complained = float("-inf")
        engine.on_quarantine = self.quarantine

    # -- For attempts

    @property
    def serving(self) -> bool:
        return self._open.is_set() and not self._closed

    async def lease(self, patience_s: float) -> SteeringLease | None:
        """Returns a lease on the global steering for an attempt that begins now; None when the
        worker does not serve within `patience_s`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._open.wait()
        return SteeringLease(self._global) if self.serving else None

    async def catch_up(self, patience_s: float) -> None:
        """Wake the loop; returns after its next look, or after `patience_s`."""
        looked = self._looked
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await looked.wait()

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
        """Apply the desired state before the first job.

        Desync marks of a previous start are cleared: their ranks no longer exist.
        """
        await patiently(lambda: self._broker.clear_desync(self._worker, self._boot), "start")
        await patiently(self._look, "start")

    async def run(self) -> str:
        """Run until cancelled; returns, with the reason, only if the engine must be abandoned."""
        unreachable = False
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.steering_poll_s):
                    await self._wake.wait()
            self._wake.clear()
            looked, self._looked = self._looked, asyncio.Event()
            try:
                await self._look()
                unreachable = False
            except ResyncFailed as error:
                return str(error)
            except Quarantined as error:
                self.quarantine(error.detail)
            except MidstreamError as error:
                if error.kind == UNAVAILABLE:
                    if not unreachable:
                        logger.warning("cannot poll global steering, Redis unreachable: %s", error)
                    unreachable = True
                elif error.kind == "engine_failed":
                    # `EngineHost` watches for the engine's death
                    logger.warning("the ranks do not respond: %s", error)
                    await asyncio.sleep(RETRY_S)
                else:
                    raise
            finally:
                looked.set()

    async def _look(self) -> None:
        await self._let_go()
        if self._out_of_step:
            await self._resync(self._out_of_step)
            if self._out_of_step:
                return
        look = await self._broker.look(self._model, self._worker)
        if look.desync:
            await self._resync(look.desync)
            return
        unfinished = self.state == "quarantined" or not all(
            trouble.lasting for trouble in self._troubles.values()
        )
        retry = unfinished and time.monotonic() - self._retried >= RETRY_S
        latest = look.version, look.proposal, look.committed
        changed = self._followed != latest
        if changed or retry:
            await self._follow()
            self._followed = latest
        due = time.monotonic() - self._compared >= COMPARE_S
        if changed or retry or due or look.ask != self._ask:
            ranks = self.ranks = await self._engine.steering_status()
            self._compared = time.monotonic()
            if why := disagreement(ranks):
                await self._resync(why)
                return
            self._ask = look.ask
            await self._report(ranks)

    async def _follow(self) -> None:
        try:
            desired = await self._broker.desired(self._model)
        except MidstreamError as error:
            if error.kind != VERSION_MISMATCH:
                raise
            # Global steering cannot be read: no job may run without it, and a restart would not
            # help.
            self._retried = time.monotonic()
            self._stop_serving("quarantined", error.detail)
            await self._publish_changes()
            return
        await self._reconcile(desired)

    async def _report(self, ranks: list[RankSteering]) -> None:
        await self._broker.report(
            WorkerSteering(
                worker=self._worker,
                boot=self._boot,
                model=self._model,
                state=self.state,
                detail=self.detail or "; ".join(trouble.why for trouble in self._troubles.values()),
                version=self._version,
                global_version=self._global.steering.version,
                at=now(),
                ask=self._ask,
                proposal=self._answer.proposal,
                prepared=bool(self._answer.proposal) and not self._answer.refusal,
                refusal=self._answer.refusal,
                applied=self._last,
                waiting=self._engine.waiting,
                desyncs=self.desyncs,
                resyncs=self.resyncs,
                ranks=ranks,
            )
        )

    # -- Reconciling

    async def _reconcile(self, desired: Desired, *, skip_global: bool = False) -> None:
        """Apply modules, then global steering, then prepare the proposal.

        What the ranks refuse is reported, and the ranks are compared afterwards.
        """
        self._retried = time.monotonic()
        await self._reconcile_modules(desired.modules)
        why = self.detail if skip_global else await self._reconcile_global(desired.current)
        await self._consider(desired.proposal)
        if not why and not self._troubles:
            self._version = desired.version
        if why:
            self._stop_serving("quarantined", why)
        elif not self._out_of_step:  # no resync is due or still to be verified
            self._serve()
        await self._publish_changes()

    async def _reconcile_modules(self, modules: dict[str, Module]) -> None:
        for name in [*(self._modules.keys() - modules.keys()), *modules]:
            module, current = modules.get(name), self._modules.get(name)
            digest = module.digest if module is not None else ""
            trouble = self._troubles.get(name)
            if (current is not None and digest == current.digest) or (
                trouble is not None and trouble.lasting and trouble.digest == digest
            ):
                continue
            try:
                await self._set_module(name, module)
            except Refused as error:
                self._trouble(name, Trouble(digest, error.detail, lasting=bool(error.answers)))
                continue
            self._troubles.pop(name, None)
            if current is not None:
                await self._engine.release_vectors(current.tensors, pinned=True)
        self._troubles = {
            name: trouble
            for name, trouble in self._troubles.items()
            if name in modules or name in self._modules
        }

    async def _set_module(self, name: str, module: Module | None) -> None:
        tensors = module.tensors if module is not None else []
        await self._hold(tensors)
        try:
            await self._engine.set_module(
                name, module.digest if module is not None else "", tensors
            )
        except BaseException:
            await self._engine.release_vectors(tensors, pinned=True)
            raise
        if module is not None:
            self._modules[name] = module
        else:
            del self._modules[name]

    def _trouble(self, name: str, trouble: Trouble) -> None:
        if self._troubles.get(name) != trouble:
            logger.warning("module %s: %s", name, trouble.why)
        self._troubles[name] = trouble
        # compare the ranks now: where one rank refused the change, others may have made it
        self._compared = float("-inf")

    async def _reconcile_global(self, global_steering: GlobalSteering) -> str:
        """Apply global steering; returns why it could not be applied, or "" when it was."""
        if (global_steering.version, global_steering.digest) == (
            self._global.steering.version,
            self._global.steering.digest,
        ):
            return ""
        try:
            await self._hold(global_steering.tensors)
            try:
                await self._check(global_steering)
                self._last = await self._engine.commit_global(global_steering)
            except BaseException:
                await self._engine.release_vectors(global_steering.tensors, pinned=True)
                raise
        except Refused as error:
            self._last, self._compared = error.answers, float("-inf")  # as for modules
            return error.detail
        self._replaced.append(self._global)
        self._global = AppliedSteering(global_steering)
        return ""

    async def _check(self, global_steering: GlobalSteering) -> None:
        """Raises Refused if a rank cannot apply `global_steering`.

        This worker may have started after it was proposed, so its ranks may not have checked it:
        they would leave out entries at a layer or hook that they lack.
        """
        answers = (
            await self._engine.prepare_global(global_steering) if global_steering.entries else []
        )
        if why := refusals(answers):
            raise Refused(f"global steering version {global_steering.version}: {why}", answers)

    async def _consider(self, proposal: Proposal | None) -> None:
        """Note whether the ranks could apply the proposal; they hold its tensors until it is
        decided.
        """
        if (proposal.id if proposal is not None else "") == self._answer.proposal:
            return
        previous, self._answer = self._answer, _Answer()
        try:
            if proposal is not None:
                self._answer = await self._prepare(proposal)
                self._last = self._answer.applied
        finally:
            await self._engine.release_vectors(previous.held, pinned=True)

    async def _prepare(self, proposal: Proposal) -> _Answer:
        tensors = proposal.steering.tensors
        try:
            await self._hold(tensors)
            answer = _Answer(proposal.id)
            answer.held = tensors
            answer.applied = await self._engine.prepare_global(proposal.steering)
            answer.refusal = refusals(answer.applied)
        except Refused as error:
            return _Answer(proposal.id, error.answers, error.detail)
        return answer

    async def _let_go(self) -> None:
        """Release the tensors of global steering that no attempt runs under any more."""
        for applied in [applied for applied in self._replaced if not applied.users]:
            self._replaced.remove(applied)
            await self._engine.release_vectors(applied.steering.tensors, pinned=True)

    async def _hold(self, tensors: list[str]) -> None:
        """Hold `tensors` on the ranks.

        Raises Refused also when a tensor cannot be read, or is no longer stored because its
        proposal or module has been withdrawn.
        """
        try:
            await self._engine.hold_vectors(tensors, self._fetch, pinned=True)
        except MidstreamError as error:
            if error.kind not in ("intervention_failed", VERSION_MISMATCH) or isinstance(
                error, Refused | Quarantined
            ):
                raise
            raise Refused(error.detail, []) from error

    async def _fetch(self, name: str) -> Tensor:
        tensor = await self._broker.get_tensor(name)
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
            self.last_desync, self.last_desync_at = why, now()
            self._complain(why)
        self._stop_serving("resyncing", why)
        self._out_of_step = why
        await self._publish_changes()
        await self._report(await self._engine.steering_status())
        try:
            await self._drain(why)
            ranks = await self._replay()
            if not await self._engine.same_content():
                raise ResyncFailed("after a resync the ranks' tables differ")
        except Quarantined as error:
            raise ResyncFailed(f"resync of the ranks failed: {error.detail}") from error
        except MidstreamError as error:
            if error.kind != VERSION_MISMATCH:
                raise
            self._stop_serving("resyncing", error.detail)  # begins again after RETRY_S
            await self._publish_changes()
            await asyncio.sleep(RETRY_S)
            return
        epoch = max(rank.epoch for rank in ranks)
        await self._broker.clear_desync(self._worker, self._boot, epoch)
        self._out_of_step = ""
        self.resyncs += 1
        self._compared = time.monotonic()
        logger.warning(
            "the ranks are in the same state again, with empty ledgers (epoch %d)", epoch
        )
        if self.state == "resyncing":
            self._serve()
        await self._publish_changes()
        await self._report(ranks)

    async def _replay(self) -> list[RankSteering]:
        """Reset every rank and apply the desired state; items that some ranks reject stay out."""
        refused = False
        for _ in range(RESYNC_ROUNDS):
            await self._engine.restart_ledgers()
            self._forget()
            await self._reconcile(await self._broker.desired(self._model), skip_global=refused)
            ranks = await self._engine.steering_status()
            if not (unequal := disagreement(ranks)):
                return ranks
            refused = self.state == "quarantined"
        raise ResyncFailed(f"after a resync {unequal}")

    async def _drain(self, why: str) -> None:
        """Stop attempts with interventions or captures, including those being claimed now.

        Attempts record their end in the ledger before they end, so that the ledger rejects what
        reset ranks report about them.
        """
        deadline = time.monotonic() + DRAIN_S
        while self._global.users or any(applied.users for applied in self._replaced):
            self.stop_runs(why)
            await asyncio.sleep(DRAIN_CHECK_S)
            if time.monotonic() > deadline:
                # raises `unavailable` while Redis is unreachable, when no job can end
                await self._broker.look(self._model, self._worker)
                raise ResyncFailed(
                    f"could not stop requests within {DRAIN_S:.0f} s to resync: {why}"
                )

    def _forget(self) -> None:
        """Forget everything that the ranks held; they have been reset."""
        self._global, self._replaced, self._modules = AppliedSteering(GlobalSteering()), [], {}
        self._answer, self._version = _Answer(), 0

    def _complain(self, why: str) -> None:
        """Log an ERROR, at most once per `desync_log_s`: every request may cause the same error."""
        if time.monotonic() - self._complained < self._settings.desync_log_s:
            logger.info("ranks diverged again (count since the start: %d): %s", self.desyncs, why)
            return
        self._complained = time.monotonic()
        logger.error("ranks diverged; no job begins until they are resynced: %s", why)

    # -- Serving

    def _serve(self) -> None:
        if not self._closed:
            self.state, self.detail = "serving", ""
            self._open.set()

    def _stop_serving(self, state: WorkerState, why: str) -> None:
        self.state, self.detail = state, why
        if not self._closed:
            self._open.clear()

    async def _publish_changes(self) -> None:
        """Publish the worker's state immediately when it has changed."""
        if self._published != (self.state, self.detail):
            await self._publish()
            self._published = (self.state, self.detail)
