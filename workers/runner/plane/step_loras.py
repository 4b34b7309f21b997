"""LoRA adapters in a rank's step: checks that each row was computed with its request's adapter."""

from typing import TYPE_CHECKING

from ..edits.actions import ActionLedger
from .requests import Requests
from .step_parts import RanStep, StepPart

if TYPE_CHECKING:
    from .loras import Loras


class Adapters(StepPart):
    """Step part of a rank that serves LoRA adapters."""

    def __init__(self, requests: Requests, loras: "Loras", actions: ActionLedger) -> None:
        self._requests, self._loras, self._actions = requests, loras, actions

    def drain(self, step: RanStep) -> None:
        """Compare adapters. Not guarded: after a difference, no row and no cached block of this
        rank can be trusted.
        """
        if step.view is not None:
            self._loras.account(
                self._requests.step, step.view, self._requests.tracked, self._actions
            )
