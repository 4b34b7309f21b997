"""Execution of a fit: a module is learned from its examples, measured on held-out ones, and
registered.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import msgspec
import numpy as np

from ...broker.ledger.jobs.ledger import Ledger
from ...broker.ledger.named.steering import Steering
from ...schemas.access.keys import scoped
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import now
from ...schemas.base.tensors import Tensor, content_hash, from_numpy
from ...schemas.jobs.fits import FitResult, StoredModuleFit
from ...schemas.jobs.jobs import Event, State
from ...schemas.requests.interventions import FAMILY
from ...schemas.requests.steering import Module, SteeringTemplate, content_digest
from ...schemas.requests.trainings import FitEffect, FitPoint, Training
from ..engine.protocol import Engine
from ..serving.attempt import Attempt
from ..serving.redis_retry import patiently

if TYPE_CHECKING:
    from ..gradients.learn import Fitted

T = TypeVar("T")


class GradientEngine(Protocol):
    """What a fit requires of the worker's engine."""

    async def run(self, work: Callable[[Any, Callable[[], None]], T]) -> T:
        """Call `work` with the model's hook points and a check, in the engine's thread. The check
        raises when the caller is cancelled.
        """


class FitAttempt:
    """One attempt at a fit."""

    def __init__(self, ledger: Ledger, engine: GradientEngine, attempt: Attempt) -> None:
        self._ledger, self._engine, self._attempt = ledger, engine, attempt
        self._steering = Steering(ledger)

    async def run(self) -> FitResult:
        """Return the result, after the module is registered. Raises MidstreamError."""
        from ..gradients import learn  # loads transformers, which only gradient workers need

        job = self._attempt.job
        wanted = job.fit
        assert wanted is not None
        loop, events = asyncio.get_running_loop(), list[Future[None]]()

        def report(point: FitPoint) -> None:
            """Emit an event; called in the engine's thread."""
            data = msgspec.structs.asdict(point)
            event = Event(event="fit", data=data, attempt=self._attempt.number)
            emission = self._attempt.emit(self._ledger, event)
            events.append(asyncio.run_coroutine_threadsafe(emission, loop))

        fitted = await self._engine.run(
            lambda points, check: learn.fit(points, wanted, report, check)
        )
        await asyncio.gather(*map(asyncio.wrap_future, events))
        training = Training(
            job=job.id,
            method=wanted.request.method,
            hook=wanted.hook,
            examples=fitted.examples,
            examples_digest=wanted.digest,
            seed=wanted.request.seed,
            identity=job.identity,
            sites=fitted.sites,
            effect=fitted.effect,
            steps=fitted.steps,
            losses=list(fitted.losses),
        )
        name = wanted.request.name
        if reason := _reason_against(wanted.request.register, fitted.effect):
            return FitResult(name=name, training=training, reason=reason)
        try:
            digest = await self._register(wanted, fitted, training)
        except MidstreamError as error:
            if error.kind != "module_limit":
                raise
            return FitResult(name=name, training=training, reason=str(error))
        return FitResult(name=name, training=training, digest=digest)

    async def _register(self, wanted: StoredModuleFit, fitted: "Fitted", training: Training) -> str:
        """Register the module, unless the job was given to another attempt; return its digest."""
        job, blobs, entries = self._attempt.job, dict[str, Tensor](), list[SteeringTemplate]()
        family = FAMILY[wanted.template.family]
        for layer, learned in fitted.tensors.items():
            tensors = [from_numpy(learned[field].numpy()) for field in family.tensors]
            names = [content_hash(tensor) for tensor in tensors]
            blobs.update(zip(names, tensors, strict=True))
            entries.append(msgspec.structs.replace(wanted.template, layers=[layer], tensors=names))
        first = next(iter(fitted.tensors.values()))[family.tensors[0]]
        module = Module(
            name=scoped(job.tenant, wanted.request.name),
            model=job.model,
            digest=content_digest(entries),
            entries=entries,
            bytes=sum(len(tensor.data) for tensor in blobs.values()),
            created=now(),
            description=wanted.request.description,
            hidden_size=first.shape[-1],
            reach=[
                float(np.abs(learned["vector"].numpy()).max()) if "vector" in learned else 0.0
                for learned in fitted.tensors.values()
            ],
            training=training,
        )
        view = await patiently(lambda: self._ledger.view(job.id), f"view of {job.id}")
        if view.attempt != self._attempt.number or view.state is not State.RUNNING:
            self._attempt.refused("cancelling" if view.state is State.CANCELLING else "stale")
        self._attempt.check()
        await patiently(lambda: self._steering.put_module(module, blobs), f"module of {job.id}")
        return module.digest


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


async def fit(ledger: Ledger, engine: Engine, attempt: Attempt, fetch: object) -> FitResult:
    """Run a job of kind `fit`."""
    return await FitAttempt(ledger, cast(GradientEngine, engine), attempt).run()
