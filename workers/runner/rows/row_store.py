"""Store of captured rows of cached prompts on a rank, under numbers that the scheduler assigns; see
`row_index`.
"""

from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError as LateError
from functools import partial

from .capture import Recording
from .extents import Extent
from .mover import Mover

#: Seconds that a step waits for the copy of recently recorded rows; the mover is never that late.
PATIENCE_S = 30.0


class RowStore:
    """Captured rows that are kept, on the CPU. The scheduler decides which are kept and dropped.

    A recording's pieces of prompt tokens are the blocks of the KV cache, so that rows are shared
    with the recording, not copied. A step waits only for rows that it must serve.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._kept: dict[int, Future[list[Extent]]] = {}

    @property
    def held(self) -> int:
        """Return the bytes of the kept rows that are copied."""
        return sum(_size(runs) for runs in self._kept.values())

    def keep(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Keep those rows of positions `first … stop` that were recorded."""
        keep = partial(recording.keep, first, stop, self._mover.memory.new_slab)
        self._kept[number] = self._mover.submit(keep)

    def serve(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Give a recording the kept rows. Raises LookupError when they are not available."""
        lost = (
            f"the rows of positions {first} to {stop - 1}, served by the prefix cache, are "
            "not available"
        )
        if number not in self._kept:
            raise LookupError(lost)
        try:
            runs = self._kept[number].result(PATIENCE_S)
        except LateError as error:
            raise LookupError(f"{lost}: they are still being copied") from error
        except Exception as error:
            raise LookupError(f"{lost}: {error}") from error
        if not runs:
            raise LookupError(lost)
        recording.reused += runs

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            runs = self._kept.pop(number, None)
            if runs is not None:
                runs.cancel()

    def clear(self) -> None:
        """Drop all rows: a step did not capture what it should have, so any may be wrong."""
        self.drop(list(self._kept))


def _size(runs: "Future[list[Extent]]") -> int:
    if not runs.done() or runs.cancelled() or runs.exception() is not None:
        return 0
    return sum({id(run.step): run.step.slab.nbytes for run in runs.result()}.values())
