"""Landings: the arrival of captured rows in a slab, to which an accelerator may still copy them."""

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


class LastLanding:
    """The landing of several steps' rows, which arrive in order: that of the last step so far."""

    def __init__(self) -> None:
        self.last: Landing = LANDED

    def wait(self) -> None:
        self.last.wait()

    def done(self) -> bool:
        return self.last.done()
