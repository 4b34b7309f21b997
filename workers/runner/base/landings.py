"""Landings: the arrival of captured rows in the arena, to which an accelerator may still be copying
them.

Landings are numbered; the copy stream writes the number of each into the shared memory after its
rows, so that another process can wait for it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Landing:
    """Arrival of what a stream copies to the host; methods may be called from any thread."""

    def __init__(self, event: "torch.cuda.Event | None" = None, number: int = 0) -> None:
        """`event`: recorded after the copy; None: all has arrived. `number`: of a landing of rows,
        see `SharedMemory.wait`.
        """
        self._event, self.number = event, number

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())


LANDED = Landing()
