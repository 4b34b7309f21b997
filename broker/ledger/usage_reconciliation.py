"""Reconciliation of usage counters with actual usage: a slice at a time, while the service runs.

Usage is changed in the commits that change what is used, so it is right, but for what a process of another version did without
counting. A count that is under way is kept up by all scripts (`tally` in lua/usage.lua), so it needs no standstill.
"""

import secrets
from collections.abc import Sequence

from ...schemas.settings import Settings
from . import scripts

#: Jobs or captures that are looked at in one script, in which Redis serves nobody else: some milliseconds.
SLICE = 250


class UsageReconciliation:
    """One count; `step` until it says what differed. Another one that begins takes its place."""

    def __init__(self, bound: scripts.Scripts, settings: Settings, at: float, slice_: int = SLICE) -> None:
        """`bound`: the `Scripts` of an asynchronous client. `at`: the time, in seconds since the epoch."""
        self._scripts, self._settings, self._at, self._slice = bound, settings, at, slice_
        self._name = secrets.token_hex(8)
        self._left = ["live", "captures"]
        self._cursor = b"0"

    async def step(self) -> list[str] | None:
        """Look at a slice more. None: there is more to look at. At the end what was counted wrong, and is right now."""
        if not self._left:
            counted = await self._scripts.recounted(args=scripts.pack(self._settings, self._at, name=self._name))
            return [*_differences(counted), *_differences(await self._scripts.list_modules(args=scripts.pack(self._settings, self._at)))]
        here = {"name": self._name, "which": self._left[0], "cursor": self._cursor, "many": self._slice}
        self._cursor = await self._scripts.recount(args=scripts.pack(self._settings, self._at, **here))
        if not self._cursor:
            return []
        if self._cursor == b"0":
            self._left.pop(0)
        return None


def _differences(reply: Sequence[bytes | int]) -> list[str]:
    told = scripts.text(reply)
    return [f"{name}: {was} instead of {found}" for name, was, found in zip(told[::3], told[1::3], told[2::3], strict=False)]
