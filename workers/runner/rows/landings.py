"""Landings: the arrival of captured rows in the arena, to which an accelerator may still be copying
them.
"""

from typing import Protocol

import torch


class Landing(Protocol):
    """Arrival of rows; methods may be called from any thread."""

    def wait(self) -> None: ...

    def done(self) -> bool: ...


class Landed:
    """Rows that have arrived already."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


LANDED = Landed()


class OnStream:
    """Rows that a copy stream copies: they have arrived when `event`, recorded after the copy, has
    occurred.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())
