"""The store of captured rows of cached prompts, under numbers that the scheduler assigns (see
`row_index`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..files.recorded import Extent
from .arena import Arena
from .capture import Recording


@dataclass(eq=False)
class RowStore:
    """Captured rows that are kept, on the CPU. The scheduler decides which are kept and dropped.

    A recording's blocks of prompt tokens are those of the KV cache, so that rows are shared with
    the recording, not copied.
    """

    _arena: Arena
    _kept: dict[int, list[Extent]] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """Return the bytes of the kept rows."""
        return sum(run.nbytes for runs in self._kept.values() for run in runs)

    def keep(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Keep those rows of positions `first … stop` that were recorded."""
        self._kept[number] = recording.keep(first, stop, self._arena.landing)

    def serve(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Give a recording the kept rows. Raises LookupError when they are not available."""
        if not (runs := self._kept.get(number)):
            raise LookupError(
                f"the rows of positions {first} to {stop - 1}, served by the prefix cache, are not "
                "available"
            )
        recording.reused += runs

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)

    def clear(self) -> None:
        """Drop all rows: a step did not capture what it should have, so any may be wrong."""
        self._kept.clear()
