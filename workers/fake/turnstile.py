"""A gate in the fake engine that a test holds: work is under way for as long as the test needs it to be, on a machine of any speed.

The fault `turnstile:file=PATH`: while the file exists, no more steps (tokens, cells) are taken than the number in it; without the
file the gate is open.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.02


class Turnstile:
    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._taken = 0  # since the file is there

    async def step(self, unless: Callable[[], bool]) -> None:
        """Wait for the permission of one step, or until `unless` holds."""
        while not (unless() or self._lets_in()):  # noqa: ASYNC110  (a file has no event)
            await asyncio.sleep(LOOK_S)

    def _lets_in(self) -> bool:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            self._taken = 0
            return True
        if not text.strip().isdecimal() or self._taken >= int(text):  # not decimal: it is being written
            return False
        self._taken += 1
        return True
