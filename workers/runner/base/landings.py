"""Landings: the arrival of captured rows in the arena, to which an accelerator may still be copying
them.

Landings are numbered; the copy stream writes the number of each into the shared memory after its
rows, so that another process can wait for it.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Landing(Protocol):
    """Arrival of rows; methods may be called from any thread."""

    number: int  # see `SharedMemory.wait`

    def wait(self) -> None: ...

    def done(self) -> bool: ...


class Landed:
    """Rows that have arrived already."""

    number = 0

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


LANDED = Landed()


class OnStream:
    """Rows that a copy stream copies: they have arrived when `event`, recorded after the copy, has
    occurred.
    """

    def __init__(self, event: "torch.cuda.Event", number: int) -> None:
        self._event, self.number = event, number

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())
