"""Global steering versions that attempts run under, and those still in use after replacement."""

from ...schemas.requests.steering import GlobalSteering


class AppliedSteering:
    """A global steering that the ranks have, or had, and how many attempts run under it."""

    def __init__(self, steering: GlobalSteering) -> None:
        self.steering, self.users = steering, 0


class SteeringLease:
    """One attempt's hold on the global steering it began under: its tensors stay on the ranks.

    `end` may be called more than once.
    """

    def __init__(self, applied: AppliedSteering) -> None:
        self.steering = applied.steering
        self._applied: AppliedSteering | None = applied
        applied.users += 1

    def end(self) -> None:
        applied, self._applied = self._applied, None
        if applied is not None:
            applied.users -= 1
