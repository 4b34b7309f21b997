"""Execution of a fit: a module is learned from its examples, measured on held-out ones, and
registered; a Jacobian lens is computed from its corpus, written to a folder, and registered.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from midstream.broker.ledger.named.registry import Registry
from midstream.schemas.access.keys import scoped
from midstream.schemas.artifacts.jacobian_lenses import (
    JACOBIAN_LENSES,
    JacobianLensRequest,
    StoredLensFit,
)
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import Record, now
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.jobs.jobs import State
from midstream.schemas.requests.interventions import FAMILY
from midstream.schemas.requests.steering import MODULES, Module, SteeringTemplate, content_digest
from midstream.schemas.requests.trainings import FitEffect, Training
from midstream.storage.formats.folders import new_folder
from midstream.storage.formats.lens_files import lens_of
from midstream.workers.serving.attempt import Attempt, Bench, Run
from midstream.workers.serving.redis_retry import patiently

from ..gradients.protocol import GradientEngine, StopCheck
from ..records.fits import (
    FitOutcome,
    FitResult,
    FitWork,
    LensFitResult,
    StoredModuleFit,
)

if TYPE_CHECKING:
    from ..gradients.learn import Fitted

T = TypeVar("T")


class FitAttempt:
    """One attempt at one fit."""

    def __init__(self, bench: Bench[GradientEngine], attempt: Attempt) -> None:
        self._ledger = bench.ledger
        self._engine = bench.engine
        self._attempt = attempt
        self._loop = asyncio.get_running_loop()
        self._events = list[Future[None]]()

    async def run(self) -> FitOutcome:
        """Return the result, after the module or lens is registered. Raises MidstreamError."""
        self._attempt.check_unsteered()
        wanted = self._attempt.job.work_as(FitWork).fit
        if isinstance(wanted, StoredLensFit):
            return await self._lens(wanted)
        return await self._module(wanted)

    def _report(self, data: Record) -> None:
        """Emit an event; called in the engine's thread."""
        emission = self._attempt.report(self._ledger, "fit", data)
        self._events.append(asyncio.run_coroutine_threadsafe(emission, self._loop))

    async def _computed(self, work: Callable[[Any, StopCheck], T]) -> T:
        """Return what the engine computes, after the events of it are written. `work` imports
        transformers: in the engine's thread, as heartbeats go on meanwhile.
        """
        result = await self._engine.run(work)
        await asyncio.gather(*map(asyncio.wrap_future, self._events))
        return result

    async def _lens(self, wanted: StoredLensFit) -> LensFitResult:
        """Write the lens to a folder of this attempt alone, and register it.

        So no other folder is overwritten: jobs that were accepted with the name's former lens keep
        its file. The folder of an attempt that fails is removed.
        """
        job = self._attempt.job
        root = self._ledger.settings.artifacts_of("lenses")
        path = f"{wanted.folder}/{job.id}-{self._attempt.number}"
        folder = new_folder(root, path, "artifacts_dir/lenses")

        def computed(points: Any, check: StopCheck) -> None:
            from ..gradients.jacobian import fit_to_folder

            fit_to_folder(points, wanted, folder, check, self._report)

        try:
            await self._computed(computed)
            request = JacobianLensRequest(
                path=path, model=job.model, description=wanted.description
            )
            lens = await asyncio.to_thread(lens_of, request, wanted.name, self._engine.info, root)
            await self._check_current()
        except BaseException as error:
            _remove(folder)
            if isinstance(error, ValueError):
                raise MidstreamError("intervention_failed", str(error)) from error
            if isinstance(error, OSError):
                detail = f"the lens cannot be written to {root} (artifacts_dir/lenses): {error}"
                raise MidstreamError("internal", detail) from error
            raise
        lenses = Registry(self._ledger, JACOBIAN_LENSES)
        try:
            await patiently(lenses.put, lens.model, lens.name, lambda _: lens, {}, of_accepted=True)
        except MidstreamError:  # refused; after any other end, the lens may be registered
            _remove(folder)
            raise
        return LensFitResult(lens=lens)

    async def _module(self, wanted: StoredModuleFit) -> FitResult:
        def learned(points: Any, check: StopCheck) -> "Fitted":
            from ..gradients import learn

            return learn.fit(points, wanted, self._report, check)

        request = wanted.request
        fitted = await self._computed(learned)
        training = Training(
            job=self._attempt.job.id,
            method=request.method,
            hook=wanted.hook,
            examples=fitted.examples,
            examples_digest=wanted.digest,
            seed=request.seed,
            identity=self._attempt.job.identity,
            sites=fitted.sites,
            effect=fitted.effect,
            steps=fitted.steps,
            losses=list(fitted.losses),
        )
        digest = ""
        reason = _reason_against(request.register, fitted.effect)
        if not reason:
            try:
                digest = await self._register(wanted, fitted, training)
            except MidstreamError as error:
                if error.kind != "module_limit":
                    raise
                reason = str(error)
        return FitResult(name=request.name, training=training, digest=digest, reason=reason)

    async def _register(self, wanted: StoredModuleFit, fitted: "Fitted", training: Training) -> str:
        """Register the module, unless the job was given to another attempt; return its digest."""
        job = self._attempt.job
        blobs = dict[str, Tensor]()
        entries = list[SteeringTemplate]()
        fields = FAMILY[wanted.template.family].tensors
        for layer, learned in fitted.tensors.items():
            tensors = [from_numpy(learned[field].cpu().numpy()) for field in fields]
            names = [content_hash(tensor) for tensor in tensors]
            blobs.update(zip(names, tensors, strict=True))
            entries.append(msgspec.structs.replace(wanted.template, layers=[layer], tensors=names))
        edits = list(fitted.tensors.values())
        module = Module(
            name=scoped(job.tenant, wanted.request.name),
            model=job.model,
            digest=content_digest(entries),
            entries=entries,
            bytes=sum(len(tensor.data) for tensor in blobs.values()),
            created=now(),
            description=wanted.request.description,
            hidden_size=edits[0][fields[0]].shape[-1],
            reach=[float(e["vector"].abs().max()) if "vector" in e else 0.0 for e in edits],
            training=training,
        )
        await self._check_current()
        modules = Registry(self._ledger, MODULES)
        await patiently(
            modules.put, module.model, module.name, module.after, blobs, of_accepted=True
        )
        return module.digest

    async def _check_current(self) -> None:
        """Stop if the job is being cancelled, or was given to another attempt."""
        job = self._attempt.job
        view = await patiently(self._ledger.view, job.id)
        current = view.attempt == self._attempt.number
        self._attempt.check_answer(view.state if current else "stale", State.RUNNING)
        self._attempt.check()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # unless it holds other lenses


def _reason_against(register: str, effect: FitEffect) -> str:
    """Return why a module is not registered; empty if it is."""
    if register == "never":
        return "register is 'never'"
    if register == "if_better" and not effect.better:
        gain = effect.after - effect.before
        return (
            f"its effect on {effect.examples} held-out examples, {gain:+.3g} ({effect.measure}), "
            f"does not exceed the standard error, {effect.error:.3g}: fit it with more examples, "
            "or with register='always'"
        )
    return ""


def run(bench: Bench[GradientEngine]) -> Run:
    return Run(lambda attempt: FitAttempt(bench, attempt).run())
