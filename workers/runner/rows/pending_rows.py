"""Landings: captured rows on their way from a forward pass to a slab."""

from typing import Protocol

import torch


class Landing(Protocol):
    """May be asked from any thread."""

    def wait(self) -> None: ...

    def done(self) -> bool: ...


class Landed:
    """They are there."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


LANDED = Landed()


class OnStream:
    """Rows that a copy stream brings: they are there when the event, recorded behind the copy, is
    over.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())
