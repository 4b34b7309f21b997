"""Reconciliation of usage counters with actual usage: a slice at a time, while the service runs.

Usage is updated in the commits that change it, so it is correct except for changes that a process
of another version made without counting. All scripts keep a running recount up to date (`tally` in
lua/usage.lua), so the service need not stop.
"""

import secrets
from collections.abc import Sequence

from ....schemas.base.settings import Settings
from ..core import scripts

#: Jobs, captures or harvests examined per script call, which blocks Redis for a few milliseconds.
SLICE = 250


class UsageReconciliation:
    """One recount: call `step` until it returns the differences.

    A recount that begins later replaces it.
    """

    def __init__(
        self, bound: scripts.Scripts, settings: Settings, at: float, slice_: int = SLICE
    ) -> None:
        """`bound`: the `Scripts` of an asynchronous client.

        `at`: the time, in seconds since the epoch.
        """
        self._scripts, self._settings, self._at, self._slice = bound, settings, at, slice_
        self._name = secrets.token_hex(8)
        self._left = ["live", "captures", "harvests", "jobs"]
        self._cursor = b"0"

    async def step(self) -> list[str] | None:
        """Count one more slice.

        None: more slices remain. At the end, the counters that were wrong and are now corrected.
        """
        if not self._left:
            counted = await self._scripts.recounted(
                args=scripts.pack(self._settings, self._at, name=self._name)
            )
            return [
                *_differences(counted),
                *_differences(
                    await self._scripts.list_modules(args=scripts.pack(self._settings, self._at))
                ),
            ]
        local = {
            "name": self._name,
            "which": self._left[0],
            "cursor": self._cursor,
            "many": self._slice,
        }
        self._cursor = await self._scripts.recount(
            args=scripts.pack(self._settings, self._at, **local)
        )
        if not self._cursor:
            return []
        if self._cursor == b"0":
            self._left.pop(0)
        return None


def _differences(reply: Sequence[bytes | int]) -> list[str]:
    text = scripts.text(reply)
    return [
        f"{name}: {was} instead of {result}"
        for name, was, result in zip(text[::3], text[1::3], text[2::3], strict=False)
    ]
