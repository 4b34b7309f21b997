"""Store of captured rows of cached prompts on a rank, under numbers that the scheduler assigns; see
`row_index`.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError

from .capture import Extent, Recording
from .mover import Mover

#: Seconds that a step waits for the copy of recently recorded rows; the mover is never that late.
PATIENCE_S = 30.0


class RowStore:
    """Copies of captured rows, on the CPU. The scheduler decides which are kept and dropped.

    The mover makes the copies; a step waits only for rows that it must serve.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._kept: dict[int, Future[list[Extent]]] = {}

    @property
    def held(self) -> int:
        """Return the bytes of the finished copies."""
        return sum(_size(copies) for copies in self._kept.values())

    def keep(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Keep those rows of positions `first … stop` that were recorded."""
        selection = recording.selection(first, stop)
        if selection is not None:
            self._kept[number] = self._mover.submit(selection.copy)

    def serve(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Give a recording the kept rows. Raises LookupError when they are not available."""
        lost = (
            f"the rows of positions {first} to {stop - 1}, served by the prefix cache, are "
            "not available"
        )
        if number not in self._kept:
            raise LookupError(lost)
        try:
            recording.reused += self._kept[number].result(PATIENCE_S)
        except LateError as error:
            raise LookupError(f"{lost}: they are still being copied") from error
        except Exception as error:
            raise LookupError(f"{lost}: {error}") from error

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            copies = self._kept.pop(number, None)
            if copies is not None:
                copies.cancel()

    def clear(self) -> None:
        """Drop all rows: a step did not capture what it should have, so any may be wrong."""
        self.drop(list(self._kept))


def _size(copies: "Future[list[Extent]]") -> int:
    if not copies.done() or copies.cancelled() or copies.exception() is not None:
        return 0
    return sum({id(run.step): run.step.slab.nbytes for run in copies.result()}.values())
