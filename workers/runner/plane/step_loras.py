"""LoRA adapters in a rank's step: each row must have been computed with its request's."""

from typing import TYPE_CHECKING

from ..edits.actions import ActionLedger
from .requests import Requests
from .step_parts import RanStep, StepPart

if TYPE_CHECKING:
    from .loras import Loras


class Adapters(StepPart):
    """One per rank that serves adapters."""

    def __init__(self, requests: Requests, loras: "Loras", actions: ActionLedger) -> None:
        self._requests, self._loras, self._actions = requests, loras, actions

    def drain(self, step: RanStep) -> None:
        """Unguarded: where they differ, no row and no cached block of this rank can be trusted."""
        if step.view is not None:
            self._loras.account(
                self._requests.step, step.view, self._requests.tracked, self._actions
            )
