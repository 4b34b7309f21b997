"""LoRA adapters in a rank's step: checks that each row was computed with its request's adapter."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....schemas.jobs.receipts import BY_REQUEST
from ..base.actions import ActionLedger
from .requests import Requests
from .step_parts import RanStep, StepPart

if TYPE_CHECKING:
    from .loras import LoadedAdapters


@dataclass(eq=False)
class Adapters(StepPart):
    """Step part of a rank that serves LoRA adapters."""

    _requests: Requests
    _loras: "LoadedAdapters"
    _actions: ActionLedger

    def drain(self, step: RanStep) -> None:
        """Compare adapters. Raises WrongAdapterError."""
        requests = self._requests
        if step.view is not None:
            with requests.guard(requests.tracked.values(), BY_REQUEST):
                self._loras.account(step.view, requests, self._actions)
