"""A gate in the fake engine that a test holds: work is under way for as long as the test needs it
to be, on a machine of any speed.

The fault `turnstile:file=PATH`: while the file exists, no attempt of a job takes more steps
(tokens, cells) than the number in it; without the file the gate is open. Steps are counted
per attempt: one of two concurrent attempts cannot use up the other's steps.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.02


class Turnstile:
    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._taken: Counter[tuple[str, int]] = Counter()  # by attempt, since the file is there

    async def step(self, attempt: tuple[str, int], unless: Callable[[], bool]) -> None:
        """Wait for the permission of one step of an attempt (job, number), or until `unless`
        holds.
        """
        while not (unless() or self._lets_in(attempt)):  # noqa: ASYNC110  (a file has no event)
            await asyncio.sleep(LOOK_S)

    def _lets_in(self, attempt: tuple[str, int]) -> bool:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            self._taken.clear()
            return True
        if not text.strip().isdecimal() or self._taken[attempt] >= int(
            text
        ):  # not decimal: it is being written
            return False
        self._taken[attempt] += 1
        return True
