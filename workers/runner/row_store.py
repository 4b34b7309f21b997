"""Store of captured rows of cached prompts on a rank, under the scheduler's numbers; see `row_index`."""

from collections.abc import Sequence

from .capture import Extent, Recording


class RowStore:
    """Copies of captured rows, on the CPU. What is kept and dropped is the scheduler's decision.

    Rows that are still on their way from an accelerator are copied when they have landed; no step waits for them.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[Extent]] = {}
        self._coming: dict[int, tuple[Recording, int, int]] = {}
        self.held = 0  # bytes

    def keep(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Keep the recorded rows of positions `first … stop`; those that were not recorded are not there."""
        self._coming[number] = recording, first, stop

    def settle(self, *, wait: bool = False) -> None:
        """Copy what has landed, or all."""
        for number, (recording, first, stop) in list(self._coming.items()):
            if wait or all(run.step.landing.done() for run in recording.owners(first, stop).values()):
                self._copy(number)

    def serve(self, number: int, recording: Recording, first: int, stop: int) -> None:
        """Give a recording the kept rows. Raises LookupError when they are not there."""
        if number in self._coming:
            self._copy(number)
        if number not in self._kept:
            raise LookupError(f"the rows of positions {first} to {stop - 1}, served by the prefix cache, are no longer stored")
        recording.reused += self._kept[number]

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._coming.pop(number, None)
            runs = self._kept.pop(number, None)
            if runs:
                self.held -= runs[0].step.slab.nbytes

    def clear(self) -> None:
        """Keep nothing: a step did not capture what it should have, and these rows may be among them."""
        self._kept.clear()
        self._coming.clear()
        self.held = 0

    def _copy(self, number: int) -> None:
        recording, first, stop = self._coming.pop(number)
        runs = recording.gather(first, stop)
        if runs:
            self._kept[number] = runs
            self.held += runs[0].step.slab.nbytes
