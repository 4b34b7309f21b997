"""What jobs of the gradient queue require of an engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from midstream.schemas.base.tensors import Tensor
from midstream.workers.engine.protocol import PublishingEngine

from ..records.estimates import Estimate
from ..records.sweeps import StoredSweep

T = TypeVar("T")
#: Called between steps of a computation; raises if its job was stopped.
StopCheck = Callable[[], None]


@dataclass(frozen=True)
class EstimateRequest:
    """The estimates of one pair of an attribution."""

    job: str
    request: int  # that its receipt names
    attempt: int
    sweep: StoredSweep  # with `attribution`
    pair: int
    mask: Tensor | None = None  # `StoredSweep.mask`: [row size], 1 for dimensions that are written
    trace: str = ""


class GradientEngine(PublishingEngine, Protocol):
    """An engine that computes gradients."""

    async def run(self, work: Callable[[Any, StopCheck], T]) -> T:
        """Call `work` with the model's hook points and a check, in the engine's thread. The check
        raises when the caller is cancelled.
        """

    async def estimate(self, ask: EstimateRequest) -> Estimate:
        """Estimate all cells, edges or features of a pair.

        The rank sends one receipt for `ask.request` with a checksum of everything that the estimate
        was computed from and of its values; it is sent also when this raises. Cancelling the call
        stops the computation after its current pass.

        Raises MidstreamError("intervention_failed") for a pair that cannot be estimated (values
        that are not finite, more memory than there is, with figures), which fails the pair alone,
        and MidstreamError("engine_failed") when the engine has died.
        """
