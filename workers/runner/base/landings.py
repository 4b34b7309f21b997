"""Landings: the arrival of captured rows in the arena, to which an accelerator may still be copying
them.

Landings are numbered; the copy stream writes the number of each into the shared memory after its
rows, so that another process can wait for it.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


#: Held while late rows are copied, and while it matters whether there are any.
FINISHING = threading.Lock()


class Landing:
    """Arrival of what a stream copies to the host; methods may be called from any thread."""

    def __init__(self, event: "torch.cuda.Event | None" = None, number: int = 0) -> None:
        """`event`: recorded after the copy; None: all has arrived. `number`: of a landing of rows,
        see `SharedMemory.wait`.
        """
        self._event = event
        self.number = number

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())


LANDED = Landing()


class LateLanding(Landing):
    """Arrival of rows by way of other memory: whoever waits for it first, or asks once the device
    is done, copies them from there, after those of earlier landings.
    """

    def __init__(
        self,
        event: "torch.cuda.Event",
        number: int,
        copy: Callable[[], None],
        late: "list[LateLanding]",
        landed: np.ndarray,
    ) -> None:
        """`late`: all that are not finished, in order, to which it is added: the device may number
        no landing after one of them. `landed`: see `SharedMemory`.
        """
        super().__init__(event, number)
        self._copy = copy
        self._late = late
        self._landed = landed
        late.append(self)

    def wait(self) -> None:
        for landing in self._late[:]:
            if landing.number <= self.number:
                Landing.wait(landing)
                with FINISHING:
                    if landing in self._late:
                        landing._copy()
                        self._landed[0] = landing.number
                        self._late.remove(landing)

    def done(self) -> bool:
        if super().done():
            self.wait()
        return self not in self._late
